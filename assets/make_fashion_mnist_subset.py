"""Makes the bundled subset of Fashion-MNIST from the files of Debian's package dataset-fashion-mnist.

The first TRAIN / 10 pictures of each class of the training split and the first TEST / 10 of the test
split, in their original order: balanced, and the same bytes on every run. Standard library only.

    python3 assets/make_fashion_mnist_subset.py [SOURCE] [TARGET]
"""
import gzip
import pathlib
import struct
import sys

TRAIN, TEST = 8000, 1000
SIDE = 28

source = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "/usr/share/datasets/fashion-mnist")
target = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else pathlib.Path(__file__).parent / "fashion-mnist")
target.mkdir(exist_ok=True)


def write(name, data):
    with open(target / name, "wb") as file:
        file.write(gzip.compress(data, compresslevel=9, mtime=0))


for split, count in (("train", TRAIN), ("t10k", TEST)):
    pictures = gzip.open(source / f"{split}-images-idx3-ubyte.gz").read()[16:]
    labels = gzip.open(source / f"{split}-labels-idx1-ubyte.gz").read()[8:]
    left = [count // 10] * 10
    chosen = []
    for i, label in enumerate(labels):
        if left[label]:
            left[label] -= 1
            chosen.append(i)
    size = SIDE * SIDE
    write(f"{split}-images-idx3-ubyte.gz", struct.pack(">IIII", 0x803, count, SIDE, SIDE) + b"".join(pictures[i * size : (i + 1) * size] for i in chosen))
    write(f"{split}-labels-idx1-ubyte.gz", struct.pack(">II", 0x801, count) + bytes(labels[i] for i in chosen))
