#!/usr/bin/env python3
"""Simulates MindSpore's msrun for tests: its variables, a scheduler on the first machine, and a log file for each process.

Like the real msrun (2.10), it passes a command that is not Python to `python`, so any other program must be started by `python3 -c`.
"""

import argparse
import os
import subprocess
import sys

parser = argparse.ArgumentParser(prog="msrun")
parser.add_argument("--worker_num", type=int, default=8)
parser.add_argument("--local_worker_num", type=int, default=8)
parser.add_argument("--master_addr", default="127.0.0.1")
parser.add_argument("--master_port", type=int, default=8118)
parser.add_argument("--node_rank", type=int, required=True)
parser.add_argument("--join", choices=["True"], required=True)
parser.add_argument("command", nargs=argparse.REMAINDER)
args = parser.parse_args()

command = args.command if args.command[0] in ("python", "python3", "pytest") else ["python", *args.command]
common = {**os.environ, "MS_WORKER_NUM": str(args.worker_num), "RANK_SIZE": str(args.worker_num)}
common.update(MS_SCHED_HOST=args.master_addr, MS_SCHED_PORT=str(args.master_port))
first = args.node_rank * args.local_worker_num
processes = [(f"worker_{first + i}.log", {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(first + i), "RANK_ID": str(first + i), "DEVICE_ID": str(i)}) for i in range(args.local_worker_num)]
if args.node_rank == 0:
    processes.insert(0, ("scheduler.log", {"MS_ROLE": "MS_SCHED", "RANK_ID": "0"}))
running = [subprocess.Popen(command, env={**common, **extra}, stdout=open(log, "w"), stderr=subprocess.STDOUT) for log, extra in processes]
sys.exit(any([process.wait() for process in running]))
