"""The networks as plain PyTorch models: torchvision's, and the CIFAR family under the same names."""

import torch
from torch import nn
import torchvision

# Those of torchvision's resnet.py: ResNets, and what has grouped or wide bottlenecks.
RESNETS = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
RESNEXTS_AND_WIDE = ["resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d", "wide_resnet50_2", "wide_resnet101_2"]
CIFAR_FAMILY = {"resnet20": 3, "resnet32": 5, "resnet44": 7, "resnet56": 9, "resnet110": 18}


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class CifarResNet(nn.Module):
    """He et al. 2015, section 4.2, with a 1x1 convolution as shortcut where the shape changes."""

    def __init__(self, blocks, classes=10, channels=3):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        inputs = 16
        for stage, width in enumerate((16, 32, 64), start=1):
            layers = []
            for index in range(blocks):
                layers.append(Block(inputs, width, 2 if stage > 1 and index == 0 else 1))
                inputs = width
            setattr(self, f"layer{stage}", nn.Sequential(*layers))
        self.fc = nn.Linear(64, classes)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(x.mean((2, 3)))


def build(arch, classes=10, stem="cifar", channels=3):
    """`arch` with torchvision's names; `stem` is for torchvision's ("cifar": 3x3 of stride 1, no pooling)."""
    if arch in CIFAR_FAMILY:
        return CifarResNet(CIFAR_FAMILY[arch], classes, channels)
    model = getattr(torchvision.models, arch)(num_classes=classes)
    if stem == "cifar":
        model.conv1 = nn.Conv2d(channels, 64, 3, 1, 1, bias=False)
        model.maxpool = nn.Identity()
    elif channels != 3:
        model.conv1 = nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
    return model
