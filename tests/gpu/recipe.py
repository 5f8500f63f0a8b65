"""Trains ResNet-18 by `lockstep train` with the `imagenet` recipe, shortened to 10 epochs, on CIFAR-10 as JPEG files of 64 pixels.
Prints a line of JSON per seed. `torch_recipe.py` does the same with PyTorch, for comparison.

    python3 recipe.py --program lockstep --archive data/cifar10-jpeg.tar.xz --work /tmp --seeds 1 2 3
"""

import argparse
import io
import json
import math
import multiprocessing
import pathlib
import re
import shutil
import sys
import tarfile

from PIL import Image

import watched

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
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", required=True)
    parser.add_argument("--archive", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    options = parser.parse_args()
    folder = pathlib.Path(options.work).resolve() / f"cifar10-jpeg-{SIDE}"
    extract_pictures(options.archive, folder)
    failed = False
    for seed in options.seeds:
        home = folder.with_name(f"recipe-{seed}")
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        (home / "job.toml").write_text(f"""
name = "recipe"
[model]
arch = "resnet18"
stem = "imagenet"
[data]
dataset = "{folder}"
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
""")
        status, printed, log, secs = watched.train(options.program, home / "job.toml", home / "out")
        accuracy = re.findall(r"validation accuracy is ([0-9.]+) %", log)
        row = {
            "side": "lockstep", "run": "recipe-imagenet", "seed": seed, "epochs": options.epochs, "precision": options.precision,
            "accuracy": float(accuracy[-1]) if accuracy else None, "whole_secs": secs["whole"],
        }
        print(json.dumps(row), flush=True)
        if status != 0 or not accuracy:
            print(printed[-2000:] + log[-2000:], file=sys.stderr, flush=True)
            failed = True
        shutil.rmtree(home)
    sys.exit(failed)


if __name__ == "__main__":
    main()
