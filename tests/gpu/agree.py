"""The same ResNet-50 job on CPU cores, on one GPU and on several, with micro-batches, a ragged last batch and batch norm
synchronised: the mean loss of every step has to be the CPU engine's, up to the rounding of the format. With the
default settings in every format, and with `train.deterministic`; on several GPUs with statistics through the GPUs'
memory and through NCCL.

    python3 agree.py --program lockstep --pictures data/fashion-mnist --work /tmp --ranks 2
"""

import argparse
import gzip
import os
import pathlib
import shutil
import struct
import subprocess
import sys

from losses import FIRST, MOST, log, means

parser = argparse.ArgumentParser()
parser.add_argument("--program", required=True)
parser.add_argument("--pictures", required=True)
parser.add_argument("--work", required=True)
parser.add_argument("--ranks", type=int, required=True)
parser.add_argument("--device", default="cuda")
parser.add_argument("--steps", type=int, default=10)
a = parser.parse_args()
# Of which a tenth is held out: four steps of 192 and one of 60, ranks of which may have different numbers of pictures.
PICTURES = 920
# Over ranks, by the environment that asks for it: what the log says of the way that statistics take.
WAYS = {
    "memory": ({}, "through the GPUs' memory"),
    "nccl": ({"LOCKSTEP_NO_PEER_MEMORY": "1"}, "batch norm's statistics go through NCCL"),
}


def first_pictures():
    """A folder with the first of the pictures."""
    folder = (pathlib.Path(a.work) / "agree-pictures").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for kind, dimensions in (("images-idx3", 3), ("labels-idx1", 1)):
        whole = gzip.decompress((pathlib.Path(a.pictures) / f"train-{kind}-ubyte.gz").read_bytes())
        magic, _, *sides = struct.unpack(f">{1 + dimensions}I", whole[: 4 + 4 * dimensions])
        size = PICTURES
        for side in sides:
            size *= side
        head = struct.pack(f">{1 + dimensions}I", magic, PICTURES, *sides)
        (folder / f"train-{kind}-ubyte").write_bytes(head + whole[4 + 4 * dimensions :][:size])
    return folder


def losses(name, device, ranks, precision="fp32", deterministic=False, way=None):
    """The mean over all ranks of each step's loss; a rank without pictures in a step has none."""
    folder = pathlib.Path(a.work) / f"agree-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "job.toml").write_text(f"""
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
steps = {a.steps}
global_batch_size = 192
accumulate = 2
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
    environment, words = WAYS[way] if way else ({}, "")
    command = [a.program, "train", str(folder / "job.toml"), "--out", str(folder / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    texts = [log(folder, rank) for rank in range(ranks)]
    if done.returncode != 0:
        sys.exit(f"{name}: {done.stdout[-1000:]}{done.stderr[-1000:]}{texts[0][-1000:]}")
    if words not in texts[0]:
        sys.exit(f"{name}: the log does not say {words!r}\n{texts[0][-1000:]}")
    mean = means(texts, a.steps, name)
    shutil.rmtree(folder)
    return mean


def show(name, values, note=""):
    print(f"{name}:", " ".join(f"{x:.4f}" for x in values), note, flush=True)


wanted = losses("cpu", "cpu", 1)
show("CPU", wanted)
if a.device == "cuda":
    cases = [("fp32", False), ("fp32", True), ("fp16", False), ("bf16", False), ("fp16", True)]
    runs = [(p, d, 1, None) for p, d in cases]
    runs += [(p, d, a.ranks, way) for p, d in cases for way in WAYS if a.ranks > 1]
else:
    runs = [("fp32", False, a.ranks, None)]
wrong = []
for precision, deterministic, ranks, way in runs:
    name = "-".join([a.device, str(ranks), precision, "deterministic" if deterministic else "default", way or "alone"])
    found = losses(name, a.device, ranks, precision, deterministic, way)
    # The ragged step's own loss is a mean over ranks of different numbers of pictures; what it does to the weights shows in
    # the steps after it.
    apart = [(step, abs(x - y) / y) for step, (x, y) in enumerate(zip(found, wanted), 1) if step % 5]
    parts = [max((x for step, x in apart if (step <= FIRST) == first), default=0) for first in (True, False)]
    show(name, found, "at most {:.1e} apart, later {:.1e}".format(*parts))
    for far, most in zip(parts, MOST[precision]):
        if not far < most:
            wrong.append(f"{name}: {far:.1e} apart, more than {most}")
sys.exit("\n".join(wrong) or 0)
