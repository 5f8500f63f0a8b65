"""A server with many machines: the delay of job starts, the CPU time of heartbeats, and the recovery time after the server is killed.

    pip install msgpack websockets
    python3 tests/bench/agents.py [--agents 100] [--slots 8] [--jobs 2000] [--secs 10] [--spread 0.5] [--idle 15]
                                  [--program target/release/lockstep] [--database postgres://USER@HOST/NAME]

Starts the real server, and simulated agents in this process. The agents speak the protocol over real websockets, each with its own token.
They train nothing, but send heartbeats and measurements at the intervals of real agents, and for every job a start, a few points of each
rank, a checkpoint and an end. Of the jobs, 40 % have 1 rank, 30 % have 2, 20 % have 8 and 10 % have 16, which needs two agents. Jobs are
submitted as fast as the server accepts them. A job runs for --secs seconds, varied by up to the fraction --spread (0: jobs that start together
end together). As with real agents, a rank's first report is sent half a second to a second after the Start. When half of the jobs have
ended, the server is killed and started again.

Prints a line of JSON:

  queued_most         largest number of jobs that waited at the same time
  connect_secs        from the first connection to the last agent's Welcome, at the beginning
  idle_cpu            the server's CPU seconds per second while agents only send heartbeats and measurements: 0.05 is 5 % of a core
  submit_ms           duration of POST /jobs, as its client measures it
  start_ms_submitted  from sending POST /jobs until the job's last agent has its Start, for jobs submitted while at least half of all
                      slots were free of demand
  start_ms_freed      from an agent's report that ranks have ended until the last agent of the job that gets these slots has its Start.
                      Ends are sent in bursts, twice a second; only Starts in slots that the newest burst freed count
  start_ms_over_kill  the same if the server was killed in between: it is killed at the end of a job, in the middle of a burst
  start_ms_kept       the same for the other Starts: their slots were kept for a larger job meanwhile, or the Start came more than
                      half a second late
  busy_cpu            the server's CPU seconds per second from the first submission until the server is killed
  restart_secs        from the start of the new server process until every agent had its Welcome and the response to a heartbeat.
                      Agents reconnect as real agents do (after 0.1 s, doubled up to 3 s, with up to half subtracted at random)
  adopted             attempts that ran when the server was killed
  not_adopted         attempts that did not continue afterwards under their number; must be 0
  again               jobs of which some agents had no Start yet when the server was killed: they start as attempt 2 when the lease of
                      attempt 1 has expired
  stops               orders to stop an attempt
  disconnected        connections that closed while the server was running; must be 0
  lost                reports that were never acknowledged, and jobs that did not start exactly once or did not succeed; must be 0
  out_of_order        jobs that started before an earlier job with the same number of ranks; must be 0

A list of milliseconds is [p50, p99, largest, count]. A Postgres database must be empty and not used otherwise.
"""

import argparse
import asyncio
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import websockets

from server import Server
from simulated_agent import Agent

# The numbers of ranks of ten jobs.
MIX = [1] * 4 + [2] * 3 + [8] * 2 + [16]
# Interval at which the due ends are sent together.
BURST_SECS = 0.5


class Job:
    """A job as the simulated agents know it."""

    def __init__(self, number, ranks, submitted):
        self.number, self.ranks, self.submitted = number, ranks, submitted
        # Whether the unfinished jobs demanded more than half of all slots at the submission.
        self.had_queue = True
        # The newest attempt's (agent, `Attempt`) pairs, and how many of these have ended.
        self.starts, self.attempts, self.ended = 0, [], 0
        self.started = None


