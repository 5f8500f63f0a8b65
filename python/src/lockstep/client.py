"""Clients, jobs and checkpoints."""

from __future__ import annotations

import hashlib
import importlib
import math
import os
import re
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

import httpx

from . import access, job_file
from .errors import JobFailed, LockstepError
from .output import say
from .progress import Progress
from .transport import Async, AsyncCalls, Calls, Sync, SyncCalls, call, stream
from .values import Json

PathLike = str | os.PathLike[str]
JobFile = PathLike | Mapping[str, Any]
Changes = Mapping[str, Any] | None
Weights = Literal["model", "ema"]

# Duration of one request that waits for a job's end, in seconds; with a line of progress, which changes after each
# request, the duration is shorter.
WAIT_SECS, WAIT_SECS_WITH_PROGRESS = 60, 1
# Size of the pieces in which a file is downloaded. After a lost connection, at most one piece is downloaded again.
PIECE_BYTES = 16 << 20
# Size of the pieces in which a file is uploaded: the maximum that the server accepts.
UPLOAD_BYTES = 8 << 20


@dataclass(frozen=True)
class Series:
    """A metric of one rank: lists of equal length. A value that was not finite is NaN."""

    steps: list[int]
    values: list[float]


class Metrics(dict[int, Series]):
    """A metric of a job, by rank. `exact`: whether the values are of single steps, and not means of ranges of steps."""

    def __init__(self, response: Json) -> None:
        self.exact: bool = response["exact"]
        points: dict[int, dict[int, float]] = {}
        for series in sorted(response["series"], key=lambda series: int(series["attempt"])):
            steps, rank = series["steps"], series["rank"]
            # An attempt repeats the steps after the checkpoint from which it continued.
            kept = {step: value for step, value in points.get(rank, {}).items() if not steps or step < steps[0]}
            values = (math.nan if value is None else value for value in series["mean"])
            points[rank] = kept | dict(zip(steps, values, strict=True))
        super().__init__((rank, Series(list(series), list(series.values()))) for rank, series in sorted(points.items()))

    def frame(self) -> Any:
        """A `pandas.DataFrame`: a row for each step, a column for each rank. Raises ImportError without pandas."""
        pandas = importlib.import_module("pandas")
        columns = {rank: pandas.Series(series.values, index=series.steps) for rank, series in self.items()}
        return pandas.DataFrame(columns).rename_axis(index="step", columns="rank")


class _Resource(Calls):
    def __init__(self, io: Sync | Async, data: Json) -> None:
        self._io = io
        self.data = data

    @property
    def id(self) -> str:
        """The id."""
        return str(self.data["id"])

    @property
    def step(self) -> int:
        """Number of completed optimizer steps when `data` was read."""
        return int(self.data["step"])

    async def _save(
        self, source: str, query: Json | None, name: str, path: PathLike | None, size_bytes: int | None = None
    ) -> Path:
        """Downloads a file as `path`, a file or a folder (default: `name` here), and returns the file's path.

        `size_bytes`: the file's size, or None if the responses have the size and a checksum.
        """
        target = Path(path or name)
        target = target / name if target.is_dir() else target
        partial = target.with_name(target.name + ".part")
        is_checked, end = size_bytes is None, 1 if size_bytes is None else size_bytes
        try:
            with open(partial, "wb") as file:
                digest = hashlib.sha256()
                while file.tell() < end:
                    headers = {"Range": f"bytes={file.tell()}-{file.tell() + PIECE_BYTES - 1}"}
                    piece = await self._send("GET", source, query, may_repeat=True, headers=headers)
                    if is_checked:
                        end = int(piece.headers["content-range"].rpartition("/")[2])
                    digest.update(piece.content)
                    file.write(piece.content)
            if is_checked and digest.hexdigest() != piece.headers["x-checksum-sha256"]:
                raise LockstepError(f"{target} is damaged: its SHA-256 is not the checkpoint's; download it again")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        return target


