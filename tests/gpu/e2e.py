"""End-to-end scenarios, from submission to files, and recovery from killed ranks: a real server, agent and ranks on GPUs, or
on CPU cores (`--device cpu`) to test the script itself.

    python3 tests/gpu/e2e.py --program target/release/lockstep --dataset assets/fashion-mnist \\
        --device cuda --ranks 4 --out out [SCENARIO ...]

Every scenario starts its own server. The exit status is 0 if all scenarios pass. Appends a line per scenario to
`OUT/results.tsv`.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback

from gang import gang
from server_under_test import Failure, ServerUnderTest, expect, expect_last_steps_kept, expect_same_tensors, gpu_memory, wait

# The driver's own memory grows a little when a GPU is first used.
SLACK_MIB = 64
# Size in bytes up to which a checkpoint is copied to OUT.
MAX_COPY_BYTES = 15_000_000


class Stage:
    """The arguments, folder and notes of a scenario, and the servers and jobs that it starts."""

    def __init__(self, arguments, folder):
        self.program = str(pathlib.Path(arguments.program).resolve())
        self.dataset = str(pathlib.Path(arguments.dataset).resolve())
        self.device, self.ranks = arguments.device, arguments.ranks
        self.out, self.folder = pathlib.Path(arguments.out).resolve(), folder
        self.notes = []

    def note(self, text):
        self.notes.append(text)
        print(f"    {text}", flush=True)

    def server(self, warm="off"):
        server = ServerUnderTest(self.program, self.folder, self.device, self.ranks, warm=warm)
        server.cli("dataset", "add", "pictures", self.dataset)
        return server

    def spec(self, name, **changes):
        spec = {
            "name": name,
            "model": {"arch": "resnet20"},
            "data": {"dataset": "pictures", "crop_padding": 2},
            "train": {"steps": 60, "batch_size": 32, "lr": 0.05, "precision": "auto"},
            "parallel": {"ranks": self.ranks, "device": self.device},
            "checkpoint": {"every_epochs": None, "every_steps": 20},
            "recovery": {"max_restarts": 3},
        }
        for key, value in changes.items():
            spec[key] = {**spec.get(key, {}), **value} if isinstance(value, dict) else value
        return spec

    def long_job(self, name, **changes):
        """Returns the specification of a longer job, its steps, and the steps between checkpoints."""
        if self.device == "cuda":
            arch, side, steps, every = "resnet50", 64, 4000, 500
        else:
            arch, side, steps, every = "resnet20", 28, 240, 50
        spec = self.spec(name, model={"arch": arch}, data={"image_size": side}, train={"steps": steps})
        spec["checkpoint"] = {"every_epochs": None, "every_steps": every, "keep": 2}
        spec["evaluate"] = {"every_epochs": 0}
        for key, value in changes.items():
            spec[key] = {**spec.get(key, {}), **value}
        return spec, spec["train"]["steps"], every

    def reproducible_job(self, steps, ranks):
        """Returns the specification of a job that writes no checkpoint before its end, and the number of its steps. `steps`: on GPUs."""
        arch, side, steps = ("resnet50", 64, steps) if self.device == "cuda" else ("resnet20", 28, 90)
        spec = self.spec("undisturbed", model={"arch": arch}, data={"image_size": side}, parallel={"ranks": ranks})
        spec["train"].update(steps=steps, deterministic=True)
        spec["checkpoint"].update(every_steps=100 * steps)
        return spec | {"evaluate": {"every_epochs": 0}}, steps

    def check_memory(self, baseline, seconds=15):
        """Waits until the GPUs' memory in use is back at the baseline."""
        if not baseline:
            return
        def check():
            # `wait` returns the first result that is true: a list with the memory.
            now = gpu_memory()
            return all(used <= before + SLACK_MIB for used, before in zip(now, baseline)) and [now]

        try:
            (now,) = wait(seconds, "GPU memory is free again", check, every=0.5)
        except Failure:
            raise Failure(f"GPU memory was {baseline} MiB and is {gpu_memory()}") from None
        self.note(f"GPU memory: {baseline} MiB before, {now} after")