class Fleet:
    """All simulated agents and jobs, and what was measured."""

    def __init__(self, server, options):
        self.server, self.options = server, options
        # `order`: jobs in the order of their starts; `early`: Starts of jobs whose submission has no response yet.
        self.jobs, self.order, self.early = {}, [], {}
        self.is_killed, self.revoked, self.disconnected, self.stops, self.done = False, 0, 0, [], 0
        # `burst`: the time of the newest burst of ends; `demand`: the ranks of all unfinished jobs.
        self.burst, self.out_of_order, self.demand, self.queued_most = 0.0, 0, 0, 0
        self.killed_at, self.from_end_over_kill = float("inf"), []
        self.from_submission, self.from_end, self.from_end_kept, self.submitting = [], [], [], []

    def lost_connection(self, agent, why):
        if not self.is_killed:
            self.disconnected += 1
            print(f"{agent.name}: {why}", file=sys.stderr)

    def submitted(self, job_id, job):
        self.jobs[job_id] = job
        self.queued_most = max(self.queued_most, len(self.jobs) - len(self.order))
        for agent, attempt in self.early.pop(job_id, []):
            self.started(agent, attempt)

    def started(self, agent, attempt):
        job = self.jobs.get(attempt.ref["job"])
        if job is None:
            # The response to the job's submission has not arrived yet.
            self.early.setdefault(attempt.ref["job"], []).append((agent, attempt))
            attempt.heard = time.monotonic()
            return
        now = getattr(attempt, "heard", None) or time.monotonic()
        if job.attempts and job.attempts[0][1].ref != attempt.ref:
            # The earlier attempt never ran: the server was killed after it had sent the Start to some of the agents.
            job.attempts, job.ended = [], 0
        job.attempts.append((agent, attempt))
        if sum(len(each.ranks) for _, each in job.attempts) < job.ranks:
            return
        job.starts, job.started = job.starts + 1, now
        job.token = attempt.ref["fencing_token"]
        self.order.append(job)
        if not job.had_queue:
            self.from_submission.append(now - job.submitted)
            return
        freed = max(machine.freed[slot] for machine, each in job.attempts for _, slot in each.ranks)
        took = now - max(freed, job.submitted)
        if freed < self.killed_at <= now:
            self.from_end_over_kill.append(took)
        else:
            (self.from_end if freed >= self.burst else self.from_end_kept).append(took)

    def attempt_done(self, job_id):
        job = self.jobs[job_id]
        job.ended += 1
        if job.ended == len(job.attempts):
            self.done += 1
            self.demand -= job.ranks

    async def end_due(self):
        """Ends due attempts in bursts. Nothing ends while the server is down, as running attempts must continue then."""
        while True:
            await asyncio.sleep(BURST_SECS)
            if self.is_killed:
                continue
            now = time.monotonic()
            due = [(agent, attempt) for agent in self.agents for attempt in agent.attempts.values() if attempt.ends_at and attempt.ends_at <= now and not attempt.ended]
            if due:
                self.burst = now
            for agent, attempt in due:
                try:
                    await agent.end(attempt)
                except websockets.ConnectionClosed:
                    pass  # The attempt's records are sent on the next connection.

    async def submit(self, pool):
        """Submits all jobs from one client, so that their order is known."""
        half = self.options.agents * self.options.slots / 2
        for number in range(self.options.jobs):
            ranks = MIX[number % len(MIX)]
            spec = {
                "name": f"j{number}", "model": {"arch": "resnet20"}, "data": {"dataset": "many"}, "train": {"steps": 8, "batch_size": 16},
                "parallel": {"ranks": ranks, "device": "cpu"}, "checkpoint": {"every_epochs": 0}, "evaluate": {"every_epochs": 0},
            }
            self.demand += ranks
            job = Job(number, ranks, time.monotonic())
            job.had_queue = self.demand > half
            created = await asyncio.get_running_loop().run_in_executor(pool, self.server.ask, "/jobs", spec)
            self.submitting.append(time.monotonic() - job.submitted)
            self.submitted(created["id"], job)


def summary(secs):
    """Returns [p50, p99, largest, count], in milliseconds."""
    if not secs:
        return []
    ordered = sorted(secs)
    quantile = lambda fraction: ordered[min(int(len(ordered) * fraction), len(ordered) - 1)]
    return [round(1000 * value, 1) for value in (quantile(0.5), quantile(0.99), ordered[-1])] + [len(ordered)]


def fencing_number(token):
    """Returns the number in a fencing token."""
    return int(str(token).split("-")[0].split(".")[0])


