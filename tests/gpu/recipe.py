"""Trains ResNet-18 by `lockstep train` with the `imagenet` recipe, shortened to 10 epochs, on CIFAR-10 as JPEG files of 64 pixels.
Prints a line of JSON per seed. `torch_recipe.py` does the same with PyTorch, for comparison.

    python3 recipe.py --program lockstep --archive data/cifar10-jpeg.tar.xz --work /tmp --seeds 1 2 3
"""

import io
import json
import math
import multiprocessing
import pathlib
import shutil
import tarfile

from PIL import Image

from options import parse_options
from training import train

SIDE = 64


def milestones(epochs):
    """Returns a third and two thirds of the epochs, in proportion to 30 and 60 of 90 epochs."""
    return [math.ceil(epochs / 3), math.ceil(2 * epochs / 3)]


def write_jpeg(entry):
    """Writes one of the archive's pictures, enlarged, as a JPEG file."""
    path, content = entry
    picture = Image.open(io.BytesIO(content)).convert("RGB").resize((SIDE, SIDE), Image.BICUBIC)
    picture.save(path, quality=95)


def extract_pictures(archive, folder):
    """Creates `train` and `val` with a folder per class, once."""
    if folder.exists():
        return
    partial = folder.with_suffix(".half")
    shutil.rmtree(partial, ignore_errors=True)
    entries = []
    with tarfile.open(archive) as tar:
        for member in tar:
            if not member.isfile():
                continue
            split, name, file = member.name.split("/")[-3:]
            path = partial / {"train": "train", "test": "val"}[split] / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            entries.append((str(path), tar.extractfile(member).read()))
    with multiprocessing.Pool() as pool:
        pool.map(write_jpeg, entries, chunksize=200)
    partial.rename(folder)


def main():
    options = parse_options(program=str, archive=str, work=str, device="cuda", precision="auto", epochs=10, seeds=[int])
    pictures = pathlib.Path(options.work).resolve() / f"cifar10-jpeg-{SIDE}"
    extract_pictures(options.archive, pictures)
    for seed in options.seeds:
        folder = pictures.with_name(f"recipe-{seed}")
        job = f"""
name = "recipe"
[model]
arch = "resnet18"
stem = "imagenet"
[data]
dataset = "{pictures}"
image_size = {SIDE}
[train]
recipe = "imagenet"
epochs = {options.epochs}
milestones = {milestones(options.epochs)}
global_batch_size = 256
precision = "{options.precision}"
seed = {seed}
[parallel]
device = "{options.device}"
[evaluate]
every_epochs = 0
"""
        accuracy, secs = train(options.program, folder, job)
        row = {
            "side": "lockstep", "run": "recipe-imagenet", "seed": seed, "epochs": options.epochs, "precision": options.precision,
            "accuracy": accuracy, "whole_secs": secs["whole_secs"],
        }
        print(json.dumps(row), flush=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
