"""Training images/s on this machine's CPU: Lockstep and PyTorch, measured in turns.

    cargo build --release
    python3 tests/bench/cpu_vs_torch.py [--threads 2] [--rounds 3] [--cases resnet50:32:32] [--precisions bf16]

Both do the same work: forward, backward and a momentum-SGD update on synthetic pictures in memory,
channels last. A round gives the median of 10 steps after 3 warm-up steps; the best round counts.
Lockstep also runs as 2 ranks with half the threads each, on the same global batch. bf16 is
train.precision = "bf16" in Lockstep, which needs AVX512-BF16, and autocast in PyTorch. Needs torch and
torchvision. Prints a table.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

import torch

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "pytorch"))
from models import CIFAR_FAMILY, build  # noqa: E402

CASES = ["resnet20:32:64", "resnet18c:32:64", "resnet50:32:32"]
WARM_UP, MEASURED = 3, 10


def network(name):
    if name in CIFAR_FAMILY:
        return build(name)
    return build(name.removesuffix("c"), stem="cifar" if name.endswith("c") else "imagenet")


def measure_torch(case, precision, threads):
    torch.set_num_threads(threads)
    name, side, batch = case.split(":")
    model = network(name).train().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    pictures = torch.randn(int(batch), 3, int(side), int(side)).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (int(batch),))
    secs = []
    for _ in range(WARM_UP + MEASURED):
        began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = model(pictures)
        torch.nn.functional.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        secs.append(time.perf_counter() - began)
    return int(batch) / statistics.median(secs[WARM_UP:])


def measure_lockstep(case, precision, ranks, threads):
    command = [ROOT / "target/release/lockstep", "bench", "--device", "cpu", "--case", case, "--precision", precision]
    command += ["--ranks", str(ranks), "--threads", str(threads), "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)["images_per_second"]


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--cases", default=",".join(CASES))
    arguments.add_argument("--precisions", default="fp32,bf16")
    arguments = arguments.parse_args()
    threads = arguments.threads
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"commit {commit}, torch {torch.__version__}, {threads} threads, best of {arguments.rounds} rounds\n", flush=True)
    print("| case | precision | Lockstep, images/s | PyTorch, images/s | ratio | Lockstep as 2 ranks | 2 ranks / 1 rank |")
    print("|---|---|---|---|---|---|---|")
    for case in arguments.cases.split(","):
        for precision in arguments.precisions.split(","):
            lockstep, pytorch, two_ranks = [], [], []
            for _ in range(arguments.rounds):
                lockstep.append(measure_lockstep(case, precision, 1, threads))
                pytorch.append(measure_torch(case, precision, threads))
                two_ranks.append(measure_lockstep(case, precision, 2, max(1, threads // 2)))
            one, torch_speed, two = max(lockstep), max(pytorch), max(two_ranks)
            row = [case, precision, f"{one:.0f}", f"{torch_speed:.0f}", f"{one / torch_speed:.2f}", f"{two:.0f}", f"{two / one:.2f}"]
            print("| " + " | ".join(row) + " |", flush=True)


main()
