"""Reads the losses of a rank's log, and defines the limits for differences between two engines."""

import re

# Maximum relative difference of the losses, for each number format: (in the first FIRST_STEPS steps, in the later steps). The second limit is
# larger because rounding errors grow with each step. Measured with agree.py in float32 (six seeds; one and two H200s; each of its EXCHANGES;
# with and without `train.deterministic`), the GPUs differ from CPU cores by at most 1.7e-4 in the first four steps and 3.8e-3 later. In the
# later steps, two runs on the same GPU also differ, by up to 5e-4.
FIRST_STEPS = 4
MAX_DIFFERENCE = {"fp32": (5e-4, 5e-3), "fp16": (1e-2, 2e-2), "bf16": (2e-2, 5e-2)}


def log(folder, rank):
    """Returns the log of a rank of `lockstep train --out folder/out`; empty if it does not exist."""
    path = folder / "out" / "attempts" / "1" / f"rank.{rank}.log"
    return path.read_text(errors="replace") if path.exists() else ""


def by_step(text):
    """Returns the loss of each step in a rank's log, including NaN and infinite losses."""
    return {int(step): float(loss) for step, loss in re.findall(r" step: (\d+), loss is (\S+)", text)}


def mean_losses(texts, steps, name):
    """Returns the mean over all ranks of each step's loss."""
    losses = [by_step(text) for text in texts]
    if any(len(each) != steps for each in losses):
        raise SystemExit(f"{name}: {[len(each) for each in losses]} losses instead of {steps}\n{texts[0][-1000:]}")
    return [sum(each[step] for each in losses) / len(losses) for step in range(1, steps + 1)]
