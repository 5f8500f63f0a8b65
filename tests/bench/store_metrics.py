"""Storage of metrics on SQLite or Postgres: points per second, bytes per point, and rows per point.

    pip install msgpack websockets
    python3 tests/bench/store_metrics.py ingest [--jobs 64] [--ranks 8] [--steps-a-report 1] [--secs 20]
    python3 tests/bench/store_metrics.py train [--secs 120] [--batch 96]
    both: [--program target/release/lockstep] [--database postgres://USER@HOST/NAME]

`ingest` simulates an agent: every rank reports eight metrics per step, as fast as the server acknowledges them. The server must keep the
connection open, and acknowledge every point. `train` trains ResNet-20 on one real rank, cancels the job, and counts the rows of the
job's points; once the points have left the table of events, it measures the bytes of the tables of metrics. Each command prints a line of
JSON. A Postgres database must be empty and not used otherwise.
"""

import argparse
import asyncio
import json
import math
import pathlib
import sqlite3
import subprocess
import sys
import time
import urllib.request

from server import Server
from simulated_agent import PROTOCOL, reply_to

NAMES = ["loss", "accuracy", "lr", "grad_norm", "images_per_second", "step_ms", "data_ms", "all_reduce_ms"]
# Maximum number of a rank's reports without acknowledgement. A real agent continues until its spool is full.
MAX_PENDING = 8


class StoreServer(Server):
    """A server whose database is measured."""

    def sql(self, query):
        """Returns the single number that a query gives."""
        if self.database:
            return int(subprocess.check_output(["psql", "-Atc", query, self.database]))
        db = sqlite3.connect(self.directory / "lockstep.db", timeout=30)
        value = db.execute(query).fetchone()[0]
        db.close()
        return value

    def size(self):
        """Returns the size of the data in bytes, without free pages and the write-ahead log."""
        if self.database:
            subprocess.check_call(["psql", "-qc", "VACUUM FULL", self.database])
            return self.sql("SELECT sum(pg_total_relation_size(oid)) FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace")
        pages, free = self.sql("SELECT page_count FROM pragma_page_count"), self.sql("SELECT freelist_count FROM pragma_freelist_count")
        return (pages - free) * self.sql("SELECT page_size FROM pragma_page_size")

    def peak_mib(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) >> 10


async def report_all(server, options):
    import msgpack
    import websockets

    slots = options.jobs * options.ranks
    token = server.ask("/tokens", {"name": "many", "scope": "agent", "agent": "many"})["secret"]
    address = f"ws://127.0.0.1:{server.port}/api/v1/agent/socket"
    wire = await websockets.connect(address, max_size=None, compression=None, additional_headers={"Authorization": f"Bearer {token}"})
    acknowledged, sent, starts = {}, {}, {}
    progress, welcomed = asyncio.Event(), asyncio.Event()

    async def say(message):
        await wire.send(msgpack.packb(message, use_single_float=True))

    machine = {"hostname": "many", "cpu": "none", "cores": slots, "memory_bytes": 1 << 40, "disk_free_bytes": 1 << 40, "version": "0"}
    await say({
        "type": "hello", "protocol": PROTOCOL, "agent_id": "many", "name": "many", "machine": machine, "attempts": [], "only_job": None,
        "slots": [{"index": i, "device": "cpu", "name": "core", "memory_bytes": 0} for i in range(slots)],
    })

    async def hear():
        async for raw in wire:
            message = msgpack.unpackb(raw)
            if message["type"] == "welcome":
                welcomed.set()
            elif message["type"] == "start":
                starts[message["attempt"]["job"]] = message["attempt"]
            elif message["type"] == "request":
                await say(reply_to(message))
            elif message["type"] == "ack":
                acknowledged[message["attempt"]["job"], message["source"]["rank"]] = message["records"]
                progress.set()
            elif message["type"] == "refused":
                sys.exit(message["reason"])

    async def beat():
        while True:
            await say({"type": "heartbeat", "attempts": list(starts.values())})
            await asyncio.sleep(2)

    tasks = [asyncio.create_task(hear()), asyncio.create_task(beat())]
    await asyncio.wait_for(welcomed.wait(), 20)
    await asyncio.to_thread(server.ask, "/datasets", {"name": "many", "path": "/many"})
    for number in range(options.jobs):
        await asyncio.to_thread(server.ask, "/jobs", {
            "name": f"j{number}", "model": {"arch": "resnet20"}, "data": {"dataset": "many"}, "train": {"steps": 10**8, "batch_size": 8},
            "parallel": {"ranks": options.ranks, "device": "cpu"}, "checkpoint": {"every_epochs": 0}, "evaluate": {"every_epochs": 0},
        })
    while len(starts) < options.jobs:
        await asyncio.sleep(0.05)
    empty_size, cpu_before, begin = server.size(), server.cpu_secs(), time.monotonic()
    end = begin + options.secs
    steps_per_report = options.steps_a_report

    async def rank(job, number):
        source, records, step = {"rank": number}, 0, 1
        while time.monotonic() < end:
            steps = list(range(step, step + steps_per_report))
            columns = [{"name": name, "steps": steps, "values": [math.sin(s + number) + 2 for s in steps]} for name in NAMES]
            events = [{"type": "metrics", "rank": number, "columns": columns}]
            if records == 0 and number == 0:
                events.insert(0, {"type": "running", "total_steps": 10**8, "steps_per_epoch": 10**5, "start_step": 0})
            await say({"type": "report", "attempt": starts[job], "source": source, "first": records, "events": events})
            records, step = records + len(events), step + steps_per_report
            while records - acknowledged.get((job, number), 0) > MAX_PENDING and time.monotonic() < end + 60:
                progress.clear()
                await asyncio.wait_for(progress.wait(), 60)
        sent[job, number] = records, step - 1

    await asyncio.gather(*(rank(job, number) for job in starts for number in range(options.ranks)))
    while any(acknowledged.get(key, 0) < records for key, (records, _) in sent.items()):
        progress.clear()
        await asyncio.wait_for(progress.wait(), 60)
    took, cpu = time.monotonic() - begin, server.cpu_secs() - cpu_before
    for task in tasks:
        task.cancel()
    points = sum(steps for _, steps in sent.values()) * len(NAMES)
    return {
        "ranks": slots, "steps_a_report": steps_per_report, "points": points, "points_a_second": round(points / took),
        "bytes_a_point": round((server.size() - empty_size) / points, 1), "rows_a_point": round(server.sql("SELECT count(*) FROM events WHERE kind = 'metrics'") / points, 4),
        "server_peak_mib": server.peak_mib(), "server_cores": round(cpu / took, 2),
    }


