"""The errors that calls raise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class LockstepError(Exception):
    """Base class of the errors of this package."""


class Unreachable(LockstepError):
    """No server responded, or the connection was lost before the response."""


class RunDeleted(LockstepError):
    """The server does not have a run that was sent before."""


def _key(pointer: str) -> str:
    """Returns the key that a JSON pointer names, with a colon (`train.lr: ` for `/train/lr`); "" for the document."""
    key = pointer.lstrip("/").replace("/", ".").replace("~1", "/").replace("~0", "~")
    return f"{key}: " if key else ""


class Problem(LockstepError):
    """The server refused a request (RFC 9457).

    Attributes: `status` (the HTTP status), `code` (such as `not_found`; empty if another program responded), `type`,
    `title`, `detail` (what is wrong and what would be right), `errors` (every mistake: `pointer`, a JSON pointer, and
    `detail`), `state` (the job's state, if it forbids the request).
    """

    def __init__(self, status: int, body: Mapping[str, Any]) -> None:
        self.status = status
        self.code: str = body.get("code") or ""
        self.type: str = body.get("type") or "about:blank"
        self.title: str = body.get("title") or ""
        self.detail: str = body.get("detail") or self.title or f"HTTP status {status}"
        self.errors: list[dict[str, str]] = body.get("errors") or []
        self.state: str | None = body.get("state")
        mistakes = [f"{_key(mistake['pointer'])}{mistake['detail']}" for mistake in self.errors]
        super().__init__("\n".join(mistakes) or self.detail)


class JobFailed(LockstepError):
    """A job failed or was cancelled while a call waited for the job's end.

    Attributes: `job` (the job's id), `state` (`failed` or `cancelled`), `reason` (a sentence), `code` (the code of the
    reason, such as `diverged`; None for a cancelled job).
    """

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.job: str = job["id"]
        self.state: str = job["state"]
        self.reason: str | None = job.get("reason")
        self.code: str | None = (job.get("failure") or {}).get("code")
        super().__init__(f"job {self.job} {self.state}" + (f": {self.reason}" if self.reason else ""))
