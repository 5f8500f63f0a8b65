"""Compares a job of two ranks with NCCL over sockets, as between machines without a faster network, with the same job without this
restriction. The losses of the first steps must agree up to rounding, and NCCL's log must say that it uses sockets.

    python3 sockets.py --program lockstep --pictures data/fashion-mnist --work /tmp [--gpus 1] [--device cpu]

With two GPUs, each rank has its own, and the other job uses shared and peer memory. With one GPU, both ranks share it: they get
different NCCL_HOSTIDs, as NCCL refuses a GPU that is used twice on a host, and the other job has one rank with all pictures. The two
ranks take turns on the GPU, so their speed does not measure the network. With --device cpu, the ranks' ring replaces NCCL.

Each rank over sockets is a separate `lockstep train`, started as by torchrun. Prints losses, one JSON line per run, and lines
"RESULT<tab>name<tab>result<tab>note" for the table of `run`.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time

from losses import FIRST_STEPS, MAX_DIFFERENCE, log, mean_losses
from training import job_command

parser = argparse.ArgumentParser()
parser.add_argument("--program", required=True)
parser.add_argument("--pictures", required=True)
parser.add_argument("--work", required=True)
parser.add_argument("--device", default="cuda")
parser.add_argument("--gpus", type=int, default=1)
parser.add_argument("--steps", type=int, help="default: 300 with two GPUs, 30 if the ranks share one, 12 on CPU cores")
parser.add_argument("--precisions", nargs="+", help="default: fp32, with two GPUs also fp16")
parser.add_argument("--limit", type=float, default=40, help="seconds for one run")
options = parser.parse_args()
on_cpu, share_gpu = options.device == "cpu", options.device == "cuda" and options.gpus < 2
steps = options.steps or (12 if on_cpu else 30 if share_gpu else 300)
precisions = options.precisions or (["fp32"] if on_cpu or share_gpu else ["fp32", "fp16"])
BATCH = 8 if on_cpu else 32
# Number of steps that are compared, with the limits of agree.py.
COMPARED = 10
# The first steps are slower, as kernels are compiled and graphs captured.
WARM = min(10, steps // 2)

# The environment of ranks that use only sockets.
SOCKETS = {
    "NCCL_SHM_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_COLLNET_ENABLE": "0",
    # Batch norm's sums also go through NCCL.
    "LOCKSTEP_NO_PEER_MEMORY": "1",
    # For ranks on CPU cores.
    "LOCKSTEP_SHARED_MEMORY": "0",
}
# The environment of all ranks. No run uses multicast (NVLS), which a virtual machine may forbid.
ALWAYS = {"NCCL_NVLS_ENABLE": "0", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,P2P,SHM"}


class OutputReader(threading.Thread):
    """Reads the output of a process, with the time of each line."""

    def __init__(self, process):
        super().__init__(daemon=True)
        self.process, self.lines = process, []
        self.start()

    def run(self):
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line))

    def text(self):
        return "".join(line for _, line in self.lines)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def job(precision, ranks):
    return f"""
