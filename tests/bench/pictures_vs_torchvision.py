"""Pictures per second prepared for training on this machine's CPU: Lockstep and torchvision, measured in turns.

    cargo build --release
    python3 tests/bench/pictures_vs_torchvision.py FOLDER [--threads 2] [--rounds 3]

Both do the same work: read a JPEG file of FOLDER/train/<class>/, decode it, apply RandomResizedCrop(224) and
RandomHorizontalFlip, and return bytes. torchvision uses ImageFolder with Pillow, and a DataLoader with as many
workers as Lockstep has threads. The best round counts. With --make N, FOLDER is created first, with N pictures
of about 480 x 370 pixels and 100 kB. Needs torch, torchvision and Pillow. Prints the speeds and their ratio.
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


def create_pictures(folder, count):
    """Writes pictures of noise whose power falls with frequency, as in photographs, so that files have the size of photographs."""
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


def measure_torchvision(folder, threads):
    steps = [transforms.RandomResizedCrop(224, antialias=True), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
    data = torchvision.datasets.ImageFolder(folder / "train", transforms.Compose(steps))
    loader = torch.utils.data.DataLoader(
        data, BATCH, shuffle=True, drop_last=True, num_workers=threads, persistent_workers=True
    )

    def batches():
        while True:
            yield from loader

    stream = batches()
    for _ in range(WARM_UP * threads):
        next(stream)
    began, pictures = time.perf_counter(), 0
    while time.perf_counter() - began < SECS:
        pictures += len(next(stream)[1])
    return pictures / (time.perf_counter() - began)


def measure_lockstep(folder, threads):
    command = [ROOT / "target/release/lockstep", "bench", "--pictures", folder, "--threads", str(threads), "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["images_per_second"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--make", type=int, metavar="N")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.make and not options.folder.exists():
        create_pictures(options.folder, options.make)
    best = {"Lockstep": 0.0, "torchvision": 0.0}
    for _ in range(options.rounds):
        for name, measure in (("Lockstep", measure_lockstep), ("torchvision", measure_torchvision)):
            best[name] = max(best[name], measure(options.folder, options.threads))
    print(f"torch {torch.__version__}, torchvision {torchvision.__version__}, {options.threads} threads, n={options.rounds}")
    print(f"Lockstep {best['Lockstep']:.0f} images/s, torchvision {best['torchvision']:.0f}, ratio {best['Lockstep'] / best['torchvision']:.2f}")


if __name__ == "__main__":
    main()
