"""Tests the examples of the pages that load and write weights, with PyTorch and torchvision. Needs Debian's PyTorch and
Python: `bash tests/run full` installs everything.
"""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors import safe_open
from safetensors.torch import load_file
from test_examples import blocks, example
from test_lockstep import SPEC, server

import lockstep

# The fixture of test_lockstep starts a server for this module, too.
__all__ = ["server"]


def picture(path: str, channels: int) -> Any:
    """Returns a picture as the networks get it before it is normalised."""
    mode = torchvision.io.ImageReadMode.GRAY if channels == 1 else torchvision.io.ImageReadMode.RGB
    return torchvision.io.read_image(path, mode)[None] / 255


def assert_predicts(job: lockstep.Job, logits: Any, path: str) -> None:
    """Checks that these logits of a picture are those of the job's best checkpoint."""
    expected = job.predict(path)
    classes = json.loads(safe_open("model.safetensors", "pt").metadata()["classes"])
    found = dict(zip(classes, logits.softmax(1)[0].tolist(), strict=True))
    assert found == pytest.approx(expected, abs=1e-4)


def test_torchvision_loads_the_model_of_getting_started() -> None:
    with zipfile.ZipFile("cifar10.zip", "w") as archive:
        for split in ("train", "test"):
            for number in range(40):
                torchvision.utils.save_image(torch.rand(3, 32, 32), "picture.png")
                archive.write("picture.png", f"{split}/{number % 10}/{number}.png")
    lockstep.Client().upload("cifar10", "cifar10.zip")
    [toml] = [toml for toml in blocks("docs/getting-started.md", "toml") if toml.startswith("# job.toml")]
    small = re.sub(r"epochs = \d+", "epochs = 1", toml)
    Path("job.toml").write_text(re.sub(r"batch_size = \d+", "batch_size = 20", small))
    names: dict[str, Any] = {}
    exec(example("docs/getting-started.md", "lockstep.submit"), names)
    exec(example("docs/getting-started.md", "torchvision"), names)
    about = safe_open("model.safetensors", "pt").metadata()
    mean, std = (torch.tensor(json.loads(about[key])).view(1, -1, 1, 1) for key in ("mean", "std"))
    logits = names["model"].eval()((picture("picture.png", 3) - mean) / std)
    assert_predicts(names["job"], logits, "picture.png")


def test_pytorch_loads_a_model_of_the_cifar_family() -> None:
    job = lockstep.submit(SPEC, image_size=28)
    job.wait()
    job.checkpoint("best").download("model.safetensors")
    names: dict[str, Any] = {"pictures": picture("shoe.png", 1)}
    exec(example("docs/training.md", "resnet20"), names)
    assert_predicts(job, names["logits"], "shoe.png")


def test_a_job_begins_with_weights_of_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    # The file that torchvision would download.
    monkeypatch.setenv("TORCH_HOME", str(Path("torch").absolute()))
    weights = torchvision.models.resnet18().state_dict()
    file = Path("torch/hub/checkpoints", Path(torchvision.models.ResNet18_Weights.DEFAULT.url).name)
    file.parent.mkdir(parents=True)
    torch.save(weights, file)
    exec(example("docs/training.md", "save_file"), {})
    model = {"arch": "resnet18", "stem": "imagenet", "pretrained": "resnet18.safetensors"}
    job = lockstep.submit(SPEC, set={"model": model}, image_size=32, lr=1e-9)
    job.wait()
    job.checkpoint().download("trained.safetensors")
    found = load_file("trained.safetensors")["layer4.1.conv2.weight"]
    assert torch.allclose(found, weights["layer4.1.conv2.weight"])
