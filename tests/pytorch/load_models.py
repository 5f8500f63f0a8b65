"""Models that the release binary has trained, loaded by PyTorch: every architecture with every stem it can have, names and
shapes strictly, and the same probabilities from the same file on the same pictures. Needs torch, torchvision and safetensors:

    cargo build --release && python3 tests/pytorch/load_models.py

Trains each for twenty steps on bundled pictures, written as colour PNGs into folders of five classes; `lockstep predict` tells
the probabilities of all five. The largest distance allowed is 1e-4.
"""

import gzip
import json
import os
import pathlib
import subprocess
import tempfile

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torchvision.io import write_png

from models import CIFAR_FAMILY, build

ROOT = pathlib.Path(__file__).parents[2]
LOCKSTEP = os.environ.get("LOCKSTEP_BIN", ROOT / "target/release/lockstep")
TORCHVISION = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
CLASSES, EACH, SHOWN, ALLOWED = 5, 64, 8, 1e-4


def idx(name, skip):
    return torch.frombuffer(bytearray(gzip.decompress((ROOT / "assets/fashion-mnist" / name).read_bytes())[skip:]), dtype=torch.uint8)


def write_pictures(folder, side):
    """`train/<class>/*.png`: each picture in a colour of its class, scaled to `side`."""
    [images] = (ROOT / "assets/fashion-mnist").glob("train-images*")
    [labels] = (ROOT / "assets/fashion-mnist").glob("train-labels*")
    pictures, truth = idx(images.name, 16).view(-1, 1, 28, 28), idx(labels.name, 8)
    made = []
    for label in range(CLASSES):
        (folder / "train" / f"class{label}").mkdir(parents=True)
        colour = torch.tensor([1.0, 0.4 + 0.1 * label, 1.0 - 0.15 * label]).view(3, 1, 1)
        for number, picture in enumerate(pictures[truth == label][:EACH]):
            scaled = F.interpolate(picture[None].float(), (side, side), mode="bilinear")[0]
            made.append((folder / "train" / f"class{label}" / f"{number}.png", (scaled * colour).round().to(torch.uint8)))
    for file, picture in made:
        write_png(picture, str(file))
    return made[:: len(made) // SHOWN][:SHOWN]


def run(*arguments):
    done = subprocess.run([LOCKSTEP, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"lockstep {' '.join(map(str, arguments))}: {done.stderr}")
    return done.stdout


def largest_difference(folder, pictures, arch, stem, side):
    job = folder / f"{arch}-{stem}.toml"
    job.write_text(f"""
name = "{job.stem}"
[model]
arch = "{arch}"
stem = "{stem}"
zero_init_residual = true
[data]
dataset = "{folder}"
image_size = {side}
validation = "none"
[train]
epochs = 1
batch_size = 16
lr = 0.02
[parallel]
device = "cpu"
""")
    out = folder / "runs" / job.stem
    run("train", job, "--out", out)
    [file] = out.glob("**/model.safetensors")
    with safe_open(file, "pt") as opened:
        about = opened.metadata()
    model = build(arch, CLASSES, stem).eval()
    model.load_state_dict(load_file(file), strict=True)
    mean, std = (torch.tensor(json.loads(about[key])).view(1, 3, 1, 1) for key in ("mean", "std"))
    batch = torch.stack([picture for _, picture in pictures]).float() / 255
    with torch.no_grad():
        theirs = F.softmax(model((batch - mean) / std), 1)
    told = json.loads(run("predict", "--model", file, "--json", *(file for file, _ in pictures)))
    ours = torch.tensor([[next(c["probability"] for c in p["classes"] if c["class"] == f"class{k}") for k in range(CLASSES)] for p in told])
    # Running statistics are young after a few steps: a deep network that was not begun tamely answers 0 and 1 only, and one
    # that has learnt nothing the same of every picture. Neither compares anything.
    spread = theirs.std(0).max().item()
    assert 0.01 < spread and theirs.max() < 0.9999, f"{job.stem}: probabilities {theirs.min():.2g} to {theirs.max():.2g}, {spread:.1e} apart"
    return (ours - theirs).abs().max().item()


if __name__ == "__main__":
    worst = 0.0
    for stem, side, arches in (("cifar", 32, [*CIFAR_FAMILY, *TORCHVISION]), ("imagenet", 64, TORCHVISION)):
        with tempfile.TemporaryDirectory() as made:
            folder = pathlib.Path(made)
            pictures = write_pictures(folder, side)
            for arch in arches:
                apart = largest_difference(folder, pictures, arch, stem, side)
                worst = max(worst, apart)
                print(f"{arch:10} {stem:9} strict; probabilities at most {apart:.1e} apart{'' if apart <= ALLOWED else '  TOO MUCH'}", flush=True)
    raise SystemExit(0 if worst <= ALLOWED else 1)
