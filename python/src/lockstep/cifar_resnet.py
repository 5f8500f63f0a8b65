"""The CIFAR family as PyTorch models: ResNets of He et al. 2015, section 4.2, with the names of Lockstep's checkpoints.

The shortcut is a 1x1 convolution where the shape changes. The file needs nothing but torch, so it can also be copied.

    from lockstep.cifar_resnet import resnet20
    from safetensors.torch import load_file

    model = resnet20(num_classes=10)
    model.load_state_dict(load_file("model.safetensors"), strict=True)
    logits = model.eval()(pictures)

`pictures`: float32 of shape (N, channels, height, width), pixels from 0 to 1 minus `mean` and divided by `std`; both
are in the metadata of the safetensors file.
"""

from __future__ import annotations

import functools

import torch
from torch import nn


class Block(nn.Module):
    """Two 3x3 convolutions with a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the block's output."""
        y = torch.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class CifarResNet(nn.Module):
    """A network of three stages of `blocks` blocks, with 16, 32 and 64 channels."""

    def __init__(self, blocks: int, num_classes: int = 10, channels: int = 3) -> None:
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
        self.fc = nn.Linear(64, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the logits, of shape (N, num_classes)."""
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(x.mean((2, 3)))


# Grey pictures need the argument `channels=1`.
resnet20 = functools.partial(CifarResNet, 3)
resnet32 = functools.partial(CifarResNet, 5)
resnet44 = functools.partial(CifarResNet, 7)
resnet56 = functools.partial(CifarResNet, 9)
resnet110 = functools.partial(CifarResNet, 18)
