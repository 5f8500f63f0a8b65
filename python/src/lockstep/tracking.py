"""Runs: trainings that a program runs itself and logs.

`log` only stores values in memory. A thread writes them to the run's folder every 100 ms, and another thread sends
them from the folder to the server; see `spool`.
"""

from __future__ import annotations

import contextlib
import enum
import glob as globs
import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from .errors import LockstepError, RunDeleted, Unreachable
from .output import say, warn_once
from .spool import Sender, Spool, keep_file, may_succeed_later
from .values import MAX_EXACT_INT, Artifact, Config, Json, Summary, json_number, scalar, to_step

Mode = Literal["online", "offline", "disabled"]

# Seconds between two writes to the folder, seconds between two requests, and time limit of `finish` for the server.
WRITE_SECS = 0.1
SEND_SECS = 1.0
FINISH_SECS = 30.0
# Maximum pause after a failed request.
BACK_OFF_SECS = 30.0
# Maximum interval between two requests. The server marks a run as failed after ten minutes without a request.
BEAT_SECS = 120.0
# Limits of the server: maximum number of a run's metrics, and maximum length of a metric's name in characters.
METRICS = 1000
NAME_CHARS = 250
# Maximum number of alerts in the summary.
ALERTS = 50
# Largest finite value in single precision, in which the server stores values.
FLOAT32_MAX = (2 - 2**-23) * 2.0**127

_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def warn_unsent(sender: Sender, error: Exception) -> None:
    """Writes to standard error, once, why a run cannot be sent."""
    is_deleted = isinstance(error, RunDeleted)
    warn_once(str(error) if is_deleted else f"run {sender.id} is kept in {sender.path} until it can be sent: {error}")


def _warn_unsupported(call: str) -> None:
    warn_once(f"{call} has no counterpart in Lockstep and does nothing")


def _line(step: int, at: int, values: dict[str, float]) -> str:
    try:
        return _ENCODER.encode({"step": step, "at": at, "values": values}) + "\n"
    except ValueError:
        return _line(step, at, {name: json_number(value) for name, value in values.items()})  # type: ignore[misc]


