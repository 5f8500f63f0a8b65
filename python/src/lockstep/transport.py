"""Requests, and the decorators by which both clients share one implementation of each call.

A call is an `async def`. Programs await the calls of an `AsyncClient`. A call of a `Client` awaits only `Sync`, which
blocks and never suspends, so the coroutine runs to its end in one step. `@call` and `@stream` make a call a method that
blocks in a `Client` and returns a coroutine in an `AsyncClient`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import time
import types
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import httpx

from .access import NO_TOKEN, Token
from .errors import Problem, Unreachable

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")
A = TypeVar("A")

# Seconds for which a request is retried.
RETRY_SECS = 60.0
# First and longest pause between retries, in seconds.
FIRST_PAUSE_SECS, LONGEST_PAUSE_SECS = 0.2, 5.0


class Sync:
    """Blocking input and output."""

    has_answered = False

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    async def exchange(self, **request: Any) -> httpx.Response:
        """Sends a request once. Raises `httpx.TransportError` if there is no response."""
        return self.http.request(**request)

    async def sleep(self, seconds: float) -> None:
        """Waits."""
        time.sleep(seconds)


class Async:
    """Input and output of asyncio, with the methods of `Sync`."""

    has_answered = False

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def exchange(self, **request: Any) -> httpx.Response:
        """Like `Sync.exchange`."""
        return await self.http.request(**request)

    async def sleep(self, seconds: float) -> None:
        """Waits."""
        await asyncio.sleep(seconds)


class Calls:
    """Base class of objects whose methods send requests."""

    _io: Sync | Async

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        *,
        may_repeat: bool = False,
        retry_secs: float = RETRY_SECS,
        **more: Any,
    ) -> httpx.Response:
        """Sends a request, and retries it for `retry_secs` seconds if that is safe. Returns the successful response.

        In `query`, lists become text with commas, and None is left out. Raises `Problem` for any other response, and
        `Unreachable` if there is no response.
        """
        params = {k: ",".join(map(str, v)) if isinstance(v, list | tuple) else v for k, v in (query or {}).items()}
        url = httpx.URL(path).copy_merge_params({k: v for k, v in params.items() if v is not None})
        gives_up_at = time.monotonic() + retry_secs
        next_pause = FIRST_PAUSE_SECS
        while True:
            pause_secs = next_pause
            failure: Problem | Unreachable
            try:
                response = await self._io.exchange(method=method, url=url, **more)
            except httpx.TransportError as error:
                address, why = error.request.url.copy_with(path="/", query=None), str(error) or type(error).__name__
                failure = Unreachable(
                    f"no server answers at {address} ({why}). Start one with `lockstep serve`. To use another server, "
                    "name its data directory on this machine (data_dir or LOCKSTEP_DATA_DIR), or for another machine "
                    "set LOCKSTEP_SERVER and LOCKSTEP_TOKEN"
                )
                was_not_sent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                # If no response has come from the URL yet, the URL is probably wrong, so the request is not retried.
                should_retry = self._io.has_answered and (may_repeat or was_not_sent)
            else:
                self._io.has_answered = True
                if response.is_success:
                    return response
                failure = _problem(response, self._io.http.auth)
                # These codes mean that the server has not processed the request. A status alone may come from a proxy.
                was_not_done = failure.code in ("too_many_requests", "unavailable")
                should_retry = was_not_done or (may_repeat and failure.status in (502, 503, 504))
                retry_after = response.headers.get("retry-after", "")
                pause_secs = max(next_pause, float(retry_after) if retry_after.isdigit() else 0.0)
            if not should_retry or time.monotonic() + pause_secs > gives_up_at:
                raise failure
            await self._io.sleep(pause_secs)
            next_pause = min(2 * next_pause, LONGEST_PAUSE_SECS)

    async def _get(self, path: str, **query: Any) -> Any:
        return (await self._send("GET", path, query, may_repeat=True)).json()

    async def _all(self, path: str, key: str, limit: int | None = None, **query: Any) -> list[dict[str, Any]]:
        """Reads a list page by page. Returns all elements, or the first `limit`."""
        elements: list[dict[str, Any]] = []
        while True:
            query["limit"] = 1000 if limit is None else min(limit - len(elements), 1000)
            page = await self._get(path, **query)
            elements += page[key]
            query["cursor"] = page["next_cursor"]
            if query["cursor"] is None or len(elements) == limit:
                return elements


def _problem(response: httpx.Response, auth: httpx.Auth | None) -> Problem:
    with contextlib.suppress(ValueError):
        if isinstance(body := response.json(), dict):
            if body.get("code") == "unauthorized":
                refused = "the token in {} was refused: replace it, or remove it there"
                hint = refused.format(auth.source) if isinstance(auth, Token) else NO_TOKEN
                body["detail"] = f"{body.get('detail')}\n{hint}"
            return Problem(response.status_code, body)
    return Problem(response.status_code, {"detail": f"{response.url} answered with status {response.status_code}"})


class SyncCalls(Calls):
    """Base class of objects whose calls block."""

    _io: Sync

    def _send_once(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Like `_send`, but blocks and does not retry."""
        return _run(self._send(method, path, retry_secs=0, **more))


class AsyncCalls(Calls):
    """Base class of objects whose calls are awaited."""

    _io: Async


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("a call of a Client was suspended")


def _iterate(items: AsyncIterator[T]) -> Iterator[T]:
    """Yields the items of an asynchronous generator that never suspends."""
    with contextlib.suppress(StopAsyncIteration):
        while True:
            yield _run(items.__anext__())  # type: ignore[arg-type]


class Method(Generic[P, S, A]):
    """A method with the result `S` in blocking classes, and `A` in asynchronous classes."""

    def __init__(self, function: Callable[..., A], block: Callable[[A], S]) -> None:
        self._function = function
        self._block = block
        self.__doc__ = function.__doc__

    @overload
    def __get__(self, instance: None, owner: Any) -> Callable[..., A]: ...
    @overload
    def __get__(self, instance: SyncCalls, owner: Any) -> Callable[P, S]: ...
    @overload
    def __get__(self, instance: AsyncCalls, owner: Any) -> Callable[P, A]: ...
    def __get__(self, instance: Calls | None, owner: Any) -> Callable[..., Any]:
        function: Callable[..., Any] = self._function
        if issubclass(owner, SyncCalls):
            function = functools.wraps(function)(lambda *args, **kwargs: self._block(self._function(*args, **kwargs)))
            if self._block is _iterate:
                # For `help`.
                signature = inspect.signature(self._function).replace(return_annotation="Iterator[Json]")
                function.__signature__ = signature  # type: ignore[attr-defined]
        return function if instance is None else types.MethodType(function, instance)


def call(function: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Method[P, T, Coroutine[Any, Any, T]]:
    """Decorates a method that returns a result."""
    return Method(function, _run)


def stream(
    function: Callable[Concatenate[Any, P], AsyncGenerator[T, None]],
) -> Method[P, Iterator[T], AsyncIterator[T]]:
    """Decorates a method that returns an iterator."""
    return Method(function, _iterate)