def ingest(options):
    server = StoreServer(options, "--no-local-agent")
    try:
        return asyncio.run(report_all(server, options))
    finally:
        server.stop()


def train(options):
    server = StoreServer(options, "--cpu-slots", "1", "--keep-points", str(options.keep))
    try:
        while not server.ask("/agents")["agents"]:
            time.sleep(0.1)
        server.ask("/datasets", {"name": "pictures", "path": str(pathlib.Path(options.pictures).resolve())})
        empty_size = server.size()
        job = server.ask("/jobs", {
            "name": "points", "model": {"arch": "resnet20"}, "data": {"dataset": "pictures"}, "train": {"steps": 10**7, "batch_size": options.batch},
            "parallel": {"ranks": 1, "device": "cpu"}, "checkpoint": {"every_epochs": 0}, "evaluate": {"every_epochs": 0},
        })["id"]
        while not server.ask(f"/jobs/{job}")["step"]:
            time.sleep(0.2)
        first, begin = server.ask(f"/jobs/{job}")["step"], time.monotonic()
        time.sleep(options.secs)
        rate = (server.ask(f"/jobs/{job}")["step"] - first) / (time.monotonic() - begin)
        server.ask(f"/jobs/{job}/cancel", {})
        while server.ask(f"/jobs/{job}")["state"] != "cancelled":
            time.sleep(0.2)
        with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{server.port}/api/v1/jobs/{job}/metrics.csv", headers={"Authorization": f"Bearer {server.token}"})) as response:
            points = sum(1 for _ in response) - 1
        rows = server.sql("SELECT count(*) FROM events WHERE kind = 'metrics'")
        while server.sql("SELECT count(*) FROM events WHERE kind = 'metrics'"):
            time.sleep(1)
        size = server.size()
        if options.database:
            metric_bytes = server.sql("SELECT pg_total_relation_size('metric_chunks') + pg_total_relation_size('metric_compaction')")
        else:
            metric_bytes = server.sql("SELECT sum(pgsize) FROM dbstat WHERE name LIKE 'metric_%' OR name LIKE 'sqlite_autoindex_metric_%'")
        return {
            "database": "postgres" if options.database else "sqlite", "steps_a_second": round(rate, 1), "points": points, "rows_a_point": round(rows / points, 4),
            "bytes_a_point": round(metric_bytes / points, 1), "with_log_and_all_else": round((size - empty_size) / points, 1),
        }
    finally:
        server.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["ingest", "train"])
    parser.add_argument("--program", default="target/release/lockstep")
    parser.add_argument("--database", default="")
    parser.add_argument("--jobs", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps-a-report", type=int, default=1)
    parser.add_argument("--secs", type=float, default=20)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--keep", type=int, default=5, help="seconds after the job's end until its points leave the events")
    parser.add_argument("--pictures", default="assets/fashion-mnist")
    options = parser.parse_args()
    print(json.dumps({"ingest": ingest, "train": train}[options.what](options)))


main()
