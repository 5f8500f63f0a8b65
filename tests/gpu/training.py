"""Trains a job by `lockstep train`, and measures the training time by watching rank 0's log."""

import re
import shutil
import subprocess
import sys
import time

from losses import log


def job_command(program, folder, job):
    """Writes a job file with the text `job` to a new folder, and returns the command that trains it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "job.toml").write_text(job)
    return [program, "train", str(folder / "job.toml"), "--out", str(folder / "out")]


def train(program, folder, job, *arguments):
    """Trains a job. Returns (validation accuracy in percent, seconds). Ends the program if the training fails.

    The seconds are a dict: `whole_secs`; `start_secs`, up to the first loss in the log; and `train_secs`, from the first to the last loss.
    Losses are logged at most ten times a second, and for the last step of each epoch.
    """
    command = [*job_command(program, folder, job), *arguments]
    began, first, last, losses_seen = time.monotonic(), None, None, 0
    with open(folder / "printed", "w+") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, text=True)
        while process.poll() is None:
            time.sleep(0.02)
            text = log(folder, 0)
            count = text.count("loss is")
            if count > losses_seen:
                now = time.monotonic()
                first = first or now
                # The line of the evaluation, which follows the last step, also contains a loss.
                if "validation accuracy" not in text:
                    last = now
                losses_seen = count
        whole = time.monotonic() - began
        printed.seek(0)
        output = printed.read()
    accuracy = re.findall(r"validation accuracy is ([0-9.]+) %", log(folder, 0))
    if process.returncode != 0 or not accuracy:
        sys.exit(output[-3000:] + log(folder, 0)[-2000:])
    secs = {
        "whole_secs": round(whole, 2),
        "start_secs": round(first - began, 2) if first else None,
        "train_secs": round(last - first, 2) if first and last else None,
    }
    return float(accuracy[-1]), secs
