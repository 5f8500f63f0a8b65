"""The values of a run: logged numbers, settings and results."""

from __future__ import annotations

import math
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from .errors import LockstepError

Json = dict[str, Any]

# The largest integer up to which all integers are exact in float64.
MAX_EXACT_INT = 2**53
# Integers of this magnitude or more become floats.
JSON_INT_LIMIT = 2**63


class Media:
    """Stands in for wandb's classes of images, tables and other media, so that programs run unchanged. Media are not
    logged.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class Artifact(Media):
    """Files under one name, for `Run.log_artifact`. Methods that are not documented here do nothing."""

    def __init__(self, name: str, type: str = "", **ignored: Any) -> None:
        self.name = name
        self.type = type
        self._files: dict[str, Path] = {}

    def add_file(self, local_path: str | os.PathLike[str], name: str | None = None, **ignored: Any) -> None:
        """Adds a file. `name`: the file's path within the artifact (default: the file's name)."""
        self._files[name or Path(local_path).name] = Path(local_path)

    def add_dir(self, local_path: str | os.PathLike[str], name: str | None = None, **ignored: Any) -> None:
        """Adds all files of a folder. `name`: the folder's path within the artifact (default: none)."""
        for file in sorted(file for file in Path(local_path).rglob("*") if file.is_file()):
            self.add_file(file, (Path(name or "") / file.relative_to(local_path)).as_posix())

    def wait(self, timeout: Any = None) -> Artifact:
        """Returns the artifact without waiting: files are sent in the background."""
        return self


def scalar(value: Any) -> float | None:
    """Converts a scalar, or a tensor or array with one element, to an int or a float. Returns None for other values."""
    if callable(item := getattr(value, "item", None)) and not isinstance(value, float):
        try:
            value = item()
        except (TypeError, ValueError, RuntimeError):
            return None
    if isinstance(value, int):
        return int(value) if -MAX_EXACT_INT <= value <= MAX_EXACT_INT else _float(value)
    if isinstance(value, str | bytes | bytearray):
        return None
    return _float(value)


def _float(value: Any) -> float | None:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError, RuntimeError):
        return None


def to_step(step: Any) -> int:
    """Converts a step to an int. Raises TypeError if the step is not a whole number."""
    try:
        return operator.index(step)
    except TypeError:
        if (number := scalar(step)) is not None and number == math.floor(number):
            return int(number)
        raise TypeError(f"a step must be a whole number, not {step!r}") from None


def json_number(value: float) -> float | str:
    """Returns a number, or a text for a number that is not finite, because JSON has only finite numbers."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def to_json(value: Any) -> Any:
    """Converts a setting or a result to JSON. Values of types that JSON lacks become text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {to_json(str(key)): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item) for item in value]
    if isinstance(value, int) and abs(value) < JSON_INT_LIMIT:
        return int(value)
    if callable(getattr(value, "__float__", None)) and (number := scalar(value)) is not None:
        return json_number(number)
    return to_json(str(value))


def to_dict(given: Any) -> Json:
    """Returns the settings in a mapping, a namespace of argparse or another object with attributes."""
    if given is None:
        return {}
    try:
        return dict(given) if isinstance(given, Mapping) else dict(vars(given))
    except TypeError:
        kind = type(given).__name__
        raise LockstepError(f"settings must be a mapping or a namespace of argparse, not a {kind}") from None


class _Values(MutableMapping[str, Any]):
    """A mapping whose keys are also attributes."""

    def __init__(self, items: Json, on_change: Callable[[], None]) -> None:
        object.__setattr__(self, "_items", items)
        object.__setattr__(self, "_on_change", on_change)

    _items: Json
    _on_change: Callable[[], None]

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[str(key)] = to_json(value)
        self._on_change()

    def __delitem__(self, key: str) -> None:
        del self._items[key]
        self._on_change()

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._items))

    def __len__(self) -> int:
        return len(self._items)

    def __getattr__(self, key: str) -> Any:
        # The module `copy` looks attributes up before the items exist.
        if key.startswith("__") or key in ("_items", "_on_change"):
            raise AttributeError(key)
        try:
            return self[key]
        except KeyError:
            raise AttributeError(f"{type(self).__name__.lower()} has no {key}") from None

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value

    def __repr__(self) -> str:
        return repr(dict(self))

    def as_dict(self) -> Json:
        """Returns a copy as a dict."""
        return dict(self)


class Config(_Values):
    """The settings of a run: `run.config["lr"]` or `run.config.lr`."""

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def update(self, given: Any = None, /, *, allow_val_change: bool | None = None, **more: Any) -> None:
        """Sets several settings. `given`: a mapping or a namespace of argparse.

        Raises `LockstepError` if a setting has another value, unless `allow_val_change` is set or this is a notebook.
        """
        new = {str(key): to_json(value) for key, value in (to_dict(given) | more).items()}
        if not (allow_val_change or (allow_val_change is None and "ipykernel" in sys.modules)):
            for key, value in new.items():
                if key in self._items and self._items[key] != value:
                    raise LockstepError(
                        f"config.{key} is already {self._items[key]!r} and would become {value!r}; to change it, "
                        f"call config.update({{{key!r}: {value!r}}}, allow_val_change=True)"
                    )
        self._items.update(new)
        self._on_change()

    def setdefaults(self, given: Any) -> None:
        """Sets the given settings that have no value yet."""
        self.update({key: value for key, value in to_dict(given).items() if str(key) not in self._items})


class Summary(_Values):
    """The results of a run: the values that the program sets, and the last value of each other metric."""

    def __init__(self, items: Json, on_change: Callable[[], None], last: dict[str, float]) -> None:
        super().__init__(items, on_change)
        object.__setattr__(self, "_last", last)

    _last: dict[str, float]

    def __getitem__(self, key: str) -> Any:
        return self._items[key] if key in self._items else self._last[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._last | self._items)

    def __len__(self) -> int:
        return len(self._last | self._items)
