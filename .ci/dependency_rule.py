#!/usr/bin/env python3
"""Checks the tables of ARCHITECTURE.md: the dependencies between crates, and that a folder of server/src uses only folders above it. Also
checks which crates may use certain libraries."""

import json
import re
import subprocess
import sys
from pathlib import Path

top = Path(__file__).resolve().parent.parent
# Libraries that only these crates may use. Development dependencies are not checked: a test may read a database file.
OWNERS = {
    ("axum", "sqlx", "tower-http", "utoipa-axum"): ["server"],
    ("cudarc",): ["host", "comm", "engine"],
    ("safetensors",): ["worker"],
    ("image",): ["data", "engine", "worker"],
    ("rayon",): ["data", "engine", "kernels", "worker"],
    ("gemm", "pulp"): ["kernels"],
    ("askama",): ["web"],
}
# Items of server/src/lib.rs that every folder may use.
ITEMS = ["now"]


def section(heading):
    return (top / "ARCHITECTURE.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]


def crate_failures():
    """Yields the dependencies that the table "Crates and their order" or OWNERS forbids."""
    rows = re.findall(r"^\| `(?:[\w/]+/)?(\w+)/`.* \| ([^|]*) \|$", section("Crates and their order"), re.M)
    allowed = {folder: re.findall(r"`(\w+)`", cell) for folder, cell in rows}
    command = ["cargo", "metadata", "--locked", "--no-deps", "--format-version", "1"]
    packages = json.loads(subprocess.run(command, cwd=top, check=True, capture_output=True).stdout)["packages"]
    for package in packages:
        # The package `lockstep`, in `src/`, may depend on all crates.
        crate = package["name"].removeprefix("lockstep-")
        for dependency in package["dependencies"]:
            name = dependency["name"]
            if dependency.get("path") and crate != "lockstep" and name.removeprefix("lockstep-") not in allowed.get(crate, []):
                yield f"{package['name']} must not depend on {name}"
            for libraries, owners in OWNERS.items():
                if name in libraries and dependency["kind"] != "dev" and crate not in owners:
                    yield f"{package['name']} must not depend on {name}: only {' and '.join(owners)} may"


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


def folder_failures():
    """Yields the uses of folders of server/src that are not above the using folder in the table "Folders of server/src".

    Reads the paths of `crate` in code outside tests: `crate::NAME`, and the names in `crate::{...}`.
    """
    order = re.findall(r"^\| `([\w/]+?)(?:/|\.rs)` \|", section("Folders of server/src"), re.M)
    root = top / "server/src"
    for path in sorted(root.rglob("*.rs")):
        file = path.relative_to(root).with_suffix("").as_posix()
        if file == "lib" or "tests" in file.split("/"):
            continue
        shown = path.relative_to(top)
        place = max((n for n, above in enumerate(order) if f"{file}/".startswith(f"{above}/")), default=None)
        if place is None:
            yield f"{shown}: its folder must be in the table of ARCHITECTURE.md"
            continue
        code = re.sub(r"//.*", "", re.split(r"^#\[cfg\(test\)\]\nmod ", path.read_text(), flags=re.M)[0])
        for name, at in names(code):
            if name not in ITEMS + order[: place + 1]:
                yield f"{shown}:{code[:at].count(chr(10)) + 1}: {order[place]} must not use {name}"


failures = [*crate_failures(), *folder_failures()]
for failure in failures:
    print(f"dependency rule: {failure}", file=sys.stderr)
if not failures:
    print("dependency rule: kept")
sys.exit(bool(failures))
