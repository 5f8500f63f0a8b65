"""Writes small WebDataset shards to `shards/`, and what is in them to `shards/expected.json`. Needs webdataset, numpy and
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
    """Smooth, so that JPEG keeps nearly all of it, and another one for each number."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    channels = [x * 4 + number * 3 % 100, y * 6 + number * 7 % 100, (x + y) * 2 + number * 11 % 100]
    return Image.fromarray(np.stack(channels, axis=2).astype(np.uint8))


def note(expected, split, key, label, image):
    pixels = np.asarray(image, dtype=np.float64)
    expected.append({"split": split, "key": key, "label": label, "mean": pixels.mean(axis=(0, 1)).tolist()})


def numbers():
    """As `webdataset.ShardWriter` writes them, classes as numbers in `.cls`."""
    expected = []
    folder = HERE / "numbers"
    folder.mkdir(parents=True, exist_ok=True)
    for split, kind, first, count in [("train", "jpg", 0, 10), ("val", "png", 10, 4)]:
        pattern = str(folder / f"{split}-%06d.tar")
        with wds.ShardWriter(pattern, maxcount=6, verbose=0, mtime=0) as shards:
            for number in range(first, first + count):
                image, key = picture(number), f"{number:06d}"
                shards.write({"__key__": key, kind: image, "cls": number % 3, "txt": f"picture {number}"})
                note(expected, split, key, number % 3, image)
    return expected


def names():
    """Keys with folders, classes as names in `.json`, several formats, and a name longer than a tar header holds."""
    expected = []
    long = "a-name-" * 18
    with wds.TarWriter(str(HERE / "names.tar"), mtime=0, encoder=True) as shard:
        for number, kind in enumerate(["jpg", "png", "webp", "jpeg"]):
            image = picture(number)
            key = f"pictures/{long if number == 1 else ''}{number}"
            label = ["dog", "cat"][number % 2]
            content = image
            if kind == "webp":
                buffer = io.BytesIO()
                image.save(buffer, "WEBP", lossless=True)
                content = buffer.getvalue()
            shard.write({"__key__": key, kind: content, "json": {"label": label, "width": WIDTH}})
            note(expected, "train", key, label, image)
    return expected


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    expected = {"width": WIDTH, "height": HEIGHT, "numbers": numbers(), "names": names()}
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
