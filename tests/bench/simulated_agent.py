"""A simulated agent, which speaks the protocol over a real websocket but trains nothing. `agents.py` starts many."""

import asyncio
import pathlib
import random
import sys
import time

import msgpack
import websockets

PROTOCOL = 6
SAMPLE_SECS = 5
# Time from a Start until the ranks' first report, in which real ranks start and find each other.
LAUNCH_SECS = (0.5, 1.0)
# First and longest pause between attempts to connect, as in worker/src/agent/mod.rs.
RETRY = (0.1, 3.0)
SPLITS = [
    {"name": "train", "samples": 60_000, "per_class": [30_000, 30_000]},
    {"name": "test", "samples": 100, "per_class": [50, 50]},
]
PICTURES = {
    "format": "idx", "classes": ["a", "b"], "height": 8, "width": 8, "channels": 1,
    "mean": [0.5], "std": [0.25], "broken": [], "broken_count": 0, "splits": SPLITS,
}


def reply_to(message):
    """Returns the reply to a request of the server: every dataset has PICTURES, and every file exists."""
    request = message["request"]
    if request["type"] == "inspect_dataset":
        reply = {"type": "dataset", "path": request["path"], "info": PICTURES}
    else:
        reply = {"type": "files", "there": [True] * len(request.get("paths", []))}
    return {"type": "reply", "id": message["id"], "reply": {"Ok": reply}}


class Attempt:
    """The ranks of an attempt on one agent, and the records of each source: of each rank, and of the agent itself."""

    def __init__(self, start):
        self.ref, self.ranks, self.world = start["attempt"], start["ranks"], start["world_size"]
        self.job_dir, self.records, self.sent, self.acknowledged = start["job_dir"], {}, {}, {}
        self.launching, self.ends_at, self.ended = None, None, False

    def is_done(self):
        return self.ended and all(self.acknowledged.get(source, 0) == len(records) for source, records in self.records.items())


