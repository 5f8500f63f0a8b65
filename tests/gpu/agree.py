"""The same ResNet-50 job on one rank and on several, batch norm synchronised, through the GPUs' memory and through NCCL:
the mean loss of every step has to be that of one rank, up to rounding.

    python3 agree.py --program lockstep --pictures data/fashion-mnist --work /tmp --ranks 2
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--program", required=True)
parser.add_argument("--pictures", required=True)
parser.add_argument("--work", required=True)
parser.add_argument("--ranks", type=int, required=True)
parser.add_argument("--device", default="cuda")
parser.add_argument("--steps", type=int, default=10)
a = parser.parse_args()
# What rounding in float16 may grow to in so few steps, with blocks that begin as nothing and a small learning rate.
MOST = 2e-2


def losses(name, ranks, environment):
    """The mean over all ranks of each step's loss."""
    folder = pathlib.Path(a.work) / f"agree-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "job.toml").write_text(f"""
name = "agree"
[model]
arch = "resnet50"
zero_init_residual = true
[data]
dataset = "{pathlib.Path(a.pictures).resolve()}"
[train]
steps = {a.steps}
global_batch_size = 32
lr = 0.01
precision = "{'fp16' if a.device == 'cuda' else 'fp32'}"
deterministic = true
seed = 1
[parallel]
ranks = {ranks}
device = "{a.device}"
sync_batch_norm = true
[evaluate]
every_epochs = 0
[log]
every_steps = 1
""")
    command = [a.program, "train", str(folder / "job.toml"), "--out", str(folder / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    logs = [folder / "out" / "attempts" / "1" / f"rank.{rank}.log" for rank in range(ranks)]
    texts = [log.read_text(errors="replace") if log.exists() else "" for log in logs]
    if done.returncode != 0:
        sys.exit(f"{name}: {done.stdout[-1000:]}{done.stderr[-1000:]}{texts[0][-1000:]}")
    if environment and "through NCCL" not in texts[0]:
        sys.exit(f"{name}: statistics did not go through NCCL\n{texts[0][-1000:]}")
    of_ranks = [[float(x) for x in re.findall(r"step: \d+, loss is ([0-9.]+)", text)][: a.steps] for text in texts]
    if any(len(each) != a.steps for each in of_ranks):
        sys.exit(f"{name}: {[len(each) for each in of_ranks]} losses instead of {a.steps}\n{texts[0][-1000:]}")
    shutil.rmtree(folder)
    return [sum(step) / ranks for step in zip(*of_ranks)]


ways = {"memory": {}, "nccl": {"LOCKSTEP_NO_PEER_MEMORY": "1"}} if a.device == "cuda" else {"cpu": {}}
one = losses("one", 1, {})
print("one rank:", " ".join(f"{x:.4f}" for x in one))
apart = {}
for way, environment in ways.items():
    several = losses(way, a.ranks, environment)
    apart[way] = max(abs(x - y) / y for x, y in zip(several, one))
    print(f"{a.ranks} ranks, {way}:", " ".join(f"{x:.4f}" for x in several), f"at most {apart[way]:.1e} apart")
sys.exit(0 if all(far < MOST for far in apart.values()) else f"more than {MOST} apart")
