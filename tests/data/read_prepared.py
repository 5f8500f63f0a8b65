"""Reads with Python's webdataset what `lockstep dataset prepare` writes, and compares it with what torchvision makes of the
same pictures. Needs webdataset, torchvision and Pillow:

    cargo build --release && python3 tests/data/read_prepared.py
"""

import os
import pathlib
import subprocess
import tempfile

import numpy as np
import webdataset as wds
from PIL import Image
from torchvision.transforms.v2 import functional

LOCKSTEP = os.environ.get("LOCKSTEP_BIN", pathlib.Path(__file__).parents[2] / "target/release/lockstep")
SHORT_SIDE = 64
CLASSES = ["a cat", "dog"]


def picture(number):
    """Smooth, of another size for each number."""
    y, x = np.mgrid[0 : 90 + number * 7, 0 : 200 - number * 5]
    channels = [x + number * 3, y * 2 // 3 + number * 5, (x + y) // 2]
    return Image.fromarray(np.stack(channels, axis=2).clip(0, 255).astype(np.uint8))


def main():
    with tempfile.TemporaryDirectory() as folder:
        source, copy = pathlib.Path(folder) / "source", pathlib.Path(folder) / "copy"
        expected = []
        for number in range(20):
            label = number % 2
            home = source / "train" / CLASSES[label]
            home.mkdir(parents=True, exist_ok=True)
            picture(number).save(home / f"{number}.png")
            resized = functional.resize(picture(number), [SHORT_SIDE])
            expected.append((label, np.asarray(resized, dtype=np.float64)))
        command = [LOCKSTEP, "dataset", "prepare", source, "--to", copy, "--short-side", str(SHORT_SIDE)]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, end="")
        assert (copy / "classes.txt").read_text().splitlines() == CLASSES
        shards = wds.WebDataset(str(copy / "train-000000.tar"), shardshuffle=False)
        keys, furthest = [], 0
        for sample in shards.decode("pil").to_tuple("__key__", "jpg", "cls"):
            key, image, label = sample
            keys.append(key)
            assert image.mode == "RGB" and min(image.size) == SHORT_SIDE, (image.mode, image.size)
            pixels = np.asarray(image, dtype=np.float64)
            same = [i for i, (l, p) in enumerate(expected) if l == label and p.shape == pixels.shape]
            apart = [np.abs(expected[i][1] - pixels).mean() for i in same]
            expected.pop(same[int(np.argmin(apart))])
            furthest = max(furthest, min(apart))
        assert keys == [f"{number:09}" for number in range(20)], keys
        assert not expected and furthest < 2, furthest
        print(f"webdataset reads all of them, at most {furthest:.2f} of 255 from torchvision's on the mean")


if __name__ == "__main__":
    main()
