"""Training from a folder of JPEG files, decoded by the GPU and by cores, as images a second.

    python3 files.py --program lockstep --pictures FOLDER --work FOLDER [--decoders gpu cpu] [--steps 300]

FOLDER holds train/<class>/*.jpg (bench/real_pictures.py makes such a one). Prints one JSON line a run: the median of
what the job says about its steps after the first fifty, and who decoded how many pictures.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
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
arguments.add_argument("--arch", default="resnet50")
arguments.add_argument("--batch", type=int, default=256)
arguments.add_argument("--ranks", type=int, default=1)
arguments.add_argument("--steps", type=int, default=300)
given = arguments.parse_args()

failed = False
for decoder in given.decoders:
    folder = pathlib.Path(given.work) / f"files-{decoder}-{time.time():.0f}"
    folder.mkdir(parents=True)
    job = folder / "job.toml"
    job.write_text(JOB.format(arch=given.arch, pictures=given.pictures, steps=given.steps, batch=given.batch, ranks=given.ranks))
    began = time.time()
    run = subprocess.run(
        [given.program, "train", str(job), "--out", str(folder / "out")],
        capture_output=True,
        text=True,
        env={**os.environ, "LOCKSTEP_DECODER": decoder},
    )
    text = run.stdout + run.stderr
    said = [float(rate.replace(",", "")) for rate in re.findall(r"([0-9][0-9,.]*) images/s", text)]
    print(
        json.dumps(
            {
                "side": "lockstep",
                "run": f"files-{decoder}",
                "status": run.returncode,
                "secs": round(time.time() - began, 1),
                "images_per_second": round(statistics.median(said[5:])) if len(said) > 5 else None,
                "fastest": round(max(said)) if said else None,
                "decoding": re.findall(r"[^\n]*JPEG files are decoded[^\n]*|[^\n]*so far, [^\n]*", text)[-2:],
                "end": "" if run.returncode == 0 else text[-600:],
            }
        ),
        flush=True,
    )
    failed |= run.returncode != 0
raise SystemExit(failed)
