"""The networks as plain PyTorch models: torchvision's, and the CIFAR family of the Python package."""

import pathlib
import sys

from torch import nn
import torchvision

# Imports the file directly, as the package needs more than torch.
sys.path.append(str(pathlib.Path(__file__).parents[2] / "python/src/lockstep"))
import cifar_resnet  # noqa: E402

# The networks of torchvision's resnet.py: ResNets, and networks with grouped or wide bottlenecks.
RESNETS = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
RESNEXTS_AND_WIDE = ["resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d", "wide_resnet50_2", "wide_resnet101_2"]
CIFAR_FAMILY = ["resnet20", "resnet32", "resnet44", "resnet56", "resnet110"]


def build(arch, classes=10, stem="cifar", channels=3):
    """Builds `arch` with torchvision's names. `stem` applies to torchvision's networks ("cifar": 3x3 with stride 1, no pooling)."""
    if arch in CIFAR_FAMILY:
        return getattr(cifar_resnet, arch)(classes, channels)
    model = getattr(torchvision.models, arch)(num_classes=classes)
    if stem == "cifar":
        model.conv1 = nn.Conv2d(channels, 64, 3, 1, 1, bias=False)
        model.maxpool = nn.Identity()
    elif channels != 3:
        model.conv1 = nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
    return model
