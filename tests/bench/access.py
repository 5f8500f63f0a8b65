"""What asking who somebody is costs: pages, lists and streams of one database, from a server that asks for a token and knows people, and
from one with --no-auth, in turns. Each request has a connection of its own.

    python3 tests/bench/access.py [--program target/release/lockstep] [--jobs 1000] [--rounds 40]

Prints a line of JSON a case: medians in milliseconds, and what the first takes of the second. Standard library only.
"""

import argparse
import http.client
import json
import pathlib
import shutil
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "gpu"))
from test_server import Stream, wait  # noqa: E402

PASSWORD = "a password of ten letters"


def free_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


class Served:
    running = []

    def __init__(self, program, directory, *options):
        self.port, self.directory = free_port(), directory
        self.process = subprocess.Popen(
            [program, "serve", "--listen", f"127.0.0.1:{self.port}", "--data-dir", str(directory), *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.headers = {}
        self.running.append(self)
        wait(20, "the server answers", self._answers)

    def _answers(self):
        try:
            return self.request("GET", "/healthz")[0] == 200
        except OSError:
            return False

    def request(self, method, path, body=None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(method, path, body, {**self.headers, **(headers or {})})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, content, answer

    def stop(self):
        self.process.terminate()
        self.process.wait(30)


def fill(database, job, jobs, events):
    """Copies a job `jobs` times, and gives it `events` lines of a log, an event each."""
    db = sqlite3.connect(database)
    columns = [row[1] for row in db.execute("PRAGMA table_info(jobs)")]
    values = {"id": "substr(id, 1, length(id) - 6) || printf('%06d', i)", "name": "name || ' ' || i", "created_at": "created_at - i * 1000"}
    taken = ", ".join(values.get(column, column) for column in columns if column != "idempotency_key")
    named = ", ".join(column for column in columns if column != "idempotency_key")
    db.execute(f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) INSERT INTO jobs ({named}) SELECT {taken} FROM jobs, n WHERE id = ?", (jobs - 1, job))
    first = db.execute("SELECT last_seq FROM jobs WHERE id = ?", (job,)).fetchone()[0] + 1
    line = '{"type":"log","attempt":1,"rank":0,"lines":[{"number":%d,"at":"2026-01-02T03:04:05Z","text":"loss is %d"}]}'
    rows = ((job, first + i, 1767323045000 + i, "log", 1, 0, line % (i + 1, i)) for i in range(events))
    db.executemany("INSERT INTO events (job_id, seq, at, kind, attempt, rank, body) VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
    db.execute("UPDATE jobs SET last_seq = ? WHERE id = ?", (first + events - 1, job))
    db.commit()
    db.close()


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--program", default="target/release/lockstep")
    arguments.add_argument("--jobs", type=int, default=1000)
    arguments.add_argument("--events", type=int, default=20_000)
    arguments.add_argument("--rounds", type=int, default=40)
    given = arguments.parse_args()
    program = str(pathlib.Path(given.program).resolve())
    work = pathlib.Path(tempfile.mkdtemp(prefix="lockstep-access-"))
    try:
        known = work / "known"
        server = Served(program, known, "--cpu-slots", "1")
        server.headers = {"Authorization": f"Bearer {(known / 'token').read_text().strip()}"}
        post = lambda path, body: server.request("POST", f"/api/v1{path}", json.dumps(body), {"Content-Type": "application/json"})
        for name, role in [("ada", "admin"), ("mona", "member"), ("vera", "viewer")]:
            assert post("/people", {"name": name, "role": role, "password": PASSWORD})[0] == 201
        wait(20, "its agent is there", lambda: b'"online":true' in server.request("GET", "/api/v1/agents")[1])
        status, made, _ = server.request("POST", "/api/v1/datasets/bundled")
        assert status in (200, 201), made
        status, made, _ = post("/jobs", {"name": "one", "model": {"arch": "resnet20"}, "data": {"dataset": "fashion-mnist"}, "train": {"steps": 10}, "evaluate": {"every_epochs": 0}})
        assert status == 201, made
        job = json.loads(made)["id"]
        wait(60, "it has trained", lambda: b'"state":"succeeded"' in server.request("GET", f"/api/v1/jobs/{job}")[1], 0.2)
        server.stop()
        fill(known / "lockstep.db", job, given.jobs, given.events)
        shutil.copytree(known, work / "open")
        asks, open_ = Served(program, known, "--no-local-agent"), Served(program, work / "open", "--no-local-agent", "--no-auth")
        form = urllib.parse.urlencode({"name": "mona", "password": PASSWORD})
        origin = f"http://127.0.0.1:{asks.port}"
        status, _, answer = asks.request("POST", "/login", form, {"Content-Type": "application/x-www-form-urlencoded", "Origin": origin})
        assert status == 303, status
        cookie = {"Cookie": answer.getheader("Set-Cookie").split(";")[0]}
        made = asks.request("POST", "/api/v1/tokens", json.dumps({"name": "bench", "scope": "read"}), {**cookie, "Content-Type": "application/json", "Origin": origin})
        token = json.loads(made[1])["secret"]
        bearer = {"Authorization": f"Bearer {token}"}

        def get(path, credential):
            def one(server, has):
                status, content, _ = server.request("GET", path, None, credential if has else None)
                assert status == 200 and content, (path, status)

            return one

        def stream(server, has):
            read = Stream(server.port, f"/api/v1/jobs/{job}/stream?since=0", 60, token if has else None)
            while read.frame()["type"] != "live":
                pass
            read.socket.close()

        cases = {
            f"page of {given.jobs} jobs, a person's session": get("/jobs", cookie),
            "page of a job, a person's session": get(f"/jobs/{job}", cookie),
            f"{given.jobs} jobs as JSON, a person's token": get("/api/v1/jobs?limit=1000", bearer),
            "one job as JSON, a person's token": get(f"/api/v1/jobs/{job}", bearer),
            f"stream of {given.events} events, a person's token": stream,
        }
        for case, one in cases.items():
            took = {True: [], False: []}
            for number in range(given.rounds + 1):
                for has in (True, False) if number % 2 else (False, True):
                    began = time.perf_counter()
                    one(asks if has else open_, has)
                    took[has].append((time.perf_counter() - began) * 1000)
            asked, free = (statistics.median(took[has][1:]) for has in (True, False))
            print(json.dumps({"case": case, "n": given.rounds, "with_ms": round(asked, 2), "without_ms": round(free, 2), "ratio": round(asked / free, 3)}), flush=True)
    finally:
        for server in Served.running:
            server.stop()
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
