"""Training from a folder of JPEG files, decoded by the GPU and by cores, as images a second.

    python3 files.py --program lockstep --pictures FOLDER --work FOLDER [--decoders gpu cpu prepared] [--steps 300]

FOLDER holds train/<class>/*.jpg (bench/real_pictures.py makes such a one). `prepared` trains from shards that
`lockstep dataset prepare` makes of it, decoded by cores. Prints one JSON line a run: images a second from step 60 to the last one (by when the
job says that they are done), of 40 steps in a row the median and the slowest, who decoded how many pictures, and the GPU memory taken.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import threading
import time

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

arguments = argparse.ArgumentParser()
arguments.add_argument("--program", required=True)
arguments.add_argument("--pictures", required=True)
arguments.add_argument("--work", required=True)
arguments.add_argument("--decoders", nargs="+", default=["gpu", "cpu"])
arguments.add_argument("--prepare-arguments", nargs="*", default=[])
arguments.add_argument("--arch", default="resnet50")
arguments.add_argument("--batch", type=int, default=256)
arguments.add_argument("--ranks", type=int, default=1)
arguments.add_argument("--steps", type=int, default=300)
given = arguments.parse_args()

def gpu_memory():
    """MiB taken on the GPU that has most of it taken."""
    asked = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True
    )
    return max((int(line) for line in asked.stdout.split() if line.isdigit()), default=0)


class Memory(threading.Thread):
    """The most GPU memory that is taken until `end`."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most, self.over = 0, threading.Event()
        self.start()

    def run(self):
        while not self.over.wait(0.5):
            self.most = max(self.most, gpu_memory())

    def end(self):
        self.over.set()
        self.join()
        return self.most


def prepared():
    """Shards of the pictures, made once."""
    shards = pathlib.Path(given.work) / "prepared"
    if not shards.exists():
        began = time.time()
        made = subprocess.run(
            [given.program, "dataset", "prepare", given.pictures, "--to", str(shards), *given.prepare_arguments],
            capture_output=True,
            text=True,
        )
        end = "" if made.returncode == 0 else (made.stdout + made.stderr)[-600:]
        took = {"side": "lockstep", "run": "prepare", "secs": round(time.time() - began, 1), "end": end}
        print(json.dumps({**took, "megabytes": round(sum(f.stat().st_size for f in shards.rglob("*.tar")) / 1e6)}), flush=True)
    return shards


failed = False
for decoder in given.decoders:
    pictures = prepared() if decoder == "prepared" else given.pictures
    folder = pathlib.Path(given.work) / f"files-{decoder}-{time.time():.0f}"
    folder.mkdir(parents=True)
    job = folder / "job.toml"
    job.write_text(JOB.format(arch=given.arch, pictures=pictures, steps=given.steps, batch=given.batch, ranks=given.ranks))
    began, memory = time.time(), Memory()
    run = subprocess.Popen(
        [given.program, "train", str(job), "--out", str(folder / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "LOCKSTEP_DECODER": "cpu" if decoder == "prepared" else decoder},
    )
    # When which step was said to be done; steps are counted from the beginning.
    lines, done = [], {}
    for line in run.stdout:
        lines.append(line)
        if found := re.search(r"epoch: (\d+) step: (\d+), loss is", line):
            done[int(found[2])] = time.time()
    run.wait()
    text = "".join(lines)
    steps = [step for step in sorted(done) if step >= 60]
    rate = lambda a, b: round((b - a) * given.batch * given.ranks / max(done[b] - done[a], 1e-9))
    # Lines come every ten steps and at the end of an epoch: about 40 steps in a row.
    windows = [rate(a, b) for a, b in zip(steps, steps[4:])]
    print(
        json.dumps(
            {
                "side": "lockstep",
                "run": f"files-{given.arch}-{decoder}-{given.ranks}",
                "status": run.returncode,
                "secs": round(time.time() - began, 1),
                "images_per_second": rate(steps[0], steps[-1]) if len(steps) > 1 else None,
                "median_of_40_steps": round(statistics.median(windows)) if windows else None,
                "slowest_40_steps": min(windows, default=None),
                "gpu_mib": memory.end(),
                "decoding": re.findall(r"[^\n]*JPEG files are decoded[^\n]*|[^\n]*so far, [^\n]*", text)[-2:],
                "end": "" if run.returncode == 0 else text[-600:],
            }
        ),
        flush=True,
    )
    failed |= run.returncode != 0
raise SystemExit(failed)
