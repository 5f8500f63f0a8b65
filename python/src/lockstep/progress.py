"""Shows a job's progress as one line that is overwritten, in terminals and notebooks."""

from __future__ import annotations

import sys
from typing import Any

# Width of the bar, in characters.
WIDTH = 20


class Progress:
    """The line of progress. `is_shown`: whether to show the line (None: only on a terminal or in a notebook)."""

    def __init__(self, is_shown: bool | None) -> None:
        is_notebook = "ipykernel" in sys.modules
        self._out = sys.stdout if is_notebook else sys.stderr
        self.is_shown = (is_notebook or self._out.isatty()) if is_shown is None else is_shown
        self._width = 0

    def show(self, job: dict[str, Any]) -> None:
        """Shows a job's state and steps, and its loss, speed and remaining time if they are known."""
        if not self.is_shown:
            return
        step, total = job["step"], job["total_steps"]
        done = WIDTH * step // total if total else 0
        line = f"\r{job['state']:<9} [{'#' * done:-<{WIDTH}}] {step}/{total or '?'}"
        values = (job["last"].get("loss"), job.get("images_per_second"), job.get("eta_secs"))
        for value, form in zip(values, ("loss {:.4f}", "{:.0f} images/s", "{:.0f} s left"), strict=True):
            line += "" if value is None else "  " + form.format(value)
        self._out.write(line.ljust(self._width))
        self._out.flush()
        self._width = len(line)

    def close(self) -> None:
        """Ends the line."""
        if self._width:
            self._out.write("\n")
