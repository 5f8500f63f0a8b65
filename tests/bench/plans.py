"""Compares the plan of `parallel.mode = "auto"` with plans written by hand, and predicted with measured step times.

    cargo build --release
    python3 tests/bench/plans.py target/release/lockstep [--device cpu|cuda] [--ranks 2,4] [--cases TEXT] [--predict 8,64,1024] [--json FILE]

A case is a network, the side of its pictures, pictures per step, micro-batches, a number of classes, and a number of ranks. For each case,
`lockstep plan` chooses a plan, and predicts the time of this plan and of the plans below. `lockstep bench` measures all of them in turns; the
median counts:

    data       data parallel
    head       the last layer split over its classes, one copy of the network
    pairs      the same, with a copy of the network for every two ranks (from 4 ranks on)
    channels   the blocks of the last stage split by out and in, and the last layer by out (CPU ranks)
    rows       pictures split by rows (on GPUs from 512 pixels on)
    stages     pipeline stages (with several micro-batches)

All plans of a case have the same pictures per step. Ranks are at most the cores or GPUs of this machine. Needs only Python. The exit status is
1 if auto is more than 5 % slower than the best plan of a case, or if a predicted time differs from the measured time by more than 10 % (data
parallel) or 15 % (all others). `--predict` only prints the plans that auto chooses for other numbers of ranks, with this machine's figures.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

MAX_SLOWER, MAX_ERROR = 0.05, {"data": 0.10, "others": 0.15}

# Each case: (network, side, pictures per rank and step, micro-batches) and the number of classes.
CPU = [
    (shape, classes)
    for shape in [("resnet20", 32, 32, 1), ("resnet18", 64, 8, 1), ("resnet18", 224, 2, 1), ("resnet50", 64, 8, 4)]
    for classes in [10, 10_000, 100_000]
]
CUDA = [
    (shape, classes)
    for shape in [("resnet50", 224, 256, 1), ("resnet50", 224, 64, 1), ("resnet18", 64, 256, 1), ("resnet50", 224, 128, 4)]
    for classes in [1_000, 200_000, 1_000_000]
] + [(("resnet50", 1024, 4, 1), 1_000), (("resnet18", 2048, 2, 1), 1_000)]

parser = argparse.ArgumentParser()
parser.add_argument("program", nargs="?", default="target/release/lockstep")
parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
parser.add_argument("--ranks", default="2", help="numbers of ranks, such as 2,4")
parser.add_argument("--cases", default="", help="only cases whose name has this text")
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--predict", default="", help="numbers of ranks, such as 8,64,1024")
parser.add_argument("--machine", help="with --predict: a file with the figures of another machine")
parser.add_argument("--json", help="a file for all figures, a line per case")
options = parser.parse_args()
on_gpus = options.device == "cuda"


def run(*arguments):
    """Returns (standard output, ""), or (None, reason) on failure."""
    done = subprocess.run([options.program, *map(str, arguments)], capture_output=True, text=True)
    return (done.stdout, "") if done.returncode == 0 else (None, (done.stderr.strip().splitlines() or ["no reason"])[-1])


def write_job(folder, shape, ranks):
    arch, side, pictures, accumulate = shape
    stem = "" if arch == "resnet20" else 'stem = "imagenet"\n'
    path = folder / "plan.toml"
    path.write_text(
        f'[model]\narch = "{arch}"\n{stem}[data]\ndataset = "none"\nimage_size = {side}\n'
        f'[train]\nbatch_size = {pictures // accumulate}\naccumulate = {accumulate}\noptimizer = "momentum"\nmomentum = 0.9\n'
        f'precision = "{"bf16" if on_gpus else "fp32"}"\n[parallel]\nranks = {ranks}\ndevice = "{options.device}"\n'
    )
    return path


def manual_plans(shape, ranks):
    """Returns the settings of each plan by its name."""
    arch, side, _, accumulate = shape
    plans = {"data": {}, "head": {"model": ranks}}
    if ranks >= 4:
        plans["pairs"] = {"model": 2}
    if not on_gpus:
        last = "layer3" if arch == "resnet20" else "layer4"
        shards = [(f"{last}.*.conv1", "out"), (f"{last}.*.conv2", "in"), ("fc", "out")]
        plans["channels"] = {"model": ranks, "shard": shards}
    if side >= 512 or not on_gpus:
        plans["rows"] = {"height": ranks}
    if accumulate > 1:
        plans["stages"] = {"pipeline": ranks}
    return plans


def settings(plan, shape, ranks):
    """Returns the settings of a job with this plan, with an unchanged number of pictures per step."""
    keys = [f"train.global_batch_size={shape[2] * ranks}", "train.batch_size="]
    if plan == "auto":
        return [*keys, "parallel.mode=auto"]
    if not plan:
        return keys
    for key, value in plan.items():
        if key == "shard":
            value = "[" + ", ".join(f'{{match="{match}", split="{split}"}}' for match, split in value) + "]"
        keys.append(f"parallel.{key}={value}")
    return [*keys, "parallel.mode=hybrid"]


def predict_plan(path, plan, shape, ranks, classes):
    sets = [part for key in settings(plan, shape, ranks) for part in ("--set", key)]
    text, why = run("plan", path, "--classes", classes, "--json", *sets)
    return (json.loads(text)["plans"][0]["plan"], "") if text else (None, why)


def measure(plan, shape, ranks, classes):
    """Measures the milliseconds of a step and the memory of a GPU in MB."""
    arch, side, pictures, accumulate = shape
    sharing = plan.get("height", 1) * plan.get("pipeline", 1)
    # On CPU ranks, the batch of `bench` is for all ranks; on GPUs, it is for each group of ranks that shares its pictures.
    batch = pictures // accumulate * (sharing if on_gpus else ranks)
    arguments = ["bench", "--json", "--device", options.device, "--ranks", ranks, "--case", f"{arch}:{side}:{batch}", "--classes", classes]
    for key in ["model", "height", "pipeline"]:
        arguments += [f"--parallel-{key}", plan.get(key, 1)]
    for match, split in plan.get("shard", []):
        arguments += ["--parallel-shard", f"{match}={split}"]
    arguments += ["--accumulate", accumulate, "--optimizer-sharding", str(plan.get("divided", False)).lower()]
    text, why = run(*arguments, *(["--precision", "bf16"] if on_gpus else []))
    if not text:
        return None, why
    row = json.loads(text.splitlines()[-1])
    return (row["step_ms"], row["gpu_memory_mb"]), ""


def as_manual_plan(plan):
    """Returns the chosen plan as settings, to find the same plan among those written by hand."""
    chosen = {key: plan.get(key, 1) for key in ["model", "height", "pipeline"] if plan.get(key, 1) > 1}
    shards = [(shard["match"], shard["split"]) for shard in plan["shard"]]
    if "model" in chosen and shards not in ([], [("fc", "out")]):
        chosen["shard"] = shards
    if "optimizer state divided" in plan["words"]:
        chosen["divided"] = True
    return chosen


def run_case(folder, shape, classes, ranks):
    path, name = write_job(folder, shape, ranks), "{}:{}:{}".format(*shape) + (f" / {shape[3]}" if shape[3] > 1 else "")
    row = {"case": name, "classes": classes, "ranks": ranks, "plans": {}, "left_out": {}}
    chosen, why = predict_plan(path, "auto", shape, ranks, classes)
    if not chosen:
        sys.exit(f"{name}, {classes} classes, {ranks} ranks: {why}")
    plans = manual_plans(shape, ranks)
    auto = next((label for label, plan in plans.items() if plan == as_manual_plan(chosen)), "auto")
    plans.setdefault(auto, as_manual_plan(chosen))
    times, memory = {label: [] for label in plans}, {}
    for _ in range(options.rounds):
        for label, plan in plans.items():
            if label in row["left_out"]:
                continue
            figures, why = measure(plan, shape, ranks, classes)
            if figures:
                times[label].append(figures[0])
                memory[label] = figures[1]
            else:
                row["left_out"][label] = why
    for label, plan in plans.items():
        if label in row["left_out"]:
            continue
        predicted, why = (chosen, "") if label == auto else predict_plan(path, plan, shape, ranks, classes)
        if not predicted:
            row["left_out"][label] = why
            continue
        ms = statistics.median(times[label])
        row["plans"][label] = {
            "words": predicted["words"],
            "predicted_ms": predicted["predicted"]["step_ms"],
            "ms": ms,
            "times": times[label],
            "error": predicted["predicted"]["step_ms"] / ms - 1,
            "predicted_mb": predicted["predicted"]["memory_bytes"] / 1e6,
            "mb": memory[label] or None,
        }
    if auto not in row["plans"]:
        sys.exit(f"{name}, {classes} classes, {ranks} ranks: auto chose {chosen['words']}: {row['left_out'][auto]}")
    best = min(row["plans"], key=lambda label: row["plans"][label]["ms"])
    row |= {"auto": auto, "best": best, "slower": row["plans"][auto]["ms"] / row["plans"][best]["ms"] - 1}
    return row


def predict(folder, cases):
    """Prints a table of the plans for other numbers of ranks."""
    rows = []
    print(f"{'case':<20}{'classes':>10}{'ranks':>7}{'step ms':>10}{'images/s':>11}{'GB a rank':>11}  limited by     plan")
    for shape, classes in cases:
        path = write_job(folder, shape, 2)
        machine = ["--machine", options.machine] if options.machine else []
        arguments = ["plan", path, "--classes", classes, "--ranks", options.predict, "--set", "parallel.mode=auto", "--json", *machine]
        text, why = run(*arguments)
        if not text:
            sys.exit(f"{shape}, {classes} classes: {why}")
        for entry in json.loads(text)["plans"]:
            plan = entry["plan"] | entry["plan"]["predicted"]
            rows.append({"case": "{}:{}:{}".format(*shape), "classes": classes, "ranks": entry["ranks"]} | plan)
            print(
                f"{rows[-1]['case']:<20}{classes:>10}{entry['ranks']:>7}{plan['step_ms']:>10.1f}{plan['images_per_second']:>11.0f}"
                f"{plan['memory_bytes'] / 1e9:>11.2f}  {plan['limited_by']:<14} {plan['words']}",
                flush=True,
            )
    return rows


def compare(folder, cases):
    rows, worst = [], {"data": 0.0, "others": 0.0, "slower": 0.0}
    print(f"{'case':<22}{'classes':>8}{'ranks':>6}  {'plan':<9}{'predicted':>10}{'measured':>10}{'error':>8}{'to best':>9}")
    for ranks in map(int, options.ranks.split(",")):
        for shape, classes in cases:
            row = run_case(folder, shape, classes, ranks)
            rows.append(row)
            best = row["plans"][row["best"]]["ms"]
            for label, plan in sorted(row["plans"].items(), key=lambda item: item[1]["ms"]):
                kind = "data" if label == "data" else "others"
                worst[kind] = max(worst[kind], abs(plan["error"]))
                mark = "  auto" if label == row["auto"] else ""
                print(
                    f"{row['case']:<22}{classes:>8}{ranks:>6}  {label:<9}{plan['predicted_ms']:>10.2f}{plan['ms']:>10.2f}"
                    f"{plan['error']:>+8.1%}{plan['ms'] / best:>9.3f}{mark}",
                    flush=True,
                )
            for label, why in row["left_out"].items():
                print(f"{'':<36}  {label:<9} left out: {why}", flush=True)
            worst["slower"] = max(worst["slower"], row["slower"])
    print(
        f"\n{len(rows)} cases: auto is at most {worst['slower']:.1%} slower than the best plan; predictions are at most "
        f"{worst['data']:.1%} (data parallel) and {worst['others']:.1%} (others) off the measured times"
    )
    return rows, worst


def main():
    cases = [case for case in (CUDA if on_gpus else CPU) if options.cases in "{}:{}:{}".format(*case[0])]
    if not cases:
        sys.exit(f"no case has {options.cases} in its name")
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        if options.predict:
            rows, worst = predict(folder, cases), {}
        else:
            rows, worst = compare(folder, cases)
    if options.json:
        lines = [*rows, {"device": options.device, "worst": worst}]
        pathlib.Path(options.json).write_text("".join(json.dumps(line) + "\n" for line in lines))
    if worst:
        sys.exit(worst["slower"] > MAX_SLOWER or worst["data"] > MAX_ERROR["data"] or worst["others"] > MAX_ERROR["others"])


main()
