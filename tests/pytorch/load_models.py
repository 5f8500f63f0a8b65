"""Models that the release binary has trained, loaded by PyTorch: every architecture with every stem it can have, names and
shapes strictly, and the same probabilities from the same file on the same pictures. And the other way round: weights that
torchvision has made are a job's `model.pretrained`. Needs torch, torchvision and safetensors; with timm its names are
compared, too. Names of networks as arguments choose some:

    cargo build --release && python3 tests/pytorch/load_models.py [resnext50_32x4d ...]

Trains each for twenty steps on bundled pictures, written as colour PNGs into folders of five classes; `lockstep predict` tells
the probabilities of all five. The largest distance allowed is 1e-4.
"""

import gzip
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torchvision.io import write_png

from models import CIFAR_FAMILY, RESNETS, RESNEXTS_AND_WIDE, build

ROOT = pathlib.Path(__file__).parents[2]
LOCKSTEP = os.environ.get("LOCKSTEP_BIN", ROOT / "target/release/lockstep")
TORCHVISION = [*RESNETS, *RESNEXTS_AND_WIDE]
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


def train(folder, name, model, side, more):
    """Runs a job of these settings; gives the exit status, what it said and the folder that it wrote to."""
    job = folder / f"{name}.toml"
    job.write_text(f"""
name = "{name}"
[model]
{model}
[data]
dataset = "{folder}"
image_size = {side}
validation = "none"
[train]
batch_size = 16
{more}
[parallel]
device = "cpu"
""")
    out = folder / "runs" / name
    done = subprocess.run([LOCKSTEP, "train", job, "--out", out], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr, out


def is_taken_over(folder, arch, stem, side):
    """Weights of torchvision's own, with as many classes and with others, and its pickles."""
    theirs = build(arch, CLASSES, stem).state_dict()
    file, pickle = folder / f"{arch}.safetensors", folder / f"{arch}-{stem}.pth"
    settings = f'arch = "{arch}"\nstem = "{stem}"\npretrained = '

    def taught(name, given):
        # So small a learning rate moves only zeros, by next to nothing; running statistics follow the pictures.
        status, said, out = train(folder, name, f'{settings}"{given}"', side, "steps = 1\nlr = 1e-30\nweight_decay = 0")
        assert status == 0, said
        [ours] = out.glob("**/model.safetensors")
        return load_file(ours), said

    def agree(ours, wanted):
        assert sorted(ours) == sorted(wanted)
        for tensor, value in wanted.items():
            if ours[tensor].shape != value.shape:
                assert tensor in ("fc.weight", "fc.bias") and len(ours[tensor]) == CLASSES, tensor
            elif "running" not in tensor and "tracked" not in tensor:
                assert (ours[tensor] - value).abs().max() < 1e-20, tensor

    for classes in (CLASSES, 1000):
        wanted = theirs if classes == CLASSES else build(arch, classes, stem).state_dict()
        save_file(wanted, file)
        ours, said = taught(f"{arch}-{stem}-{classes}", file)
        agree(ours, wanted)
        assert ("the last layer (fc) keeps its initial values" in said) == (classes != CLASSES), said
    for new_format in (True, False):
        torch.save(theirs, pickle, _use_new_zipfile_serialization=new_format)
        status, said, _ = train(folder, f"{arch}-{stem}-pickle-{new_format}", f'{settings}"{pickle}"', side, "steps = 1")
        command = said[said.index("python3 -c") :].splitlines()[0].replace("python3", sys.executable, 1)
        assert status == 1 and "pickle" in said, said
        subprocess.run(command, shell=True, check=True)
        converted = load_file(pickle.with_suffix(".safetensors"))
        assert sorted(converted) == sorted(theirs) and all(torch.equal(converted[n], theirs[n]) for n in theirs)
    for made in (file, pickle, pickle.with_suffix(".safetensors")):
        made.unlink()
    shutil.rmtree(folder / "runs")


def has_timm_s_names(arch):
    try:
        import timm
    except ImportError:
        return "no timm here"
    shapes = lambda model: [(name, value.shape) for name, value in model.state_dict().items()]
    assert shapes(timm.create_model(arch)) == shapes(build(arch, 1000, "imagenet"))
    return f"timm {timm.__version__}'s names are the same"


def largest_difference(folder, pictures, arch, stem, side):
    settings = f'arch = "{arch}"\nstem = "{stem}"\nzero_init_residual = true'
    name = f"{arch}-{stem}"
    # At 0.02 these answer 0 and 1 only.
    lr = 0.002 if arch in RESNEXTS_AND_WIDE and stem == "imagenet" else 0.02
    status, said, out = train(folder, name, settings, side, f"epochs = 1\nlr = {lr}")
    if status:
        raise SystemExit(f"{name}: {said}")
    [file] = out.glob("**/model.safetensors")
    with safe_open(file, "pt") as opened:
        about = opened.metadata()
    model = build(arch, CLASSES, stem).eval()
    model.load_state_dict(load_file(file), strict=True)
    mean, std = (torch.tensor(json.loads(about[key])).view(1, 3, 1, 1) for key in ("mean", "std"))
    batch = torch.stack([picture for _, picture in pictures]).float() / 255
    with torch.no_grad():
        theirs = F.softmax(model((batch - mean) / std), 1)
    reported = json.loads(run("predict", "--model", file, "--json", *(file for file, _ in pictures)))
    ours = torch.tensor([[next(c["probability"] for c in p["classes"] if c["class"] == f"class{k}") for k in range(CLASSES)] for p in reported])
    # Running statistics are young after a few steps: a deep network that was not begun tamely answers 0 and 1 only, and one
    # that has learnt nothing the same of every picture. Neither compares anything.
    spread = theirs.std(0).max().item()
    assert 0.01 < spread and theirs.max() < 0.9999, f"{name}: probabilities {theirs.min():.2g} to {theirs.max():.2g}, {spread:.1e} apart"
    return (ours - theirs).abs().max().item()


if __name__ == "__main__":
    worst = 0.0
    for stem, side, arches in (("cifar", 32, [*CIFAR_FAMILY, *TORCHVISION]), ("imagenet", 64, TORCHVISION)):
        with tempfile.TemporaryDirectory() as made:
            folder = pathlib.Path(made)
            pictures = write_pictures(folder, side)
            for arch in [arch for arch in arches if arch in (sys.argv[1:] or arches)]:
                apart = largest_difference(folder, pictures, arch, stem, side)
                worst = max(worst, apart)
                print(f"{arch:16} {stem:9} strict; probabilities at most {apart:.1e} apart{'' if apart <= ALLOWED else '  TOO MUCH'}", flush=True)
                is_taken_over(folder, arch, stem, side)
                names = has_timm_s_names(arch) if arch in TORCHVISION else "none of timm's"
                print(f"{arch:16} {stem:9} torchvision's weights are taken over; {names}", flush=True)
    raise SystemExit(0 if worst <= ALLOWED else 1)
