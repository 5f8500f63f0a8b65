"""Reads a job's specification from a TOML file, and changes its keys."""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import LockstepError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read(job: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Returns the specification in a TOML file, or a copy of a specification that is given as a mapping."""
    if isinstance(job, Mapping):
        return copy.deepcopy(dict(job))
    try:
        return tomllib.loads(Path(job).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LockstepError(f"{os.fspath(job)} cannot be read as a job file: {error}") from error


def change(spec: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Sets keys, by path (`{"train.lr": 0.1}`) or nested (`{"train": {"lr": 0.1}}`)."""
    for path, value in changes.items():
        if isinstance(value, Mapping):
            change(spec, {f"{path}.{key}": inner for key, inner in value.items()})
            continue
        *tables, key = path.split(".")
        table: Any = spec
        for name in tables:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise LockstepError(f"{path} cannot be set: {name} is not a table of the job file")
        table[key] = value


def path_of(key: str, schemas: Mapping[str, Any]) -> str:
    """Returns the path of a key that only one table of a job file has: `train.lr` for `lr`.

    `schemas`: the schemas of the server's OpenAPI document. An unknown key is returned unchanged: the server's error
    names the nearest key.
    """
    tables = schemas["JobSpec"]["properties"]
    if key in tables:
        return key

    def has_key(table: Any) -> bool:
        names = re.findall(r"#/components/schemas/(\w+)", str(table))
        return any(key in schemas[name].get("properties", {}) for name in names)

    paths = [f"{name}.{key}" for name, table in tables.items() if has_key(table)]
    if len(paths) > 1:
        raise LockstepError(f"{key} is ambiguous ({', '.join(paths)}): give one of these paths in set={{...}}")
    return paths[0] if paths else key
