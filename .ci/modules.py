#!/usr/bin/env python3
"""Checks that a folder of server/src uses only folders above it in ARCHITECTURE.md's table "Folders of server/src".

The check reads the paths of `crate` in code outside tests: `crate::NAME`, and the names in `crate::{...}`.
"""

import re
import sys
from pathlib import Path

top = Path(__file__).resolve().parent.parent
root = top / "server/src"
section = (top / "ARCHITECTURE.md").read_text().split("## Folders of server/src")[1].split("\n## ")[0]
order = re.findall(r"^\| `([\w/]+?)(?:/|\.rs)` \|", section, re.M)
# Items of lib.rs that every folder may use.
ITEMS = ["now"]


def names(text):
    """(name, position) of each module or item of the crate that the text names."""
    for found in re.finditer(r"\bcrate::(?:(\w+)|\{)", text):
        if found[1]:
            yield found[1], found.start()
            continue
        depth, start = 1, True
        for token in re.compile(r"\w+|[{},]").finditer(text, found.end()):
            if depth == 1 and start and token[0] not in "{},":
                yield token[0], token.start()
            start = token[0] == ","
            depth += (token[0] == "{") - (token[0] == "}")
            if depth == 0:
                break


failed = []
for path in sorted(root.rglob("*.rs")):
    file = path.relative_to(root).with_suffix("").as_posix()
    if file == "lib" or "tests" in file.split("/"):
        continue
    shown = path.relative_to(top)
    place = max((n for n, above in enumerate(order) if f"{file}/".startswith(f"{above}/")), default=None)
    if place is None:
        failed.append(f"{shown}: its folder must be in the table of ARCHITECTURE.md")
        continue
    code = re.sub(r"//.*", "", re.split(r"^#\[cfg\(test\)\]\nmod ", path.read_text(), flags=re.M)[0])
    for name, at in names(code):
        if name not in ITEMS + order[: place + 1]:
            failed.append(f"{shown}:{code[:at].count(chr(10)) + 1}: {order[place]} must not use {name}")
for line in failed:
    print(f"dependency rule: {line}", file=sys.stderr)
sys.exit(bool(failed))
