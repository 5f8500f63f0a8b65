"""The cost of authentication: requests pages, lists and streams in turns from a server with tokens and people, and from a server with --no-auth
and the same database. Each request has its own connection. Also compares the times of the response 404 for a private job and for a missing
job, and the times of GET /healthz with and without clients that read large pages.

    python3 tests/bench/access.py [--program target/release/lockstep] [--jobs 1000] [--rounds 40]

Prints a line of JSON per case: medians (of /healthz 95th percentiles) in milliseconds, and their ratio. Standard library only.
"""

import argparse
import http.client
import json
import multiprocessing
import pathlib
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "gpu"))
from server import free_port  # noqa: E402
from server_under_test import Stream, wait  # noqa: E402

PASSWORD = "a password of ten letters"


class Server:
    """`lockstep serve` on a free port. `running` has all servers, which `main` stops."""

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
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, content, response

    def stop(self):
        self.process.terminate()
        self.process.wait(30)


def fill(database, job, jobs, events):
    """Copies a job until there are `jobs` jobs, and adds `events` log events of one line each to the first job."""
    db = sqlite3.connect(database)
    columns = [row[1] for row in db.execute("PRAGMA table_info(jobs)")]
    values = {"id": "substr(id, 1, length(id) - 6) || printf('%06d', i)", "name": "name || ' ' || i", "created_at": "created_at - i * 1000"}
    selected = ", ".join(values.get(column, column) for column in columns if column != "idempotency_key")
    inserted = ", ".join(column for column in columns if column != "idempotency_key")
    db.execute(f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) INSERT INTO jobs ({inserted}) SELECT {selected} FROM jobs, n WHERE id = ?", (jobs - 1, job))
    first = db.execute("SELECT last_seq FROM jobs WHERE id = ?", (job,)).fetchone()[0] + 1
    line = '{"type":"log","attempt":1,"rank":0,"lines":[{"number":%d,"at":"2026-01-02T03:04:05Z","text":"loss is %d"}]}'
    # 1767323045000 ms since 1970 is the time in the line.
    rows = ((job, first + i, 1767323045000 + i, "log", 1, 0, line % (i + 1, i)) for i in range(events))
    db.executemany("INSERT INTO events (job_id, seq, at, kind, attempt, rank, body) VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
    db.execute("UPDATE jobs SET last_seq = ? WHERE id = ?", (first + events - 1, job))
    db.commit()
    db.close()


def milliseconds(request):
    began = time.perf_counter()
    request()
    return (time.perf_counter() - began) * 1000


def beside_readers(readers, read, measure):
    """Returns the result of `measure` while `readers` threads of another process call `read` again and again, and the number of these calls."""
    context = multiprocessing.get_context("fork")
    stop, calls, failures = context.Event(), context.Value("i", 0), context.SimpleQueue()

    def repeat():
        try:
            while not stop.is_set():
                read()
                with calls:
                    calls.value += 1
        except Exception as error:
            failures.put(repr(error))

    def run():
        threads = [threading.Thread(target=repeat) for _ in range(readers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    process = context.Process(target=run)
    process.start()
    try:
        wait(60, "a call returns", lambda: calls.value > 0 or not failures.empty())
        result = measure()
    finally:
        stop.set()
        process.join()
    assert failures.empty(), failures.get()
    return result, calls.value


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", default="target/release/lockstep")
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    program = str(pathlib.Path(options.program).resolve())
    work = pathlib.Path(tempfile.mkdtemp(prefix="lockstep-access-"))
    try:
        directory = work / "data"
        server = Server(program, directory, "--cpu-slots", "1")
        server.headers = {"Authorization": f"Bearer {(directory / 'token').read_text().strip()}"}
        post = lambda path, body: server.request("POST", f"/api/v1{path}", json.dumps(body), {"Content-Type": "application/json"})
        for name, role in [("ada", "admin"), ("mona", "member"), ("vera", "viewer")]:
            assert post("/people", {"name": name, "role": role, "password": PASSWORD})[0] == 201
        wait(20, "the agent is online", lambda: b'"online":true' in server.request("GET", "/api/v1/agents")[1])
        status, content, _ = server.request("POST", "/api/v1/datasets/bundled")
        assert status in (200, 201), content
        ids = []
        for name, private in [("one", False), ("two", True)]:
            status, content, _ = post("/jobs", {"name": name, "private": private, "model": {"arch": "resnet20"}, "data": {"dataset": "fashion-mnist"}, "train": {"steps": 10}, "evaluate": {"every_epochs": 0}})
            assert status == 201, content
            ids.append(json.loads(content)["id"])
            wait(60, "the job has succeeded", lambda: b'"state":"succeeded"' in server.request("GET", f"/api/v1/jobs/{ids[-1]}")[1], 0.2)
        job, private = ids
        missing = private[:-1] + ("1" if private[-1] == "0" else "0")
        server.stop()
        fill(directory / "lockstep.db", job, options.jobs, options.events)
        shutil.copytree(directory, work / "open")
        authenticated, unauthenticated = Server(program, directory, "--no-local-agent"), Server(program, work / "open", "--no-local-agent", "--no-auth")
        form = urllib.parse.urlencode({"name": "mona", "password": PASSWORD})
        origin = f"http://127.0.0.1:{authenticated.port}"
        status, _, response = authenticated.request("POST", "/login", form, {"Content-Type": "application/x-www-form-urlencoded", "Origin": origin})
        assert status == 303, status
        cookie = {"Cookie": response.getheader("Set-Cookie").split(";")[0]}
        created = authenticated.request("POST", "/api/v1/tokens", json.dumps({"name": "bench", "scope": "read"}), {**cookie, "Content-Type": "application/json", "Origin": origin})
        token = json.loads(created[1])["secret"]
        bearer = {"Authorization": f"Bearer {token}"}

        def get(path, headers):
            def request(server, has_auth):
                status, content, _ = server.request("GET", path, None, headers if has_auth else None)
                assert status == 200 and content, (path, status)

            return request

        def stream(server, has_auth):
            events = Stream(server.port, f"/api/v1/jobs/{job}/stream?since=0", 60, token if has_auth else None)
            while events.frame()["type"] != "live":
                pass
            events.socket.close()

        cases = {
            f"page of {options.jobs} jobs, a person's session": get("/jobs", cookie),
            "page of a job, a person's session": get(f"/jobs/{job}", cookie),
            f"{options.jobs} jobs as JSON, a person's token": get("/api/v1/jobs?limit=1000", bearer),
            "one job as JSON, a person's token": get(f"/api/v1/jobs/{job}", bearer),
            f"stream of {options.events} events, a person's token": stream,
        }
        for case, request in cases.items():
            times = {True: [], False: []}
            for number in range(options.rounds + 1):
                for has_auth in (True, False) if number % 2 else (False, True):
                    times[has_auth].append(milliseconds(lambda: request(authenticated if has_auth else unauthenticated, has_auth)))
            with_auth, without = (statistics.median(times[has_auth][1:]) for has_auth in (True, False))
            print(json.dumps({"case": case, "n": options.rounds, "with_ms": round(with_auth, 2), "without_ms": round(without, 2), "ratio": round(with_auth / without, 3)}), flush=True)

        def lookup(unseen):
            status = authenticated.request("GET", f"/api/v1/jobs/{unseen}", None, bearer)[0]
            assert status == 404, (unseen, status)

        times, count = {private: [], missing: []}, 5 * options.rounds
        for number in range(count + 1):
            for unseen in (private, missing) if number % 2 else (missing, private):
                times[unseen].append(milliseconds(lambda: lookup(unseen)))
        of_private, of_missing = (statistics.median(times[unseen][1:]) for unseen in (private, missing))
        case = "one job as JSON: private and missing"
        print(json.dumps({"case": case, "n": count, "private_ms": round(of_private, 2), "missing_ms": round(of_missing, 2), "ratio": round(of_private / of_missing, 3)}), flush=True)

        page, health = get("/api/v1/jobs?limit=1000", bearer), get("/healthz", {})
        p95 = lambda: statistics.quantiles((milliseconds(lambda: health(authenticated, True)) for _ in range(count)), n=20)[-1]
        for readers in (8, 40):
            alone = p95()
            beside, pages = beside_readers(readers, lambda: page(authenticated, True), p95)
            case = f"GET /healthz beside {readers} readers of {options.jobs} jobs as JSON"
            print(json.dumps({"case": case, "n": count, "pages": pages, "beside_p95_ms": round(beside, 2), "alone_p95_ms": round(alone, 2), "ratio": round(beside / alone, 3)}), flush=True)
    finally:
        for server in Server.running:
            server.stop()
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
