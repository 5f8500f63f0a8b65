"""Compares the losses of the same ResNet-50 job on CPU cores, on one GPU and on several, with a smaller last batch and
synchronised batch norm. The mean loss of every step must equal the CPU engine's, up to the rounding of the precision. Runs every
precision with the default settings, and some with `train.deterministic` and two micro-batches; on several GPUs, batch norm's
statistics go through the GPUs' memory and through NCCL.

    python3 agree.py --program lockstep --pictures data/fashion-mnist --work /tmp --ranks 2
"""

import gzip
import os
import pathlib
import shutil
import struct
import subprocess
import sys

from losses import FIRST_STEPS, MAX_DIFFERENCE, log, mean_losses
from options import parse_options
from training import job_command

options = parse_options(program=str, pictures=str, work=str, ranks=int, device="cuda", steps=10)
# A tenth is held out, which leaves four steps of 192 pictures and one of 60, whose ranks may have different numbers of pictures.
PICTURES = 920
# How batch norm's statistics are exchanged: the environment that selects it, and the line of the log that confirms it.
EXCHANGES = {
    "memory": ({}, "through the GPUs' memory"),
    "nccl": ({"LOCKSTEP_NO_PEER_MEMORY": "1"}, "batch norm's statistics go through NCCL"),
}


def first_pictures():
    """Writes the first PICTURES pictures to a folder and returns the folder."""
    folder = (pathlib.Path(options.work) / "agree-pictures").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for kind, dimensions in (("images-idx3", 3), ("labels-idx1", 1)):
        content = gzip.decompress((pathlib.Path(options.pictures) / f"train-{kind}-ubyte.gz").read_bytes())
        magic, _, *sides = struct.unpack(f">{1 + dimensions}I", content[: 4 + 4 * dimensions])
        size = PICTURES
        for side in sides:
            size *= side
        head = struct.pack(f">{1 + dimensions}I", magic, PICTURES, *sides)
        (folder / f"train-{kind}-ubyte").write_bytes(head + content[4 + 4 * dimensions :][:size])
    return folder


def losses(name, device, ranks, precision="fp32", deterministic=False, exchange=None):
    """Trains the job and returns the mean over all ranks of each step's loss."""
    folder = pathlib.Path(options.work) / f"agree-{name}"
    command = job_command(options.program, folder, f"""
name = "agree"
[model]
arch = "resnet50"
stem = "imagenet"
zero_init_residual = true
[data]
dataset = "{first_pictures()}"
validation = 0.1
image_size = 64
drop_remainder = false
[train]
steps = {options.steps}
global_batch_size = 192
accumulate = {2 if deterministic else 1}
lr = 0.002
precision = "{precision}"
deterministic = {str(deterministic).lower()}
seed = 1
[parallel]
ranks = {ranks}
device = "{device}"
sync_batch_norm = true
[evaluate]
every_epochs = 0
[log]
every_steps = 1
""")
    environment, line = EXCHANGES[exchange] if exchange else ({}, "")
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    texts = [log(folder, rank) for rank in range(ranks)]
    if result.returncode != 0:
        sys.exit(f"{name}: {result.stdout[-1000:]}{result.stderr[-1000:]}{texts[0][-1000:]}")
    if line not in texts[0]:
        sys.exit(f"{name}: the log does not contain {line!r}\n{texts[0][-1000:]}")
    mean = mean_losses(texts, options.steps, name)
    shutil.rmtree(folder)
    return mean


def print_losses(name, values, note=""):
    print(f"{name}:", " ".join(f"{x:.4f}" for x in values), note, flush=True)


# By `deterministic`, which determines the number of micro-batches.
expected_losses = [losses("cpu", "cpu", 1, deterministic=deterministic) for deterministic in (False, True)]
for values in expected_losses:
    print_losses("CPU", values)
if options.device == "cuda":
    cases = [("fp32", False), ("fp32", True), ("fp16", False), ("bf16", False), ("fp16", True)]
    runs = [(precision, deterministic, 1, None) for precision, deterministic in cases]
    if options.ranks > 1:
        runs += [(*case, options.ranks, exchange) for case in cases for exchange in EXCHANGES]
else:
    runs = [("fp32", False, options.ranks, None)]
problems = []
for precision, deterministic, ranks, exchange in runs:
    name = "-".join([options.device, str(ranks), precision, "deterministic" if deterministic else "default", exchange or "no-exchange"])
    actual = losses(name, options.device, ranks, precision, deterministic, exchange)
    expected = expected_losses[deterministic]
    # Each fifth step has only 60 pictures, and its loss is a mean over ranks with different numbers of pictures, so this loss is not
    # compared. The step's effect on the weights shows in the following steps.
    differences = [(step, abs(x - y) / y) for step, (x, y) in enumerate(zip(actual, expected), 1) if step % 5]
    largest = [max((x for step, x in differences if (step <= FIRST_STEPS) == is_early), default=0) for is_early in (True, False)]
    print_losses(name, actual, f"differ by at most {largest[0]:.1e} in the first {FIRST_STEPS} steps, and by {largest[1]:.1e} later")
    for difference, limit in zip(largest, MAX_DIFFERENCE[precision]):
        if not difference < limit:
            problems.append(f"{name}: losses differ by {difference:.1e}, more than {limit}")
sys.exit("\n".join(problems) or 0)
