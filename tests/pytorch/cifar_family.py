"""Compares the CIFAR family of the Python package with recorded names, shapes and logits, as `worker/tests/worker/pytorch.rs` does
for the engine. Needs torch and numpy:

    python3 tests/pytorch/cifar_family.py
"""

import json
import pathlib
import sys

import torch

from generator import parameter, values

HERE = pathlib.Path(__file__).parent
# Imports the file directly, as the package needs more than torch.
sys.path.append(str(HERE.parents[1] / "python/src/lockstep"))
import cifar_resnet  # noqa: E402

recorded = json.loads((HERE / "fixtures/architectures.json").read_text())
for arch in ("resnet20", "resnet32", "resnet44", "resnet56", "resnet110"):
    expected = recorded[arch]["cifar"]
    model = getattr(cifar_resnet, arch)(expected["classes"], expected["channels"]).eval()
    # The counters of batches are not recorded.
    parameters = [[name, list(value.shape)] for name, value in model.state_dict().items() if not name.endswith("tracked")]
    assert parameters == expected["parameters"], f"{arch}: {parameters}"
    weights = {name: torch.from_numpy(parameter(arch, name, shape, features=64)) for name, shape in expected["parameters"]}
    model.load_state_dict(weights, strict=False)
    side, channels = expected["image_size"], expected["channels"]
    pictures = torch.from_numpy(values(f"{arch}.cifar.images", 2, side, side, channels)).permute(0, 3, 1, 2)
    with torch.no_grad():
        logits = model(pictures.contiguous())
    reference = torch.tensor(expected["logits"])
    difference = ((logits - reference).abs().max() / reference.abs().max()).item()
    assert difference < 1e-4, f"{arch}: logits differ by {difference:.1e}"
    print(f"{arch}: logits differ by at most {difference:.1e}")
