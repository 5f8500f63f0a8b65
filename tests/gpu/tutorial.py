"""Trains the example job file cifar10-resnet50.toml on CIFAR-10 by `lockstep train`. Prints the seconds of training, the last epoch's
loss of each rank, and the validation accuracy, as a line of JSON.

    python3 tutorial.py --program lockstep --job cifar10-resnet50.toml --pictures cifar-10-batches-bin --work /tmp --ranks 8
"""

import json
import pathlib
import re
import statistics

from losses import log
from options import parse_options
from training import train

options = parse_options(program=str, job=str, pictures=str, work=str, ranks=int, epochs=10)

folder = pathlib.Path(options.work) / f"tutorial-{options.ranks}"
# The accuracy is measured once, at the end.
keys = [f"data.dataset={pathlib.Path(options.pictures).resolve()}", f"train.epochs={options.epochs}", "evaluate.every_epochs=0",
        "checkpoint.every_epochs=1000"]
arguments = ["--ranks", str(options.ranks), *(part for key in keys for part in ("--set", key))]
accuracy, secs = train(options.program, folder, pathlib.Path(options.job).read_text(), *arguments)


def last_epoch_loss(rank):
    """Returns the mean of the last epoch's losses in a rank's log."""
    losses = re.findall(rf"^.*epoch: {options.epochs} step: \d+, loss is ([0-9.]+)", log(folder, rank), re.MULTILINE)
    return round(statistics.mean(map(float, losses)), 4)


losses = [last_epoch_loss(rank) for rank in range(options.ranks)]
row = {
    "ranks": options.ranks, "epochs": options.epochs, **secs, "loss": round(statistics.mean(losses), 4), "loss_by_rank": losses,
    "accuracy": accuracy,
}
print(json.dumps(row))
