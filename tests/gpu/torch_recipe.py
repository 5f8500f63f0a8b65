"""PyTorch's counterpart of `recipe.py`: torchvision's ResNet-18 and its first recipe for ImageNet, shortened to 10 epochs, on the same files,
with torchvision's transforms and mixed precision, without weight decay for batch norm and biases. Prints a line of JSON per seed.

    python3 torch_recipe.py --pictures cifar10-jpeg-64 --seeds 1 2 3
"""

import json
import multiprocessing
import os
import pathlib
import time

import numpy
import torch
import torchvision
from PIL import Image
from torch.nn import functional
from torchvision import transforms

from options import parse_options
from recipe import SIDE, milestones


def decode(path):
    return numpy.asarray(Image.open(path).convert("RGB"))


class Split(torch.utils.data.Dataset):
    """A split's pictures, decoded once and kept in memory, which gives the same pixels as decoding in each epoch."""

    def __init__(self, folder, transform):
        classes = sorted(path.name for path in folder.iterdir())
        files = [(file, label) for label, name in enumerate(classes) for file in sorted((folder / name).iterdir())]
        with multiprocessing.Pool() as pool:
            self.pixels = numpy.stack(pool.map(decode, [file for file, _ in files], chunksize=200))
        self.labels = [label for _, label in files]
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, number):
        return self.transform(Image.fromarray(self.pixels[number])), self.labels[number]


def main():
    options = parse_options(pictures=str, device="cuda", epochs=10, seeds=[int])
    folder, device = pathlib.Path(options.pictures), torch.device(options.device)
    normalise = [transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    training = Split(
        folder / "train", transforms.Compose([transforms.RandomResizedCrop(SIDE), transforms.RandomHorizontalFlip(), *normalise])
    )
    # The ratio 256 to 224, as in torchvision's script.
    resize = round(SIDE * 256 / 224)
    validation = Split(
        folder / "val", transforms.Compose([transforms.Resize(resize), transforms.CenterCrop(SIDE), *normalise])
    )
    workers = {"num_workers": os.cpu_count(), "pin_memory": True, "persistent_workers": True}
    for seed in options.seeds:
        torch.manual_seed(seed)
        train = torch.utils.data.DataLoader(training, 256, shuffle=True, drop_last=True, **workers)
        test = torch.utils.data.DataLoader(validation, 500, **workers)
        net = torchvision.models.resnet18(num_classes=10).to(device, memory_format=torch.channels_last)
        matrices = [p for p in net.parameters() if p.ndim > 1]
        others = [p for p in net.parameters() if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 1e-4}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.SGD(groups, 0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones(options.epochs), 0.1)
        scaler = torch.amp.GradScaler(options.device)
        began = time.monotonic()
        for _ in range(options.epochs):
            net.train()
            for pictures, labels in train:
                pictures = pictures.to(device, non_blocking=True, memory_format=torch.channels_last)
                with torch.autocast(options.device, torch.float16):
                    loss = functional.cross_entropy(net(pictures), labels.to(device, non_blocking=True))
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
            schedule.step()
        secs = time.monotonic() - began
        net.eval()
        right = 0
        with torch.no_grad(), torch.autocast(options.device, torch.float16):
            for pictures, labels in test:
                scores = net(pictures.to(device, memory_format=torch.channels_last))
                right += (scores.argmax(1).cpu() == labels).sum().item()
        row = {
            "side": "pytorch", "run": "recipe-imagenet", "seed": seed, "epochs": options.epochs,
            "accuracy": 100 * right / len(validation), "train_secs": round(secs, 1),
        }
        print(json.dumps(row), flush=True)
        del train, test


if __name__ == "__main__":
    main()
