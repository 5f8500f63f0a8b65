"""The run of this program: `init` begins it, and functions with `wandb`'s names log to it."""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from .client import Client
from .errors import LockstepError, Problem, RunDeleted, Unreachable
from .output import say, warn_once
from .spool import REQUEST_SECS, RUN, Sender, Spool, is_free, may_succeed_later, read_run, run_folders, send_folder
from .tracking import SEND_SECS, Mode, Run, outcome, warn_unsent
from .values import Json, to_dict, to_json

Resume = Literal["allow", "must", "never", "auto"]
PathLike = str | os.PathLike[str]
P = ParamSpec("P")
T = TypeVar("T")

# Seconds for which `init` retries to ask the server whether it has a run.
BEGIN_SECS = 60.0

_run: Run | None = None


class Settings:
    """Accepts the arguments of `wandb.Settings`. They have no effect."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        pass


def _new_id() -> str:
    return "".join(secrets.choice("0123456789abcdefghijklmnopqrstuvwxyz") for _ in range(12))


def _find_interrupted(root: Path) -> str | None:
    """Returns the id of the newest run that has not ended although no process writes it; None without such a run."""
    for file in sorted(root.glob(f"*/{RUN}"), key=lambda file: file.stat().st_mtime, reverse=True):
        if (run := read_run(file.parent))["state"] == "running" and is_free(file.parent):
            return str(run["id"])
    return None


def _is_on_server(client: Client, id: str) -> bool:
    try:
        client._send_once("PATCH", f"/runs/{id}", json={}, timeout=REQUEST_SECS)
    except Problem as problem:
        if problem.status != 404:
            raise
        return False
    return True


def _begin(sender: Sender, may_begin_later: bool) -> tuple[Json, bool] | None:
    """Begins a run on the server. Returns the run's job, and whether the job is new.

    `may_begin_later`: whether to return None if the server is unreachable, because the number of the next record is
    known without the server.
    """
    gives_up_at = time.monotonic() + BEGIN_SECS
    while True:
        try:
            return sender.begin()
        except (Problem, Unreachable) as error:
            if not may_succeed_later(error):
                raise
            if may_begin_later:
                warn_unsent(sender, error)
                return None
            if time.monotonic() > gives_up_at:
                raise LockstepError(
                    f"run {sender.id} has no folder here, and the server cannot tell whether the run exists: {error}. "
                    'Leave out id, or give mode="offline" if the run is new'
                ) from None
        time.sleep(SEND_SECS)


def init(
    *,
    project: str | None = None,
    name: str | None = None,
    config: Any = None,
    id: str | None = None,
    resume: Resume | bool | None = None,
    mode: Mode | None = None,
    tags: Sequence[str] | None = None,
    notes: str | None = None,
    dir: PathLike | None = None,
    group: str | None = None,
    job_type: str | None = None,
    private: bool = False,
    reinit: Any = None,
    **ignored: Any,
) -> Run:
    """Begins a run. The run ends with `finish`, at the end of a `with` statement or with the program.

    `project`, `name`, `notes`, `tags`: as for jobs; `group` and `job_type` become tags. `config`: the settings, a
    mapping or a namespace of argparse. `private`: whether only the owner and admins see the run; cannot be changed
    later. `dir`: the folder that contains `lockstep-runs`, the folder of runs (default: the working folder).

    `mode`: `online` (default, or the variable LOCKSTEP_MODE), `offline` (nothing is sent until `lockstep.sync`) or
    `disabled` (nothing is stored).

    `id`: the id of the run to continue or to begin (letters, digits, `-` and `_`). `resume`: `must` requires that the
    run exists, `never` that the run does not exist; `auto` or True without `id` continues the folder's newest run whose
    program was killed. A run that an exception ended is continued only by its `id`.

    If a run is active, `init` returns this run; with `reinit=True` (default in notebooks) `init` finishes this run and
    begins another run. Other arguments of W&B are ignored with a warning.

    Raises `Problem` if the server refuses the run, `LockstepError` if another process writes to the run's folder. If
    the server is unreachable, the run is sent later; only an `id` without a folder here then raises an error.
    """
    global _run
    if (before := current()) is not None and not before._is_forked:
        # In a notebook, a cell that calls `init` is often run again.
        if reinit in (None, "default") and "ipykernel" in sys.modules:
            reinit = True
        if reinit not in (True, "finish_previous"):
            warn_once(f"init returns the active run {before.id}: call finish() first, or give reinit=True")
            return before
        before.finish()
    if unused := sorted(key for key, value in ignored.items() if value is not None):
        warn_once(f"init ignores arguments that have no counterpart in Lockstep: {', '.join(unused)}")
    chosen_mode = mode or os.environ.get("LOCKSTEP_MODE") or "online"
    if chosen_mode not in ("online", "offline", "disabled"):
        raise LockstepError(f"mode is {chosen_mode!r}: it must be online, offline or disabled")
    if resume not in (None, True, False, "allow", "must", "never", "auto"):
        raise LockstepError(f"resume is {resume!r}: it must be allow, must, never, auto, True or False")
    if id is not None and not re.fullmatch("[A-Za-z0-9_-]{1,64}", id):
        raise LockstepError(f"id is {id!r}: it must have 1 to 64 letters, digits, '-' and '_'")
    root = Path(dir or ".").absolute() / "lockstep-runs"
    if id is None and resume in (True, "auto"):
        if (id := _find_interrupted(root)) is None:
            say(f"a new run begins: {root} has no interrupted run; give id=... to continue a run that has ended")
    if id is None and resume == "must":
        raise LockstepError('resume="must" needs the id of the run to continue')
    has_given_id, id = id is not None, id or _new_id()
    valid_project = re.sub("[^A-Za-z0-9_.-]", "-", (project or "").lstrip("."))[:100] or "default"
    labels = [*(tags or []), *(label for label in (group, job_type) if label)]
    run: Json = {
        "id": id,
        "name": (name or id)[:200],
        "project": valid_project,
        "config": {str(key): to_json(value) for key, value in to_dict(config).items()},
        "tags": [str(label).replace(",", " ")[:40] for label in labels],
        "notes": notes,
        "private": private,
        "summary": {},
        "state": "running",
        "reason": None,
        # In milliseconds since 1970. A run that is sent later keeps this time.
        "started_at": time.time_ns() // 1_000_000,
        "ended_at": None,
        # The metrics that do not use their `step_metric`; see `define_metric`.
        "over_steps": [],
    }
    if chosen_mode == "disabled":
        _run = Run(run, "disabled", None, 0, False)
        return _run

    path = root / id
    client = Client() if chosen_mode == "online" else None
    is_here = (path / RUN).exists()
    if has_given_id and resume in ("must", "never"):
        is_known = is_here or (client is not None and _is_on_server(client, id))
        if is_known != (resume == "must"):
            raise LockstepError(f"resume is {resume!r}, and run {id} {'exists' if is_known else 'does not exist'}")
    spool = Spool(path)
    try:
        step, is_resumed, url = spool.last_step + 1, is_here, None
        if is_here:
            _continue(run, read_run(path), name, project)
        spool.write_run(json.dumps(run))
        sender = Sender(path, client, spool.make_durable) if client else None
        if sender and (begun := _begin(sender, may_begin_later=is_here or not has_given_id)):
            job, is_new = begun
            url = str(client._io.http.base_url).partition("/api/v1")[0] + f"/jobs/{job['id']}" if client else None
            if not is_here and not is_new:
                known = job | {"private": job["spec"].get("private")} | (job.get("external") or {})
                _continue(run, known, name, project)
            # The server may have records of this run from another folder.
            spool.pad(sender.acknowledged)
            if sender.acknowledged:
                step = max(step, int(job["step"]) + 1)
            is_resumed |= not is_new
            if private and not is_new and not job["spec"].get("private"):
                say(f"run {id} is not private: only a new run can be private")
    except BaseException:
        spool.close()
        if not is_here:
            shutil.rmtree(path, ignore_errors=True)
        raise
    _run = Run(run, "online" if client else "offline", spool, step, is_resumed)
    _run._url = url
    _run._note_change()
    _run._start(sender)
    if is_resumed:
        say(f"continues run {id} at step {step}")
    elif project and project != valid_project:
        say(
            f"the project is {valid_project!r} instead of {project!r}: a project's name has 1 to 100 letters, digits, "
            "'.', '_' and '-', and does not begin with '.'"
        )
    if url:
        say(f"run {run['name']} is at {url}")
    return _run


def _continue(run: Json, before: Json, name: str | None, project: str | None) -> None:
    """Keeps the earlier values of a continued run for which the program gives no value."""
    run["config"] = (before.get("config") or {}) | run["config"]
    run["summary"] = before.get("summary") or {}
    if isinstance(before.get("started_at"), int):
        run["started_at"] = before["started_at"]
    run["name"] = name or before.get("name") or run["name"]
    run["project"] = run["project"] if project else before.get("project") or run["project"]
    run["tags"] = run["tags"] or before.get("tags") or []
    run["notes"] = run["notes"] or before.get("notes")
    run["private"] = run["private"] or before.get("private") or False
    run["over_steps"] = before.get("over_steps") or []


def current() -> Run | None:
    """Returns the run that `init` has begun; None if it has ended."""
    return None if _run is None or _run._has_ended else _run


def active() -> Run:
    """Returns the active run. Raises `LockstepError` if no run is active."""
    if (run := current()) is None:
        raise LockstepError("no run is active: call lockstep.init first")
    return run


def _of_active(method: Callable[Concatenate[Run, P], T]) -> Callable[P, T]:
    """Returns a function that calls this method of the active run."""

    @functools.wraps(method, assigned=("__doc__", "__name__", "__annotations__"))
    def function(*args: P.args, **kwargs: P.kwargs) -> T:
        return method(active(), *args, **kwargs)

    # A pickled function is looked up by its name in this module.
    function.__qualname__ = method.__name__
    # `help` shows the signature without `self`.
    function.__wrapped__ = functools.partial(method, None)  # type: ignore[arg-type]
    return function


log, define_metric, alert = _of_active(Run.log), _of_active(Run.define_metric), _of_active(Run.alert)
save, log_artifact, watch = _of_active(Run.save), _of_active(Run.log_artifact), _of_active(Run.watch)


def finish(exit_code: int | None = None, quiet: bool | None = None) -> None:
    """Ends the active run, if there is one; see `Run.finish`."""
    if (run := current()) is not None:
        run.finish(exit_code)


def unwatch(*args: Any, **kwargs: Any) -> None:
    """See `Run.unwatch`."""


def login(*args: Any, **kwargs: Any) -> bool:
    """Does nothing. The server and the token are determined in the same way as by the command line."""
    return True


def sync(*dirs: PathLike, url: str | None = None, token: str | None = None, again: bool = False) -> dict[str, int]:
    """Sends the records and files of runs that the server lacks. Returns each run's number of records on the server.

    `dirs`: folders of runs, or folders that contain such folders, also from other machines. An interrupted call can be
    repeated. `url`, `token`: as for `Client`. `again`: whether to send runs that were deleted on the server. Without
    it, raises `LockstepError` for such a run, after the other runs were sent. Also raises `LockstepError` if a folder
    has no runs or cannot be read, and `Problem` and `Unreachable` like every call.
    """
    sent: dict[str, int] = {}
    deleted: RunDeleted | None = None
    with Client(url, token) as client:
        for dir in dirs:
            for path in run_folders(Path(dir)):
                try:
                    sender = send_folder(path, client, again)
                    sent[sender.id] = sender.acknowledged
                except RunDeleted as error:
                    deleted = error
    if deleted is not None:
        raise LockstepError(f"{deleted}. sync(..., again=True) sends the run again") from deleted
    return sent


@atexit.register
def _end_with_program() -> None:
    if (run := current()) is not None:
        error = getattr(sys, "last_value", None)
        run._end(*outcome(None if error is run._older_error else error))


def _mark_as_forked() -> None:
    if _run is not None:
        _run._is_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark_as_forked)