name = "sockets"
[model]
arch = "resnet18"
stem = "cifar"
zero_init_residual = true
[data]
dataset = "{pathlib.Path(options.pictures).resolve()}"
validation = 0.01
image_size = 32
[train]
steps = {steps}
global_batch_size = {2 * BATCH}
lr = 0.002
precision = "{precision}"
deterministic = {str(precision == "fp32").lower()}
seed = 1
[parallel]
ranks = {ranks}
device = "{options.device}"
sync_batch_norm = true
[evaluate]
every_epochs = 0
[checkpoint]
every_epochs = 1000
keep = 2
[log]
every_steps = 1
"""


def environments(name):
    """Returns the environment of each process to start: one process that starts all ranks, or one per rank."""
    base = {**os.environ, **ALWAYS}
    if name != "sockets":
        return [base]
    if share_gpu:
        base["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    base.setdefault("NCCL_SOCKET_IFNAME", "lo")
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCKSTEP_SECRET": secrets.token_hex(16)}
    return [
        {
            **base,
            **SOCKETS,
            **rendezvous,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            # Different hosts for NCCL, which otherwise refuses a GPU that is used twice.
            "NCCL_HOSTID": f"lockstep-sockets-{rank}",
        }
        for rank in range(2)
    ]


def train(name, precision, ranks):
    """Runs the job and returns (mean loss of each step, images per second, counts of the transports in NCCL's log)."""
    folder = pathlib.Path(options.work) / f"sockets-{name}-{precision}"
    command = job_command(options.program, folder, job(precision, ranks))
    readers = []
    for environment in environments(name):
        environment["NCCL_DEBUG_FILE"] = str(folder / "nccl.%p")
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
        )
        readers.append(OutputReader(process))
    deadline, is_late = time.monotonic() + options.limit, False
    for reader in readers:
        try:
            reader.process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            is_late = True
    if is_late:
        # Terminates before it kills, as killed ranks may leave unfinished work on a GPU.
        for method in ("terminate", "kill"):
            for reader in readers:
                if reader.process.poll() is None:
                    getattr(reader.process, method)()
            for reader in readers:
                try:
                    reader.process.wait(10)
                except subprocess.TimeoutExpired:
                    pass
    for reader in readers:
        reader.join(5)
    nccl = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("nccl.*")))
    texts = [log(folder, rank) for rank in range(ranks)]
    if is_late or any(reader.process.returncode != 0 for reader in readers):
        for reader in readers:
            print(reader.text()[-1500:])
        warnings = [line for line in nccl.splitlines() if " WARN " in line]
        print(*(warnings or nccl.splitlines())[-12:], sep="\n")
        counts = [len(re.findall(r", loss is ", text)) for text in texts]
        after = f"not done after {options.limit:.0f} s, {counts} steps; " if is_late else ""
        sys.exit(f"{name} {precision}: {after}exit statuses {[reader.process.returncode for reader in readers]}")
    mean = mean_losses(texts, steps, f"{name} {precision}")
    # Rank 0's process, or the process that starts all ranks, prints the finished steps.
    times = {}
    for printed_at, line in readers[0].lines:
        if match := re.search(r" step: (\d+), loss is", line):
            times[int(match[1])] = printed_at
    speed = (steps - WARM) * 2 * BATCH / max(times[steps] - times[WARM], 1e-9)
    transports = collections.Counter(re.findall(r" via ([A-Z][A-Za-z0-9]*/[A-Za-z]+)", nccl))
    row = {
        "side": "lockstep", "run": f"sockets-{name}", "precision": precision, "ranks": ranks, "device": options.device,
        "one_gpu_shared": share_gpu and ranks > 1, "global_batch": 2 * BATCH, "steps": steps, "images_per_second": round(speed, 1),
        "nccl": dict(transports), "statistics": re.findall(r"[^\n]*gradients (?:go|are)[^\n]*", texts[0])[:1],
    }
    print(json.dumps(row), flush=True)
    print(f"{name} {precision}:", " ".join(f"{x:.5f}" for x in mean[:COMPARED]), flush=True)
    shutil.rmtree(folder)
    if name == "sockets" and not on_cpu and (not transports or any(not transport.startswith("NET/Socket") for transport in transports)):
        sys.exit(f"sockets {precision}: NCCL's log names other transports than sockets: {dict(transports)}")
    if name == "memory" and not on_cpu and any(transport.startswith("NET/") for transport in transports):
        sys.exit(f"memory {precision}: NCCL also used the network: {dict(transports)}")
    return mean, speed, transports


if not on_cpu:
    compute_mode = subprocess.run(
        ["nvidia-smi", "--query-gpu=compute_mode", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout
    if share_gpu and "Exclusive" in compute_mode:
        print("RESULT\tsockets\tskip\tthe only GPU allows one process at a time (compute mode)")
        sys.exit(0)
reference, ranks = ("alone", 1) if share_gpu else ("memory", 2)
problems = []
for precision in precisions:
    expected, reference_speed, _ = train(reference, precision, ranks)
    actual, speed, transports = train("sockets", precision, 2)
    differences = [abs(x - y) / y for x, y in zip(actual, expected)]
    first_steps, later_steps = max(differences[:FIRST_STEPS]), max(differences[FIRST_STEPS:COMPARED], default=0)
    differing = f"differences of at most {first_steps:.1e}, from step {FIRST_STEPS + 1} on of {later_steps:.1e}"
    equal = "equal in all steps" if actual == expected else differing
    for difference, limit in zip((first_steps, later_steps), MAX_DIFFERENCE[precision]):
        if not difference < limit:
            problems.append(f"sockets {precision}: losses differ by {difference:.1e}, more than {limit}")
    names = {"alone": "one rank with all pictures", "memory": "shared and peer memory"}
    note = f"{steps} steps against {names[reference]}"
    if not on_cpu:
        note += "; NCCL: " + ", ".join(f"{transport} {count}x" for transport, count in sorted(transports.items()))
    print(f"RESULT\tsockets.{precision}.losses\t{'FAIL' if problems else 'pass'}, {equal}\t{note}")
    result = f"{speed:.0f} images/s, {reference} {reference_speed:.0f}"
    if share_gpu:
        result += ", ONE GPU SHARED: does not measure the network"
    print(f"RESULT\tsockets.{precision}.speed\t{result}\tResNet-18, 32 px, batch {BATCH} per rank", flush=True)
sys.exit("\n".join(problems) or 0)
