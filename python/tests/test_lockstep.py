"""Tests the package with a real server: the program LOCKSTEP_BIN, or this tree's debug build."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import subprocess
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from test_examples import ROOT, blocks, example

import lockstep
from lockstep import access

PROGRAM = Path(os.environ.get("LOCKSTEP_BIN", ROOT / "target/debug/lockstep")).absolute()
SPEC: dict[str, Any] = {
    "model": {"arch": "resnet20"},
    "data": {"dataset": "fashion-mnist", "image_size": 16, "validation": 0.01},
    "train": {"steps": 4, "batch_size": 8},
    "parallel": {"ranks": 2, "device": "cpu"},
}


def start_server(folder: Path, *options: str, listen: str = "127.0.0.1:0") -> tuple[subprocess.Popen[str], str]:
    """Starts a server with its data in `lockstep-data` of a folder. Returns its process and its URL."""
    command = [str(PROGRAM), "serve", "--listen", listen, "--no-open", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
    with open(folder / "server.log", "a") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().split()[-1]


@contextlib.contextmanager
def serve(folder: Path, *options: str) -> Iterator[str]:
    process, url = start_server(folder, *options)
    with process:
        try:
            yield url
        finally:
            process.terminate()


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Starts a server in the working folder, where clients find its token."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("LOCKSTEP_")]:
            patch.delenv(name)
        patch.chdir(tmp_path_factory.mktemp("server"))
        with serve(Path("."), "--cpu-slots", "2", "--webhooks-allow-private") as url:
            patch.setenv("LOCKSTEP_SERVER", url)
            with lockstep.Client() as client:
                client.register_bundled()
                page = client.request("GET", "/datasets/fashion-mnist/samples", split="test", limit=1)
            Path("shoe.png").write_bytes(base64.b64decode(page["samples"][0]["png"]))
            yield


@pytest.fixture(params=["sync", "async"])
def api(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A client, and `do`, which awaits or collects the result of a call."""
    loop = asyncio.new_event_loop()

    async def collect(value: Any) -> Any:
        return [item async for item in value] if hasattr(value, "__aiter__") else await value

    if request.param == "sync":
        with lockstep.Client() as client:
            done = lambda value: list(value) if isinstance(value, Iterator) else value  # noqa: E731
            yield SimpleNamespace(kind=request.param, client=client, do=done)
    else:
        a_client = lockstep.AsyncClient()
        yield SimpleNamespace(
            kind=request.param, client=a_client, do=lambda value: loop.run_until_complete(collect(value))
        )
        loop.run_until_complete(a_client.aclose())
    loop.close()


def store(w: Any, **values: Any) -> bool:
    """Stores values for later calls. Always true, so that it can be part of a check."""
    w.__dict__.update(values)
    return True


def reaches(w: Any, state: str) -> bool:
    """Waits until the fork has this state; false if it does not in time."""
    ends_at = time.monotonic() + 30
    while w.fork.state != state and time.monotonic() < ends_at:
        time.sleep(0.05)
        w.do(w.fork.refresh())
    return bool(w.fork.state == state)


def write_zip() -> str:
    with zipfile.ZipFile("shoes.zip", "w") as archive:
        for side in ("left", "right"):
            archive.write("shoe.png", f"shoes/{side}/1.png")
    return "shoes.zip"


