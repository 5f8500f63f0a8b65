"""Trains the example job file cifar10-resnet50.toml on CIFAR-10 by `lockstep train`. Prints the seconds of training, the last epoch's
loss of each rank, and the validation accuracy, as a line of JSON.

    python3 tutorial.py --program lockstep --job cifar10-resnet50.toml --pictures cifar-10-batches-bin --work /tmp --ranks 8
"""

import argparse
import json
import pathlib
import re
import shutil
import statistics
import sys

import watched

parser = argparse.ArgumentParser()
parser.add_argument("--program", required=True)
parser.add_argument("--job", required=True)
parser.add_argument("--pictures", required=True)
parser.add_argument("--work", required=True)
parser.add_argument("--ranks", type=int, required=True)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--set", action="append", default=[], help="another key of the job, as in train.lr=0.02")
options = parser.parse_args()

folder = pathlib.Path(options.work) / f"tutorial-{options.ranks}"
shutil.rmtree(folder, ignore_errors=True)
keys = [f"data.dataset={pathlib.Path(options.pictures).resolve()}", f"train.epochs={options.epochs}",
        # The accuracy is measured once, at the end.
        "evaluate.every_epochs=0", "checkpoint.every_epochs=1000", *options.set]
arguments = ["--ranks", str(options.ranks), *(part for key in keys for part in ("--set", key))]
status, printed, text, secs = watched.train(options.program, options.job, folder / "out", *arguments)
print(printed[-3000:])
if status != 0:
    print(text[-1500:])
    sys.exit(1)


def last_epoch_loss(rank):
    """Returns the mean of the last epoch's losses in a rank's log."""
    log = (folder / "out" / "attempts" / "1" / f"rank.{rank}.log").read_text(errors="replace")
    losses = re.findall(rf"^.*epoch: {options.epochs} step: \d+, loss is ([0-9.]+)", log, re.MULTILINE)
    return round(statistics.mean(map(float, losses)), 4)


losses = [last_epoch_loss(rank) for rank in range(options.ranks)]
row = {
    "ranks": options.ranks, "epochs": options.epochs, "train_secs": secs["train"], "start_secs": secs["start"], "whole_secs": secs["whole"],
    "loss": round(statistics.mean(losses), 4), "loss_by_rank": losses,
    "accuracy": float(re.findall(r"validation accuracy is ([0-9.]+) %", text)[-1]),
}
print(json.dumps(row))
