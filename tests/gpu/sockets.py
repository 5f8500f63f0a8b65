"""Two ranks of one machine with NCCL over sockets, as between machines that have no other way to each other, beside the same job
with nothing switched off. The losses of the first steps have to agree up to rounding, and NCCL's own log has to say that it took sockets.

    python3 sockets.py --program lockstep --pictures data/fashion-mnist --work /tmp [--gpus 1] [--device cpu]

With two GPUs each rank has its own, and the comparison is with shared and peer memory. With one GPU both ranks share it: they are given
different NCCL_HOSTIDs, as NCCL takes no GPU twice on a host, and the comparison is with one rank that has all pictures. The two
take turns on the GPU, so their speed is no figure of the network. With --device cpu the ranks' ring takes NCCL's part.

Each rank of the sockets' side is a `lockstep train` of its own, started as torchrun would. Prints losses, one JSON line a run, and lines
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

from losses import FIRST, MOST, log, means

parser = argparse.ArgumentParser()
parser.add_argument("--program", required=True)
parser.add_argument("--pictures", required=True)
parser.add_argument("--work", required=True)
parser.add_argument("--device", default="cuda")
parser.add_argument("--gpus", type=int, default=1)
parser.add_argument("--steps", type=int, help="default: 300 with two GPUs, 30 where they share one, 12 on CPU cores")
parser.add_argument("--precisions", nargs="+", help="default: fp32, with two GPUs also fp16")
parser.add_argument("--limit", type=float, default=40, help="seconds for one run")
a = parser.parse_args()
cpu, shared = a.device == "cpu", a.device == "cuda" and a.gpus < 2
steps = a.steps or (12 if cpu else 30 if shared else 300)
precisions = a.precisions or (["fp32"] if cpu or shared else ["fp32", "fp16"])
BATCH = 8 if cpu else 32
# Of all steps these are compared, with what agree.py allows.
COMPARED = 10
# The first steps are slower: kernels are compiled, graphs captured.
WARM = min(10, steps // 2)

# Nothing but sockets; no multicast in either run, which a virtual machine may not be allowed.
SOCKETS = {
    "NCCL_SHM_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_COLLNET_ENABLE": "0",
    # Batch norm's sums through NCCL as well.
    "LOCKSTEP_NO_PEER_MEMORY": "1",
    # On CPU cores.
    "LOCKSTEP_SHARED_MEMORY": "0",
}
ALWAYS = {"NCCL_NVLS_ENABLE": "0", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,P2P,SHM"}


class OutputReader(threading.Thread):
    """Reads what a process prints, with the time of each line."""

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


def job(folder, precision, ranks):
    (folder / "job.toml").write_text(f"""
