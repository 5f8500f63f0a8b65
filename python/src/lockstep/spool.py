"""The folder of a run, which stores everything that a program logs, and the sending of the folder to the server.

`run.json` has the fields of the run. `records.jsonl` has one record on each line: the values of one step. The server
identifies a record by its number, which is the number of its line. `files` has copies of the files that the program
saved. A file is sent unless the server has a file with the same path that has the same size and time, or was changed
later. The empty file `sent` exists if a server had the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import httpx

from .client import Client
from .errors import LockstepError, Problem, RunDeleted, Unreachable
from .output import warn_once
from .values import Json

if os.name == "posix":
    import fcntl

RUN = "run.json"
RECORDS = "records.jsonl"
FILES = "files"
SENT = "sent"
# The server accepts at most 10,000 values and 1 MiB in a request.
REQUEST_VALUES = 10_000
REQUEST_BYTES = 900 << 10
REQUEST_SECS = 20.0
# Time limit for sending each part of a file, and for the server to store the file.
FILE_SECS = 300.0
# Fields of `run.json` that are sent before a run's files (`CHANGES`) and after them (`END`). Each group is a request,
# so that a field that is too large does not block the other fields.
CHANGES = (("config",), ("summary",))
END = ("state", "reason", "ended_at")
# Stands for a record that the server already has from another folder.
PLACEHOLDER = b'{"step":0,"at":0,"values":{}}\n'


def read_run(path: Path) -> Json:
    """Reads `run.json` of a run's folder."""
    try:
        run: Json = json.loads((path / RUN).read_text(encoding="utf-8"))
        return {"config": {}, "summary": {}, "state": "running", "reason": None} | run | {"id": str(run["id"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LockstepError(f"{path} cannot be read as the folder of a run: {error!r}") from error


def may_succeed_later(error: Exception) -> bool:
    """Whether the same request may succeed later."""
    return isinstance(error, Unreachable) or (
        isinstance(error, Problem) and (error.status in (408, 429) or error.status >= 500)
    )


def keep_file(path: Path, source: Path, name: str) -> None:
    """Copies a file into a run's folder atomically. `name`: the file's path within the run."""
    target = path / FILES / name
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = path / f"{FILES}.{secrets.token_hex(8)}"
    try:
        shutil.copy2(source, partial)
        # The server would keep the earlier copy if that were newer.
        if target.exists() and partial.stat().st_mtime_ns < target.stat().st_mtime_ns:
            os.utime(partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


class Spool:
    """Writes the folder of a run. Only one process at a time can have the folder open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(path)
        self._file = open(path / RECORDS, "ab", buffering=0)
        # The number of records, and the size of their lines.
        self.record_count, self._size_bytes = 0, 0
        # The largest step of all records, or -1. The last record may have a smaller step.
        self.last_step = -1
        with open(path / RECORDS, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    self.record_count += 1
                    self._size_bytes += len(line)
                    record = _record(line, f"{path / RECORDS}, line {self.record_count}")
                    self.last_step = max(self.last_step, int(record.get("step", -1)))
        # A killed process may have left an incomplete line.
        self._file.truncate(self._size_bytes)

    def append(self, lines: bytes) -> None:
        """Appends whole lines. Raises OSError, and appends nothing, if they cannot be written."""
        try:
            rest = memoryview(lines)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(self._size_bytes)
            raise
        self._size_bytes += len(lines)

    def pad(self, acknowledged: int) -> None:
        """Appends placeholders until the folder has as many records as the server: `acknowledged`."""
        self.append(PLACEHOLDER * max(acknowledged - self.record_count, 0))

    def write_run(self, text: str) -> None:
        """Replaces `run.json` atomically."""
        new = self.path / f"{RUN}.new"
        new.write_text(text, encoding="utf-8")
        new.replace(self.path / RUN)

    def make_durable(self) -> None:
        """Waits until the appended records would survive a loss of power."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the folder, so that another process can continue the run."""
        self._file.close()
        self._lock.close()


def _record(line: bytes, where: str) -> Json:
    try:
        record: Json = {"values": {}} | json.loads(line)
        return record
    except (ValueError, TypeError) as error:
        raise LockstepError(f"{where}, is damaged ({error!r}): copy the folder again") from error


def _lock(path: Path) -> Any:
    """Locks a run's folder until the returned file is closed or this process ends. Forked processes lack the lock."""
    file = open(path / "lock", "w")
    if os.name == "posix":
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.close()
            raise LockstepError(
                f"another process writes to {path}, and only one can: let only one process call init, or give "
                "each process its own id"
            ) from error
        except OSError:
            pass  # The file system has no locks.
    return file


def is_free(path: Path) -> bool:
    """Whether no process writes to a run's folder."""
    with contextlib.suppress(LockstepError):
        _lock(path).close()
        return True
    return False


class Sender:
    """Sends the records, changes and files in a run's folder that the server lacks.

    `make_durable`: called before records are sent, so that the folder cannot lose a record that the server has.
    Otherwise two records could have the same number.
    """

    def __init__(self, path: Path, client: Client, make_durable: Callable[[], None] = lambda: None) -> None:
        self.path = path
        self.id: str = read_run(path)["id"]
        self._client = client
        self._make_durable = make_durable
        # Whether to send a run that was deleted on the server.
        self.sends_deleted = False
        self._file: BinaryIO = open(path / RECORDS, "rb")
        # The number of the record at the file's position.
        self._next_number = 1
        # The fields of `run.json` that the server has; None before the first request.
        self._server_fields: Json | None = None
        # Size and time of each file that the server has, by path; None before the first request.
        self._server_files: dict[str, tuple[int, int]] | None = None
        # The first error of the changes and files that the server has refused.
        self._refusal: LockstepError | None = None
        # Numbers of records that the server has, of records that this sender sent, and of files that this sender sent.
        self.acknowledged = self.sent_records = self.sent_files = 0

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def begin(self) -> tuple[Json, bool]:
        """Makes the run on the server, or continues the run with this id. Returns the job, and whether it is new."""
        run = read_run(self.path)
        keys = ("id", "name", "project", "config", "tags", "notes", "private", "started_at")
        new = {key: run[key] for key in keys if run.get(key)}
        response = self._client._send_once("POST", "/runs", json=new, timeout=REQUEST_SECS)
        is_new = response.status_code == 201
        self._mark_as_sent()
        self._server_fields = {"state": "running", "summary": {}} | ({"config": run["config"]} if is_new else {})
        self._seek(0 if is_new else self._count_records())
        return response.json(), is_new

    def _connect(self) -> None:
        try:
            self.send_heartbeat()
        except Problem as problem:
            if problem.status != 404:
                raise
            self.begin()
        else:
            self._mark_as_sent()
            # The state `running` is not sent, so that a run that has ended on the server stays ended.
            self._server_fields = {"state": "running"}
            self._seek(self._count_records())

    def _mark_as_sent(self) -> None:
        # The folder may be read-only.
        with contextlib.suppress(OSError):
            (self.path / SENT).touch()

    def send_heartbeat(self) -> None:
        """Tells the server that the run still trains."""
        self._change({})

    def send(self) -> bool:
        """Sends everything that the server lacks. Returns whether anything was sent. Can be repeated after an error.

        Raises `Problem` or `Unreachable`; `RunDeleted`; `LockstepError` if the folder is damaged.
        """
        if self._server_fields is None:
            self._connect()
        # Read before the records: if the run has ended, all records are in the file.
        run = read_run(self.path)
        self._seek(self.acknowledged)
        before, self._refusal = self._next_number, None
        self._send_records()
        # If the server has more records than the folder, another folder has continued the run and has newer changes.
        is_older = self._next_number <= self.acknowledged
        has_sent = not is_older and self._send_changes(run, *CHANGES)
        try:
            has_sent |= self._send_files()
        # Files do not block the run's end. A proxy, for example, closes the connection to refuse a large file.
        except (Problem, Unreachable) as error:
            self._refusal = self._refusal or error
        # The end is sent last, so that a program that waits for the end finds the files, and the alerts in the summary.
        # `running` is never sent: `begin` sets it, and `send_end` may have sent a later state meanwhile.
        if run["state"] != "running" and not is_older:
            has_sent |= self._send_changes(run, END)
        self.sent_records += self._next_number - before
        if self._refusal:
            raise self._refusal
        return has_sent or self._next_number != before

    def send_end(self) -> None:
        """Sends the changes and the end of an ended run, while another thread uploads a file."""
        self._send_changes(read_run(self.path), *CHANGES, END)

    def _send_records(self) -> None:
        while lines := self._next_lines():
            self._make_durable()
            try:
                acknowledged = self._post(lines)
            except Problem as problem:
                # A server that was restored from a backup has fewer records.
                if problem.status != 409 or (acknowledged := self._count_records()) == self._next_number - 1:
                    raise
                self._server_fields = {"state": "running"}
            self._seek(acknowledged)

    def _send_changes(self, run: Json, *groups: tuple[str, ...]) -> bool:
        """Sends the fields that the server lacks. Returns whether the server has accepted a field."""
        has_sent = False
        for keys in groups:
            known = self._server_fields or {}
            changed = {key: run[key] for key in keys if run.get(key) is not None and run[key] != known.get(key)}
            if changed:
                try:
                    self._change(changed)
                except Problem as problem:
                    if may_succeed_later(problem):
                        raise
                    self._refusal = self._refusal or problem
                    continue
                self._server_fields = known | changed
                has_sent = True
        return has_sent

    def _send_files(self) -> bool:
        root = self.path / FILES
        if not root.exists():
            return False
        if self._server_files is None:
            listed = self._request("GET", "/files").json()["files"]
            self._server_files = {file["path"]: (file["size_bytes"], file["modified_ms"]) for file in listed}
        has_sent, refusal = False, None
        for file in sorted(file for file in root.rglob("*") if file.is_file()):
            name, status = file.relative_to(root).as_posix(), file.stat()
            version = status.st_size, status.st_mtime_ns // 1_000_000
            on_server = self._server_files.get(name)
            if on_server == version:
                continue
            if on_server and on_server[1] > version[1]:
                warn_once(f"{file} is not sent, because the server has a newer file {name} of run {self.id}")
                continue
            query = {"path": name, "modified_ms": version[1]}
            headers = {"Content-Type": "application/octet-stream"}
            try:
                with open(file, "rb") as content:
                    self._request("PUT", "/file", FILE_SECS, query=query, content=content, headers=headers)
            # A refused file does not block the other files.
            except Problem as problem:
                refusal = refusal or problem
                continue
            self._server_files[name] = version
            self.sent_files += 1
            has_sent = True
            # New records do not wait for the other files.
            self._send_records()
        if refusal:
            raise refusal
        return has_sent

    def _request(self, method: str, path: str, timeout: float = REQUEST_SECS, **more: Any) -> httpx.Response:
        try:
            return self._client._send_once(method, f"/runs/{self.id}{path}", timeout=timeout, **more)
        except Problem as problem:
            if problem.code == "not_found" and not self.sends_deleted and (self.path / SENT).exists():
                raise RunDeleted(
                    f"run {self.id} was deleted on the server, or belongs to another server or person; its folder "
                    f"{self.path} is kept"
                ) from problem
            raise

    def _change(self, body: Json) -> None:
        self._request("PATCH", "", json=body)

    def _count_records(self) -> int:
        """Returns the number of records that the server has."""
        return self._post([], first=1)

    def _post(self, lines: list[bytes], first: int | None = None) -> int:
        body = b'{"first":%d,"records":[%b]}' % (first or self._next_number, b",".join(lines))
        headers = {"Content-Type": "application/json"}
        response = self._request("POST", "/records", content=body, headers=headers)
        return int(response.json()["acknowledged"])

    def _next_lines(self) -> list[bytes]:
        """Returns the lines of the next request. The file's position does not change."""
        start = self._file.tell()
        lines: list[bytes] = []
        values = size_bytes = 0
        # A line without its end is still being written.
        while (line := self._file.readline()).endswith(b"\n"):
            record = _record(line, f"{self.path / RECORDS}, line {self._next_number + len(lines)}")
            values += len(record["values"])
            size_bytes += len(line)
            if lines and (values > REQUEST_VALUES or size_bytes > REQUEST_BYTES):
                break
            lines.append(line)
        self._file.seek(start)
        return lines

    def _seek(self, acknowledged: int) -> None:
        """Moves the file's position after the records that the server has."""
        if acknowledged < self._next_number - 1:
            self._file.seek(0)
            self._next_number = 1
        while self._next_number <= acknowledged:
            start = self._file.tell()
            if not self._file.readline().endswith(b"\n"):
                self._file.seek(start)
                break
            self._next_number += 1
        self.acknowledged = acknowledged


def run_folders(path: Path) -> list[Path]:
    """Returns the folders of runs among `path` and the folders in `path` and in `path/lockstep-runs`.

    Raises `LockstepError` if there are none.
    """
    patterns = (RUN, f"*/{RUN}", f"lockstep-runs/*/{RUN}")
    found = [file.parent for pattern in patterns for file in sorted(path.glob(pattern))]
    if not (folders := [folder for folder in found if (folder / RECORDS).exists()]):
        why = f"no folder in it has {RUN} and {RECORDS}" if path.exists() else "it does not exist"
        raise LockstepError(f"{path} has no runs: {why}")
    return folders


def send_folder(path: Path, client: Client, again: bool = False) -> Sender:
    """Sends the parts of a run that the server lacks. Returns the closed sender, which has the numbers.

    `again`: whether to send a run that was deleted on the server, for which `RunDeleted` is raised otherwise.
    """
    sender = Sender(path, client)
    sender.sends_deleted = again
    with contextlib.closing(sender):
        sender.send()
    return sender