class CheckpointCalls(_Resource):
    """The calls of `Checkpoint` and `AsyncCheckpoint`."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}, step {self.step}>"

    @call
    async def download(self, path: PathLike | None = None, *, weights: Weights = "model") -> Path:
        """Downloads the weights, a safetensors file with torchvision's names, and returns the file's path.

        `path`: a file or a folder (default: `model.safetensors` here). `weights`: `ema` for the moving average of jobs
        with `train.ema_decay`. Raises `Problem` if the server has no such file, and `LockstepError` if the file was
        damaged during the download. A failed download leaves no file.
        """
        name = f"{weights}.safetensors"
        return await self._save(f"/checkpoints/{self.id}/{name}", None, name, path)


C = TypeVar("C", bound=CheckpointCalls)
J = TypeVar("J", bound="JobCalls[Any, Any]")


class JobCalls(_Resource, Generic[J, C]):
    """The calls of `Job` and `AsyncJob`."""

    _checkpoint_type: type[C]

    def __repr__(self) -> str:
        steps = f"step {self.step} of {self.data['total_steps'] or '?'}"
        return f"<{type(self).__name__} {self.id} {self.name!r}, {self.state}, {steps}>"

    @property
    def name(self) -> str:
        """The name. Other jobs may have the same name."""
        return str(self.data["name"])

    @property
    def state(self) -> str:
        """The state when `data` was read, such as `queued`, `running` or `succeeded`."""
        return str(self.data["state"])

    @property
    def is_over(self) -> bool:
        """Whether the job had succeeded, failed or been cancelled when `data` was read."""
        return self.state in ("succeeded", "failed", "cancelled")

    async def _read(self, **query: Any) -> None:
        self.data = await self._get(f"/jobs/{self.id}", **query)

    async def _act(self, action: str) -> None:
        self.data = (await self._send("POST", f"/jobs/{self.id}/{action}")).json()

    @call
    async def refresh(self) -> None:
        """Reads `data` again. Raises `Problem` (`not_found`) if the job was deleted."""
        await self._read()

    @call
    async def wait(self, timeout: float = math.inf, *, progress: bool | None = None) -> None:
        """Waits until the job has ended.

        `timeout`: seconds, rounded up. `progress`: whether to show a line of progress (default: on a terminal and in a
        notebook). Raises `JobFailed` if the job fails or is cancelled, and `TimeoutError` if it has not ended in time;
        the job then continues.
        """
        ends_at = time.monotonic() + timeout
        line = Progress(progress)
        wait_secs = WAIT_SECS_WITH_PROGRESS if line.is_shown else WAIT_SECS
        try:
            line.show(self.data)
            while not self.is_over:
                if (left := ends_at - time.monotonic()) <= 0:
                    raise TimeoutError(f"job {self.id} is {self.state} after {timeout} seconds")
                await self._read(wait=math.ceil(min(left, wait_secs)))
                line.show(self.data)
        finally:
            line.close()
        if self.state != "succeeded":
            raise JobFailed(self.data)

    @call
    async def cancel(self) -> None:
        """Cancels the job and keeps its checkpoints. Raises `Problem` if the job has ended."""
        await self._act("cancel")

    @call
    async def pause(self) -> None:
        """Pauses the job: it writes a checkpoint and frees its slots. Raises `Problem` unless the job waits or runs."""
        await self._act("pause")

    @call
    async def resume(self) -> None:
        """Continues a paused job from its newest checkpoint. Raises `Problem` if the job is not paused."""
        await self._act("resume")

    @call
    async def retry(self) -> None:
        """Continues a failed or cancelled job from its newest checkpoint. Raises `Problem` for any other job."""
        await self._act("retry")

    @call
    async def delete(self) -> None:
        """Deletes the job with its history, log and checkpoints. Raises `Problem` if the job has not ended."""
        await self._send("DELETE", f"/jobs/{self.id}")

    @call
    async def fork(self, /, checkpoint: str | int = "latest", *, set: Changes = None, **keys: Any) -> J:
        """Submits a new job that continues from a checkpoint of this job, with other settings.

        `set`, `keys`: see `Client.submit`. Raises `Problem` if a setting is wrong or the checkpoint does not exist.
        """
        body = {"checkpoint": str(checkpoint), "set": await _changes(self, set, keys)}
        forked: J = type(self)(self._io, await _submit(self, f"/jobs/{self.id}/fork", body))  # type: ignore[assignment]
        return forked

    @call
    async def metrics(self, name: str, /, **query: Any) -> Metrics:
        """Returns a metric by rank: `job.metrics("loss")[0].values` is the loss of rank 0.

        `query`: parameters of `GET /jobs/{id}/metrics`, such as `ranks=[0, 1]` or `points=500` (default: 10000). A
        metric that no rank has reported is empty. Raises `Problem` if a parameter is wrong, and `LockstepError` if the
        program of a run has not logged the metric.
        """
        found = Metrics(await self._get(f"/jobs/{self.id}/metrics", name=name, **{"points": 10000} | query))
        if not found and self.data.get("external"):
            listed = await self._get(f"/jobs/{self.id}/metrics", points=1)
            names = sorted({series["name"] for series in listed["series"]})
            if name not in names:
                raise LockstepError(f"job {self.id} has no metric {name!r}; its metrics: {', '.join(names) or 'none'}")
        return found

    @call
    async def checkpoints(self) -> list[C]:
        """Returns the checkpoints, newest first."""
        listed = await self._all(f"/jobs/{self.id}/checkpoints", "checkpoints")
        return [self._checkpoint_type(self._io, data) for data in listed]

    async def _choose(self, which: str | int) -> Json:
        listed = await self._all(f"/jobs/{self.id}/checkpoints", "checkpoints")
        # A job without validation has no best checkpoint.
        best = [data for data in listed if data["best"]] or listed
        matching = [data for data in listed if str(which) in (data["id"], str(data["step"]))]
        found = {"best": best, "latest": listed}.get(str(which), matching)
        if not found and self.data.get("external"):
            jobs = await self._all("/jobs", "jobs", name=self.name)
            trained = [job["id"] for job in jobs if job["name"] == self.name and not job.get("external")]
            newest = f"; the newest job of this name that Lockstep trains is {trained[0]}" if trained else ""
            raise LockstepError(f"job {self.id} is a run from elsewhere and has no checkpoints{newest}")
        if not found:
            steps = ", ".join(str(data["step"]) for data in listed) or "none"
            raise LockstepError(f"job {self.id} has no checkpoint {which}; steps with a checkpoint: {steps}")
        return found[0]

    @call
    async def checkpoint(self, which: str | int = "best") -> C:
        """Returns a checkpoint. `which`: `best`, `latest`, a step or an id. Raises `LockstepError` if none matches."""
        return self._checkpoint_type(self._io, await self._choose(which))

    @call
    async def predict(
        self, picture: PathLike | bytes, *, checkpoint: str | int = "best", weights: Weights = "model"
    ) -> dict[str, float]:
        """Classifies one picture. Returns the probability (0 to 1) of every class, the most probable class first.

        `picture`: the path or the bytes of a JPEG, PNG, WebP, GIF, BMP or TIFF file. `checkpoint`: see `checkpoint`.
        `weights`: see `Checkpoint.download`. Raises `OSError` if the file cannot be read, and `LockstepError` if the
        file is not a picture or the checkpoint does not exist.
        """
        if isinstance(picture, list | tuple):
            raise LockstepError("predict classifies one picture: call it for each picture")
        content = picture if isinstance(picture, bytes) else Path(picture).read_bytes()
        path = f"/checkpoints/{(await self._choose(checkpoint))['id']}/predict"
        headers = {"Content-Type": "application/octet-stream"}
        query = {"weights": weights}
        response = await self._send("POST", path, query, may_repeat=True, content=content, headers=headers)
        [prediction] = response.json()["predictions"]
        if prediction.get("error"):
            name = "the picture" if isinstance(picture, bytes) else os.fspath(picture)
            raise LockstepError(f"{name} {prediction['error']}")
        return {entry["class"]: entry["probability"] for entry in prediction["classes"]}

    @call
    async def evaluation(self, /, *, checkpoint: str | int = "best", **query: Any) -> Json:
        """Evaluates a checkpoint on the job's validation pictures or on another dataset, and waits for the result.

        `query`: parameters of `GET /jobs/{id}/evaluation` (`dataset`, `weights`). Returns `accuracy` (0 to 1), `loss`,
        `classes`, `confusion` (number of pictures: `[label][predicted]`) and more. Raises `Problem` if the
        evaluation fails.
        """
        query["checkpoint"] = (await self._choose(checkpoint))["id"]
        while True:
            response = await self._send("GET", f"/jobs/{self.id}/evaluation", query, may_repeat=True)
            if response.status_code != 202:
                return dict(response.json())

    @call
    async def files(self) -> list[Json]:
        """Returns the files that the program of a run has saved: `path`, `size_bytes`, `modified_ms`.

        Raises `Problem` for a job that the server's own ranks train.
        """
        return list((await self._get(f"/runs/{self.id}/files"))["files"])

    @call
    async def download_file(self, name: str, path: PathLike | None = None) -> Path:
        """Downloads a file that the program of a run has saved, and returns the path of the copy.

        `name`: the file's path within the run. `path`: a file or a folder (default: the file's name here). Raises
        `LockstepError` if the file does not exist. A failed download leaves no file.
        """
        sizes = {file["path"]: file["size_bytes"] for file in (await self._get(f"/runs/{self.id}/files"))["files"]}
        if name not in sizes:
            raise LockstepError(f"job {self.id} has no file {name!r}; its files: {', '.join(sizes) or 'none'}")
        file_name = name.rpartition("/")[2]
        return await self._save(f"/runs/{self.id}/file", {"path": name}, file_name, path, sizes[name])

    async def _follow(self, key: str, path: str, follow: bool, query: Json) -> AsyncGenerator[Json, None]:
        """Yields the elements of a growing list, in order of `seq`."""
        newest = 0
        while True:
            was_over = self.is_over
            page = await self._get(f"/jobs/{self.id}/{path}", **query)
            # The last page has no cursor, so the next request reads this page again, with the elements added since.
            for element in [element for element in page[key] if element["seq"] > newest]:
                newest = element["seq"]
                yield element
            if page["next_cursor"] is not None:
                query["cursor"] = page["next_cursor"]
            elif was_over or not follow:
                return
            else:
                await self._io.sleep(1)
                await self._read()

    @stream
    def logs(self, /, *, follow: bool = False, **query: Any) -> AsyncGenerator[Json, None]:
        """Yields log lines, oldest first: `at`, `rank`, `attempt`, `number`, `text`.

        `follow`: continue until the job has ended, with two requests a second. `query`: parameters of
        `GET /jobs/{id}/logs`, such as `rank=0` or `q="nan"`. Raises `Problem` if a parameter is wrong.
        """
        return self._follow("lines", "logs", follow, query)

    @stream
    def events(self, *types: str, follow: bool = False) -> AsyncGenerator[Json, None]:
        """Yields events in order: `seq`, `at`, `type` and the fields of the type.

        `types`: types to include, such as `state`, `metrics`, `checkpoint`, `evaluation`. `follow`: see `logs`.
        """
        return self._follow("events", "events", follow, {"type": types or None})


async def _submit(calls: Calls, path: str, body: Json) -> Json:
    """Submits a job and prints warnings. The idempotency key prevents a second job if the request is repeated."""
    headers = {"Idempotency-Key": uuid.uuid4().hex}
    job: Json = (await calls._send("POST", path, may_repeat=True, json=body, headers=headers)).json()
    for warning in job.get("warnings") or []:
        say(f"warning: {warning}")
    return job


async def _changes(calls: Calls, changes: Changes, keys: Json) -> Json:
    """Combines `set` and the keywords of a call into one mapping of paths."""
    paths = dict(changes or {})
    if keys:
        schemas = (await calls._get("/openapi.json"))["components"]["schemas"]
        paths |= {job_file.path_of(key, schemas): value for key, value in keys.items()}
    return paths


class ClientCalls(Calls, Generic[J]):
    """The calls of `Client` and `AsyncClient`."""

    _job_type: type[J]

    @call
    async def submit(self, job: JobFile, /, *, set: Changes = None, **keys: Any) -> J:
        """Submits a job.

        `job`: a TOML file, or its content as a mapping. `set`: keys to change, by path (`{"train.lr": 0.1}`) or nested.
        `keys`: keys that only one table has (`lr=0.1` is `train.lr`). None means a key's default. A folder as
        `data.dataset` is registered under its name unless it is registered already. Warnings of the server are written
        to standard error.

        Raises `Problem` with every mistake in `errors`; `LockstepError` if the file cannot be read or a key is
        ambiguous.
        """
        spec = job_file.read(job)
        job_file.change(spec, await _changes(self, set, keys))
        await self._resolve_paths(spec)
        return self._job_type(self._io, await _submit(self, "/jobs", spec))

    async def _resolve_paths(self, spec: Json) -> None:
        """Makes paths absolute, and replaces the path of a dataset by the dataset's name."""
        model, data = spec.get("model"), spec.get("data")
        if isinstance(model, dict) and os.path.exists(pretrained := str(model.get("pretrained") or "")):
            model["pretrained"] = os.path.realpath(pretrained)
        if isinstance(data, dict) and os.sep in str(data.get("dataset")):
            path = os.path.realpath(data["dataset"])
            names = [known["name"] for known in await self._all("/datasets", "datasets") if known["path"] == path]
            if not names and os.path.isdir(path):
                names = [re.sub(r"[^A-Za-z0-9_.-]", "-", os.path.basename(path)).lstrip(".")[:100] or "dataset"]
                await self._inspect("/datasets", {"name": names[0], "path": path, "private": bool(spec.get("private"))})
            data["dataset"] = names[0] if names else path

    @call
    async def job(self, name: str) -> J:
        """Returns the job with this id, or the newest job with this name.

        Raises `Problem` (`not_found`) for an id without a job, `LockstepError` for a name that no job has.
        """
        ids = [name]
        if not re.fullmatch("j[0-9a-z]{26}", name):
            listed = await self._all("/jobs", "jobs", name=name, fields="id,name")
            ids = [data["id"] for data in listed if data["name"] == name]
        if not ids:
            raise LockstepError(f"no job is called {name}; jobs() returns all jobs")
        if len(ids) > 1:
            say(f"{len(ids)} jobs are called {name}; the newest is taken: {ids[0]}")
        return self._job_type(self._io, await self._get(f"/jobs/{ids[0]}"))

    @call
    async def jobs(self, /, limit: int | None = None, **query: Any) -> list[J]:
        """Returns jobs, newest first: at most `limit`, or all.

        `query`: parameters of `GET /jobs`, such as `state="running"`, `where="train.lr>0.1"`, `tag=["a", "b"]` or
        `sort="-best"`. Raises `Problem` if a parameter is wrong.
        """
        return [self._job_type(self._io, data) for data in await self._all("/jobs", "jobs", limit, **query)]

    @call
    async def datasets(self) -> list[Json]:
        """Returns the registered datasets: `name`, `path`, `info` (classes, numbers of pictures) and more."""
        return await self._all("/datasets", "datasets")

    async def _inspect(self, path: str, body: Json | None = None) -> Json:
        while (response := await self._send("POST", path, json=body)).status_code == 202:
            pass  # The server responds with 202 after two minutes if the inspection has not ended.
        return dict(response.json())

    @call
    async def register(self, name: str, path: PathLike, *, private: bool = False) -> Json:
        """Registers a folder of the machines that train as a dataset. Returns the dataset in the format of `datasets`.

        Waits for the inspection of the files, which takes minutes for millions of pictures. `private`: only the
        dataset's owner and admins see it. Raises `Problem` if the name is taken or the folder is not a dataset.
        """
        return await self._inspect("/datasets", {"name": name, "path": os.path.abspath(path), "private": private})

    @call
    async def upload(self, name: str, file: PathLike, *, private: bool = False) -> Json:
        """Uploads a zip file of pictures and registers it as a dataset. Returns the dataset as `datasets` does.

        The file has a folder for each class, or `train/<class>` and `val/<class>`. `private`: only the dataset's
        owner and admins see it. Raises `Problem` if the name is taken or the file is not a zip file of pictures.
        """
        path, offset = f"/datasets/uploads/{quote(name, safe='')}", 0
        headers = {"content-type": "application/octet-stream"}
        with open(file, "rb") as archive:
            while True:
                piece, query = archive.read(UPLOAD_BYTES), {"offset": offset}
                await self._send("PUT", f"{path}/archive", query, may_repeat=True, content=piece, headers=headers)
                offset += len(piece)
                if len(piece) < UPLOAD_BYTES:
                    break
        return await self._inspect(path, {"private": private})

    @call
    async def register_bundled(self) -> Json:
        """Registers the program's own pictures as `fashion-mnist`. Raises `Problem` (`name_taken`)."""
        return await self._inspect("/datasets/bundled")

    @call
    async def agents(self) -> list[Json]:
        """Returns the machines: `name`, `online`, `slots`, `machine`, `warnings` and more."""
        return await self._all("/agents", "agents")

    @call
    async def queue(self) -> list[Json]:
        """Returns the waiting jobs in the order in which they get slots: `place`, `id`, `name`, `reason` and more."""
        return await self._all("/queue", "jobs")

    @call
    async def request(self, method: str, path: str, /, *, json: Any = None, **query: Any) -> Any:
        """Sends any other request of the REST interface: `request("GET", "/projects")`. `path` is below `/api/v1`.

        `query`: parameters of the URL, in addition to those in `path`; lists become text with commas. Returns the
        response's JSON, the bytes of any other content, or None without a body. Raises `Problem`.
        """
        response = await self._send(method, path, query, may_repeat=method == "GET", json=json)
        if not response.content:
            return None
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return response.json() if is_json else response.content


