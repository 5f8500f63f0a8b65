"""What the scripts that compare losses share: where a rank's log is, the losses in it, and how far two engines may be apart."""

import re

# Which of the compared steps count as first ones, and by format how far losses may be apart in these and in the later ones: rounding
# grows with each step. With blocks that begin as nothing and a small learning rate, the CPU's own losses move by 1e-5 and 1.2e-4 in the
# first six steps when the learning rate is a hundred-thousandth higher, and by 9e-4 in the next four.
FIRST = 6
MOST = {"fp32": (5e-4, 5e-3), "fp16": (1e-2, 2e-2), "bf16": (2e-2, 5e-2)}


def log(folder, rank):
    """The log of a rank of `lockstep train --out folder/out`; empty where there is none."""
    path = folder / "out" / "attempts" / "1" / f"rank.{rank}.log"
    return path.read_text(errors="replace") if path.exists() else ""


def by_step(text):
    """The loss of each step in a rank's log; NaN and infinite ones, too."""
    return {int(step): float(loss) for step, loss in re.findall(r" step: (\d+), loss is (\S+)", text)}


def means(texts, steps, name):
    """The mean over all ranks of each step's loss."""
    losses = [by_step(text) for text in texts]
    if any(len(each) != steps for each in losses):
        raise SystemExit(f"{name}: {[len(each) for each in losses]} losses instead of {steps}\n{texts[0][-1000:]}")
    return [sum(each[step] for each in losses) / len(losses) for step in range(1, steps + 1)]
