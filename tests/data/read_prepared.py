"""Reads the shards of `lockstep dataset prepare` with Python's webdataset, and compares their pictures with the same pictures scaled by
torchvision. Needs webdataset, torchvision and Pillow:

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
    """Returns a smooth picture with a different size for each number."""
    y, x = np.mgrid[0 : 90 + number * 7, 0 : 200 - number * 5]
    channels = [x + number * 3, y * 2 // 3 + number * 5, (x + y) // 2]
    return Image.fromarray(np.stack(channels, axis=2).clip(0, 255).astype(np.uint8))


def main():
    with tempfile.TemporaryDirectory() as folder:
        source, prepared = pathlib.Path(folder) / "source", pathlib.Path(folder) / "prepared"
        expected = []
        for number in range(20):
            label = number % 2
            class_folder = source / "train" / CLASSES[label]
            class_folder.mkdir(parents=True, exist_ok=True)
            picture(number).save(class_folder / f"{number}.png")
            resized = functional.resize(picture(number), [SHORT_SIDE])
            expected.append((label, np.asarray(resized, dtype=np.float64)))
        command = [LOCKSTEP, "dataset", "prepare", source, "--to", prepared, "--short-side", str(SHORT_SIDE)]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, end="")
        assert (prepared / "classes.txt").read_text().splitlines() == CLASSES
        shards = wds.WebDataset(str(prepared / "train-000000.tar"), shardshuffle=False)
        keys, largest_difference = [], 0
        for key, image, label in shards.decode("pil").to_tuple("__key__", "jpg", "cls"):
            keys.append(key)
            assert image.mode == "RGB" and min(image.size) == SHORT_SIDE, (image.mode, image.size)
            pixels = np.asarray(image, dtype=np.float64)
            # The order of the samples is not known, so each is compared with the most similar picture of its class and size.
            candidates = [i for i, (each, array) in enumerate(expected) if each == label and array.shape == pixels.shape]
            differences = [np.abs(expected[i][1] - pixels).mean() for i in candidates]
            expected.pop(candidates[int(np.argmin(differences))])
            largest_difference = max(largest_difference, min(differences))
        assert keys == [f"{number:09}" for number in range(20)], keys
        assert not expected and largest_difference < 2, largest_difference
        print(f"webdataset reads all pictures; their pixels' mean difference from torchvision's is at most {largest_difference:.2f} of 255")


if __name__ == "__main__":
    main()
