"""Client of Lockstep, a self-hosted training service.

`submit` submits a job to the server that the command line would use. `Client` has a method for every
call of the REST interface, and `AsyncClient` has the same methods as coroutines. `init` and `log` report a training
run of this program to the server, as in `wandb`.
"""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any

from . import session, values
from .client import AsyncCheckpoint, AsyncClient, AsyncJob, Changes, Checkpoint, Client, Job, JobFile, Metrics, Series
from .errors import JobFailed, LockstepError, Problem, Unreachable
from .session import Settings, alert, define_metric, finish, init, log, log_artifact, login, save, sync, unwatch
from .session import watch as watch
from .tracking import AlertLevel, Run
from .values import Artifact, Media

# Stand-ins for wandb's media classes, so that programs written for wandb run. Lockstep does not store these values.
Audio, Histogram, Html, Image, Object3D, Table, Video = (
    type(name, (Media,), {}) for name in ("Audio", "Histogram", "Html", "Image", "Object3D", "Table", "Video")
)
plot = Media()  # `lockstep.plot.line(...)` and all other functions do nothing.

__all__ = ["AsyncCheckpoint", "AsyncClient", "AsyncJob", "Checkpoint", "Client", "Job", "Metrics", "Series"]
__all__ += ["JobFailed", "LockstepError", "Problem", "Unreachable", "submit"]
__all__ += ["AlertLevel", "Run", "Settings", "alert", "define_metric", "finish", "init", "log", "login"]
__all__ += ["log_artifact", "plot", "save", "sync", "unwatch", "watch"]
__all__ += ["Artifact", "Audio", "Histogram", "Html", "Image", "Object3D", "Table", "Video"]

# These names are not in `__all__`, because their values change, and `config` and `summary` need a run.
if TYPE_CHECKING:
    run: Run | None
    config: values.Config
    summary: values.Summary
    __version__: str
else:

    def __getattr__(name: str) -> Any:
        if name == "run":
            return session.current()
        if name in ("config", "summary"):
            return getattr(session.active(), name)
        if name == "__version__":
            return importlib.metadata.version("lockstep")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def submit(job: JobFile, /, *, set: Changes = None, **keys: Any) -> Job:
    """Submits a job with a new `Client`; see `Client.submit`."""
    return Client().submit(job, set=set, **keys)