def check_steps(job, ranks, steps, killed=None):
    """Checks that every rank has reported every step, and none twice in an attempt. The last steps of a rank that was killed in attempt 1 may
    be missing."""
    reported = job.loss_steps()
    for (rank, attempt), listed in reported.items():
        expect(listed == sorted(set(listed)), f"rank {rank} reported a step twice in attempt {attempt}")
    for rank in range(ranks):
        seen = set().union(*(set(s) for (r, _), s in reported.items() if r == rank))
        missing = set(range(1, steps + 1)) - seen
        if rank == killed:
            missing -= set(range(max(reported[rank, 1]), job.first_step(2)))
        missing = sorted(missing)
        expect(not missing, f"rank {rank} never reported steps {missing[:10]} of {steps}")


def stream(stage):
    """A job is submitted over REST and followed by a websocket: it has every event once and in order, and its checkpoint."""
    server = stage.server()
    job = server.submit(stage.spec("stream", train={"steps": 120}, checkpoint={"every_steps": 60}))
    folder = job.final_checkpoint(120)
    check_steps(job, stage.ranks, 120)
    last = [e for e in job.events if e["type"] == "metrics" and e["name"] == "loss"][-1]["values"][-1]
    stage.note(f"{job.events[-1]['seq']} events, loss {last:.4f} at the end")
    expect(last < 2.0, f"the job learns nothing: loss {last}")
    if stage.device == "cuda":
        for name in ("gpu_utilization", "gpu_memory_bytes"):
            is_reported = any(e["type"] == "metrics" and e["name"] == name for e in job.events)
            stage.note(f"{name} {'reported' if is_reported else 'NOT reported (shorter than a second?)'}")
    devices = {e["device"] for e in job.events if e["type"] == "rank"}
    stage.note(f"ranks on {', '.join(sorted(devices))}")
    checkpoints = server.get(f"/jobs/{job.id}/checkpoints")["checkpoints"]
    expect(any(c["step"] == 120 for c in checkpoints), f"no checkpoint of step 120: {checkpoints}")
    size = sum(f.stat().st_size for f in folder.iterdir())
    if size <= MAX_COPY_BYTES:
        # Copies the files into one folder, as OUT may not have deeper folders.
        into = stage.out / f"checkpoint-{stage.device}"
        shutil.copytree(folder, into, dirs_exist_ok=True)
        stage.note(f"checkpoint of {size} bytes in {into.name}")
    server.stop()


def twenty(stage):
    """Twenty successive jobs leave no processes and no GPU memory in use."""
    server = stage.server()
    server.submit(stage.spec("first", train={"steps": 5})).expect_success()
    # The baseline is measured after one job, as the driver's memory grows at first use, and when all ranks have ended.
    time.sleep(1)
    baseline, began = gpu_memory(), time.monotonic()
    for number in range(20):
        job = server.submit(stage.spec(f"job {number + 1} of 20", train={"steps": 10}))
        job.expect_success()
        wait(10, "the job's ranks are gone", lambda: not job.ranks(1))
    stage.note(f"{(time.monotonic() - began) / 20:.1f} s per job of 10 steps")
    stage.check_memory(baseline)
    server.stop()


