"""Compares learning at a high learning rate with PyTorch: ResNet-50 on enlarged CIFAR-10 pictures with the recipe of
`torch_learns.py`, by `lockstep train`. Prints a line of JSON per seed.

    python3 learns.py --program lockstep --pictures cifar-10-batches-bin --work /tmp --size 224 --precision auto \\
        --lr 0.1 --epochs 5 --seeds 1 2 3
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import time

from losses import by_step, log
from options import parse_options
from training import job_command

options = parse_options(program=str, pictures=str, work=str, size=224, precision="auto", lr=0.1, epochs=5, batch=256, seeds=[int])

for seed in options.seeds:
    folder = pathlib.Path(options.work) / f"learns-{options.size}-{options.precision}-{options.lr}-{seed}"
    command = job_command(options.program, folder, f"""
name = "learns"
[model]
arch = "resnet50"
stem = "imagenet"
[data]
dataset = "{pathlib.Path(options.pictures).resolve()}"
image_size = {options.size}
crop_padding = 4
horizontal_flip = true
[train]
epochs = {options.epochs}
global_batch_size = {options.batch}
lr = {options.lr}
weight_decay = 5e-4
schedule = "cosine"
precision = "{options.precision}"
seed = {seed}
[parallel]
device = "cuda"
[evaluate]
every_epochs = 0
[checkpoint]
every_epochs = 1000
keep = 2
[log]
every_steps = 1
""")
    began = time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True)
    secs = time.monotonic() - began
    text = log(folder, 0)
    losses = list(by_step(text).values())
    accuracy = re.findall(r"validation accuracy is ([0-9.]+) %", text)
    # Without NaN, in groups of 65 successive steps. With a batch size of 256, an epoch has 195 steps.
    finite = [[x for x in losses[i : i + 65] if x == x] for i in range(0, len(losses), 65)]
    row = {
        "side": "lockstep", "size": options.size, "precision": options.precision, "lr": options.lr, "epochs": options.epochs, "seed": seed,
        "accuracy": float(accuracy[-1]) if accuracy else None, "whole_secs": round(secs, 2),
        "losses": [round(sum(part) / max(len(part), 1), 4) for part in finite],
        "not_finite": len(losses) - sum(map(len, finite)),
        "bfloat16": re.findall(r"float16 could not hold .*", text),
    }
    print(json.dumps(row), flush=True)
    if result.returncode != 0:
        print(result.stdout[-1000:], result.stderr[-1000:], text[-1000:], sep="\n", file=sys.stderr, flush=True)
    shutil.rmtree(folder)
