"""`parallel.mode = "auto"` beside plans that are written by hand, and predictions beside measured steps.

    cargo build --release
    python3 tests/bench/plans.py target/release/lockstep [--device cpu|cuda] [--ranks 2,4] [--cases TEXT] [--predict 8,64,1024] [--json FILE]

A case is a network, a side of pictures, pictures of a step, micro-batches, a number of classes, and a number of ranks. For each one
`lockstep plan` chooses a plan and predicts it and the plans below, and `lockstep bench` measures all of them, in turns; the median counts:

    data       data parallel
    head       the last layer split over its classes, one copy of the network
    pairs      the same, a copy for every two ranks (from 4 ranks on)
    channels   the blocks of the last stage split by out and in, and the last layer by out (CPU ranks)
    rows       rows of pictures (from 512 pixels on, and on CPU ranks always)
    stages     pipeline stages (with several micro-batches)

Pictures of a step are equal in all plans of a case. Ranks are at most the cores or GPUs of this machine. Needs Python alone. Ends with 1
if auto is more than 5 % slower than the best plan of a case, or a prediction is further from what was measured than 10 % (data
parallel) or 15 % (all others). `--predict` only prints the plans that auto chooses for other numbers of ranks, with this machine's figures.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

SLOWER, ERROR = 0.05, {"data": 0.10, "others": 0.15}

# Network, side, pictures of a rank in a step, micro-batches; and numbers of classes.
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
parser.add_argument("--machine", help="with --predict: the figures of another machine")
parser.add_argument("--json", help="a file for all figures, a line a case")
a = parser.parse_args()
on_gpus = a.device == "cuda"


def run(*arguments):
    """Standard output, or None and the reason."""
    done = subprocess.run([a.program, *map(str, arguments)], capture_output=True, text=True)
    return (done.stdout, "") if done.returncode == 0 else (None, (done.stderr.strip().splitlines() or ["no reason"])[-1])


def job(folder, shape, ranks):
    arch, side, pictures, accumulate = shape
    stem = "" if arch == "resnet20" else 'stem = "imagenet"\n'
    path = folder / "plan.toml"
    path.write_text(
        f'[model]\narch = "{arch}"\n{stem}[data]\ndataset = "none"\nimage_size = {side}\n'
        f'[train]\nbatch_size = {pictures // accumulate}\naccumulate = {accumulate}\noptimizer = "momentum"\nmomentum = 0.9\n'
        f'precision = "{"bf16" if on_gpus else "fp32"}"\n[parallel]\nranks = {ranks}\ndevice = "{a.device}"\n'
    )
    return path


def by_hand(shape, ranks):
    """Plans by name: the settings of each."""
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
    """Of a job. The pictures of a step stay."""
    found = [f"train.global_batch_size={shape[2] * ranks}", "train.batch_size="]
    if plan == "auto":
        return [*found, "parallel.mode=auto"]
    if not plan:
        return found
    for key, value in plan.items():
        if key == "shard":
            value = "[" + ", ".join(f'{{match="{match}", split="{split}"}}' for match, split in value) + "]"
        found.append(f"parallel.{key}={value}")
    return [*found, "parallel.mode=hybrid"]


def planned(path, plan, shape, ranks, classes):
    sets = [part for key in settings(plan, shape, ranks) for part in ("--set", key)]
    text, why = run("plan", path, "--classes", classes, "--json", *sets)
    return (json.loads(text)["plans"][0]["plan"], "") if text else (None, why)


def measured(plan, shape, ranks, classes):
    """Milliseconds of a step, and MB of a GPU."""
    arch, side, pictures, accumulate = shape
    sharing = plan.get("height", 1) * plan.get("pipeline", 1)
    # On CPU ranks the batch of a case is that of all ranks, on GPUs that of each rank with pictures of its own.
    batch = pictures // accumulate * (sharing if on_gpus else ranks)
    arguments = ["bench", "--json", "--device", a.device, "--ranks", ranks, "--case", f"{arch}:{side}:{batch}", "--classes", classes]
    for key in ["model", "height", "pipeline"]:
        arguments += [f"--parallel-{key}", plan.get(key, 1)]
    for match, split in plan.get("shard", []):
        arguments += ["--parallel-shard", f"{match}={split}"]
    arguments += ["--accumulate", accumulate, "--optimizer-sharding", str(plan.get("divided", False)).lower()]
    text, why = run(*arguments, *(["--precision", "bf16"] if on_gpus else []))
    if not text:
        return None, why
    found = json.loads(text.splitlines()[-1])
    return (found["step_ms"], found["gpu_memory_mb"]), ""


def of_words(plan):
    """What a plan that was chosen is called here, as settings."""
    found = {key: plan.get(key, 1) for key in ["model", "height", "pipeline"] if plan.get(key, 1) > 1}
    shards = [(of["match"], of["split"]) for of in plan["shard"]]
    if "model" in found and shards not in ([], [("fc", "out")]):
        found["shard"] = shards
    if "optimizer state divided" in plan["words"]:
        found["divided"] = True
    return found


def case(folder, shape, classes, ranks):
    path, name = job(folder, shape, ranks), "{}:{}:{}".format(*shape) + (f" / {shape[3]}" if shape[3] > 1 else "")
    row = {"case": name, "classes": classes, "ranks": ranks, "plans": {}, "left_out": {}}
    chosen, why = planned(path, "auto", shape, ranks, classes)
    if not chosen:
        sys.exit(f"{name}, {classes} classes, {ranks} ranks: {why}")
    plans = by_hand(shape, ranks)
    auto = next((of for of, plan in plans.items() if plan == of_words(chosen)), "auto")
    plans.setdefault(auto, of_words(chosen))
    times, memory = {of: [] for of in plans}, {}
    for _ in range(a.rounds):
        for of, plan in plans.items():
            if of in row["left_out"]:
                continue
            found, why = measured(plan, shape, ranks, classes)
            if found:
                times[of].append(found[0])
                memory[of] = found[1]
            else:
                row["left_out"][of] = why
    for of, plan in plans.items():
        if of in row["left_out"]:
            continue
        predicted, why = (chosen, "") if of == auto else planned(path, plan, shape, ranks, classes)
        if not predicted:
            row["left_out"][of] = why
            continue
        ms = statistics.median(times[of])
        row["plans"][of] = {
            "words": predicted["words"],
            "predicted_ms": predicted["step_ms"],
            "ms": ms,
            "times": times[of],
            "error": predicted["step_ms"] / ms - 1,
            "predicted_mb": predicted["memory_bytes"] / 1e6,
            "mb": memory[of] or None,
        }
    if auto not in row["plans"]:
        sys.exit(f"{name}, {classes} classes, {ranks} ranks: auto chose {chosen['words']}: {row['left_out'][auto]}")
    best = min(row["plans"], key=lambda of: row["plans"][of]["ms"])
    row |= {"auto": auto, "best": best, "slower": row["plans"][auto]["ms"] / row["plans"][best]["ms"] - 1}
    return row


def predict(folder, cases):
    """A table of the plans of other numbers of ranks."""
    rows = []
    print(f"{'case':<20}{'classes':>10}{'ranks':>7}{'step ms':>10}{'images/s':>11}{'GB a rank':>11}  limited by     plan")
    for shape, classes in cases:
        path = job(folder, shape, 2)
        machine = ["--machine", a.machine] if a.machine else []
        arguments = ["plan", path, "--classes", classes, "--ranks", a.predict, "--set", "parallel.mode=auto", "--json", *machine]
        text, why = run(*arguments)
        if not text:
            sys.exit(f"{shape}, {classes} classes: {why}")
        for found in json.loads(text)["plans"]:
            plan = found["plan"]
            rows.append({"case": "{}:{}:{}".format(*shape), "classes": classes, "ranks": found["ranks"]} | plan)
            print(
                f"{rows[-1]['case']:<20}{classes:>10}{found['ranks']:>7}{plan['step_ms']:>10.1f}{plan['images_per_second']:>11.0f}"
                f"{plan['memory_bytes'] / 1e9:>11.2f}  {plan['limited_by']:<14} {plan['words']}",
                flush=True,
            )
    return rows


def compare(folder, cases):
    rows, worst = [], {"data": 0.0, "others": 0.0, "slower": 0.0}
    print(f"{'case':<22}{'classes':>8}{'ranks':>6}  {'plan':<9}{'predicted':>10}{'measured':>10}{'error':>8}{'to best':>9}")
    for ranks in map(int, a.ranks.split(",")):
        for shape, classes in cases:
            row = case(folder, shape, classes, ranks)
            rows.append(row)
            best = row["plans"][row["best"]]["ms"]
            for of, plan in sorted(row["plans"].items(), key=lambda of: of[1]["ms"]):
                kind = "data" if of == "data" else "others"
                worst[kind] = max(worst[kind], abs(plan["error"]))
                mark = "  auto" if of == row["auto"] else ""
                print(
                    f"{row['case']:<22}{classes:>8}{ranks:>6}  {of:<9}{plan['predicted_ms']:>10.2f}{plan['ms']:>10.2f}"
                    f"{plan['error']:>+8.1%}{plan['ms'] / best:>9.3f}{mark}",
                    flush=True,
                )
            for of, why in row["left_out"].items():
                print(f"{'':<36}  {of:<9} left out: {why}", flush=True)
            worst["slower"] = max(worst["slower"], row["slower"])
    print(
        f"\n{len(rows)} cases: auto is at most {worst['slower']:.1%} slower than the best plan; predictions are at most "
        f"{worst['data']:.1%} (data parallel) and {worst['others']:.1%} (others) from what was measured"
    )
    return rows, worst


def main():
    cases = [of for of in (CUDA if on_gpus else CPU) if a.cases in "{}:{}:{}".format(*of[0])]
    if not cases:
        sys.exit(f"no case has {a.cases} in its name")
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        if a.predict:
            rows, worst = predict(folder, cases), {}
        else:
            rows, worst = compare(folder, cases)
    if a.json:
        lines = [*rows, {"device": a.device, "worst": worst}]
        pathlib.Path(a.json).write_text("".join(json.dumps(line) + "\n" for line in lines))
    if worst:
        sys.exit(worst["slower"] > SLOWER or worst["data"] > ERROR["data"] or worst["others"] > ERROR["others"])


main()
