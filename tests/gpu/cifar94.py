"""Trains the recipe `cifar-94` on CIFAR-10 by `lockstep train`. Prints a line of JSON per seed, then mean and standard deviation.
`torch_cifar94.py` is PyTorch's counterpart.

    python3 cifar94.py --program lockstep --pictures cifar-10-batches-bin --work /tmp --seeds 50
"""

import argparse
import json
import pathlib
import re
import shutil
import statistics
import sys

import watched


def print_summary(side, rows):
    """Prints mean and standard deviation of accuracies, and the median of training seconds, as a line of JSON."""
    accuracy, secs = [row["accuracy"] for row in rows], [row["train_secs"] for row in rows if row["train_secs"] is not None]
    spread = statistics.stdev(accuracy) if len(accuracy) > 1 else 0.0
    print(json.dumps({
        "side": side, "run": "cifar-94", "n": len(rows), "accuracy_mean": round(statistics.mean(accuracy), 3),
        "accuracy_std": round(spread, 3), "train_secs_median": round(statistics.median(secs), 3) if secs else None,
    }), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", required=True)
    parser.add_argument("--pictures", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--seeds", type=int, default=10, help="number of runs")
    a = parser.parse_args()
    rows = []
    for seed in range(1, a.seeds + 1):
        home = pathlib.Path(a.work).resolve() / f"cifar94-{seed}"
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        (home / "job.toml").write_text(f"""
name = "cifar-94"
[model]
arch = "cifarnet"
[data]
dataset = "{pathlib.Path(a.pictures).resolve()}"
[train]
recipe = "cifar-94"
global_batch_size = 2000
precision = "{a.precision}"
seed = {seed}
[parallel]
device = "{a.device}"
[checkpoint]
every_epochs = 0
keep = 2
[log]
every_steps = 1
""")
        status, printed, text, secs = watched.train(a.program, home / "job.toml", home / "out")
        accuracy = re.findall(r"validation accuracy is ([0-9.]+) %", text)
        if status != 0 or not accuracy:
            sys.exit(printed[-2000:] + text[-2000:])
        row = {
            "side": "lockstep", "run": "cifar-94", "seed": seed, "precision": a.precision, "accuracy": float(accuracy[-1]),
            "train_secs": secs["train"], "start_secs": secs["start"], "whole_secs": secs["whole"],
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
        shutil.rmtree(home)
    print_summary("lockstep", rows)


if __name__ == "__main__":
    main()