def kill(stage):
    """After kill -9 of one rank, the others end within 5 s, and the job continues from its newest checkpoint or a later step."""
    server, baseline = stage.server(), gpu_memory()
    spec, steps, every = stage.long_job("kill")
    job = server.submit(spec)
    job.until_checkpoint(every)
    ranks = job.ranks(1)
    expect(len(ranks) == stage.ranks, f"{stage.ranks} ranks, but these processes: {ranks}")
    victim = max(ranks)
    os.kill(ranks[victim], signal.SIGKILL)
    killed = time.monotonic()
    wait(5, "the other ranks are gone", lambda: not job.ranks(1), every=0.01)
    stage.note(f"the other ranks ended {time.monotonic() - killed:.1f} s after rank {victim} was killed")
    job.until_attempt(2)
    stage.note(f"attempt 2 ran {time.monotonic() - killed:.1f} s after the kill")
    reasons = [e["reason"] for e in job.events if e["type"] == "state" and e.get("reason")]
    expect(any(f"rank {victim} was killed by signal 9" in r for r in reasons), f"no reason names rank {victim}: {reasons}")
    job.expect_success()
    check_steps(job, stage.ranks, steps, victim)
    first = job.first_step(2)
    stage.note(f"attempt 2 began with step {first}")
    expect(first > every, f"attempt 2 began with step {first}, not after a checkpoint")
    stage.check_memory(baseline)
    server.stop()


