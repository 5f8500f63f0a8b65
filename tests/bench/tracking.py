"""A training loop that is logged by Lockstep's Python package to a server on SQLite, and by MLflow's client to MLflow's own SQLite store.

    cargo build --release
    pip install httpx mlflow-skinny sqlalchemy alembic        # and torch; without it the loop is plain Python
    python3 tests/bench/tracking.py [--program target/release/lockstep] [--steps 2000] [--rounds 3]

Both are measured in turns. Each round is a new run in the same store, with four metrics per step. Points per second count the whole loop
with training, from its first step until every point is stored, which for Lockstep is the server's last response. The time of a call is
that of `log` or `log_metrics`. Afterwards, every point is read back and counted, which is not timed. Prints a table, and the entry for
tests/bench/results/tracking.json.
"""

import argparse
import json
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "python/src"))
# Telemetry would add threads to the measurement.
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

import mlflow  # noqa: E402

import lockstep  # noqa: E402

try:
    import torch
except ImportError:
    torch = None

NAMES = ("train/loss", "train/accuracy", "lr", "grad_norm")


def train_torch(steps):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        inputs = torch.randn(16, 32)
        labels = inputs[:, :4].argmax(1)
        outputs = model(inputs)
        loss = torch.nn.functional.cross_entropy(outputs, labels)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        accuracy = (outputs.argmax(1) == labels).float().mean()
        yield dict(zip(NAMES, (loss.item(), accuracy.item(), 0.1, norm.item())))


def train_plain(steps):
    chance, weights = random.Random(0), [0.0] * 32
    for _ in range(steps):
        inputs = [chance.gauss(0, 1) for _ in weights]
        error = sum(w * x for w, x in zip(weights, inputs)) - sum(inputs[:4])
        weights = [w - 0.01 * error * x for w, x in zip(weights, inputs)]
        norm = abs(error) * sum(x * x for x in inputs) ** 0.5
        yield dict(zip(NAMES, (error * error, float(abs(error) < 0.5), 0.01, norm)))


def time_loop(log, finish, steps):
    """Returns the seconds of the loop, and of each call."""
    calls = []
    began = time.perf_counter()
    for step, values in enumerate((train_torch if torch else train_plain)(steps)):
        before = time.perf_counter()
        log(values, step)
        calls.append(time.perf_counter() - before)
    finish()
    return time.perf_counter() - began, calls


def log_to_lockstep(steps):
    run = lockstep.init(project="bench", name="tracking")
    secs, calls = time_loop(run.log, run.finish, steps)
    [job] = [job for job in lockstep.Client().jobs(project="bench") if job.data["external"]["id"] == run.id]
    text = job._send_once("GET", f"/jobs/{job.id}/metrics.csv").text
    return secs, calls, len(text.splitlines()) - 1


def log_to_mlflow(steps):
    run = mlflow.start_run()
    secs, calls = time_loop(lambda values, step: mlflow.log_metrics(values, step=step), mlflow.end_run, steps)
    client = mlflow.MlflowClient()
    return secs, calls, sum(len(client.get_metric_history(run.info.run_id, name)) for name in NAMES)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="target/release/lockstep")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    program = pathlib.Path(options.program).resolve()
    for name in [name for name in os.environ if name.startswith(("LOCKSTEP_", "MLFLOW_TRACKING_"))]:
        del os.environ[name]
    loggers = {"Lockstep": (log_to_lockstep, []), "MLflow": (log_to_mlflow, [])}
    with tempfile.TemporaryDirectory(prefix="lockstep-tracking-") as folder:
        os.chdir(folder)
        command = [program, "serve", "--listen", "127.0.0.1:0", "--no-local-agent", "--no-open"]
        with open("server.log", "w") as log:
            server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            os.environ["LOCKSTEP_SERVER"] = server.stdout.readline().split()[-1]
            mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
            # Creates the tables, which takes seconds.
            mlflow.set_experiment("bench")
            for _ in range(options.rounds):
                for name, (measure, results) in loggers.items():
                    secs, calls, points = measure(options.steps)
                    if points != len(NAMES) * options.steps:
                        sys.exit(f"{name} stored {points} of {len(NAMES) * options.steps} points")
                    results.append((points / secs, calls))
        finally:
            server.terminate()
            server.wait()
    rows = []
    for name, (_, results) in loggers.items():
        calls = sorted(1e6 * secs for _, calls_of_round in results for secs in calls_of_round)
        rows.append({
            "logged by": name, "points a second": round(statistics.median(rate for rate, _ in results)),
            "all rounds": ", ".join(str(round(rate)) for rate, _ in results),
            "call, microseconds (median)": round(statistics.median(calls), 1), "call, microseconds (p99)": round(calls[len(calls) * 99 // 100], 1),
        })
    for row in rows:
        print("  ".join(f"{key}: {value}" for key, value in row.items()), file=sys.stderr)
    lockstep_row, mlflow_row = rows
    ratios = {
        "points a second, ours to MLflow's": round(lockstep_row["points a second"] / mlflow_row["points a second"], 1),
        "time of a call, MLflow's to ours": round(mlflow_row["call, microseconds (median)"] / lockstep_row["call, microseconds (median)"], 1),
    }
    print("  ".join(f"{key}: {value}" for key, value in ratios.items()), file=sys.stderr)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    loop = f"PyTorch {torch.__version__}" if torch else "plain Python"
    print(json.dumps([{
        "title": f"A training loop ({loop}, {options.steps} steps of {len(NAMES)} metrics) logged by our package and by MLflow {mlflow.__version__}, both to SQLite",
        "commit": commit, "hardware": f"{os.cpu_count()} cores, {platform.machine()}", "n": options.rounds,
        "command": "python3 tests/bench/tracking.py", "rows": [*rows, ratios],
    }], indent=2))


main()