name = "sockets"
[model]
arch = "resnet18"
stem = "cifar"
zero_init_residual = true
[data]
dataset = "{pathlib.Path(a.pictures).resolve()}"
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
device = "{a.device}"
sync_batch_norm = true
[evaluate]
every_epochs = 0
[checkpoint]
every_epochs = 1000
keep = 2
[log]
every_steps = 1
""")
    return [a.program, "train", str(folder / "job.toml"), "--out", str(folder / "out")]


def environments(name):
    """Of each process that is started: one that starts all ranks, or one for each rank."""
    base = {**os.environ, **ALWAYS}
    if name != "sockets":
        return [base]
    if shared:
        base["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    base.setdefault("NCCL_SOCKET_IFNAME", "lo")
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCKSTEP_SECRET": secrets.token_hex(16)}
    return [
        {
            **base,
            **SOCKETS,
            **meeting,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            # Hosts of their own to NCCL, else it refuses to have a GPU twice.
            "NCCL_HOSTID": f"lockstep-sockets-{rank}",
        }
        for rank in range(2)
    ]


def train(name, precision, ranks):
    """Runs the job and returns (mean loss of each step, images a second, transports that NCCL named)."""
    folder = pathlib.Path(a.work) / f"sockets-{name}-{precision}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = job(folder, precision, ranks)
    started = []
    for environment in environments(name):
        environment["NCCL_DEBUG_FILE"] = str(folder / "nccl.%p")
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
        )
        started.append(OutputReader(process))
    until, late = time.monotonic() + a.limit, False
    for reader in started:
        try:
            reader.process.wait(max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            late = True
    if late:
        # An end in order first: ranks that are killed leave a GPU in the middle of something.
        for ask in ("terminate", "kill"):
            for reader in started:
                if reader.process.poll() is None:
                    getattr(reader.process, ask)()
            for reader in started:
                try:
                    reader.process.wait(10)
                except subprocess.TimeoutExpired:
                    pass
    for reader in started:
        reader.join(5)
    nccl = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("nccl.*")))
    texts = [log(folder, rank) for rank in range(ranks)]
    if late or any(reader.process.returncode != 0 for reader in started):
        for reader in started:
            print(reader.text()[-1500:])
        warnings = [line for line in nccl.splitlines() if " WARN " in line]
        print(*(warnings or nccl.splitlines())[-12:], sep="\n")
        done = [len(re.findall(r", loss is ", text)) for text in texts]
        after = f"not done after {a.limit:.0f} s, {done} steps; " if late else ""
        sys.exit(f"{name} {precision}: {after}exit statuses {[reader.process.returncode for reader in started]}")
    mean = means(texts, steps, f"{name} {precision}")
    # Rank 0's process, or the one that starts all, says which step is done.
    times = {}
    for at, line in started[0].lines:
        if found := re.search(r" step: (\d+), loss is", line):
            times[int(found[1])] = at
    speed = (steps - WARM) * 2 * BATCH / max(times[steps] - times[WARM], 1e-9)
    ways = collections.Counter(re.findall(r" via ([A-Z][A-Za-z0-9]*/[A-Za-z]+)", nccl))
    row = {
        "side": "lockstep", "run": f"sockets-{name}", "precision": precision, "ranks": ranks, "device": a.device,
        "one_gpu_shared": shared and ranks > 1, "global_batch": 2 * BATCH, "steps": steps, "images_per_second": round(speed, 1),
        "nccl": dict(ways), "statistics": re.findall(r"[^\n]*gradients (?:go|are)[^\n]*", texts[0])[:1],
    }
    print(json.dumps(row), flush=True)
    print(f"{name} {precision}:", " ".join(f"{x:.5f}" for x in mean[:COMPARED]), flush=True)
    shutil.rmtree(folder)
    if name == "sockets" and not cpu and (not ways or any(not way.startswith("NET/Socket") for way in ways)):
        sys.exit(f"sockets {precision}: NCCL's log names these ways between the ranks, not sockets alone: {dict(ways)}")
    if name == "memory" and not cpu and any(way.startswith("NET/") for way in ways):
        sys.exit(f"memory {precision}: NCCL went over the network, too: {dict(ways)}")
    return mean, speed, ways


mode = ""
if not cpu:
    asked = subprocess.run(
        ["nvidia-smi", "--query-gpu=compute_mode", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout
    if shared and "Exclusive" in asked:
        print("RESULT\tsockets\tskip\tthe one GPU takes one process at a time (compute mode)")
        sys.exit(0)
beside, ranks = ("alone", 1) if shared else ("memory", 2)
wrong = []
for precision in precisions:
    wanted, usual, _ = train(beside, precision, ranks)
    found, speed, ways = train("sockets", precision, 2)
    apart = [abs(x - y) / y for x, y in zip(found, wanted)]
    parts = max(apart[:FIRST]), max(apart[FIRST:COMPARED], default=0)
    equal = "equal in all steps" if found == wanted else "at most {:.1e} apart, from step {} on {:.1e}".format(parts[0], FIRST + 1, parts[1])
    for far, most in zip(parts, MOST[precision]):
        if not far < most:
            wrong.append(f"sockets {precision}: {far:.1e} apart, more than {most}")
    names = {"alone": "one rank with all pictures", "memory": "shared and peer memory"}
    note = f"{steps} steps against {names[beside]}"
    if not cpu:
        note += "; NCCL: " + ", ".join(f"{way} {count}x" for way, count in sorted(ways.items()))
    print(f"RESULT\tsockets.{precision}.losses\t{'FAIL' if wrong else 'pass'}, {equal}\t{note}")
    result = f"{speed:.0f} images/s, {beside} {usual:.0f}"
    if shared:
        result += ", ONE GPU SHARED: no figure of the network"
    print(f"RESULT\tsockets.{precision}.speed\t{result}\tResNet-18, 32 px, batch {BATCH} a rank", flush=True)
sys.exit("\n".join(wrong) or 0)
