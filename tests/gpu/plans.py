"""The plans of `lockstep plan` beside measured ones: python3 plans.py PROGRAM RANKS WORK >> plans.jsonl

For networks, sizes of pictures and numbers of classes: what is predicted and what is measured for data parallel and for a split head, and how
much slower the plan that `auto` would choose is than the faster of both. Batches are those of a rank.
"""

import json
import os
import subprocess
import sys

program, ranks, work = sys.argv[1], int(sys.argv[2]), sys.argv[3]
CASES = [
    (arch, side, batch, classes)
    for arch, side, batch in [("resnet50", 224, 256), ("resnet50", 224, 64), ("resnet18", 64, 256), ("resnet18", 224, 128)]
    for classes in [1_000, 200_000, 1_000_000]
]

def run(*arguments):
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)}: {done.stderr}")
    return done.stdout


worst = {"data": 0.0, "split": 0.0, "chosen": 0.0}
for arch, side, batch, classes in CASES:
    job = os.path.join(work, "plan.toml")
    with open(job, "w") as file:
        file.write(
            f'[model]\narch = "{arch}"\n[data]\ndataset = "none"\nimage_size = {side}\n[train]\nbatch_size = {batch}\nprecision = "bf16"\n'
            f"momentum = 0.9\n[parallel]\nranks = {ranks}\n"
        )
    row = {"case": f"{arch}:{side}:{batch}", "classes": classes, "ranks": ranks}
    for name, keys in [("data", []), ("split", ["parallel.mode=hybrid", f"parallel.model={ranks}"]), ("auto", ["parallel.mode=auto"])]:
        sets = [part for key in keys for part in ("--set", key)]
        plan = json.loads(run("plan", job, "--classes", str(classes), "--json", *sets))["plans"][0]["plan"]
        row[name] = {"predicted_ms": round(plan["step_ms"], 2), "words": plan["words"]}
    for name, model in [("data", 1), ("split", ranks)]:
        measured = run(
            "bench", "--case", row["case"], "--precision", "bf16", "--ranks", str(ranks), "--classes", str(classes),
            "--parallel-model", str(model), "--json",
        )  # fmt: skip
        measured = json.loads(measured.splitlines()[-1])
        row[name] |= {"ms": measured["step_ms"], "images_per_second": measured["images_per_second"], "memory_mb": measured["gpu_memory_mb"]}
        row[name]["error"] = round(row[name]["predicted_ms"] / row[name]["ms"] - 1, 3)
        worst[name] = max(worst[name], abs(row[name]["error"]))
    chosen = "split" if "fc split by out" in row["auto"]["words"] else "data"
    row["slower"] = round(row[chosen]["ms"] / min(row["data"]["ms"], row["split"]["ms"]) - 1, 3)
    worst["chosen"] = max(worst["chosen"], row["slower"])
    print(json.dumps(row), flush=True)
print(json.dumps({"worst": worst}))
sys.exit(worst["data"] > 0.1 or worst["split"] > 0.15 or worst["chosen"] > 0.05)
