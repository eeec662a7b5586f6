"""Turns of callers at a few places: a share for each caller, and submissions before reads."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

__all__ = ["Turns"]


@dataclass(eq=False, slots=True)
class _Call:
    owner: str
    is_read: bool
    weight: int
    place: asyncio.Future[None]


class Turns:
    """Lets ``max_running`` calls run at a time, and others wait; for one event loop.

    Submissions run before reads. Within both, the next call belongs to the caller with the fewest
    running calls, and then to the call that came first. Submissions and reads have a line each. A
    full line still takes a caller with less than its share of it. The share is ``max_waiting``
    divided by the number of callers in the line.

    ``max_waiting``: the weight of all calls of one line. ``refuse``: returns the error for a call
    that finds no place, from the number of calls that wait.
    """

    def __init__(
        self, max_running: int, max_waiting: int, refuse: Callable[[int], Exception]
    ) -> None:
        self._num_free = max_running
        self._max_waiting = max_waiting
        self._refuse = refuse
        self._waiting: list[_Call] = []
        self._running: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        """The number of calls that wait."""
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, owner: str, *, is_read: bool, weight: int = 1) -> AsyncIterator[None]:
        """Wait for a place, and hold it until the block ends; raise the error of ``refuse``."""
        if self._num_free == 0:
            await self._wait(owner, is_read, weight)
        else:
            self._num_free -= 1
        self._running[owner] += 1
        try:
            yield
        finally:
            self._running[owner] -= 1
            self._running += Counter()  # without callers that run nothing
            self._leave()

    async def _wait(self, owner: str, is_read: bool, weight: int) -> None:
        line = Counter({owner: weight})
        for other in self._waiting:
            if other.is_read is is_read:
                line[other.owner] += other.weight
        limit = self._max_waiting
        if line.total() > limit and line[owner] > limit // len(line):
            raise self._refuse(self.num_waiting)
        call = _Call(owner, is_read, weight, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        try:
            await call.place
        except asyncio.CancelledError:
            if call in self._waiting:
                self._waiting.remove(call)
            else:
                self._leave()
            raise

    def _leave(self) -> None:
        """Give a place to the next call."""
        # A cancelled call removes itself when it runs next.
        waiting = [call for call in self._waiting if not call.place.cancelled()]
        if not waiting:
            self._num_free += 1
            return
        call = min(waiting, key=lambda one: (one.is_read, self._running[one.owner]))
        self._waiting.remove(call)
        call.place.set_result(None)
