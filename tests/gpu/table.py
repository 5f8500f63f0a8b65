"""Prints the lines of `bench.jsonl`, of Lockstep and PyTorch, as a table: python3 table.py out/bench.jsonl"""

import json
import sys

rows = []
for line in open(sys.argv[1]):
    row = json.loads(line)
    if "error" in row:
        rows.append((row["side"], row["case"], str(row.get("world", 1)), "", "", row["error"][:80]))
    elif row["side"] == "lockstep":
        details = f"first step {row.get('first_step_secs', 0):.1f} s, {row.get('gpu_memory_mb', 0) / 1e3:.1f} GB"
        case = f"{row['case']} {row['device']}"
        rows.append((row["run"], case, str(row["ranks"]), f"{row['images_per_second']:.0f}", f"{row['step_ms']:.2f}", details))
    else:
        details = f"warm-up {row['warm_s']} s, {row['gib']} GiB"
        rows.append((row["run"], row["case"], str(row["world"]), str(row["img_s"]), f"{row['median_ms']:.2f}", details))
print("| run | case | GPUs | images/s | step ms | |\n|---|---|---|---|---|---|")
for row in rows:
    print(f"| {' | '.join(row)} |")
