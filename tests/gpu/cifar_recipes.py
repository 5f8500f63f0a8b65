"""Trains a recipe for CIFAR-10 by `lockstep train`, once for each seed. Prints a line of JSON per seed, then the mean and the standard
deviation of the accuracy. PyTorch's counterpart is `torch_cifar94.py` for `cifar-94`, and `torch_tta.py` (24 epochs with SGD) for `cifar-fast`.

    python3 cifar_recipes.py --recipe cifar-94 --program lockstep --pictures cifar-10-batches-bin --work /tmp --seeds 50
"""

import json
import pathlib
import shutil
import statistics

from options import parse_options
from training import train

# The network of each recipe, and the pictures per step.
RECIPES = {"cifar-94": ('arch = "cifarnet"', 2000), "cifar-fast": ('arch = "resnet18"\nstem = "cifar"', 1024)}


def print_summary(side, recipe, rows):
    """Prints the mean and the standard deviation of accuracies, and the median of training seconds, as a line of JSON."""
    accuracy, secs = [row["accuracy"] for row in rows], [row["train_secs"] for row in rows if row["train_secs"] is not None]
    spread = statistics.stdev(accuracy) if len(accuracy) > 1 else 0.0
    print(json.dumps({
        "side": side, "run": recipe, "n": len(rows), "accuracy_mean": round(statistics.mean(accuracy), 3),
        "accuracy_std": round(spread, 3), "train_secs_median": round(statistics.median(secs), 3) if secs else None,
    }), flush=True)


def main():
    # `seeds`: the number of runs.
    options = parse_options(recipe=str, program=str, pictures=str, work=str, device="cuda", precision="auto", seeds=10)
    network, batch = RECIPES[options.recipe]
    rows = []
    for seed in range(1, options.seeds + 1):
        folder = pathlib.Path(options.work).resolve() / f"{options.recipe}-{seed}"
        job = f"""
name = "{options.recipe}"
[model]
{network}
[data]
dataset = "{pathlib.Path(options.pictures).resolve()}"
[train]
recipe = "{options.recipe}"
global_batch_size = {batch}
precision = "{options.precision}"
seed = {seed}
[parallel]
device = "{options.device}"
[evaluate]
every_epochs = 0
[checkpoint]
every_epochs = 0
keep = 2
[log]
every_steps = 1
"""
        accuracy, secs = train(options.program, folder, job)
        rows.append({"side": "lockstep", "run": options.recipe, "seed": seed, "precision": options.precision, "accuracy": accuracy, **secs})
        print(json.dumps(rows[-1]), flush=True)
        shutil.rmtree(folder)
    print_summary("lockstep", options.recipe, rows)


if __name__ == "__main__":
    main()