# Calls in order: the name, the call, and a check of its result or of the error that it raises. `w`: the fixture `api`;
# `a`: the result; `e`: the error.
CALLS: list[tuple[str, Callable[[Any], Any], Callable[[Any, Any], Any]]] = [
    ("Client.register_bundled", lambda w: w.client.register_bundled(), lambda w, e: e.code == "name_taken"),
    ("Client.datasets", lambda w: w.client.datasets(), lambda w, a: store(w, path=a[0]["path"])),
    ("Client.register", lambda w: w.client.register(w.kind, w.path), lambda w, a: a["name"] == w.kind),
    (
        "Client.upload",
        lambda w: w.client.upload(f"zip-{w.kind}", write_zip()),
        lambda w, a: a["info"]["classes"] == ["left", "right"] and a["info"]["splits"][0]["samples"] == 2,
    ),
    ("Client.upload", lambda w: w.client.upload("no-zip", "shoe.png"), lambda w, e: "is not a zip file" in str(e)),
    ("Client.agents", lambda w: w.client.agents(), lambda w, a: a[0]["online"] and len(a[0]["slots"]) == 2),
    ("Client.queue", lambda w: w.client.queue(), lambda w, a: a == []),
    ("Client.request", lambda w: w.client.request("DELETE", f"/datasets/{w.kind}"), lambda w, a: a is None),
    (
        "Client.submit",
        lambda w: w.client.submit(SPEC, set={"train": {"seed": 7}}, name=w.kind, lr=0.05),
        lambda w, a: store(w, job=a) and (a.data["spec"]["train"]["lr"], a.data["spec"]["train"]["seed"]) == (0.05, 7),
    ),
    (
        "Client.request",
        lambda w: w.client.request("GET", "/jobs?limit=1&fields=id", name=w.kind),
        lambda w, a: a["jobs"] == [{"id": w.job.id}],
    ),
    (
        "Job.logs",
        lambda w: w.job.logs(rank=1, follow=True),
        lambda w, a: w.job.is_over and {x["rank"] for x in a} == {1},
    ),
    ("Job.wait", lambda w: w.job.wait(60), lambda w, a: w.job.state == "succeeded"),
    ("Job.refresh", lambda w: w.job.refresh(), lambda w, a: w.job.step == 4),
    ("Job.metrics", lambda w: w.job.metrics("loss"), lambda w, a: list(a) == [0, 1] and a[1].steps == [1, 2, 3, 4]),
    ("Job.checkpoints", lambda w: w.job.checkpoints(), lambda w, a: [c.step for c in a] == [4]),
    ("Job.checkpoint", lambda w: w.job.checkpoint(), lambda w, a: store(w, checkpoint=a) and a.step == 4),
    ("Job.checkpoint", lambda w: w.job.checkpoint(5), lambda w, e: "steps with a checkpoint: 4" in str(e)),
    ("Checkpoint.download", lambda w: w.checkpoint.download(w.kind), lambda w, a: a.stat().st_size > 1e6),
    # test_tracking_server tests these calls for a run, which has files.
    ("Job.files", lambda w: w.job.files(), lambda w, e: e.code == "wrong_state"),
    ("Job.download_file", lambda w: w.job.download_file("x"), lambda w, e: e.code == "wrong_state"),
    ("Job.predict", lambda w: w.job.predict("shoe.png"), lambda w, a: len(a) == 10 and 0.99 < sum(a.values()) < 1.01),
    ("Job.predict", lambda w: w.job.predict(["shoe.png"]), lambda w, e: "classifies one picture" in str(e)),
    (
        "Client.request",
        lambda w: w.client.request("GET", f"/jobs/{w.job.id}/metrics.csv"),
        lambda w, a: isinstance(a, bytes) and b"loss" in a,
    ),
    ("Job.predict", lambda w: w.job.predict(b"no"), lambda w, e: str(e).startswith("the picture ")),
    ("Job.evaluation", lambda w: w.job.evaluation(), lambda w, a: 0 < a["samples"] < 200),
    (
        "Job.events",
        lambda w: w.job.events("plan", "checkpoint"),
        lambda w, a: [e["type"] for e in a] == ["plan", "checkpoint"],
    ),
    ("Client.job", lambda w: w.client.job(w.kind), lambda w, a: a.id == w.job.id),
    ("Client.jobs", lambda w: w.client.jobs(1, state=["succeeded"], name=w.kind), lambda w, a: a[0].id == w.job.id),
    (
        "Job.fork",
        lambda w: w.job.fork(steps=10**6),
        lambda w, a: store(w, fork=a) and a.data["parent"]["job"] == w.job.id,
    ),
    ("Job.pause", lambda w: w.fork.pause(), lambda w, a: reaches(w, "paused")),
    ("Job.resume", lambda w: w.fork.resume(), lambda w, a: reaches(w, "running")),
    ("Job.wait", lambda w: w.fork.wait(0), lambda w, e: isinstance(e, TimeoutError)),
    ("Job.delete", lambda w: w.fork.delete(), lambda w, e: (e.code, e.state) == ("wrong_state", "running")),
    ("Job.cancel", lambda w: w.fork.cancel(), lambda w, a: reaches(w, "cancelled")),
    ("Job.wait", lambda w: w.fork.wait(), lambda w, e: isinstance(e, lockstep.JobFailed) and e.state == "cancelled"),
    ("Job.retry", lambda w: w.fork.retry(), lambda w, a: not w.fork.is_over),
    ("Job.cancel", lambda w: w.fork.cancel(), lambda w, a: reaches(w, "cancelled")),
    ("Job.delete", lambda w: w.fork.delete(), lambda w, a: a is None),
    ("Job.refresh", lambda w: w.fork.refresh(), lambda w, e: (e.status, e.code) == (404, "not_found")),
]


