"""Tests runs that a program logs: the records that reach a simulated server and the records in the run's folder."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

import lockstep
import lockstep as wandb
from lockstep import output, session, spool, tracking

SOURCE = Path(__file__).parents[1] / "src"


class FakeServer:
    """Implements the calls of `/runs` of docs/reference/rest.md in memory."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        # Faults of the next requests: a status, or None, which handles the request and then breaks the connection.
        self.faults: list[int | None] = []
        self.is_down = False
        self.requests: list[tuple[str, str, Any]] = []
        self.beats = 0
        # Uploads of files wait for this.
        self.may_store_files = threading.Event()
        self.may_store_files.set()
        this = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def respond(self) -> None:
                content = self.rfile.read(int(self.headers.get("content-length") or 0))
                body = content if self.command == "PUT" else json.loads(content or b"null")
                fault = this.faults.pop(0) if this.faults else 503 if this.is_down else 200
                status, out = (fault, {}) if fault not in (None, 200) else this.handle(self.command, self.path, body)
                if fault is None:
                    self.close_connection = True
                    return
                content = json.dumps(out).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_PATCH = respond

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()

    def handle(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        self.requests.append((method, path, body))
        parts = path.removeprefix("/api/v1/runs").split("/")[1:]
        id = parts[0] if parts else body["id"]
        if not parts:
            is_new = id not in self.runs
            run = self.runs.setdefault(id, body | {"records": [], "summary": {}})
            run |= {"state": "running", "config": run.get("config", {}) | body.get("config", {})}
            external = {"config": run["config"], "summary": run["summary"]}
            steps = [record["step"] for record in run["records"]]
            job = {"id": f"j-{id}", "name": run["name"], "step": max(steps, default=0), "external": external}
            return (201 if is_new else 200), job | {"spec": {"private": run.get("private", False)}}
        if id not in self.runs:
            return 404, {"code": "not_found", "detail": "no such run"}
        run = self.runs[id]
        files = run.setdefault("files", {})
        if method == "GET":
            keys = ("path", "size_bytes", "modified_ms")
            listed = [(path, len(content), modified_ms) for path, (content, modified_ms) in files.items()]
            return 200, {"files": [dict(zip(keys, file, strict=True)) for file in listed]}
        if method == "PUT":
            self.may_store_files.wait(timeout=20)
            query = parse_qs(urlsplit(path).query)
            files[query["path"][0]] = body, int(query["modified_ms"][0])
            return 200, {}
        if method == "PATCH":
            self.beats += body == {}
            for key in ("config", "summary"):
                run[key] = run.get(key, {}) | body.get(key, {})
            run |= {key: body[key] for key in ("state", "reason") if key in body}
            return 200, {}
        assert sum(len(record["values"]) for record in body["records"]) <= 10_000
        stored_count = len(run["records"])
        if body["first"] > stored_count + 1:
            return 409, {"detail": "a gap", "expected": stored_count + 1}
        run["records"] += body["records"][stored_count + 1 - body["first"] :]
        return 200, {"acknowledged": len(run["records"])}

    def points(self, id: str) -> dict[str, list[tuple[int, float]]]:
        found: dict[str, list[tuple[int, float]]] = {}
        for record in self.runs[id]["records"]:
            for name, value in record["values"].items():
                found.setdefault(name, []).append((record["step"], value))
        return found


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.http.shutdown()
    fake.http.server_close()


@pytest.fixture(autouse=True)
def environment(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("LOCKSTEP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LOCKSTEP_SERVER", server.url)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SOURCE), *map(os.path.abspath, sys.path)]))
    monkeypatch.chdir(tmp_path)
    # Short pauses keep the tests quick.
    for name, secs in (("SEND_SECS", 0.02), ("BACK_OFF_SECS", 0.05), ("WRITE_SECS", 0.02), ("FINISH_SECS", 20.0)):
        monkeypatch.setattr(tracking, name, secs)
    output._warned.clear()
    yield
    server.is_down = False
    lockstep.finish()


