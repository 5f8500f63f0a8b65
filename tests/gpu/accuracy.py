"""ResNet-18 with the 3x3 stem on CIFAR-10 with the recipe of PyTorch's side (one cycle to lr 0.4, batch 512,
label smoothing 0.1, crop and flip), by `lockstep train`; appends a line of JSON.

    python3 accuracy.py --program lockstep --pictures cifar-10-batches-bin --work /tmp --out accuracy.jsonl \\
        --epochs 10 --seed 1
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--program", required=True)
parser.add_argument("--pictures", required=True)
parser.add_argument("--work", required=True)
parser.add_argument("--out", required=True)
parser.add_argument("--epochs", type=int, required=True)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--batch", type=int, default=512)
parser.add_argument("--lr", type=float, default=0.4)
parser.add_argument("--precision", default="auto")
parser.add_argument("--device", default="cuda")
parser.add_argument("--ranks", type=int, default=1)
parser.add_argument("--sync-batch-norm", default="true")
a = parser.parse_args()

folder = pathlib.Path(a.work) / f"accuracy-{a.epochs}-{a.seed}-{a.ranks}-{a.batch}-{a.sync_batch_norm}"
shutil.rmtree(folder, ignore_errors=True)
folder.mkdir(parents=True)
(folder / "job.toml").write_text(f"""
name = "accuracy"
[model]
arch = "resnet18"
stem = "cifar"
[data]
dataset = "{pathlib.Path(a.pictures).resolve()}"
crop_padding = 4
horizontal_flip = true
[train]
epochs = {a.epochs}
global_batch_size = {a.batch}
optimizer = "nesterov"
lr = {a.lr}
momentum = 0.9
weight_decay = 5e-4
schedule = "one_cycle"
pct_start = 0.25
label_smoothing = 0.1
precision = "{a.precision}"
seed = {a.seed}
[parallel]
ranks = {a.ranks}
device = "{a.device}"
sync_batch_norm = {a.sync_batch_norm}
[evaluate]
every_epochs = 0
[checkpoint]
every_epochs = 1000
keep = 2
""")
began = time.monotonic()
command = [a.program, "train", str(folder / "job.toml"), "--out", str(folder / "out")]
log = folder / "out" / "attempts" / "1" / "rank.0.log"
printed = open(folder / "printed", "w+")
process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, text=True)
# Training is from the first loss line to the last (at most ten are written a second, and the last of
# each epoch): starting, evaluating and writing left out.
first = last = None
lines = 0
while process.poll() is None:
    time.sleep(0.02)
    seen = log.read_text(errors="replace").count("loss is") if log.exists() else 0
    # The evaluation's line also has a loss in it, but comes after the last step's.
    if seen > lines:
        now = time.monotonic()
        first = first or now
        if "validation accuracy" not in log.read_text(errors="replace"):
            last = now
        lines = seen
secs = time.monotonic() - began
text = log.read_text(errors="replace") if log.exists() else ""
printed.seek(0)
print(printed.read()[-3000:], text[-1500:], sep="\n")
if process.returncode != 0:
    sys.exit(1)
accuracy = float(re.findall(r"validation accuracy is ([0-9.]+) %", text)[-1])
row = {
    "epochs": a.epochs, "seed": a.seed, "ranks": a.ranks, "global_batch": a.batch, "precision": a.precision,
    "sync_batch_norm": a.sync_batch_norm == "true", "accuracy": accuracy, "whole_secs": round(secs, 2),
    "train_secs": round(last - first, 2) if first and last else None,
    "start_secs": round(first - began, 2) if first else None,
}
with open(a.out, "a") as out:
    out.write(json.dumps(row) + "\n")
print(json.dumps(row))
shutil.rmtree(folder)