def outcome(error: BaseException | None) -> tuple[str, str | None]:
    """Returns the final state of a run that ends with `error`, and the reason."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "succeeded", None
    if isinstance(error, KeyboardInterrupt):
        return "cancelled", "interrupted"
    return "failed", f"{type(error).__name__}: {error}"[:500]


class AlertLevel(enum.Enum):
    """How urgent an alert is."""

    INFO = "INFO"
    WARN = "WARN"
    ERROR = "ERROR"


class Run:
    """A run that this program trains. `init` returns it.

    `config` has the settings and `summary` the results. `resumed`: whether the run existed before. Arguments of W&B
    that are not described here have no effect. After the run's end, calls that change it raise `LockstepError`.
    """

    def __init__(self, run: Json, mode: Mode, spool: Spool | None, step: int, is_resumed: bool) -> None:
        self._fields = run
        self._mode: Mode = mode
        self._spool = spool
        self._step = step
        self.resumed = is_resumed
        self._url: str | None = None
        self._has_ended = self._is_forked = False
        # An error from before this run does not fail the run.
        self._older_error = getattr(sys, "last_value", None)
        # The last value of each metric, and the names that were checked and are valid.
        self._last: dict[str, float] = {}
        self._names: set[str] = set()
        # By name or pattern, as `define_metric` gives it: the metric in place of steps, and the results in the summary.
        self._defined: dict[str, tuple[str | None, frozenset[str]]] = {}
        # The same for each metric, found by `_rule`.
        self._rules: dict[str, tuple[str | None, frozenset[str]]] = {}
        self._alerted_at: dict[str, float] = {}
        self.config = Config(run["config"], self._note_change)
        self.summary = Summary(run["summary"], self._note_change, self._last)
        self._lock = threading.Lock()
        self._buffer: deque[tuple[int, int, dict[str, float]]] = deque()
        self._unwritten = b""
        self._has_changed = False
        self._failure: Exception | None = None
        # Set when there is data to write, when data was written, and when the run ends.
        self._has_data, self._has_written, self._ends = threading.Event(), threading.Event(), threading.Event()
        self._writer_thread: threading.Thread | None = None
        self._sender_thread: threading.Thread | None = None
        self._sender: Sender | None = None

    # Properties.

    @property
    def id(self) -> str:
        """The id: with it, `init(id=..., resume="must")` continues the run."""
        return str(self._fields["id"])

    @property
    def name(self) -> str:
        """The name on the dashboard."""
        return str(self._fields["name"])

    @name.setter
    def name(self, name: str) -> None:
        warn_once("a run's name is set by init(name=...) and cannot be changed later")

    @property
    def project(self) -> str:
        """The project."""
        return str(self._fields["project"])

    @property
    def notes(self) -> str | None:
        """The notes."""
        notes: str | None = self._fields["notes"]
        return notes

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags."""
        return tuple(self._fields["tags"])

    @property
    def step(self) -> int:
        """The step of the next `log` without `step`."""
        return self._step

    @property
    def dir(self) -> str | None:
        """The run's folder."""
        return str(self._spool.path) if self._spool else None

    @property
    def url(self) -> str | None:
        """The URL of the run's page; None if the server did not have the run when `init` returned."""
        return self._url

    @property
    def offline(self) -> bool:
        """Whether the run is not sent to the server."""
        return self._mode != "online"

    @property
    def disabled(self) -> bool:
        """Whether nothing is stored or sent."""
        return self._mode == "disabled"

    def get_url(self) -> str | None:
        """Returns `url`."""
        return self._url

    def __repr__(self) -> str:
        return f"<Run {self.id} {self.name!r}, {self._fields['state']}, step {self._step}>"

    # Logging.

    def log(
        self, data: Mapping[str, Any], step: int | None = None, commit: bool | None = None, sync: bool | None = None
    ) -> None:
        """Logs the values of one step.

        `data`: numbers by name; also tensors and arrays with one element, and mappings, whose names are joined by
        dots. Other values are not logged, with one warning for each name. `step`: 0 or more (default: the property
        `step`). `commit`: whether the next call without `step` belongs to the next step (default: only if `step` is
        not given).

        Does not wait for the disk or the server. In a forked process it does nothing.
        """
        if self._is_forked:
            return warn_once("log does nothing in a forked process: the process that called init must log")
        if type(data) is not dict and not isinstance(data, Mapping):
            raise TypeError(f"log requires a mapping of names to numbers, not a {type(data).__name__}")
        values: dict[str, float] = {}
        for name, value in data.items():
            if type(value) is float and name in self._names and -FLOAT32_MAX <= value <= FLOAT32_MAX:
                values[name] = value
            else:
                self._add(values, name, value)
        if step is not None and type(step) is not int:
            step = to_step(step)
        at = int(time.time() * 1000)
        with self._lock:
            self._require_unfinished()
            if step is None:
                step = self._step
                if commit or commit is None:
                    self._step += 1
            else:
                self._step = max(self._step, step + bool(commit))
            # For a step outside this range, the server would refuse the whole request.
            if not 0 <= step < MAX_EXACT_INT:
                return warn_once(f"a step must be 0 to 2^53 - 1: the values of step {step} are not logged")
            if not values:
                return
            self._last.update(values)
            if self._mode == "disabled":
                return
            if self._defined:
                for own_step, own_values in self._by_step(step, values).items():
                    self._buffer.append((own_step, at, own_values))
            else:
                self._buffer.append((step, at, values))
        if not self._has_data.is_set():
            self._has_data.set()

    def _add(self, values: dict[str, float], name: str, value: Any) -> None:
        if not isinstance(name, str):
            raise TypeError(f"names of logged values must be text: {name!r}")
        if isinstance(value, Mapping):
            for key, inner in value.items():
                self._add(values, f"{name}.{key}", inner)
            return
        found = scalar(value)
        if found is None:
            return warn_once(f"{name} is not logged: {type(value).__name__} is not a number")
        if name not in self._names:
            # For an invalid name or too many names, the server would refuse the whole request.
            if not 0 < len(name) <= NAME_CHARS or not name.isprintable():
                return warn_once(f"{name!r} is not logged: a name has 1 to {NAME_CHARS} printable characters")
            if len(self._names) >= METRICS:
                return warn_once(f"further names are not logged: a run has at most {METRICS} metrics")
            self._names.add(name)
        if FLOAT32_MAX < abs(found) < math.inf:
            warn_once(f"{name} has values beyond the range of 32-bit numbers (3.4e38), which are stored as infinite")
        values[name] = found

    def _by_step(self, step: int, values: dict[str, float]) -> dict[int, dict[str, float]]:
        """Groups values by their step on the axis of their metric."""
        found: dict[int, dict[str, float]] = {}
        for name, value in values.items():
            if name not in self._rules:
                self._rules[name] = self._rule(name)
            axis, kinds = self._rules[name]
            own_step = step
            if axis is not None:
                axis_value = self._last.get(axis, -1)
                if 0 <= axis_value < MAX_EXACT_INT and axis_value == math.floor(axis_value):
                    own_step = int(axis_value)
                else:
                    # Values on two axes would have the same steps and replace each other.
                    self._fields["over_steps"].append(name)
                    self._rules[name] = None, kinds
                    self._has_changed = True
                    found_value = f"{axis} has the value {axis_value}" if axis in self._last else f"{axis} has no value"
                    warn_once(
                        f"{name} is from now on shown over the run's steps, because {found_value}: "
                        "a step must be a whole number"
                    )
            found.setdefault(own_step, {})[name] = value
            if kinds and math.isfinite(value):
                self._summarize(name, value, kinds)
        return found

    def _rule(self, name: str) -> tuple[str | None, frozenset[str]]:
        patterns = [p for p in self._defined if p == name or (p.endswith("*") and name.startswith(p[:-1]))]
        # A name takes precedence over patterns, and a longer pattern over a shorter one.
        patterns.sort(key=lambda pattern: (pattern == name, len(pattern)))
        axis, kinds = self._defined[patterns[-1]] if patterns else (None, frozenset())
        return (None if axis == name or name in self._fields["over_steps"] else axis), kinds

    def _summarize(self, name: str, value: float, kinds: frozenset[str]) -> None:
        results = self.summary._items.setdefault(name, {})
        # The program may have set another result under this name.
        for kind in kinds if isinstance(results, dict) else ():
            old = results.setdefault(kind, value)
            if kind == "last" or (kind == "min" and value < old) or (kind == "max" and value > old):
                results[kind] = value
            self._has_changed = True

    def define_metric(
        self,
        /,
        name: str,
        step_metric: str | None = None,
        summary: str | None = None,
        goal: str | None = None,
        **ignored: Any,
    ) -> None:
        """Sets how metrics are shown. `name`: the name of a metric, or a prefix of several names and `*`.

        `step_metric`: the metric whose values replace the steps, such as `epoch`; whole numbers only. At the first
        other or missing value, a metric returns to the run's steps for the rest of the run. `summary`: `min`, `max`,
        `first`, `last`, or `best` with `goal` (`minimize` or `maximize`), or several with commas;
        `run.summary["loss"]["min"]` has the result.
        """
        if self._is_forked:
            return
        kinds = {kind.strip().lower() for kind in (summary or "").split(",") if kind.strip()}
        if "best" in kinds and goal:
            kinds.add(goal[:3].lower())
        if unknown := kinds - {"min", "max", "first", "last", "best", "copy", "none"}:
            warn_once(f"define_metric: {', '.join(sorted(unknown))} is not kept in the summary")
        with self._lock:
            self._defined[name] = step_metric, frozenset(kinds & {"min", "max", "first", "last"})
            self._rules.clear()

    def alert(
        self, title: str, text: str = "", level: str | AlertLevel | None = None, wait_duration: Any = None
    ) -> None:
        """Writes an alert to standard error and into the run's history, and sends it to webhooks for `run.alert`.

        The newest alerts are also in `run.summary["alerts"]`.

        `level`: `INFO` (default), `WARN` or `ERROR`. `wait_duration`: seconds, or a timedelta, in which further alerts
        with this title are ignored (default: 60). Any other level is replaced by `INFO`, with a warning.
        """
        self._require_unfinished()
        try:
            level = AlertLevel(level or "INFO").value
        except ValueError:
            warn_once(f"the level {level!r} of an alert is not INFO, WARN or ERROR; the alert has the level INFO")
            level = "INFO"
        wait_secs = getattr(wait_duration, "total_seconds", lambda: 60 if wait_duration is None else wait_duration)()
        if time.monotonic() - self._alerted_at.get(title, -math.inf) < wait_secs:
            return
        self._alerted_at[title] = time.monotonic()
        say(f"{level}: {title}: {text}")
        alert = {"title": title[:64], "text": text[:500], "level": level, "at": int(time.time() * 1000)}
        self.summary["alerts"] = [*self.summary.get("alerts", []), alert][-ALERTS:]

    def watch(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: Lockstep does not store gradients of other programs."""
        _warn_unsupported("watch")

    def unwatch(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing, like `watch`."""

    def save(
        self,
        glob_str: str | os.PathLike[str],
        base_path: str | os.PathLike[str] | None = None,
        policy: str | None = None,
        glob: bool = True,
    ) -> list[str]:
        """Stores files in their current state with the run, and returns their paths within the run.

        `glob_str`: a path, or a pattern such as `out/*.safetensors`; with `glob=False` always a path. `base_path`: the
        folder to which paths are relative (default: the working folder); a file outside this folder keeps only its
        name. A file that is saved again replaces the earlier file, but never a file on the server that was changed
        later, for example by this run in another folder. The files are copied into the run's folder before
        this method returns, and sent in the background.
        """
        base = os.path.abspath(base_path or ".")
        kept: list[str] = []
        pattern = os.fspath(glob_str) if glob else globs.escape(os.fspath(glob_str))
        for found in sorted(globs.glob(pattern, recursive=True)):
            file = Path(os.path.abspath(found))
            if file.is_file():
                name = file.relative_to(base).as_posix() if file.is_relative_to(base) else file.name
                kept.append(name)
                self._keep(file, name)
        if not kept:
            warn_once(f"save found no file {os.fspath(glob_str)}")
        return kept

    def log_artifact(
        self,
        /,
        artifact_or_path: Artifact | str | os.PathLike[str],
        name: str | None = None,
        type: str | None = None,
        **ignored: Any,
    ) -> Artifact:
        """Stores the files of an `Artifact`, a file or a folder with the run, like `save`, in a folder of its own.

        `name`: the folder (default: the name of the artifact, file or folder). Artifacts have no versions here.
        """
        artifact = artifact_or_path
        if not isinstance(artifact, Artifact):
            path = Path(os.path.abspath(artifact))
            artifact = Artifact(name or path.name, type or "")
            if path.is_dir():
                artifact.add_dir(path)
            else:
                artifact.add_file(path)
        for own_name, file in artifact._files.items():
            self._keep(file, f"{artifact.name}/{own_name}")
        return artifact

    def _keep(self, file: Path, name: str) -> None:
        self._require_unfinished()
        if self._spool is None or self._is_forked:
            return
        try:
            keep_file(self._spool.path, file, name)
        # The program must not fail because a copy cannot be stored.
        except OSError as error:
            warn_once(f"{file} is not stored with run {self.id}: {error}")
        self._note_change()

    def log_code(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: Lockstep does not store code of other programs."""
        _warn_unsupported("log_code")

    # The end.

    def finish(self, exit_code: int | None = None, quiet: bool | None = None) -> None:
        """Ends the run, as failed if `exit_code` is given and not 0. Waits up to 30 seconds for the server.

        The server gets the run's end after the files, unless their upload takes longer. If the run could not be sent
        completely, writes the command that sends the rest. Called automatically at the end of the program.
        """
        if exit_code:
            self._end("failed", f"exit code {exit_code}")
        else:
            self._end("succeeded", None)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(*outcome(error))

    def _end(self, state: str, reason: str | None) -> None:
        if self._is_forked:
            return
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
        self._fields |= {"state": state, "reason": reason, "ended_at": time.time_ns() // 1_000_000}
        self._has_changed = True
        self._ends.set()
        self._has_data.set()
        if self._spool is None or self._writer_thread is None:
            return
        self._writer_thread.join()
        command = f"python -m lockstep sync {self._spool.path}"
        if self._sender_thread is None or self._sender is None:
            say(f"run {self.id} is kept in its folder; send it by: {command}")
        else:
            self._has_written.set()
            if self._failure is not None and may_succeed_later(self._failure):
                say(f"run {self.id} waits for the server, for up to {FINISH_SECS:g} s")
            self._sender_thread.join(FINISH_SECS + SEND_SECS)
            if self._sender_thread.is_alive() and not isinstance(self._failure, Unreachable):
                # A file is still being uploaded. Without its end, the run would count as failed later.
                with contextlib.suppress(LockstepError):
                    self._sender.send_end()
            is_deleted = isinstance(self._failure, RunDeleted)
            if (self._sender_thread.is_alive() or self._failure is not None) and not is_deleted:
                # The thread has written the reason.
                say(f"run {self.id} was not sent completely. Send the rest by: {command}")
            if self._sender_thread.is_alive():
                return
        self._spool.close()

    # Storing and sending.

    def _require_unfinished(self) -> None:
        if self._has_ended:
            raise LockstepError(f"run {self.id} is finished: call lockstep.init to begin another run")

    def _note_change(self) -> None:
        if not self._is_forked:
            self._require_unfinished()
            self._has_changed = True
            self._has_data.set()

    def _start(self, sender: Sender | None) -> None:
        write = self._write_until_end
        self._writer_thread = threading.Thread(target=write, name="lockstep-writer", daemon=True)
        self._writer_thread.start()
        if sender is not None:
            self._sender = sender
            send = self._send_until_end
            self._sender_thread = threading.Thread(target=send, args=(sender,), name="lockstep-sender", daemon=True)
            self._sender_thread.start()

    def _write_until_end(self) -> None:
        tries_left = 10
        while True:
            # After a failure, the thread tries again without a signal.
            self._has_data.wait(SEND_SECS if self._unwritten or self._has_changed else None)
            self._has_data.clear()
            is_last = self._ends.is_set()
            try:
                self._write(is_last)
            # The program must not fail because its values cannot be written.
            except Exception as error:
                warn_once(f"run {self.id} cannot be written to its folder; trying again: {error}")
                if is_last:
                    tries_left -= 1
                    self._has_data.set()
                    time.sleep(WRITE_SECS)
                if tries_left == 0:
                    lost = "its last values and its end" if self._unwritten else "its end"
                    return say(f"run {self.id} has lost {lost}, because {self.dir} cannot be written: {error}")
            else:
                if is_last:
                    return
            self._ends.wait(WRITE_SECS)

    def _write(self, is_last: bool) -> None:
        assert self._spool is not None
        # Reset before `run.json` is written, so that a concurrent change is written later.
        if has_changed := self._has_changed:
            self._has_changed = False
        try:
            lines = []
            while self._buffer:
                lines.append(_line(*self._buffer.popleft()))
            self._unwritten += "".join(lines).encode()
            if self._unwritten:
                self._spool.append(self._unwritten)
                self._unwritten = b""
            # Written after the records, so that a folder of an ended run has all records.
            if has_changed:
                with self._lock:
                    text = json.dumps(self._fields, indent=1, default=str)
                self._spool.write_run(text)
            if is_last:
                self._spool.make_durable()
        except Exception:
            self._has_changed |= has_changed
            raise
        self._has_written.set()

    def _send_until_end(self, sender: Sender) -> None:
        assert self._writer_thread is not None
        pause, sent_at, ends_by = SEND_SECS, time.monotonic(), math.inf
        while True:
            self._has_written.clear()
            if is_last := self._ends.is_set():
                # After the writer has ended, the folder does not change.
                self._writer_thread.join()
                ends_by = min(ends_by, time.monotonic() + FINISH_SECS)
            try:
                if sender.send():
                    sent_at = time.monotonic()
                elif time.monotonic() - sent_at >= BEAT_SECS:
                    sender.send_heartbeat()
                    sent_at = time.monotonic()
            # The program must not fail because its values cannot be sent.
            except Exception as error:
                warn_unsent(sender, error)
                self._failure = error
                if is_last and (not may_succeed_later(error) or time.monotonic() > ends_by):
                    break
                if is_last:
                    time.sleep(WRITE_SECS)
                else:
                    self._ends.wait(pause)
                    pause = min(2 * pause, BACK_OFF_SECS)
                continue
            self._failure, pause = None, SEND_SECS
            if is_last:
                break
            self._has_written.wait(BEAT_SECS)
            self._ends.wait(SEND_SECS)
        sender.close()
