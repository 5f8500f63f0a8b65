"""Measures training from a folder of JPEG files, decoded by the GPU and by CPU cores, in images per second.

    python3 files.py --program lockstep --pictures FOLDER --work FOLDER [--decoders gpu cpu prepared] [--steps 300]

FOLDER contains train/<class>/*.jpg (bench/real_pictures.py creates such a folder). `prepared` trains from shards that
`lockstep dataset prepare` creates, decoded by CPU cores. Prints one JSON line per run: images per second from step 60 to the last (by the times
of the log's lines), the median and the slowest of 40 successive steps, the numbers of pictures by decoder, and the GPU memory in use.
"""

import json
import os
import pathlib
import re
import statistics
import subprocess
import threading
import time

from options import parse_options
from server_under_test import gpu_memory
from training import job_command

JOB = """name = "files"
[model]
arch = "{arch}"
[data]
dataset = "{pictures}"
image_size = 224
random_resized_crop = true
validation = "none"
mean = [0.485, 0.456, 0.406]
std = [0.229, 0.224, 0.225]
[train]
steps = {steps}
batch_size = {batch}
lr = 0.1
precision = "fp16"
[parallel]
ranks = {ranks}
[checkpoint]
every_epochs = 0
[log]
every_steps = 10
"""

options = parse_options(program=str, pictures=str, work=str, decoders=["gpu", "cpu"], arch="resnet50", batch=256, ranks=1, steps=300)


class PeakMemory(threading.Thread):
    """Measures, until `stop`, the largest memory in use on any GPU, in MiB."""

    def __init__(self):
        super().__init__(daemon=True)
        self.peak, self.stopped = 0, threading.Event()
        self.start()

    def run(self):
        while not self.stopped.wait(0.5):
            self.peak = max([self.peak, *gpu_memory()])

    def stop(self):
        self.stopped.set()
        self.join()
        return self.peak


def prepare_shards():
    """Creates shards of the pictures once, and returns their folder."""
    shards = pathlib.Path(options.work) / "prepared"
    if not shards.exists():
        began = time.time()
        result = subprocess.run(
            [options.program, "dataset", "prepare", options.pictures, "--to", str(shards)],
            capture_output=True,
            text=True,
        )
        end = "" if result.returncode == 0 else (result.stdout + result.stderr)[-600:]
        row = {"side": "lockstep", "run": "prepare", "secs": round(time.time() - began, 1), "end": end}
        print(json.dumps({**row, "megabytes": round(sum(f.stat().st_size for f in shards.rglob("*.tar")) / 1e6)}), flush=True)
    return shards


failed = False
for decoder in options.decoders:
    pictures = prepare_shards() if decoder == "prepared" else options.pictures
    folder = pathlib.Path(options.work) / f"files-{decoder}-{time.time():.0f}"
    job = JOB.format(arch=options.arch, pictures=pictures, steps=options.steps, batch=options.batch, ranks=options.ranks)
    began, memory = time.time(), PeakMemory()
    run = subprocess.Popen(
        job_command(options.program, folder, job),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "LOCKSTEP_DECODER": "cpu" if decoder == "prepared" else decoder},
    )
    # The time at which each step's line was printed; steps are counted over all epochs.
    lines, printed_at = [], {}
    for line in run.stdout:
        lines.append(line)
        if match := re.search(r"epoch: (\d+) step: (\d+), loss is", line):
            printed_at[int(match[2])] = time.time()
    run.wait()
    text = "".join(lines)
    steps = [step for step in sorted(printed_at) if step >= 60]
    rate = lambda a, b: round((b - a) * options.batch * options.ranks / max(printed_at[b] - printed_at[a], 1e-9))
    # A line is printed every ten steps and at the end of an epoch, so a window of five lines has about 40 steps.
    windows = [rate(a, b) for a, b in zip(steps, steps[4:])]
    print(
        json.dumps(
            {
                "side": "lockstep",
                "run": f"files-{options.arch}-{decoder}-{options.ranks}",
                "status": run.returncode,
                "secs": round(time.time() - began, 1),
                "images_per_second": rate(steps[0], steps[-1]) if len(steps) > 1 else None,
                "median_of_40_steps": round(statistics.median(windows)) if windows else None,
                "slowest_40_steps": min(windows, default=None),
                "gpu_mib": memory.stop(),
                "decoding": re.findall(r"[^\n]*JPEG files are decoded[^\n]*|[^\n]*so far, [^\n]*", text)[-2:],
                "end": "" if run.returncode == 0 else text[-600:],
            }
        ),
        flush=True,
    )
    failed |= run.returncode != 0
raise SystemExit(failed)
