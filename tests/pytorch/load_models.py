"""Loads models that the release binary has trained in PyTorch: every architecture with every stem, with strict names and shapes, and
compares the probabilities of the same pictures. Also uses torchvision's weights as a job's `model.pretrained`. Needs torch,
torchvision and safetensors. If timm is installed, its names are compared, too. Arguments select networks by name:

    cargo build --release && python3 tests/pytorch/load_models.py [resnext50_32x4d ...]

Trains each network for twenty steps on bundled pictures, written as colour PNGs into folders of five classes. `lockstep predict`
gives the probabilities of all five classes, which may differ by at most 1e-4.
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
CLASSES, PER_CLASS, COMPARED, MAX_DIFFERENCE = 5, 64, 8, 1e-4


def read_idx(name, skip):
    return torch.frombuffer(bytearray(gzip.decompress((ROOT / "assets/fashion-mnist" / name).read_bytes())[skip:]), dtype=torch.uint8)


def write_pictures(folder, side):
    """Writes `train/<class>/*.png`, each picture in its class's colour and scaled to `side`. Returns some files with their pixels."""
    [images] = (ROOT / "assets/fashion-mnist").glob("train-images*")
    [labels] = (ROOT / "assets/fashion-mnist").glob("train-labels*")
    pictures, truth = read_idx(images.name, 16).view(-1, 1, 28, 28), read_idx(labels.name, 8)
    written = []
    for label in range(CLASSES):
        (folder / "train" / f"class{label}").mkdir(parents=True)
        colour = torch.tensor([1.0, 0.4 + 0.1 * label, 1.0 - 0.15 * label]).view(3, 1, 1)
        for number, picture in enumerate(pictures[truth == label][:PER_CLASS]):
            scaled = F.interpolate(picture[None].float(), (side, side), mode="bilinear")[0]
            written.append((folder / "train" / f"class{label}" / f"{number}.png", (scaled * colour).round().to(torch.uint8)))
    for file, picture in written:
        write_png(picture, str(file))
    return written[:: len(written) // COMPARED][:COMPARED]


def run(*arguments):
    result = subprocess.run([LOCKSTEP, *map(str, arguments)], capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"lockstep {' '.join(map(str, arguments))}: {result.stderr}")
    return result.stdout


def train(folder, name, model, side, settings):
    """Runs a job with these settings. Returns the exit status, the output and the job's folder."""
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
{settings}
[parallel]
device = "cpu"
""")
    out = folder / "runs" / name
    result = subprocess.run([LOCKSTEP, "train", job, "--out", out], capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr, out


def check_pretrained(folder, arch, stem, side):
    """Checks that a job starts from torchvision's weights, with the same and with another number of classes, and that its pickles can be
    converted by the command in the error."""
    original = build(arch, CLASSES, stem).state_dict()
    file, pickle = folder / f"{arch}.safetensors", folder / f"{arch}-{stem}.pth"
    settings = f'arch = "{arch}"\nstem = "{stem}"\npretrained = '

    def train_once(name, pretrained):
        # With so small a learning rate, only zeros change, by a negligible amount. Running statistics follow the pictures.
        status, output, out = train(folder, name, f'{settings}"{pretrained}"', side, "steps = 1\nlr = 1e-30\nweight_decay = 0")
        assert status == 0, output
        [trained] = out.glob("**/model.safetensors")
        return load_file(trained), output

    def check_weights(trained, pretrained):
        assert sorted(trained) == sorted(pretrained)
        for tensor, value in pretrained.items():
            if trained[tensor].shape != value.shape:
                assert tensor in ("fc.weight", "fc.bias") and len(trained[tensor]) == CLASSES, tensor
            elif "running" not in tensor and "tracked" not in tensor:
                assert (trained[tensor] - value).abs().max() < 1e-20, tensor

    for classes in (CLASSES, 1000):
        pretrained = original if classes == CLASSES else build(arch, classes, stem).state_dict()
        save_file(pretrained, file)
        trained, output = train_once(f"{arch}-{stem}-{classes}", file)
        check_weights(trained, pretrained)
        assert ("the last layer (fc) keeps its initial values" in output) == (classes != CLASSES), output
    for new_format in (True, False):
        torch.save(original, pickle, _use_new_zipfile_serialization=new_format)
        status, output, _ = train(folder, f"{arch}-{stem}-pickle-{new_format}", f'{settings}"{pickle}"', side, "steps = 1")
        command = output[output.index("python3 -c") :].splitlines()[0].replace("python3", sys.executable, 1)
        assert status == 1 and "pickle" in output, output
        subprocess.run(command, shell=True, check=True)
        converted = load_file(pickle.with_suffix(".safetensors"))
        assert sorted(converted) == sorted(original) and all(torch.equal(converted[name], original[name]) for name in original)
    for path in (file, pickle, pickle.with_suffix(".safetensors")):
        path.unlink()
    shutil.rmtree(folder / "runs")


def compare_timm_names(arch):
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
    # At a learning rate of 0.02, these networks give only probabilities of 0 and 1.
    lr = 0.002 if arch in RESNEXTS_AND_WIDE and stem == "imagenet" else 0.02
    status, output, out = train(folder, name, settings, side, f"epochs = 1\nlr = {lr}")
    if status:
        raise SystemExit(f"{name}: {output}")
    [file] = out.glob("**/model.safetensors")
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    model = build(arch, CLASSES, stem).eval()
    model.load_state_dict(load_file(file), strict=True)
    mean, std = (torch.tensor(json.loads(metadata[key])).view(1, 3, 1, 1) for key in ("mean", "std"))
    batch = torch.stack([picture for _, picture in pictures]).float() / 255
    with torch.no_grad():
        expected = F.softmax(model((batch - mean) / std), 1)
    reported = json.loads(run("predict", "--model", file, "--json", *(file for file, _ in pictures)))
    predicted = torch.tensor([[next(c["probability"] for c in p["classes"] if c["class"] == f"class{k}") for k in range(CLASSES)] for p in reported])
    # The comparison is meaningful only if the probabilities vary. After a few steps, a deep network with unsuitable initial weights may give
    # only 0 and 1, and a network that has learned nothing gives the same for every picture.
    spread = expected.std(0).max().item()
    assert 0.01 < spread and expected.max() < 0.9999, f"{name}: probabilities {expected.min():.2g} to {expected.max():.2g}, standard deviation {spread:.1e}"
    return (predicted - expected).abs().max().item()


if __name__ == "__main__":
    worst = 0.0
    for stem, side, arches in (("cifar", 32, [*CIFAR_FAMILY, *TORCHVISION]), ("imagenet", 64, TORCHVISION)):
        with tempfile.TemporaryDirectory() as path:
            folder = pathlib.Path(path)
            pictures = write_pictures(folder, side)
            for arch in [arch for arch in arches if arch in (sys.argv[1:] or arches)]:
                difference = largest_difference(folder, pictures, arch, stem, side)
                worst = max(worst, difference)
                print(f"{arch:16} {stem:9} strict; probabilities differ by at most {difference:.1e}{'' if difference <= MAX_DIFFERENCE else '  TOO MUCH'}", flush=True)
                check_pretrained(folder, arch, stem, side)
                names = compare_timm_names(arch) if arch in TORCHVISION else "not a network of timm"
                print(f"{arch:16} {stem:9} training starts from torchvision's weights; {names}", flush=True)
    raise SystemExit(0 if worst <= MAX_DIFFERENCE else 1)
