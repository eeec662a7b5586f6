"""Who waits for a change of a job hears of it: from the engine's threads to the event loop."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Changes"]


class Changes:
    """Wakes the waiting requests of this server; made, and waited on, in its event loop.

    Changes made by another server are not heard of: whoever waits looks again now and then
    (`optpipe_api.desk.watch` does so for jobs).
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, set[asyncio.Event]] = defaultdict(set)
        self._listeners: list[Callable[[str | None], None]] = []
        self.is_closed = False

    def publish(self, job_id: str) -> None:
        """Say that a job has changed; from any thread."""
        self._call(self._wake, job_id)

    def close(self) -> None:
        """Let every waiter go, now and from now on; from any thread or signal handler."""
        self._call(self._wake_all)

    def listen(self, listener: Callable[[str | None], None]) -> None:
        """Call somebody, in the event loop, with the id of each that changes; None at the end."""
        self._listeners.append(listener)

    @contextmanager
    def subscribed(self, job_id: str) -> Iterator[asyncio.Event]:
        """An event that is set at the next change; look at the job after entering, not before."""
        event = asyncio.Event()
        if self.is_closed:
            event.set()
        self._waiting[job_id].add(event)
        try:
            yield event
        finally:
            self._waiting[job_id].discard(event)
            if not self._waiting[job_id]:
                del self._waiting[job_id]

    def _call(self, function: object, *arguments: object) -> None:
        if callable(function) and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _wake(self, job_id: str) -> None:
        for event in self._waiting.get(job_id, ()):
            event.set()
        for listener in self._listeners:
            listener(job_id)

    def _wake_all(self) -> None:
        self.is_closed = True
        for events in self._waiting.values():
            for event in events:
                event.set()
        for listener in self._listeners:
            listener(None)
