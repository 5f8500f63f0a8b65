"""Tests runs that a program logs with a real server."""

from __future__ import annotations

import csv
import math
import struct
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from test_examples import example
from test_lockstep import server, start_server

import lockstep
from lockstep import tracking

# The fixture of test_lockstep starts a server for this module, too.
__all__ = ["server"]


@pytest.fixture(autouse=True)
def finish_run() -> Iterator[None]:
    yield
    lockstep.finish()


def job_of(run: lockstep.Run) -> lockstep.Job:
    [job] = [job for job in lockstep.Client().jobs(name=run.name) if job.name == run.name]
    return job


def to_single(value: float) -> float:
    """Rounds to single precision, in which the server stores values."""
    stored: float = struct.unpack("f", struct.pack("f", value))[0]
    return stored


def points(job: lockstep.Job, name: str) -> list[tuple[int, float]]:
    """Returns every stored point."""
    text = lockstep.Client()._send_once("GET", f"/jobs/{job.id}/metrics.csv", query={"name": name}).text
    return [(int(row["step"]), to_single(float(row["value"]))) for row in csv.DictReader(text.splitlines())]


def test_an_offline_run_that_is_sent_twice_has_each_of_100000_points_once() -> None:
    began = time.time()
    with lockstep.init(name="many", mode="offline", config={"lr": 0.1}, tags=["a"], group="g") as run:
        for step in range(50_000):
            run.log({"train/loss": 1 / (step + 1), "step_ms": step * 0.37})
        run.summary["best"] = 0.5
        Path("weights.safetensors").write_bytes(b"first")
        run.save("weights.safetensors")
        Path("weights.safetensors").write_bytes(b"second")
        run.save("weights.safetensors")
        Path("empty").touch()
        run.log_artifact("empty", name="more")
    ended = time.time()
    for _ in range(2):
        assert lockstep.sync("lockstep-runs") == {run.id: 50_000}
        job = job_of(run)
        assert (job.state, job.data["tags"], job.step) == ("succeeded", ["a", "g"], 49_999)
        # The run's own times, not those of the call of sync.
        times = [datetime.fromisoformat(job.data[key]).timestamp() for key in ("created_at", "finished_at")]
        assert began - 0.01 < times[0] < times[1] < ended + 0.01
        saved = {file["path"]: (file["size_bytes"], file["modified_ms"]) for file in job.files()}
        assert [(path, size) for path, (size, _) in saved.items()] == [("more/empty", 0), ("weights.safetensors", 6)]
        assert saved["weights.safetensors"][1] == Path("weights.safetensors").stat().st_mtime_ns // 1_000_000
        assert job.download_file("weights.safetensors", "copy").read_bytes() == b"second"
        assert job.download_file("more/empty").read_bytes() == b""
        with pytest.raises(lockstep.LockstepError, match="is a run from elsewhere and has no checkpoints"):
            job.checkpoint()
        assert job.data["external"]["config"] == {"lr": 0.1} and job.data["external"]["summary"] == {"best": 0.5}
        assert points(job, "train/loss") == [(step, to_single(1 / (step + 1))) for step in range(50_000)]
        assert points(job, "step_ms") == [(step, to_single(step * 0.37)) for step in range(50_000)]


def test_a_failed_run_continues_in_another_folder() -> None:
    run = lockstep.init(id="live", name="live", dir="a", config={"lr": 0.1})
    assert run.url is not None and run.url.endswith(f"/jobs/{job_of(run).id}")
    run.log({"loss": 1.0, "odd": math.nan})
    run.config.update({"lr": 0.2}, allow_val_change=True)
    with pytest.raises(ValueError), run:
        run.alert("diverged", "the loss is infinite")
        raise ValueError("bad batch")
    job = job_of(run)
    assert [event["type"] for event in job.events("alert", "state")][-2:] == ["alert", "state"]
    with pytest.raises(lockstep.LockstepError, match="no metric 'nope'; its metrics: loss, odd"):
        job.metrics("nope")
    assert (job.state, job.data["reason"]) == ("failed", "ValueError: bad batch")
    with lockstep.init(id="live", dir="b", resume="must") as again:
        assert job_of(again).state == "running"
        assert (again.name, again.step, again.config.lr) == ("live", 1, 0.2)
        again.log({"loss": 0.5})
    job = job_of(again)
    assert job.state == "succeeded" and points(job, "loss") == [(0, 1.0), (1, 0.5)]


def test_each_point_arrives_once_if_the_server_is_killed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracking, "SEND_SECS", 0.05)
    process, url = start_server(tmp_path, "--no-local-agent")
    try:
        monkeypatch.setenv("LOCKSTEP_SERVER", url)
        run = lockstep.init(name="survives")
        for step in range(15_000):
            run.log({"x": step})
            if step in (5_000, 10_000):
                ends_at = time.monotonic() + 20
                while job_of(run).step < step - 4_000:
                    assert time.monotonic() < ends_at
                process.kill()
                process.wait()
                process, _ = start_server(tmp_path, "--no-local-agent", listen=url.removeprefix("http://"))
        run.finish()
        job = job_of(run)
        assert job.state == "succeeded" and points(job, "x") == [(step, step) for step in range(15_000)]
    finally:
        process.kill()
        process.wait()


def test_package_and_server_have_the_same_limits() -> None:
    names = ["x" * 250, "Überlebensrate, %", "a/b.c"]
    with lockstep.init(name="limits") as run:
        run.log({name: 1.0 for name in names}, step=2**53 - 1)
        run.log({str(number): number for number in range(2000)}, step=0)
        run.log({"x" * 251: 1.0, "a\nb": 1.0}, step=0)
        run.log({"loss": 1.0}, step=-1)
        run.log({"loss": 1.0}, step=2**53)
        run.log({"loss": 1.0})
    job = job_of(run)
    assert job.state == "succeeded" and job.step == 2**53 - 1
    assert all(len(job.metrics(name)) == 1 for name in names)
    assert lockstep.sync("lockstep-runs")[run.id] == 2


def test_examples_of_the_tracking_page_run_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    for text in (example("docs/tracking.md", "first try"), example("docs/tracking.md", "notes.json")):
        exec(compile(text, "an example", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out.split()
    assert printed[0] == "succeeded" and printed[-2:] == ["notes.json", "copy.json"]
