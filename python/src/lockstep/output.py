"""Lines on standard error."""

from __future__ import annotations

import sys

_warned: set[str] = set()


def say(text: str) -> None:
    """Writes a line to standard error."""
    print(f"lockstep: {text}", file=sys.stderr, flush=True)


def warn_once(text: str) -> None:
    """Writes a line to standard error, unless it was written before."""
    if text not in _warned:
        _warned.add(text)
        say(text)
