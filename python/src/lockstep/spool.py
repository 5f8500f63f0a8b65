"""The folder of a run, which has all that a program logs, and the way from there to the server.

`run.json` has what belongs to the run as a whole. `records.jsonl` has a record on each line: values of one step. The
number of a record is the number of its line, so the server can tell which ones it has. `files` has copies of what the
program saved; the server has a file if it has one of the same path, size and time.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .client import Client
from .errors import LockstepError, Problem

if os.name == "posix":
    import fcntl

Json = dict[str, Any]

RUN = "run.json"
RECORDS = "records.jsonl"
FILES = "files"
# A request may have 10,000 values and 1 MiB.
REQUEST_VALUES = 10_000
REQUEST_BYTES = 900 << 10
REQUEST_SECS = 20.0
# For each part of a file, and until the server has it on its disk.
FILE_SECS = 300.0
# The line of a record that the server already has from another folder.
PLACEHOLDER = b'{"step":0,"at":0,"values":{}}\n'


def read_run(path: Path) -> Json:
    """What `run.json` of a run's folder says."""
    try:
        run: Json = json.loads((path / RUN).read_text(encoding="utf-8"))
        return {"config": {}, "summary": {}, "state": "running", "reason": None} | run | {"id": str(run["id"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LockstepError(f"{path} cannot be read as the folder of a run: {error!r}") from error


def keep_file(path: Path, source: Path, name: str) -> None:
    """Copies a file into a run's folder, all or nothing. `name`: its path within the run."""
    target = path / FILES / name
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = path / f"{FILES}.{secrets.token_hex(8)}"
    try:
        shutil.copy2(source, partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


class Spool:
    """The folder of a run as the program that logs writes it, the only one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(path)
        self._file = open(path / RECORDS, "ab", buffering=0)
        # A process that was killed may have left a part of a line.
        self.records, self._size_bytes = 0, 0
        # The largest step of a record, -1 without one. The last record's may be smaller.
        self.last_step = -1
        with open(path / RECORDS, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    self.records, self._size_bytes = self.records + 1, self._size_bytes + len(line)
                    record = _record(line, f"{path / RECORDS}, line {self.records}")
                    self.last_step = max(self.last_step, int(record.get("step", -1)))
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

    def pad(self, records: int) -> None:
        """Lets the next record be the one after so many, which the server has."""
        self.append(PLACEHOLDER * max(records - self.records, 0))

    def write_run(self, text: str) -> None:
        """Replaces `run.json`, all or nothing."""
        new = self.path / f"{RUN}.new"
        new.write_text(text, encoding="utf-8")
        new.replace(self.path / RUN)

    def make_durable(self) -> None:
        """Waits until what was appended would survive a loss of power."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Lets another program continue the run."""
        self._file.close()
        self._lock.close()


def _record(line: bytes, where: str) -> Json:
    try:
        record: Json = {"values": {}} | json.loads(line)
        return record
    except (ValueError, TypeError) as error:
        raise LockstepError(f"{where}, is damaged ({error!r}): copy the folder again") from error


def _lock(path: Path) -> Any:
    """Holds the lock of a run's folder until it is closed or this process ends; forked processes do not have it."""
    file = open(path / "lock", "w")
    if os.name == "posix":
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.close()
            raise LockstepError(
                f"another process writes to {path}, and a run has one writer: let only one process call init, or give "
                "each its own id"
            ) from error
        except OSError:
            pass  # A file system without locks.
    return file


def is_free(path: Path) -> bool:
    """Whether no process writes to a run's folder."""
    with contextlib.suppress(LockstepError):
        _lock(path).close()
        return True
    return False


class Sender:
    """Sends what the folder of a run has and the server lacks.

    `make_durable`: called before records are sent. The server never has a record that a folder has lost, so a number
    never stands for two records.
    """

    def __init__(self, path: Path, client: Client, make_durable: Callable[[], None] = lambda: None) -> None:
        self.path = path
        self.id: str = read_run(path)["id"]
        self._client = client
        self._make_durable = make_durable
        self._file = open(path / RECORDS, "rb")
        # The number of the record at which the file stands.
        self._next = 1
        # What the server has of `run.json`; None before it was asked.
        self._known: Json | None = None
        # Size and time of each file that the server has, by its path; None before it was asked.
        self._files: dict[str, tuple[int, int]] | None = None
        # Records that the server has.
        self.acknowledged = 0

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def begin(self) -> tuple[Json, bool]:
        """Makes the run on the server, or lets one with this id continue: the job, and whether it is new."""
        run = read_run(self.path)
        new = {key: run[key] for key in ("id", "name", "project", "config", "tags", "notes") if run.get(key)}
        response = self._client._send_once("POST", "/runs", json=new, timeout=REQUEST_SECS)
        is_new = response.status_code == 201
        self._known = {"state": "running", "summary": {}} | ({"config": run["config"]} if is_new else {})
        self._seek(0 if is_new else self._ask())
        return response.json(), is_new

    def _connect(self) -> None:
        try:
            self.beat()
        except Problem as problem:
            if problem.status != 404:
                raise
            self.begin()
        else:
            # A run that is over stays so.
            self._known = {"state": "running"}
            self._seek(self._ask())

    def beat(self) -> None:
        """Tells the server that the run goes on."""
        self._change({})

    def send(self) -> bool:
        """Sends all that is new; whether there was anything. A repeat does no harm.

        Raises `Problem` or `Unreachable`; `LockstepError` if the folder is damaged.
        """
        if self._known is None:
            self._connect()
        # Where the run has ended, all records are there.
        run = read_run(self.path)
        self._seek(self.acknowledged)
        before = self._next
        self._send_records()
        has_changes, has_files = self._send_changes(run), self._send_files()
        return has_changes or has_files or self._next != before

    def _send_records(self) -> None:
        while lines := self._batch():
            self._make_durable()
            try:
                acknowledged = self._post(lines)
            except Problem as problem:
                # A server that was restored from a backup has fewer.
                if problem.status != 409 or (acknowledged := self._ask()) == self._next - 1:
                    raise
                self._known = {"state": "running"}
            self._seek(acknowledged)

    def _send_changes(self, run: Json) -> bool:
        has_sent, refused = False, None
        assert self._known is not None
        # Apart, so that one that is too large does not hold up the others.
        for keys in (("state", "reason"), ("summary",), ("config",)):
            changed = {key: run[key] for key in keys if run[key] is not None and run[key] != self._known.get(key)}
            if changed:
                try:
                    self._change(changed)
                except Problem as problem:
                    refused = refused or problem
                    continue
                self._known |= changed
                has_sent = True
        if refused:
            raise refused
        return has_sent

    def _send_files(self) -> bool:
        root = self.path / FILES
        if not root.exists():
            return False
        if self._files is None:
            listed = self._client._send_once("GET", f"/runs/{self.id}/files", timeout=REQUEST_SECS).json()["files"]
            self._files = {file["path"]: (file["size_bytes"], file["modified_ms"]) for file in listed}
        has_sent, refused = False, None
        for file in sorted(file for file in root.rglob("*") if file.is_file()):
            name, about = file.relative_to(root).as_posix(), file.stat()
            version = about.st_size, about.st_mtime_ns // 1_000_000
            if self._files.get(name) == version:
                continue
            query = {"path": name, "modified_ms": version[1]}
            headers = {"Content-Type": "application/octet-stream"}
            try:
                with open(file, "rb") as content:
                    self._client._send_once(
                        "PUT", f"/runs/{self.id}/file", query=query, content=content, headers=headers, timeout=FILE_SECS
                    )
            # One that is refused does not hold up the others.
            except Problem as problem:
                refused = refused or problem
                continue
            self._files[name] = version
            has_sent = True
            # What was logged since does not wait for the other files.
            self._send_records()
        if refused:
            raise refused
        return has_sent

    def _change(self, body: Json) -> None:
        self._client._send_once("PATCH", f"/runs/{self.id}", json=body, timeout=REQUEST_SECS)

    def _ask(self) -> int:
        """How many records the server has."""
        return self._post([], first=1)

    def _post(self, lines: list[bytes], first: int | None = None) -> int:
        body = b'{"first":%d,"records":[%b]}' % (first or self._next, b",".join(lines))
        headers = {"Content-Type": "application/json"}
        path = f"/runs/{self.id}/records"
        response = self._client._send_once("POST", path, content=body, headers=headers, timeout=REQUEST_SECS)
        return int(response.json()["acknowledged"])

    def _batch(self) -> list[bytes]:
        """The lines of the next request; the file stays where it is."""
        start = self._file.tell()
        lines: list[bytes] = []
        values = size_bytes = 0
        # Without its end, a line is being written.
        while (line := self._file.readline()).endswith(b"\n"):
            record = _record(line, f"{self.path / RECORDS}, line {self._next + len(lines)}")
            values += len(record["values"])
            size_bytes += len(line)
            if lines and (values > REQUEST_VALUES or size_bytes > REQUEST_BYTES):
                break
            lines.append(line)
        self._file.seek(start)
        return lines

    def _seek(self, acknowledged: int) -> None:
        """Lets the file stand after the records that the server has."""
        if acknowledged < self._next - 1:
            self._file.seek(0)
            self._next = 1
        while self._next <= acknowledged:
            start = self._file.tell()
            if not self._file.readline().endswith(b"\n"):
                self._file.seek(start)
                break
            self._next += 1
        self.acknowledged = acknowledged


def folders(path: Path) -> Iterator[Path]:
    """The folders of runs: this one, or those in it or in its `lockstep-runs`."""
    for pattern in (RUN, f"*/{RUN}", f"lockstep-runs/*/{RUN}"):
        for file in sorted(path.glob(pattern)):
            if (file.parent / RECORDS).exists():
                yield file.parent


def send_folder(path: Path, client: Client) -> Sender:
    """Sends what the server lacks of a run."""
    sender = Sender(path, client)
    with contextlib.closing(sender):
        sender.send()
    return sender
