"""Pictures a second made ready for training on this machine's CPU, ours and torchvision's in turns in one run.

    cargo build --release
    python3 tests/bench/pictures_vs_torchvision.py FOLDER [--threads 2] [--rounds 3]

The same work on both sides: read a JPEG file of FOLDER/train/<class>/, decode it, RandomResizedCrop(224) and
RandomHorizontalFlip, bytes out. Theirs is ImageFolder with a DataLoader of as many workers as we have threads,
decoding with Pillow; each side's best round counts. With --make N, FOLDER is made first: N pictures of about
480 x 370 pixels and 100 kB. Needs torch, torchvision and Pillow; prints a table.
"""

import argparse
import json
import pathlib
import subprocess
import time

import numpy
import torch
import torchvision
from PIL import Image
from torchvision import transforms

ROOT = pathlib.Path(__file__).parent.parent.parent
BATCH, WARM_UP, SECS = 128, 2, 10


def make(folder, count):
    """Noise whose power falls with frequency, as in photographs, so that files are as large as theirs."""
    random = numpy.random.default_rng(0)
    height, width = 640, 800
    frequency = numpy.hypot(numpy.fft.fftfreq(height)[:, None], numpy.fft.fftfreq(width)[None, :])
    frequency[0, 0] = 1
    noise = random.standard_normal((3, height, width)) + 1j * random.standard_normal((3, height, width))
    planes = numpy.fft.ifft2(noise / frequency**1.05).real
    planes = (planes - planes.mean((1, 2), keepdims=True)) / planes.std((1, 2), keepdims=True)
    light = planes[0] * 45
    colours = [light + planes[1] * 18, light, light + planes[2] * 18]
    scene = numpy.clip(numpy.stack(colours, -1) + 120, 0, 255).astype(numpy.uint8)
    for number in range(count):
        w, h = int(random.integers(400, 560)), int(random.integers(300, 440))
        top, left = int(random.integers(0, height - h + 1)), int(random.integers(0, width - w + 1))
        home = folder / "train" / f"class{number % 10}"
        home.mkdir(parents=True, exist_ok=True)
        Image.fromarray(scene[top : top + h, left : left + w]).save(home / f"{number:06d}.jpg", quality=90)


def theirs(folder, threads):
    steps = [transforms.RandomResizedCrop(224, antialias=True), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
    data = torchvision.datasets.ImageFolder(folder / "train", transforms.Compose(steps))
    loader = torch.utils.data.DataLoader(
        data, BATCH, shuffle=True, drop_last=True, num_workers=threads, persistent_workers=True
    )

    def batches():
        while True:
            yield from loader

    ahead = batches()
    for _ in range(WARM_UP * threads):
        next(ahead)
    began, pictures = time.perf_counter(), 0
    while time.perf_counter() - began < SECS:
        pictures += len(next(ahead)[1])
    return pictures / (time.perf_counter() - began)


def ours(folder, threads):
    command = [ROOT / "target/release/lockstep", "bench", "--pictures", folder, "--threads", str(threads), "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["images_per_second"]


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("folder", type=pathlib.Path)
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--make", type=int, metavar="N")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    if given.make and not given.folder.exists():
        make(given.folder, given.make)
    best = {"ours": 0.0, "theirs": 0.0}
    for _ in range(given.rounds):
        for name, side in (("ours", ours), ("theirs", theirs)):
            best[name] = max(best[name], side(given.folder, given.threads))
    print(f"torch {torch.__version__}, torchvision {torchvision.__version__}, {given.threads} threads, n={given.rounds}")
    print(f"ours {best['ours']:.0f} images/s, theirs {best['theirs']:.0f}, ratio {best['ours'] / best['theirs']:.2f}")


if __name__ == "__main__":
    main()
