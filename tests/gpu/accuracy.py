"""Trains ResNet-18 with the 3x3 stem on CIFAR-10 with the recipe of PyTorch's counterpart (one cycle to lr 0.4, batch 512,
label smoothing 0.1, crop and flip) by `lockstep train`, and appends a line of JSON.

    python3 accuracy.py --program lockstep --pictures cifar-10-batches-bin --work /tmp --out accuracy.jsonl \\
        --epochs 10 --seed 1
"""

import json
import pathlib
import shutil

from options import parse_options
from training import train

options = parse_options(
    program=str, pictures=str, work=str, out=str, epochs=int, seed=1, batch=512, lr=0.4, precision="auto", device="cuda", ranks=1,
    sync_batch_norm="true",
)

folder = pathlib.Path(options.work) / f"accuracy-{options.epochs}-{options.seed}-{options.ranks}-{options.batch}-{options.sync_batch_norm}"
job = f"""
name = "accuracy"
[model]
arch = "resnet18"
stem = "cifar"
[data]
dataset = "{pathlib.Path(options.pictures).resolve()}"
crop_padding = 4
horizontal_flip = true
[train]
epochs = {options.epochs}
global_batch_size = {options.batch}
optimizer = "nesterov"
lr = {options.lr}
momentum = 0.9
weight_decay = 5e-4
schedule = "one_cycle"
pct_start = 0.25
label_smoothing = 0.1
precision = "{options.precision}"
seed = {options.seed}
[parallel]
ranks = {options.ranks}
device = "{options.device}"
sync_batch_norm = {options.sync_batch_norm}
[evaluate]
every_epochs = 0
[checkpoint]
every_epochs = 1000
keep = 2
"""
accuracy, secs = train(options.program, folder, job)
row = {
    "epochs": options.epochs, "seed": options.seed, "ranks": options.ranks, "global_batch": options.batch, "precision": options.precision,
    "sync_batch_norm": options.sync_batch_norm == "true", "accuracy": accuracy, **secs,
}
with open(options.out, "a") as out:
    out.write(json.dumps(row) + "\n")
print(json.dumps(row))
shutil.rmtree(folder)
