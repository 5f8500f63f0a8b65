"""Converts CIFAR-10 from PyTorch tensors (`train.pt`, `test.pt`) to CIFAR-10's binary format.

    python3 cifar_binary.py cifar10 cifar-10-batches-bin
"""

import pathlib
import sys

import numpy
import torch

source, into = map(pathlib.Path, sys.argv[1:])
into.mkdir(parents=True, exist_ok=True)


def write(split, names):
    data = torch.load(source / f"{split}.pt")
    # A record has the label, then the planes of red, green and blue.
    pixels = data["images"].permute(0, 3, 1, 2).reshape(len(data["labels"]), -1).numpy()
    records = numpy.concatenate([data["labels"].numpy().astype(numpy.uint8)[:, None], pixels], axis=1)
    # The tensors are sorted by class; the files of CIFAR-10 are not.
    records = records[numpy.random.default_rng(0).permutation(len(records))]
    for name, part in zip(names, numpy.array_split(records, len(names))):
        part.tofile(into / name)
    return data["classes"]


write("train", [f"data_batch_{n}.bin" for n in range(1, 6)])
classes = write("test", ["test_batch.bin"])
(into / "batches.meta.txt").write_text("\n".join(classes) + "\n")