def wait_until(condition: Callable[[], Any]) -> None:
    ends_at = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < ends_at
        time.sleep(0.01)


def stored_records(path: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(path) / spool.RECORDS).read_text().splitlines()]


def folder_of(run: lockstep.Run) -> str:
    assert run.dir is not None
    return run.dir


def run_python(code: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def run_sync(*arguments: Path | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "lockstep", "sync", *arguments], capture_output=True, text=True)


def test_calls_of_wandb_have_the_same_effect(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    exec("from lockstep import *", {})  # needs no run
    wandb.login()
    run = wandb.init(
        project="..my shoes", name="first", config={"lr": 0.1, "net": {"depth": 20}}, tags=["a"], group="g", notes="n",
        settings=wandb.Settings(silent=True), entity="team",
    )  # fmt: skip
    assert wandb.run is run and wandb.init() is run and wandb.config is run.config
    run.config.epochs = 3
    run.config.update(argparse.Namespace(seed=7))
    run.config.setdefaults({"lr": 1.0, "wd": 0})
    with pytest.raises(lockstep.LockstepError, match="allow_val_change=True"):
        run.config["lr"] = 0.2
    run.config.update({"lr": 0.2}, allow_val_change=True)
    run.define_metric("epoch")
    run.define_metric("val/*", step_metric="epoch", summary="min,max")
    wandb.log({"loss": 2, "n": {"a": Fraction(1, 2), "b": True}, "picture": wandb.Image(None), "word": "x"})
    wandb.log({"loss": 1.5, "huge": 1e300}, commit=False)
    wandb.log({"acc": 0.5, "huge": -1e301, "picture": wandb.Image(None), "chart": wandb.plot.line("x", "y")})
    for step, value in enumerate((0.3, math.nan, 0.1, 0.2)):
        wandb.log({"epoch": step, "val/loss": value, "loss": math.inf}, step=10 + step)
    wandb.log({"loss": 0.25}, step=5)
    wandb.log({"loss": 0.125}, commit=True)
    run.summary["best"] = 0.1
    run.summary.note = "good"
    wandb.alert("diverged", "loss is inf", level=wandb.AlertLevel.WARN)
    wandb.alert("diverged", "again, too soon")
    wandb.alert("other", level="banana")
    wandb.watch(None)
    Path("weights").mkdir()
    Path("weights/x.pt").write_bytes(b"1")
    assert wandb.save("weights/*.pt", policy="now") == ["weights/x.pt"]
    Path("weights/[x].pt").write_bytes(b"1")
    assert wandb.save("weights/[x].pt", glob=False) == ["weights/[x].pt"]
    Path("weights/[x].pt").unlink()
    assert wandb.save("nothing.pt") == wandb.save("nothing.pt") == []
    artifact = wandb.Artifact("model", type="model", metadata={"a": 1})
    artifact.add_file("weights/x.pt", name="y.pt")
    artifact.add_dir("weights", name="d")
    wandb.log_artifact(artifact).wait()
    wandb.log_artifact("weights", name="folder", type="model")
    assert wandb.summary["loss"] == 0.125 and dict(run.summary)["acc"] == 0.5 and run.step == 14
    wandb.finish()
    assert wandb.run is None
    assert server.points(run.id) == {
        "loss": [(0, 2), (1, 1.5), *((10 + n, "Infinity") for n in range(4)), (5, 0.25), (13, 0.125)],
        "n.a": [(0, 0.5)],
        "n.b": [(0, 1)],
        "acc": [(1, 0.5)],
        "huge": [(1, 1e300), (1, -1e301)],
        "epoch": [(10, 0), (11, 1), (12, 2), (13, 3)],
        "val/loss": [(0, 0.3), (1, "NaN"), (2, 0.1), (3, 0.2)],
    }
    logged = server.runs[run.id]
    assert (logged["project"], logged["name"]) == ("my-shoes", "first")
    assert (logged["tags"], logged["notes"]) == (["a", "g"], "n")
    assert logged["config"] == {"lr": 0.2, "net": {"depth": 20}, "epochs": 3, "seed": 7, "wd": 0}
    assert logged["state"] == "succeeded"
    # All files are uploaded before the request that ends the run.
    ends = [method for method, _, body in server.requests if method == "PUT" or "state" in (body or {})]
    assert ends[-1] == "PATCH" and ends.count("PATCH") == 1
    alerts = [(alert["title"], alert["level"]) for alert in logged["summary"].pop("alerts")]
    assert alerts == [("diverged", "WARN"), ("other", "INFO")]
    assert logged["summary"] == {"val/loss": {"min": 0.1, "max": 0.3}, "best": 0.1, "note": "good"}
    lines = capsys.readouterr().err.splitlines()
    saved = {path: content for path, (content, _) in logged["files"].items()}
    assert saved == dict.fromkeys(["weights/x.pt", "weights/[x].pt", "model/y.pt", "model/d/x.pt", "folder/x.pt"], b"1")
    once = ("picture is not logged: Image", "word is not logged: str", "WARN: diverged", "watch has no", "save found")
    project = "the project is 'my-shoes' instead of '..my shoes'"
    for words in (*once, "level 'banana'", "huge has values beyond", project):
        assert len([line for line in lines if words in line]) == 1, (words, lines)
    assert any("init ignores" in line and "entity, settings" in line for line in lines)
    late: list[Callable[[], Any]] = [
        lambda: run.log({"loss": 1.0}),
        lambda: run.save("weights/x.pt"),
        lambda: run.summary.update(late=5),
        lambda: run.config.update(late=5),
        lambda: run.alert("late"),
    ]
    for call in late:
        with pytest.raises(lockstep.LockstepError, match="is finished"):
            call()
    with pytest.raises(lockstep.LockstepError, match="lockstep.init first"):
        wandb.log({"loss": 1.0})


class Tensor:
    def __init__(self, *values: float) -> None:
        self.values = values

    def item(self) -> float:
        [value] = self.values
        return value


@pytest.mark.parametrize(
    ("value", "logged"),
    [
        (Tensor(0.5), 0.5),
        (Tensor(0.5, 1.0), None),
        (10**400, "Infinity"),
        (-(2**60), -(2.0**60)),
        (None, None),
        ([1.0], None),
        (b"1", None),
        (1j, None),
    ],
)
def test_only_numbers_are_logged(value: Any, logged: Any) -> None:
    with lockstep.init(mode="offline") as run:
        run.log({"x": value, "y": 1.0})
    assert stored_records(folder_of(run))[0]["values"] == ({} if logged is None else {"x": logged}) | {"y": 1.0}


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 251, "\ud800"])
def test_invalid_names_of_metrics_are_left_out(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with lockstep.init(mode="offline") as run:
        run.log({name: 1.0, "y": 1.0})
        run.log({str(number): number for number in range(1001)})
    assert [len(record["values"]) for record in stored_records(folder_of(run))] == [1, 999]
    errors = capsys.readouterr().err
    assert "1 to 250" in errors and "at most 1000 metrics" in errors


@pytest.mark.parametrize(
    ("end", "state"),
    [
        ("pass", ("succeeded", None)),
        ("raise ValueError('bad batch')", ("failed", "ValueError: bad batch")),
        ("raise KeyboardInterrupt", ("cancelled", "interrupted")),
        (
            "import signal as s; s.signal(s.SIGTERM, s.default_int_handler); s.raise_signal(s.SIGTERM)",
            ("cancelled", "interrupted"),
        ),
        ("run.finish(exit_code=3)", ("failed", "exit code 3")),
        ("with run: raise OSError('full')", ("failed", "OSError: full")),
        ("with run: import sys; sys.exit(0)", ("succeeded", None)),
    ],
)
def test_a_run_ends_with_its_program(end: str, state: tuple[str, str | None], server: FakeServer) -> None:
    code = f"import lockstep\nrun = lockstep.init(id='one')\nrun.log({{'x': 1}})\n{end}"
    run_python(code).communicate()
    assert server.points("one") == {"x": [(0, 1)]}
    assert (server.runs["one"]["state"], server.runs["one"].get("reason")) == state


def test_a_second_sync_of_an_offline_run_sends_no_record_again(server: FakeServer) -> None:
    with lockstep.init(mode="offline") as run:
        run.log({"loss": 1.0})
    assert server.runs == {}
    assert lockstep.sync(".") == {run.id: 1}
    sent = len(server.requests)
    assert lockstep.sync(folder_of(run)) == {run.id: 1}
    assert server.points(run.id) == {"loss": [(0, 1)]} and server.runs[run.id]["state"] == "succeeded"
    assert all(not (body or {}).get("records") for _, _, body in server.requests[sent:]), "no record is sent again"


def test_each_point_arrives_once_despite_an_outage_and_lost_responses(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.is_down = True
    run = lockstep.init()
    for step in range(20_000):
        run.log({"x": float(step)})
        if step == 5_000:
            wait_until(lambda: run._failure is not None)
            server.is_down = False
            wait_until(lambda: server.runs.get(run.id, {}).get("records"))
            server.faults = [None, 500, 429, None, 503]
        if step == 15_000:
            wait_until(lambda: not server.faults)
    run.finish()
    assert server.points(run.id) == {"x": [(step, step) for step in range(20_000)]}
    assert server.runs[run.id]["state"] == "succeeded"
    errors = capsys.readouterr().err
    assert f"run {run.id} is kept in" in errors and errors.count("HTTP status 503") == 1


def test_finish_prints_the_sync_command_if_the_server_stays_unreachable(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracking, "FINISH_SECS", 0.1)
    run = lockstep.init(project="p")
    run.log({"x": 1.0})
    wait_until(lambda: server.points(run.id))
    server.is_down = True
    run.log({"x": 2.0})
    run.finish()
    errors = capsys.readouterr().err
    assert errors.strip().endswith(f"Send the rest by: python -m lockstep sync {run.dir}"), errors
    assert errors.count("HTTP status 503") == 1, errors
    server.is_down = False
    # The thread of `run` may have sent the record before the command does.
    complete = "is complete on the server"
    for expected in ((complete, "sent 1 record and 0 files"), (complete,)):
        assert run_sync(folder_of(run)).stdout in [f"{run.id}: {words}\n" for words in expected]
    assert server.points(run.id) == {"x": [(0, 1), (1, 2)]} and server.runs[run.id]["state"] == "succeeded"
    # Without a server or a token, there is one error for all runs.
    lockstep.init(id="unsent", mode="offline").finish()
    for name, value, words in (
        ("LOCKSTEP_SERVER", "http://127.0.0.1:1", "no server answers"),
        ("LOCKSTEP_TOKEN_FILE", "none", "the token file none"),
    ):
        monkeypatch.setenv(name, value)
        result = run_sync(".")
        assert (result.returncode, result.stdout) == (1, "")
        [line] = result.stderr.splitlines()
        assert line.startswith(f"nothing more was sent: {words}")


def test_a_long_upload_of_a_file_does_not_hide_the_end_of_its_run(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracking, "FINISH_SECS", 0.1)
    server.may_store_files.clear()
    Path("weights").write_bytes(b"1")
    run = lockstep.init()
    run.save("weights")
    wait_until(lambda: any(method == "PUT" for method, _, _ in server.requests))
    run.summary["best"] = 1
    run.finish()
    logged = server.runs[run.id]
    assert (logged["state"], logged["summary"], logged["files"]) == ("succeeded", {"best": 1}, {})
    assert "was not sent completely" in capsys.readouterr().err
    server.may_store_files.set()
    wait_until(lambda: logged["files"])


def test_a_restored_or_emptied_server_gets_the_missing_records(server: FakeServer) -> None:
    run = lockstep.init()
    for step in range(100):
        run.log({"x": step})
    wait_until(lambda: len(server.runs[run.id]["records"]) == 100)
    # Simulates the restoration of an older backup.
    del server.runs[run.id]["records"][40:]
    run.log({"x": 100})
    run.finish()
    expected = {"x": [(step, step) for step in range(101)]}
    assert server.points(run.id) == expected
    server.runs.clear()
    lockstep.init(id="zz-other", mode="offline").finish()
    with pytest.raises(lockstep.LockstepError, match=f"run {run.id} was deleted on the server"):
        lockstep.sync(".")
    assert list(server.runs) == ["zz-other"]
    result = run_sync(folder_of(run))
    assert result.returncode == 1 and "--again sends the run again" in result.stderr and run.id not in server.runs
    run_sync(folder_of(run), "--again")
    assert server.points(run.id) == expected
    assert lockstep.sync(".") == {run.id: 101, "zz-other": 0}


def test_a_run_that_is_deleted_while_it_is_logged_is_not_offered_to_sync(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    run = lockstep.init()
    server.runs.clear()
    run.log({"x": 1.0})
    run.finish()
    errors = capsys.readouterr().err
    assert errors.count(f"run {run.id} was deleted on the server") == 1 and "lockstep sync" not in errors
    assert server.runs == {}


LOGS_UNTIL_KILLED = """
import itertools, os, lockstep
run = lockstep.init(id="killed")
for n in itertools.count(run.step):
    run.log({"x": n})
    if n == int(os.environ["STOP_AT"]):
        print("stopped", flush=True)
        input()
"""


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_a_killed_program_loses_at_most_the_last_moment_and_continues(
    mode: str, server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCKSTEP_MODE", mode)
    path, count = Path("lockstep-runs/killed"), 0
    for _ in range(2):
        stop_at = count + 5_000
        monkeypatch.setenv("STOP_AT", f"{stop_at}")
        with run_python(LOGS_UNTIL_KILLED) as child:
            assert child.stdout is not None and child.stdin is not None
            child.stdout.readline()
            # The program no longer logs, and its records are written by the background thread.
            wait_until(lambda: len(stored_records(path)) == int(os.environ["STOP_AT"]) + 1)
            wait_until(lambda: mode == "offline" or bool(server.runs))
            with pytest.raises(lockstep.LockstepError, match="another process writes"):
                lockstep.init(id="killed")
            child.stdin.write("\n")
            child.stdin.flush()
            child.send_signal(signal.SIGKILL)
        text = (path / spool.RECORDS).read_bytes()
        # Adds an incomplete record, as a kill during a write leaves.
        (path / spool.RECORDS).write_bytes(text + b'{"step": 1, "val')
        count = text.count(b"\n")
        assert count > stop_at and spool.read_run(path)["state"] == "running"
    assert bool(server.runs) == (mode == "online")
    with lockstep.init(resume="auto") as run:
        assert (run.id, run.step, run.resumed) == ("killed", count, True)
        run.log({"x": count})
    assert lockstep.sync(".") == {"killed": count + 1}
    assert server.points("killed") == {"x": [(n, n) for n in range(count + 1)]}
    with pytest.raises(ValueError), lockstep.init(id="killed"):
        raise ValueError("bad batch")
    assert f"continues run killed at step {count}" in capsys.readouterr().err
    with lockstep.init(resume="auto") as run:
        assert run.id != "killed"
    assert f"a new run begins: {path.absolute().parent} has no interrupted run" in capsys.readouterr().err


def test_a_forked_process_sends_nothing(server: FakeServer, capfd: pytest.CaptureFixture[str]) -> None:
    run = lockstep.init()
    run.log({"x": 1.0})
    # Simulates a fork while another thread is in a call.
    run._lock.acquire()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(Exception):
            lockstep.log({"x": 2.0})
            run.config["a"] = 1
            run.define_metric("x", summary="min")
            run.finish()
            session._end_with_program()
            os._exit(0)
        os._exit(1)
    run._lock.release()
    assert os.waitpid(child, 0)[1] == 0
    run.log({"x": 3.0})
    run.finish()
    assert server.points(run.id) == {"x": [(0, 1), (1, 3)]}
    assert (server.runs[run.id]["state"], server.runs[run.id]["config"]) == ("succeeded", {})
    assert "log does nothing in a forked process" in capfd.readouterr().err


def test_a_run_continues_in_another_folder(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    def save(content: bytes, modified_secs: float) -> None:
        Path("w.pt").write_bytes(content)
        os.utime("w.pt", (modified_secs, modified_secs))
        run.save("w.pt")

    with lockstep.init(id="moves", dir="a", project="my shoes", config={"lr": 0.1}) as run:
        run.log({"x": 0})
        run.log({"x": 1})
        save(b"newer", 2_000)
        save(b"older", 1_000)
        wait_until(lambda: server.runs["moves"].get("files", {}).get("w.pt", [None])[0] == b"older")
    assert capsys.readouterr().err.count("the project is 'my-shoes'") == 1
    with lockstep.init(id="moves", dir="b", project="my shoes", private=True, resume="must") as run:
        assert (run.step, run.resumed, run.config.lr) == (2, True, 0.1)
        run.log({"x": 2})
        save(b"newest", time.time() + 3_600)
    errors = capsys.readouterr().err
    assert "continues run moves at step 2" in errors and "the project is" not in errors
    assert "run moves is not private" in errors and "private" not in server.runs["moves"]
    # Continues in the first folder, which lacks the third record.
    with lockstep.init(id="moves", dir="a") as run:
        run.log({"x": 3})
    assert server.points("moves") == {"x": [(n, n) for n in range(4)]}
    assert lockstep.sync("a", "b/lockstep-runs") == {"moves": 4}
    assert server.points("moves") == {"x": [(n, n) for n in range(4)]}
    assert server.runs["moves"]["files"]["w.pt"][0] == b"newest"
    assert "the server has a newer file w.pt of run moves" in capsys.readouterr().err
    lockstep.init(id="hidden", private=True).finish()
    assert server.runs["hidden"]["private"] is True


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "on"}, "must be online, offline or disabled"),
        ({"resume": "sometimes"}, "must be allow, must, never, auto, True or False"),
        ({"config": "abc"}, "must be a mapping or a namespace of argparse, not a str"),
        ({"id": "a/b"}, "1 to 64 letters"),
        ({"resume": "must"}, "needs the id"),
        ({"id": "new", "resume": "must"}, "does not exist"),
        ({"id": "old", "resume": "never"}, "exists"),
        ({"id": "old", "resume": "never", "mode": "offline"}, "exists"),
    ],
)
def test_errors_of_init_name_their_cause(settings: dict[str, Any], words: str) -> None:
    lockstep.init(id="old").finish()
    with pytest.raises(lockstep.LockstepError, match=words):
        lockstep.init(**settings)
    assert lockstep.run is None and [path.name for path in Path("lockstep-runs").iterdir()] == ["old"]


def test_a_refused_run_leaves_no_folder(server: FakeServer) -> None:
    server.faults = [422]
    with pytest.raises(lockstep.Problem):
        lockstep.init()
    assert list(Path("lockstep-runs").iterdir()) == []


def test_a_run_continues_after_its_largest_step(server: FakeServer) -> None:
    with lockstep.init(id="r") as run:
        run.define_metric("val/*", step_metric="epoch")
        run.log({"train/loss": 1.0}, step=1000)
        run.log({"epoch": 3, "val/loss": 0.5})
    with lockstep.init(id="r") as run:
        assert run.step > 1000
        run.log({"train/loss": 0.9})
    steps = [record["step"] for record in server.runs["r"]["records"]]
    assert steps[-1] > 1000 and 3 in steps, steps


def test_a_metric_over_a_fractional_step_metric_keeps_every_point_in_order(server: FakeServer) -> None:
    for first in (0, 8):
        with lockstep.init(id="r") as run:
            run.define_metric("loss", step_metric="epoch")
            for n in range(first, first + 8):
                run.log({"epoch": n * 0.25, "loss": n})
                # A new definition does not return the metric to the epochs.
                run.define_metric("loss", step_metric="epoch", summary="min")
    assert server.points("r")["loss"] == [(n, n) for n in range(16)]


def test_sync_sends_all_runs_of_a_copied_folder_and_reports_damage(server: FakeServer, tmp_path: Path) -> None:
    runs = []
    for number in range(3):
        with lockstep.init(mode="offline", dir="cluster") as run:
            run.log({"x": number})
        runs.append(run)
    copy = tmp_path / "copied"
    Path("cluster").rename(copy)
    broken = copy / "lockstep-runs" / runs[0].id / spool.RECORDS
    whole = broken.read_bytes()
    broken.write_bytes(b"\0\0\n" + whole)
    result = run_sync(copy, tmp_path / "lockstep-runs")
    assert result.returncode == 1 and "line 1, is damaged" in result.stderr and "has no runs" in result.stderr
    assert len(result.stdout.splitlines()) == 2
    broken.write_bytes(whole)
    assert lockstep.sync(copy) == {run.id: 1 for run in runs}
    assert [server.points(run.id) for run in runs] == [{"x": [(0, n)]} for n in range(3)]


def test_a_disabled_run_stores_and_sends_nothing(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_MODE", "disabled")
    with lockstep.init(config={"a": 1}) as run:
        lockstep.log({"x": 1.0})
        assert run.config.a == 1 and run.summary.x == 1.0
    assert not Path("lockstep-runs").exists() and server.requests == []


def test_an_idle_run_sends_heartbeats(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "BEAT_SECS", 0.05)
    lockstep.init()
    wait_until(lambda: server.beats >= 2)


def test_a_full_disk_is_reported_and_records_are_written_later(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = lockstep.init()
    assert run._spool is not None
    append, tries = run._spool.append, []

    def fails_twice(lines: bytes) -> None:
        tries.append(len(lines))
        if len(tries) <= 2:
            raise OSError(28, "No space left on device")
        append(lines)

    monkeypatch.setattr(run._spool, "append", fails_twice)
    run.log({"x": 1.0})
    wait_until(lambda: len(tries) > 2)
    run.log({"x": 2.0})
    run.finish()
    assert server.points(run.id) == {"x": [(0, 1), (1, 2)]}
    assert "No space left" in capsys.readouterr().err


def test_values_that_a_full_disk_lacks_are_called_lost(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = lockstep.init()
    run.log({"x": 1.0})
    wait_until(lambda: server.points(run.id))

    def fails(lines: bytes) -> None:
        raise OSError(28, "No space left on device")

    assert run._spool is not None
    monkeypatch.setattr(run._spool, "append", fails)
    run.log({"x": 2.0})
    run.summary["best"] = 2
    run.finish()
    lost = f"has lost its last values and its end, because {run.dir} cannot be written: [Errno 28] No space left"
    assert lost in capsys.readouterr().err
    # The server does not show a run without its last values as succeeded.
    assert server.points(run.id) == {"x": [(0, 1)]}
    assert (server.runs[run.id]["state"], server.runs[run.id]["summary"]) == ("running", {})


def test_log_takes_less_than_20_microseconds() -> None:
    run = lockstep.init(mode="offline")
    values = {f"metric {n}": n / 7 for n in range(5)}
    run.log(values)
    best = math.inf
    for _ in range(50):
        began = time.perf_counter()
        for _ in range(200):
            run.log(values)
        best = min(best, (time.perf_counter() - began) / 200)
    assert best < 20e-6, best