def lost(stage):
    """After kill -9 of a rank far from a checkpoint, another rank has kept the last step, and the final weights are those of an undisturbed job."""
    # On CPU cores, ranks with shared memory do not keep the last step.
    os.environ["LOCKSTEP_SHARED_MEMORY"] = "0"
    server = stage.server()
    del os.environ["LOCKSTEP_SHARED_MEMORY"]
    spec, steps = stage.reproducible_job(900, stage.ranks)
    undisturbed = server.submit(spec).final_checkpoint(steps)
    job = server.submit({**spec, "name": "lost"})
    # Kills the last rank, then rank 0, which writes checkpoints.
    kills = ((1, stage.ranks - 1), (2, 0))
    for attempt, victim in kills:
        job.until_step(steps * attempt // 3, attempt)
        os.kill(job.ranks(attempt)[victim], signal.SIGKILL)
        killed = time.monotonic()
        job.until_attempt(attempt + 1)
        stage.note(f"attempt {attempt + 1} ran {time.monotonic() - killed:.1f} s after rank {victim} was killed")
    count = expect_same_tensors(job.final_checkpoint(steps), undisturbed)
    expect_last_steps_kept(stage, job, kills)
    stage.note(f"{count} tensors of step {steps} are those of the undisturbed job")
    server.stop()


def modes(stage):
    """After kill -9 of a rank under every parallel plan, the final weights are bit for bit those of an undisturbed job."""
    server, ranks = stage.server(), stage.ranks
    plans = {
        "data": {},
        "ZeRO-1": {"optimizer_sharding": True},
        "model": {"mode": "hybrid", "model": ranks},
        "height": {"mode": "hybrid", "height": ranks},
        "pipeline": {"mode": "hybrid", "pipeline": ranks},
    }
    steps, every = (1500, 500) if stage.device == "cuda" else (60, 20)
    for name, parallel in plans.items():
        spec = stage.spec(name, model={"arch": "resnet18"}, data={"image_size": 64}, parallel=parallel)
        spec["train"] = {"steps": steps, "batch_size": 8, "accumulate": 4, "lr": 0.05, "precision": "auto", "deterministic": True}
        spec["checkpoint"] = {"every_epochs": None, "every_steps": every, "sharded": name != "data"}
        spec["evaluate"] = {"every_epochs": 0}
        undisturbed = server.submit(spec).final_checkpoint(steps)
        job = server.submit({**spec, "name": f"{name}, killed"})
        job.until_checkpoint(every)
        victim, process = max(job.ranks(1).items())
        os.kill(process, signal.SIGKILL)
        count = expect_same_tensors(job.final_checkpoint(steps), undisturbed)
        expect(job.first_step(2) > every, f"{name}: attempt 2 began with step {job.first_step(2)}")
        stage.note(f"{name}: {count} tensors are those of the undisturbed job after rank {victim} was killed")
    server.stop()


def give_up(stage):
    """Without restarts, the job fails with a reason and leaves no processes and no GPU memory in use."""
    server, baseline = stage.server(), gpu_memory()
    spec, _, _ = stage.long_job("give up", train={"steps": 100000}, recovery={"max_restarts": 0})
    job = server.submit(spec)
    job.until_step(20)
    os.kill(job.ranks(1)[0], signal.SIGKILL)
    expect(job.end() == "failed", f"the job is {job.state}")
    expect("rank 0 was killed by signal 9" in job.reason, job.reason)
    wait(5, "all ranks are gone", lambda: not job.ranks(1))
    stage.note(job.reason)
    stage.check_memory(baseline)
    server.stop()


def cancel(stage):
    """A cancelled job frees its GPUs."""
    server, baseline = stage.server(), gpu_memory()
    spec, _, _ = stage.long_job("cancel", train={"steps": 100000})
    job = server.submit(spec)
    job.until_step(20)
    requested = time.monotonic()
    server.request("POST", f"/jobs/{job.id}/cancel")
    expect(job.end() == "cancelled", f"the job is {job.state}: {job.reason}")
    wait(5, "all ranks are gone", lambda: not job.ranks(1))
    stage.note(f"gone {time.monotonic() - requested:.1f} s after the request")
    stage.check_memory(baseline)
    server.stop()


def starts(stage):
    """Measures the seconds from submission to the first step and to the end of ten steps, and from the kill of a rank to the next step, without
    and with spare processes."""
    for warm in ("off", "on"):
        server = stage.server(warm)
        # The first job fills the cache of kernels and plans.
        server.submit(stage.spec("first", train={"steps": 10})).expect_success()
        first_steps, ends, recoveries = [], [], []
        for number in range(5):
            # A spare process opens its GPU in this time.
            time.sleep(4)
            began = time.monotonic()
            job = server.submit(stage.spec(f"start {number}", train={"steps": 10}))
            job.until_step(1)
            first_steps.append(time.monotonic() - began)
            job.expect_success()
            ends.append(time.monotonic() - began)
        for number in range(3):
            spec, _, every = stage.long_job(f"kill {number}", train={"steps": 100000})
            job = server.submit(spec)
            job.until_checkpoint(every)
            # The next spare process starts after 5 s, and opens its GPU.
            time.sleep(9)
            [file] = server.data.rglob(f"{job.id}/attempts/*/rank.0.pid")
            os.kill(json.loads(file.read_text())["pid"], signal.SIGKILL)
            killed = time.monotonic()
            job.until_step(every + 1, attempt=2)
            recoveries.append(time.monotonic() - killed)
            server.request("POST", f"/jobs/{job.id}/cancel")
            job.end()
        for label, values in (("first step", first_steps), ("ten steps", ends), ("next step after a kill", recoveries)):
            stage.note(f"--warm {warm}: {label} " + ", ".join(f"{value:.2f}" for value in sorted(values)) + " s")
        server.stop()
        shutil.rmtree(stage.folder)


def suspend(stage):
    """After SIGSTOP of one rank, the attempt ends at the stall time-out with a reason that names the rank, and a new attempt starts."""
    server, baseline = stage.server(), gpu_memory()
    stall = 10
    spec, _, every = stage.long_job("suspend", recovery={"stall_timeout_secs": stall})
    job = server.submit(spec)
    job.until_checkpoint(every)
    ranks = job.ranks(1)
    victim = max(ranks)
    os.kill(ranks[victim], signal.SIGSTOP)
    stopped = time.monotonic()
    wait(stall + 10, "the ranks are gone", lambda: not job.ranks(1))
    stage.note(f"attempt 1 ended {time.monotonic() - stopped:.1f} s after SIGSTOP (stall time-out {stall} s)")
    job.until_attempt(2)
    reasons = [e["reason"] for e in job.events if e["type"] == "state" and e.get("reason")]
    expect(any(f"rank {victim}" in r for r in reasons), f"rank {victim} is not named: {reasons}")
    stage.note(next(r for r in reasons if f"rank {victim}" in r))
    if stage.device == "cuda" and stage.ranks > 1:
        lines = [line for line in job.log().splitlines() if "no step for" in line]
        stage.note(f"the watchdog logged: {lines[0] if lines else 'NOTHING'}")
        expect(lines, "no rank's watchdog has logged the stall")
    job.expect_success()
    stage.check_memory(baseline)
    server.stop()


def across(stage):
    """Training continues from a checkpoint of one device on the other device, and back.

    The training loss shows whether the job learns: after the first epoch it is 1.15 to 1.19 on every device and in every format. The
    validation accuracy of so early an epoch varies from 20 to 56 % for the same job, so it must only be better than chance, which is 10 %
    with a standard deviation of 1 % for the 1,000 bundled pictures. worker/engine/src/cuda/tests/trajectories.rs compares the distribution."""
    text = "\n".join(
        [
            'name = "across"',
            '[model]\narch = "resnet20"',
            f'[data]\ndataset = "{stage.dataset}"',
            "[train]\nepochs = 1\nglobal_batch_size = 128\nlr = 0.01",
            "[parallel]\nranks = 1",
        ]
    )
    stage.folder.mkdir(parents=True, exist_ok=True)
    (stage.folder / "across.toml").write_text(text)

    def train(device, epochs, resume=None):
        """Trains up to an epoch, or only evaluates a checkpoint of this epoch. Returns (newest checkpoint, accuracy, last training loss)."""
        out = stage.folder / f"across-{epochs}-{device}"
        command = [stage.program, "train", str(stage.folder / "across.toml"), "--out", str(out)]
        command += ["--set", f"parallel.device={device}", "--set", f"train.epochs={epochs}"]
        command += ["--resume", str(resume)] if resume else []
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        expect(result.returncode == 0, f"{' '.join(command)}: {result.stderr[-2000:]}")
        accuracies = re.findall(r"validation accuracy is ([0-9.]+) %", result.stdout + result.stderr)
        expect(accuracies, f"no accuracy was reported: {result.stdout[-2000:]}")
        losses = re.findall(rf"epoch: {epochs} step: \d+, loss is ([0-9.]+)", result.stdout + result.stderr)
        newest = max((out / "checkpoints").glob(f"{epochs}-*"), key=lambda f: f.stat().st_mtime, default=resume)
        return newest, float(accuracies[-1]), float(losses[-1]) if losses else None

    def expect_same(reported, checkpoint, epochs, device):
        _, again, _ = train(device, epochs, checkpoint)
        stage.note(f"epoch {epochs}: {reported} %, evaluated on {device}: {again} %")
        expect(abs(again - reported) <= 1, f"the accuracy of the same weights is {reported} %, and {again} % on {device}")

    other = "cpu"
    checkpoint_1, accuracy_1, loss_1 = train(stage.device, 1)
    stage.note(f"epoch 1: training loss {loss_1}")
    expect(loss_1 is not None and loss_1 < 1.3, f"the job learns nothing: a training loss of {loss_1} after the first epoch, 2.3 is chance")
    expect_same(accuracy_1, checkpoint_1, 1, other)
    checkpoint_2, accuracy_2, _ = train(other, 2, checkpoint_1)
    expect_same(accuracy_2, checkpoint_2, 2, stage.device)
    _, accuracy_3, loss_3 = train(stage.device, 3, checkpoint_2)
    stage.note(f"epoch 3 on {stage.device}: {accuracy_3} %, training loss {loss_3}")
    expect(loss_3 is not None and loss_3 < loss_1, f"the training loss was {loss_1} after epoch 1 and is {loss_3} after epoch 3")
    expect(min(accuracy_1, accuracy_2, accuracy_3) > 15, f"no better than chance: {accuracy_1}, {accuracy_2}, {accuracy_3} %")


def overflow(stage):
    """A job whose gradients overflow float16 continues in bfloat16, also after a crash. With precision = "fp16" the job fails with a reason."""
    server = stage.server()
    # Every float16 gradient overflows at this loss scale.
    spec, steps, every = stage.long_job("overflow", train={"loss_scale": 1e9})
    job = server.submit(spec)
    job.until_checkpoint(every)
    victim, process = max(job.ranks(1).items())
    os.kill(process, signal.SIGKILL)
    job.expect_success()
    check_steps(job, stage.ranks, steps, victim)
    lines = [line for line in job.log().splitlines() if "training continues in bfloat16" in line]
    devices = {e["device"] for e in job.events if e["type"] == "rank" and e["attempt"] == 2 and e["step"] > every}
    stage.note(f"logged: {lines}; attempt 2 on {devices}")
    if stage.device == "cuda":
        expect(len(lines) == 1 and "5 steps in a row" in lines[0], f"not logged once: {lines}")
        expect(devices and all(device.endswith("bf16") for device in devices), f"attempt 2 ran on {devices}")
        skipped = [e["values"][-1] for e in job.events if e["type"] == "metrics" and e["name"] == "skipped_steps"]
        # Up to two further steps have started when the fifth overflow is known.
        expect(5 <= max(skipped) <= 7, f"skipped steps reported: {skipped[:10]}")
        spec["train"]["precision"] = "fp16"
        job = server.submit(spec)
        expect(job.end() == "failed" and "float16 could not hold" in job.reason, f"{job.state}: {job.reason}")
        stage.note(job.reason)
    server.stop()


SCENARIOS = {scenario.__name__: scenario for scenario in (stream, twenty, overflow, kill, lost, modes, gang, give_up, cancel, suspend, starts, across)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", required=True)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", default="out")
    parser.add_argument("scenarios", nargs="*", help=f"default: all of {', '.join(SCENARIOS)}")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.scenarios if name not in SCENARIOS]
    if unknown:
        parser.error(f"no scenario is called {unknown[0]}; choose from {', '.join(SCENARIOS)}")
    out = pathlib.Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in arguments.scenarios or SCENARIOS:
        print(f"{name}: {SCENARIOS[name].__doc__}", flush=True)
        with tempfile.TemporaryDirectory(prefix="lockstep-e2e-") as folder:
            stage = Stage(arguments, pathlib.Path(folder) / "server")
            began, result = time.monotonic(), "pass"
            try:
                SCENARIOS[name](stage)
            except Exception as error:
                result = "FAIL"
                failed += 1
                stage.note(str(error) if isinstance(error, Failure) else traceback.format_exc())
                save_logs(stage, out, name)
            finally:
                kill_processes(folder)
            secs = time.monotonic() - began
        line = [f"{name} ({arguments.device} x {arguments.ranks})", result, f"{secs:.1f} s", "; ".join(stage.notes)]
        with open(out / "results.tsv", "a") as results:
            results.write("\t".join(part.replace("\t", " ").replace("\n", " | ") for part in line) + "\n")
        print(f"  {result} in {secs:.1f} s", flush=True)
    sys.exit(1 if failed else 0)


def save_logs(stage, out, name):
    """Saves the ends of the logs of the server and the ranks of a failed scenario."""
    texts = []
    files = [*stage.folder.rglob("*.log"), *stage.folder.rglob("*.stderr")]
    for file in sorted(files, key=lambda file: file.stat().st_mtime)[-40:]:
        texts.append(f"==== {file.relative_to(stage.folder)}\n{file.read_text(errors='replace')[-8000:]}")
    (out / f"e2e-{name}.txt").write_text("\n".join(texts))


def kill_processes(folder):
    """Kills the remaining processes of a scenario: all whose command line contains its folder."""
    for entry in pathlib.Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                if folder.encode() in (entry / "cmdline").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            pass


if __name__ == "__main__":
    main()