def test_every_call_returns_its_result_or_raises_its_error(api: Any) -> None:
    for name, call, is_right in CALLS:
        try:
            result = api.do(call(api))
        except (lockstep.LockstepError, TimeoutError) as error:
            result = error
        assert is_right(api, result), (name, result)


def test_every_public_call_is_tested_and_documented() -> None:
    kinds = (lockstep.Client, lockstep.Job, lockstep.Checkpoint)
    public = {f"{k.__name__}.{n}": getattr(k, n) for k in kinds for n in dir(k) if not n.startswith("_")}
    calls = {name: call for name, call in public.items() if callable(call) and name != "Client.close"}
    assert calls.keys() == {name for name, _, _ in CALLS}
    assert [name for name, call in calls.items() if not call.__doc__] == []


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda c: c.submit(SPEC, lrr=1), lockstep.Problem, "lrr: "),
        (lambda c: c.submit(SPEC, lr="high", arch="resnet19"), lockstep.Problem, "\ntrain.lr: "),
        (lambda c: c.submit(SPEC, set={"name": "x", "name.y": 1}), lockstep.LockstepError, "name is not a table"),
        (lambda c: c.submit(SPEC, set={"model": {"arch": {"x": 1}}}), lockstep.LockstepError, "arch is not a table"),
        (lambda c: c.submit(SPEC, every_epochs=1), lockstep.LockstepError, "checkpoint.every_epochs, evaluate.every"),
        (lambda c: c.submit("none.toml"), lockstep.LockstepError, "none.toml cannot be read as a job file: "),
        (lambda c: c.submit(SPEC, lr=1e4).wait(), lockstep.JobFailed, "failed: "),
        (lambda c: c.job("nobody"), lockstep.LockstepError, "no job is called nobody"),
        (lambda c: lockstep.Client("http://host:port"), lockstep.LockstepError, "'http://host:port': Invalid port"),
        (lambda c: lockstep.Client(token="x").agents(), lockstep.Problem, "in the argument `token` was refused"),
        (lambda c: lockstep.Client(data_dir="none").agents(), lockstep.Problem, "LOCKSTEP_TOKEN or, on the server's"),
        (
            lambda c: lockstep.Client("127.0.0.1:1").agents(),
            lockstep.Unreachable,
            "no server answers at http://127.0.0.1:1",
        ),
    ],
)
def test_errors_name_their_cause(call: Callable[[lockstep.Client], Any], kind: type[Exception], words: str) -> None:
    with lockstep.Client() as client, pytest.raises(kind, match=re.escape(words)):
        call(client)


class LosesResponses(httpx.HTTPTransport):
    """Responds 503 to the first submission of a job, and loses the response to the second."""

    submissions = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            LosesResponses.submissions += 1
            if self.submissions == 1:
                return httpx.Response(503, text="<html>a proxy</html>")
            if self.submissions == 2:
                super().handle_request(request).close()
                raise httpx.ReadError("the connection broke", request=request)
        return super().handle_request(request)


def test_a_submission_with_a_lost_response_creates_one_job() -> None:
    with lockstep.Client() as client:
        client.agents()
        client._io.http._transport = LosesResponses()
        job = client.submit(SPEC, name="once", set={"train.steps": 100_000})
        assert [other.id for other in client.jobs(name="once")] == [job.id]
        assert LosesResponses.submissions == 3
        job.cancel()


def test_warnings_and_notes_about_jobs_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile("sides.zip", "w") as archive:
        for number in range(16):
            for folder in ("train/left", "train/right", "val/left"):
                archive.write("shoe.png", f"{folder}/{number}.png")
    with lockstep.Client() as client:
        client.upload("sides", "sides.zip")
        changes = {"data.dataset": "sides", "data.validation": "val", "train.steps": 100_000}
        jobs = [client.submit(SPEC, name="sides", set=changes) for _ in range(2)]
        assert "lockstep: warning: dataset sides: " in capsys.readouterr().err
        assert client.job("sides").id == jobs[1].id
        assert f"2 jobs are called sides; the newest is taken: {jobs[1].id}" in capsys.readouterr().err
        for job in jobs:
            job.cancel()