class Checkpoint(CheckpointCalls, SyncCalls):
    """A checkpoint of a job. `data` is the checkpoint's JSON (docs/reference/rest.md)."""


class Job(JobCalls["Job", Checkpoint], SyncCalls):
    """A job. `data` is the job's JSON (docs/reference/rest.md), as last read by `refresh`, `wait` or an action."""

    _checkpoint_type = Checkpoint


class Client(ClientCalls[Job], SyncCalls):
    """A connection to a server, to be closed by `close` or `with`.

    `url`: the server's URL (default: LOCKSTEP_SERVER, the URL that a server on this machine has recorded in
    `data_dir`, or http://127.0.0.1:7070). `token`: the access token (default: from the file that
    LOCKSTEP_TOKEN_FILE names, LOCKSTEP_TOKEN, or, for a server on this machine, the file `token` in `data_dir`).
    `data_dir`: the data directory of a server on this machine (default: LOCKSTEP_DATA_DIR, or `lockstep-data`).
    LOCKSTEP_CA_FILE names certificates to trust in addition to the system's.

    Every call raises `Problem` if the server refuses the call, and `Unreachable` if no server responds. Once the server
    has responded to a request, requests that can be repeated safely are retried for a minute.
    """

    _job_type = Job

    def __init__(
        self, url: str | None = None, token: str | None = None, *, data_dir: PathLike | None = None
    ) -> None:
        self._io = Sync(httpx.Client(**access.httpx_arguments(url, token, data_dir)))

    def close(self) -> None:
        """Closes the connections."""
        self._io.http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncCheckpoint(CheckpointCalls, AsyncCalls):
    """Like `Checkpoint`, with calls that are awaited."""


class AsyncJob(JobCalls["AsyncJob", AsyncCheckpoint], AsyncCalls):
    """Like `Job`, with calls that are awaited; `logs` and `events` are asynchronous iterators."""

    _checkpoint_type = AsyncCheckpoint


class AsyncClient(ClientCalls[AsyncJob], AsyncCalls):
    """Like `Client`, with calls that are awaited (asyncio); to be closed by `aclose` or `async with`."""

    _job_type = AsyncJob

    def __init__(
        self, url: str | None = None, token: str | None = None, *, data_dir: PathLike | None = None
    ) -> None:
        self._io = Async(httpx.AsyncClient(**access.httpx_arguments(url, token, data_dir)))

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._io.http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()
