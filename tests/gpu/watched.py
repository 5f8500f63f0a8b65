"""Runs `lockstep train` and measures its training time by watching rank 0's log."""

import pathlib
import subprocess
import time


def train(program, job, out, *arguments):
    """Trains the job file and returns (exit status, output, rank 0's log, seconds).

    The seconds are a dict: `whole`; `start`, up to the first loss in the log; and `train`, from the first to the last loss.
    Losses are logged at most ten times a second, and for the last step of each epoch.
    """
    out = pathlib.Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    log = out / "attempts" / "1" / "rank.0.log"
    began, first, last, losses_seen = time.monotonic(), None, None, 0
    with open(out.parent / "printed", "w+") as printed:
        command = [program, "train", str(job), "--out", str(out), *arguments]
        process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, text=True)
        while process.poll() is None:
            time.sleep(0.02)
            text = log.read_text(errors="replace") if log.exists() else ""
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
    text = log.read_text(errors="replace") if log.exists() else ""
    secs = {
        "whole": round(whole, 2),
        "start": round(first - began, 2) if first else None,
        "train": round(last - first, 2) if first and last else None,
    }
    return process.returncode, output, text, secs
