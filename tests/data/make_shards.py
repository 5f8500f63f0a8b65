"""Writes small WebDataset shards to `shards/`, and their expected samples to `shards/expected.json`. Needs webdataset, numpy and
Pillow:

    python3 tests/data/make_shards.py
"""

import io
import json
import pathlib

import numpy as np
import webdataset as wds
from PIL import Image

HERE = pathlib.Path(__file__).parent / "shards"
WIDTH, HEIGHT = 12, 8


def picture(number):
    """Returns a picture that is different for each number, and smooth, so that JPEG hardly changes it."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    channels = [x * 4 + number * 3 % 100, y * 6 + number * 7 % 100, (x + y) * 2 + number * 11 % 100]
    return Image.fromarray(np.stack(channels, axis=2).astype(np.uint8))


def add_expected(expected, split, key, label, image):
    """Adds a sample: split, key, label, and the mean of each channel of `image`."""
    pixels = np.asarray(image, dtype=np.float64)
    expected.append({"split": split, "key": key, "label": label, "mean": pixels.mean(axis=(0, 1)).tolist()})


def numbers():
    """Writes shards by `webdataset.ShardWriter`, with classes as numbers in `.cls`."""
    expected = []
    folder = HERE / "numbers"
    folder.mkdir(parents=True, exist_ok=True)
    for split, kind, first, count in [("train", "jpg", 0, 10), ("val", "png", 10, 4)]:
        pattern = str(folder / f"{split}-%06d.tar")
        with wds.ShardWriter(pattern, maxcount=6, verbose=0, mtime=0) as shards:
            for number in range(first, first + count):
                image, key = picture(number), f"{number:06d}"
                shards.write({"__key__": key, kind: image, "cls": number % 3, "txt": f"picture {number}"})
                add_expected(expected, split, key, number % 3, image)
    return expected


def names():
    """Writes a shard with folders in its keys, classes as names in `.json`, several formats, and a name too long for a tar header."""
    expected = []
    long_name = "a-name-" * 18
    with wds.TarWriter(str(HERE / "names.tar"), mtime=0, encoder=True) as shard:
        for number, kind in enumerate(["jpg", "png", "webp", "jpeg"]):
            image = picture(number)
            key = f"pictures/{long_name if number == 1 else ''}{number}"
            label = ["dog", "cat"][number % 2]
            content = image
            if kind == "webp":
                buffer = io.BytesIO()
                image.save(buffer, "WEBP", lossless=True)
                content = buffer.getvalue()
            shard.write({"__key__": key, kind: content, "json": {"label": label, "width": WIDTH}})
            add_expected(expected, "train", key, label, image)
    return expected


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    expected = {"width": WIDTH, "height": HEIGHT, "numbers": numbers(), "names": names()}
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
