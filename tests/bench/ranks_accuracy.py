"""Trains the same job on 1, 2 and 4 ranks of one thread each. Accuracies may differ by at most 0.5 points, and two runs on the same
number of ranks must write the same model.safetensors, bit for bit.

    cargo build --release
    python3 tests/bench/ranks_accuracy.py [--epochs 6] [--ranks 1,2,4,2]

ResNet-20 on the bundled pictures as in `lockstep demo`, global batch 64, batch norm synchronised. A number that
--ranks repeats is run twice. Needs only Python. Prints a table. The exit status is 1 if a condition does not hold.
"""

import argparse
import hashlib
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parent.parent.parent
JOB = """
name = "ranks-accuracy"
[model]
arch = "resnet20"
[data]
dataset = "{dataset}"
validation = "test"
crop_padding = 2
horizontal_flip = true
[train]
epochs = {epochs}
global_batch_size = 64
optimizer = "nesterov"
lr = 0.1
momentum = 0.9
weight_decay = 0.0005
schedule = "one_cycle"
[parallel]
ranks = {ranks}
sync_batch_norm = true
[checkpoint]
keep = 2
[log]
every_steps = 50
"""


def tensor_digest(model):
    """Returns a digest of the weights without the file's metadata, which names the number of ranks."""
    size = int.from_bytes(model[:8], "little")
    head = json.loads(model[8 : 8 + size])
    head.pop("__metadata__", None)
    return hashlib.sha256(json.dumps(head, sort_keys=True).encode() + model[8 + size :]).hexdigest()[:12]


def train(ranks, epochs):
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        job = folder / "job.toml"
        job.write_text(JOB.format(dataset=ROOT / "assets/fashion-mnist", epochs=epochs, ranks=ranks))
        command = [ROOT / "target/release/lockstep", "train", job, "--out", folder / "out"]
        began = time.monotonic()
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        secs = time.monotonic() - began
        accuracy = float(re.findall(r"validation accuracy is ([\d.]+) %", output)[-1])
        newest = max((folder / "out/checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)
        model = (newest / "model.safetensors").read_bytes()
        return accuracy, tensor_digest(model), hashlib.sha256(model).hexdigest()[:12], secs


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--epochs", type=int, default=6)
    arguments.add_argument("--ranks", default="1,2,4,2")
    arguments = arguments.parse_args()
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    print(f"commit {commit.stdout.strip()}, {arguments.epochs} epochs\n", flush=True)
    print("| ranks | validation accuracy | SHA-256 of the tensors | of model.safetensors | seconds |")
    print("|---|---|---|---|---|")
    accuracies, file_digests, problems = [], {}, []
    for ranks in map(int, arguments.ranks.split(",")):
        accuracy, tensors_digest, file_digest, secs = train(ranks, arguments.epochs)
        print(f"| {ranks} | {accuracy:.2f} % | {tensors_digest} | {file_digest} | {secs:.0f} |", flush=True)
        accuracies.append(accuracy)
        if file_digests.setdefault(ranks, file_digest) != file_digest:
            problems.append(f"two runs on {ranks} ranks gave different files")
    if max(accuracies) - min(accuracies) > 0.5:
        problems.append("accuracies are more than 0.5 points apart")
    print("\n".join(["", *problems]) if problems else "\naccuracies agree within 0.5 points, and repeated runs wrote the same file")
    sys.exit(bool(problems))


main()
