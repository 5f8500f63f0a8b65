"""PyTorch's counterpart of `learns.py`: ResNet-50 on enlarged CIFAR-10 pictures, SGD with momentum 0.9, cosine schedule,
weight decay 5e-4, batch 256, crop and flip. Prints a line of JSON per seed.

    python3 torch_learns.py --pictures cifar10 --size 224 --precision bf16 --lr 0.1 --epochs 5 --seeds 1 2 3
"""

import json
import math
import time

import torch
import torchvision
from torch.nn import functional

from options import parse_options

options = parse_options(pictures=str, size=224, precision="bf16", lr=0.1, epochs=5, batch=256, seeds=[int])
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
device = torch.device("cuda")


def load(split):
    data = torch.load(f"{options.pictures}/{split}.pt")
    return data["images"].to(device).permute(0, 3, 1, 2).contiguous(), data["labels"].to(device)


train, train_labels = load("train")
test, test_labels = load("test")
scaled = train.float() / 255
mean, std = scaled.mean((0, 2, 3)).view(1, 3, 1, 1), scaled.std((0, 2, 3)).view(1, 3, 1, 1)
del scaled


def prepare(pictures):
    enlarged = functional.interpolate(pictures.float() / 255, size=options.size, mode="bilinear", align_corners=False)
    return ((enlarged - mean) / std).to(memory_format=torch.channels_last)


def augment(pictures):
    """Pads each picture with 4 black pixels on each side, then crops and flips it at random."""
    count, side = len(pictures), pictures.shape[-1]
    padded = functional.pad(pictures, (4, 4, 4, 4))
    corner = torch.randint(0, 9, (count, 2), device=device)
    along = torch.arange(side, device=device)
    columns = torch.where(torch.rand(count, 1, device=device) < 0.5, along.flip(0), along) + corner[:, 1:]
    rows = along + corner[:, :1]
    which = torch.arange(count, device=device)
    return padded[which[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def autocast():
    return torch.autocast("cuda", torch.bfloat16, enabled=options.precision == "bf16")


for seed in options.seeds:
    torch.manual_seed(seed)
    net = torchvision.models.resnet50(num_classes=10).to(device, memory_format=torch.channels_last)
    compiled = torch.compile(net)
    optimizer = torch.optim.SGD(net.parameters(), options.lr, momentum=0.9, weight_decay=5e-4, fused=True)
    steps = len(train) // options.batch
    total, done, began, losses = steps * options.epochs, 0, None, []
    for _ in range(options.epochs):
        net.train()
        order = torch.randperm(len(train), device=device)
        for step in range(steps):
            chosen = order[step * options.batch : (step + 1) * options.batch]
            for group in optimizer.param_groups:
                group["lr"] = 0.5 * options.lr * (1 + math.cos(math.pi * done / total))
            with autocast():
                loss = functional.cross_entropy(compiled(prepare(augment(train[chosen]))), train_labels[chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
            done += 1
            # The first steps, in which the network is compiled, are not timed.
            if done == 20:
                torch.cuda.synchronize()
                began = time.monotonic()
    torch.cuda.synchronize()
    secs = time.monotonic() - began
    net.eval()
    right = 0
    with torch.no_grad(), autocast():
        for first in range(0, len(test), 500):
            right += (net(prepare(test[first : first + 500])).argmax(1) == test_labels[first : first + 500]).sum().item()
    losses = torch.stack(losses).tolist()
    # `losses`: the mean loss of each 65 successive steps. With a batch size of 256, an epoch has 195 steps.
    row = {
        "side": "pytorch", "size": options.size, "precision": options.precision, "lr": options.lr, "epochs": options.epochs, "seed": seed,
        "accuracy": 100 * right / len(test), "train_secs": round(secs, 2),
        "losses": [round(sum(losses[i : i + 65]) / len(losses[i : i + 65]), 4) for i in range(0, len(losses), 65)],
    }
    print(json.dumps(row), flush=True)
