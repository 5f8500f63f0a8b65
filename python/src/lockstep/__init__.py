"""Client of Lockstep, a self-hosted training service.

`submit` submits a job to the server that the command line would use. `Client` has every call; `AsyncClient` has the
same calls to be awaited.
"""

from __future__ import annotations

from typing import Any

from .client import AsyncCheckpoint, AsyncClient, AsyncJob, Changes, Checkpoint, Client, Job, JobFile, Metrics, Series
from .errors import JobFailed, LockstepError, Problem, Unreachable

__all__ = ["AsyncCheckpoint", "AsyncClient", "AsyncJob", "Checkpoint", "Client", "Job", "Metrics", "Series"]
__all__ += ["JobFailed", "LockstepError", "Problem", "Unreachable", "submit"]


def submit(job: JobFile, /, *, set: Changes = None, **keys: Any) -> Job:
    """Submits a job with a new `Client`; see `Client.submit`."""
    return Client().submit(job, set=set, **keys)
