"""A service that answers from a list, and both clients behind one face."""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeAlias

import httpx
import pytest

from optpipe.client import AsyncClient, Client

Part: TypeAlias = "bytes | Exception | Callable[[], bytes]"

BASE = "http://planner:8000/base"
JOB = {
    "id": "a" * 32,
    "state": "running",
    "has_schedule": False,
    "problem_hash": "sha256:0",
    "objective": "makespan",
    "options": {"time_limit_s": 60.0},
    "created_at": "2026-01-31T12:00:00Z",
    "a_field_of_the_future": 1,
}


class Script:
    """Answers requests from a list, and remembers them; an exception in the list is raised."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def paths(self) -> list[str]:
        """What was asked for, below the address."""
        return [request.url.path.removeprefix("/base/v1/") for request in self.requests]


def told(**changes: Any) -> httpx.Response:
    return httpx.Response(200, json=JOB | changes)


def fault(
    status: int, code: str, headers: dict[str, str] | None = None, **extra: Any
) -> httpx.Response:
    headers = {"Content-Type": "application/problem+json"} | (headers or {})
    body = {"status": status, "code": code, "detail": "the reason", **extra}
    return httpx.Response(status, headers=headers, content=json.dumps(body))


def event(number: int, kind: str, **fields: Any) -> bytes:
    """One server-sent event, as the service writes it."""
    at = {"number": number, "kind": kind, "at": "2026-01-31T12:00:00Z"}
    return f"event: {kind}\nid: {number}\ndata: {json.dumps(at | fields)}\n\n".encode()


class _Parts(httpx.SyncByteStream, httpx.AsyncByteStream):
    def __init__(self, parts: tuple[Part, ...]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[bytes]:
        for part in self._parts:
            if isinstance(part, Exception):
                raise part
            yield part() if callable(part) else part

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self:
            yield part


def stream(*parts: Part) -> httpx.Response:
    """A stream of events that ends, or breaks with an exception; a part may be made when due."""
    kind = {"Content-Type": "text/event-stream; charset=utf-8"}
    return httpx.Response(200, headers=kind, stream=_Parts(parts))


def plain(
    script: Callable[[httpx.Request], httpx.Response] | None, base: str = BASE, **arguments: Any
) -> Any:
    """The client for plain code."""
    transport = None if script is None else httpx.MockTransport(script)
    return Client(base, transport=transport, **arguments)


def waited(
    script: Callable[[httpx.Request], httpx.Response] | None, base: str = BASE, **arguments: Any
) -> Any:
    """The client for async code, each of whose methods is waited for."""
    transport = None if script is None else httpx.MockTransport(script)
    client = AsyncClient(base, transport=transport, **arguments)
    return _Waited(client, asyncio.new_event_loop())


class _Waited:
    """Waits for whatever an asynchronous object promises."""

    def __init__(self, promising: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._promising = promising
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._promising, name)
        return self._calling(found) if callable(found) else found

    def close(self) -> None:
        self._loop.run_until_complete(self._promising.aclose())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _calling(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            promise = method(*args, **kwargs)
            if inspect.isasyncgen(promise):
                return self._each(promise)
            if not inspect.iscoroutine(promise):
                return self._face(promise)
            return self._face(self._loop.run_until_complete(promise))

        return call

    def _face(self, result: Any) -> Any:
        is_handle = type(result).__name__.startswith("Async")
        return _Waited(result, self._loop) if is_handle else result

    def _each(self, promises: Any) -> Iterator[Any]:
        try:
            while True:
                try:
                    yield self._loop.run_until_complete(anext(promises))
                except StopAsyncIteration:
                    return
        finally:
            self._loop.run_until_complete(promises.aclose())


def noted_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let no client pause; return the list of the pauses, in seconds, that it would have made."""
    pauses: list[float] = []

    async def note(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("optpipe.client.client.time.sleep", pauses.append)
    monkeypatch.setattr("optpipe.client.async_client.asyncio.sleep", note)
    return pauses