def test_progress_is_printed_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    job = lockstep.submit(SPEC)
    job.wait(progress=True)
    lines = capsys.readouterr().err.split("\r")
    assert len(lines) > 2 and re.match(r"succeeded \[#{20}\] 4/4  loss \d\.\d{4}  \d+ images/s", lines[-1]), lines


def test_token_and_url_are_found_as_by_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    local, remote = os.environ["LOCKSTEP_SERVER"], "http://10.0.0.1:7070"
    (tmp_path / "token").write_text("own\n")

    def authorization(url: str, **environment: str) -> str | None:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            token: access.Token | None = access.httpx_arguments(url, None, tmp_path)["auth"]
            return token.header if token else None

    assert authorization(local) == authorization("localhost:1") == authorization("http://[::1]:1") == "Bearer own"
    assert authorization(remote) is None and authorization("http://127.0.0.1@example.com") is None
    assert authorization(remote, LOCKSTEP_TOKEN="theirs") == "Bearer theirs"
    assert authorization(local, LOCKSTEP_TOKEN="theirs", LOCKSTEP_TOKEN_FILE=str(tmp_path / "token")) == "Bearer own"
    with pytest.raises(lockstep.LockstepError, match="LOCKSTEP_CA_FILE is none"):
        authorization("https://10.0.0.1", LOCKSTEP_CA_FILE="none")
    # The recorded URL is used if it leads to this machine.
    with monkeypatch.context() as patch:
        patch.delenv("LOCKSTEP_SERVER")
        for recorded, found in (("http://127.0.0.1:4321", "http://127.0.0.1:4321"), (remote, access.DEFAULT_SERVER)):
            (tmp_path / "address").write_text(recorded)
            assert access.httpx_arguments(None, None, tmp_path)["base_url"] == f"{found}/api/v1"
            patch.setenv("LOCKSTEP_DATA_DIR", str(tmp_path))
            assert access.httpx_arguments(None, None, None)["base_url"] == f"{found}/api/v1"
    port = httpx.URL(local).port or 0
    assert access.listener_owners(access._loopback_addresses(httpx.URL(local)), port) == {os.getuid()}
    monkeypatch.setattr(access, "listener_owners", lambda addresses, port: {os.getuid() + 1})
    with pytest.raises(lockstep.LockstepError, match="has user id"):
        authorization(local)


def test_examples_of_the_documents_run_unchanged() -> None:
    [toml] = blocks("docs/python.md", "toml")
    small = re.sub(r"steps = \d+", "steps = 4", toml).replace("[data]", "[data]\nimage_size = 16\nvalidation = 0.01")
    for name in ("fashion.toml", "job.toml"):
        Path(name).write_text(small)
    names: dict[str, Any] = {"__name__": "__main__"}
    for text in (
        example("docs/python.md", "job.predict"),
        example("docs/python.md", "lockstep.Client()"),
        example("docs/python.md", "asyncio"),
        example("docs/getting-started.md", "lockstep.submit"),
    ):
        exec(compile(text, "an example", "exec"), names)
    assert Path("model.safetensors").stat().st_size > 1e6


def test_the_example_for_webhooks_verifies_messages_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[tuple[Any, bytes]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.headers, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Receiver) as receiver, lockstep.Client() as client:
        threading.Thread(target=receiver.handle_request, daemon=True).start()
        webhook = client.request("POST", "/webhooks", json={"url": f"http://127.0.0.1:{receiver.server_port}"})
        client.request("POST", f"/webhooks/{webhook['id']}/test")
        client.request("DELETE", f"/webhooks/{webhook['id']}")
    [(headers, body)] = received
    names: dict[str, Any] = {}
    exec(example("docs/webhooks.md", "is_genuine"), names)
    is_genuine, secret = names["is_genuine"], webhook["secret"]
    assert is_genuine(secret, headers, body)
    assert not is_genuine(secret, headers, body + b" ") and not is_genuine("whsec_AAAA", headers, body)
    later = time.time() + 301
    monkeypatch.setattr(time, "time", lambda: later)
    assert not is_genuine(secret, headers, body)