async def measure(server, options):
    fleet = Fleet(server, options)
    loop, pool, figures = asyncio.get_running_loop(), ThreadPoolExecutor(8), {}

    async def ask(*question):
        return await loop.run_in_executor(pool, server.ask, *question)

    async def cpu_while(work):
        before, begin = server.cpu_secs(), time.monotonic()
        await work
        return round((server.cpu_secs() - before) / (time.monotonic() - begin), 4)

    async def until(is_so, secs, what):
        end = time.monotonic() + secs
        while not is_so():
            if time.monotonic() > end:
                sys.exit(f"not within {secs} s: {what} ({fleet.done} of {options.jobs} jobs done, {fleet.stops[:3]})")
            await asyncio.sleep(0.02)

    def token(number):
        name = f"machine-{number:04}"
        return server.ask("/tokens", {"name": name, "scope": "agent", "agent": name})["secret"]

    tokens = await asyncio.gather(*(loop.run_in_executor(pool, token, number) for number in range(options.agents)))
    fleet.agents = [Agent(fleet, number, secret) for number, secret in enumerate(tokens)]
    begin = time.monotonic()
    tasks = [asyncio.create_task(agent.run()) for agent in fleet.agents]
    await until(lambda: all(agent.adopted.is_set() for agent in fleet.agents), 120, "all agents are connected")
    figures["connect_secs"] = round(time.monotonic() - begin, 2)
    await ask("/datasets", {"name": "many", "path": "/many"})
    figures["idle_cpu"] = await cpu_while(asyncio.sleep(options.idle))

    tasks.append(asyncio.create_task(fleet.end_due()))
    submission = asyncio.create_task(fleet.submit(pool))
    timeout = 120 + options.secs * options.jobs * 8 / (options.agents * options.slots)

    async def until_half_done():
        await submission
        await until(lambda: fleet.done >= options.jobs / 2, timeout, "half of the jobs have ended")

    figures["busy_cpu"] = await cpu_while(until_half_done())
    fleet.is_killed, fleet.killed_at = True, time.monotonic()
    for agent in fleet.agents:
        agent.adopted.clear()
    server.kill()
    begin = time.monotonic()
    server.start()
    await until(lambda: all(agent.adopted.is_set() for agent in fleet.agents), 120, "all agents are connected again")
    figures["restart_secs"] = round(time.monotonic() - begin, 2)
    await loop.run_in_executor(pool, server.wait)
    running = {job: attempt.ref["attempt"] for agent in fleet.agents for job, attempt in agent.attempts.items() if not attempt.ended}
    alive = {}
    for state in ("starting", "running"):
        alive.update(await loop.run_in_executor(pool, server.jobs, state))
    figures["adopted"] = len(running)
    figures["not_adopted"] = fleet.revoked + sum(1 for job, number in running.items() if alive.get(job, {}).get("attempt") != number)
    fleet.is_killed = False
    await until(lambda: fleet.done >= options.jobs, timeout, "all jobs have ended")
    succeeded = await loop.run_in_executor(pool, server.jobs, "succeeded")
    unacknowledged = sum(len(agent.attempts) for agent in fleet.agents)
    attempts = {job_id: succeeded.get(job_id, {}).get("attempt") for job_id, job in fleet.jobs.items() if job.starts == 1}
    figures["again"] = sum(1 for number in attempts.values() if number == 2)
    once = sum(1 for number in attempts.values() if number in (1, 2))
    # Fencing tokens grow with every attempt.
    newest = {}
    for job in sorted(fleet.order, key=lambda job: fencing_number(job.token)):
        fleet.out_of_order += job.number < newest.get(job.ranks, 0)
        newest[job.ranks] = max(job.number, newest.get(job.ranks, 0))
    for task in tasks:
        task.cancel()
    return figures | {
        "queued_most": fleet.queued_most, "submit_ms": summary(fleet.submitting), "start_ms_submitted": summary(fleet.from_submission), "start_ms_freed": summary(fleet.from_end), "start_ms_over_kill": summary(fleet.from_end_over_kill),
        "start_ms_kept": summary(fleet.from_end_kept), "disconnected": fleet.disconnected, "lost": unacknowledged + options.jobs - once,
        "out_of_order": fleet.out_of_order, "stops": len(fleet.stops),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="target/release/lockstep")
    parser.add_argument("--database", default="", help="empty: SQLite, in a temporary folder")
    parser.add_argument("--agents", type=int, default=100)
    parser.add_argument("--slots", type=int, default=8, help="slots of each agent, at least 8, as jobs of 16 ranks use two agents")
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--secs", type=float, default=10, help="duration of a job")
    parser.add_argument("--spread", type=float, default=0.5, help="largest deviation from --secs, as a fraction")
    parser.add_argument("--idle", type=float, default=15, help="seconds for which agents only send heartbeats at the beginning")
    options = parser.parse_args()
    server = Server(options, "--no-local-agent")
    try:
        figures = asyncio.run(measure(server, options))
    finally:
        server.stop()
    print(json.dumps({"agents": options.agents, "slots": options.slots, "jobs": options.jobs, "database": "postgres" if options.database else "sqlite"} | figures))


main()