class Agent:
    """One machine: its connection, and its newest attempt of each job."""

    def __init__(self, fleet, number, token):
        self.fleet, self.number, self.token, self.name = fleet, number, token, f"machine-{number:04}"
        self.attempts, self.wire, self.adopted = {}, None, asyncio.Event()
        # The time at which each slot became free.
        self.freed = [0.0] * fleet.options.slots

    def hello(self):
        machine = {
            "hostname": self.name, "cpu": "none", "cores": len(self.freed), "memory_bytes": 1 << 40, "disk_free_bytes": 1 << 40,
            "version": "0", "address": f"10.{self.number >> 8}.{self.number & 255}.1", "network_id": self.name,
        }
        return {
            "type": "hello", "protocol": PROTOCOL, "agent_id": self.name, "name": self.name, "machine": machine, "only_job": None,
            "slots": [{"index": i, "device": "cpu", "name": "core", "memory_bytes": 0} for i in range(len(self.freed))],
            "attempts": [attempt.ref for attempt in self.attempts.values()],
        }

    async def say(self, message):
        if self.wire is None:
            return  # After a reconnection, the message is sent again or is obsolete.
        await self.wire.send(msgpack.packb(message, use_single_float=True))

    async def run(self):
        pause = RETRY[0]
        address = f"ws://127.0.0.1:{self.fleet.server.port}/api/v1/agent/socket"
        head = {"Authorization": f"Bearer {self.token}"}
        while True:
            beating = None
            try:
                async with websockets.connect(address, max_size=None, compression=None, ping_interval=None, additional_headers=head) as wire:
                    self.wire = wire
                    await self.say(self.hello())
                    async for raw in wire:
                        if await self.hear(msgpack.unpackb(raw)) == "welcome":
                            pause, beating = RETRY[0], asyncio.create_task(self.beat())
                self.fleet.lost_connection(self, "the server closed the connection")
            except (OSError, websockets.WebSocketException) as error:
                self.fleet.lost_connection(self, repr(error))
            finally:
                self.wire = None
                if beating:
                    beating.cancel()
            await asyncio.sleep(pause * random.uniform(0.5, 1))
            pause = min(pause * 2, RETRY[1])

    async def beat(self):
        """Sends heartbeats and measurements at the intervals of real agents."""
        try:
            sample_at = time.monotonic() + random.uniform(0, SAMPLE_SECS)
            while True:
                await self.say({"type": "heartbeat", "attempts": [attempt.ref for attempt in self.attempts.values()]})
                if time.monotonic() >= sample_at:
                    sample_at += SAMPLE_SECS
                    await self.say(self.sample())
                await asyncio.sleep(self.heartbeat_secs)
        except websockets.ConnectionClosed:
            pass

    def sample(self):
        gpus = [{"slot": i, "utilization": 0.5, "memory_used_bytes": 1 << 30, "temperature_celsius": None, "power_watts": None} for i in range(len(self.freed))]
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return {
            "type": "sample", "at": at, "cpus": 8.0, "host_cpus": 8, "cpu_utilization": 0.5, "load": 1.0, "memory_used_bytes": 1 << 30,
            "memory_bytes": 1 << 40, "host_memory_bytes": 1 << 40, "disk_used_bytes": 1, "disk_bytes": 1 << 40,
            "disk_read_bytes_per_second": 0, "disk_written_bytes_per_second": 0, "network_received_bytes_per_second": 0,
            "network_sent_bytes_per_second": 0, "gpus": gpus,
        }

    async def hear(self, message):
        kind = message["type"]
        if kind == "welcome":
            self.heartbeat_secs = message["heartbeat_secs"]
            self.fleet.revoked += len(message["revoked"])
            for ref in message["revoked"]:
                self.give_up(ref)
            for attempt in self.attempts.values():
                attempt.acknowledged = {}
            for acknowledged in message["acknowledged"]:
                self.note_acknowledged(acknowledged)
            for attempt in self.attempts.values():
                for source in attempt.records:
                    attempt.sent[source] = attempt.acknowledged.get(source, 0)
                await self.report(attempt)
                if attempt.ends_at is None:
                    # The previous server may have been killed between `ready` and `launch`.
                    await self.say_ready(attempt)
        elif kind == "heartbeat_ack":
            self.adopted.set()
        elif kind == "start":
            await self.start(message)
        elif kind == "launch":
            attempt = self.attempts.get(message["attempt"]["job"])
            if attempt and attempt.ref == message["attempt"] and attempt.ends_at is None:
                self.launch_later(attempt)
        elif kind == "ack":
            self.note_acknowledged(message)
        elif kind == "request":
            await self.say(reply_to(message))
        elif kind == "refused":
            sys.exit(message["reason"])
        elif kind == "stop":
            self.fleet.stops.append(message["reason"])
            self.give_up(message["attempt"])
        return kind

    def note_acknowledged(self, acknowledged):
        """Notes the number of stored records. Forgets the attempt once it has ended and all its records are stored."""
        job, source = acknowledged["attempt"]["job"], acknowledged["source"]
        attempt = self.attempts.get(job)
        if attempt is None:
            return
        attempt.acknowledged[source if source == "agent" else source["rank"]] = acknowledged["records"]
        if attempt.is_done():
            del self.attempts[job]
            self.fleet.attempt_done(job)

    async def start(self, start):
        attempt = Attempt(start)
        self.attempts[attempt.ref["job"]] = attempt
        self.fleet.started(self, attempt)
        if len(attempt.ranks) == attempt.world:
            self.launch_later(attempt)
        else:
            await self.say_ready(attempt)

    async def say_ready(self, attempt):
        is_first = any(rank == 0 for rank, _ in attempt.ranks)
        await self.say({"type": "ready", "attempt": attempt.ref, "port": 20_000 if is_first else None})

    def give_up(self, ref):
        """Forgets an attempt that no longer belongs to this agent. An ended attempt is forgotten once its end is acknowledged."""
        attempt = self.attempts.get(ref["job"])
        if attempt and attempt.ref == ref and not attempt.ended:
            del self.attempts[ref["job"]]

    def launch_later(self, attempt):
        """Launches an attempt, unless it was launched on an earlier connection."""
        if attempt.launching is None:
            attempt.launching = asyncio.create_task(self.launch(attempt))

    async def launch(self, attempt):
        await asyncio.sleep(random.uniform(*LAUNCH_SECS))
        if self.attempts.get(attempt.ref["job"]) is not attempt:
            return  # The attempt was given up meanwhile.
        spread = self.fleet.options.spread
        attempt.ends_at = time.monotonic() + self.fleet.options.secs * random.uniform(1 - spread, 1 + spread)
        for rank, _ in attempt.ranks:
            steps = list(range(1, 5))
            columns = [{"name": name, "steps": steps, "values": [1.0 / s for s in steps]} for name in ("loss", "step_ms")]
            events = [{"type": "metrics", "rank": rank, "columns": columns}]
            if rank == 0:
                events.insert(0, {"type": "running", "total_steps": 8, "steps_per_epoch": 4, "start_step": 0})
                (pathlib.Path(attempt.job_dir) / "checkpoints" / "1-4").mkdir(parents=True, exist_ok=True)
                events.append({"type": "checkpoint", "epoch": 1, "step": 4, "val_accuracy": None, "val_loss": None, "best": False, "size_bytes": 1})
            attempt.records[rank] = events
        try:
            await self.report(attempt)
        except websockets.ConnectionClosed:
            pass  # The records are sent on the next connection.

    async def report(self, attempt):
        """Sends the records that have not been sent on this connection."""
        for source, records in list(attempt.records.items()):
            first = attempt.sent.get(source, 0)
            if first < len(records):
                attempt.sent[source] = len(records)
                named = source if source == "agent" else {"rank": source}
                await self.say({"type": "report", "attempt": attempt.ref, "source": named, "first": first, "events": records[first:]})

    async def end(self, attempt):
        attempt.ended, attempt.records["agent"] = True, [{"type": "ended", "how": "succeeded", "step": 8}]
        now = time.monotonic()
        for _, slot in attempt.ranks:
            self.freed[slot] = now
        if self.wire:
            await self.report(attempt)
