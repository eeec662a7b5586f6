"""Few at a time: what hundreds want in the same moment does not hold up whatever else is due.

The event loop does all that is ready before it looks up again. Two hundred followers that come
together, or hear the same news, are a tenth of a second of work, and submissions that share a
commit are all ready at once; here they are a few for each turn of the loop, in the order in which
they came.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["InTurns", "Turns", "wake"]

_EACH_TURN = 8


class InTurns:
    """Lets a few requests begin in each turn of the event loop."""

    def __init__(self, app: ASGIApp, *, turns: Turns) -> None:
        self._app = app
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Begin a request when it is its turn."""
        if scope["type"] == "http":
            await self._turns.mine()
        await self._app(scope, receive, send)


class Turns:
    """Whose turn it is: those who come first, a few for each turn of the event loop."""

    def __init__(self) -> None:
        self._num_begun = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def mine(self) -> None:
        """Return when it is the caller's turn: at once, where few have come."""
        loop = asyncio.get_running_loop()
        if self._num_begun == 0:
            loop.call_soon(self._next_turn)
        if self._num_begun < _EACH_TURN:
            self._num_begun += 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next_turn(self) -> None:
        self._num_begun = 0
        while self._waiting and self._num_begun < _EACH_TURN:
            turn = self._waiting.popleft()
            # Who hung up meanwhile has cancelled his.
            if not turn.done():
                turn.set_result(None)
                self._num_begun += 1
        if self._num_begun:
            asyncio.get_running_loop().call_soon(self._next_turn)


def wake(waiting: Iterable[asyncio.Future[None]]) -> None:
    """Let some go on now and the others in the turns after it."""
    _wake(deque(waiting))


def _wake(waiting: deque[asyncio.Future[None]]) -> None:
    num_woken = 0
    while waiting and num_woken < _EACH_TURN:
        end = waiting.popleft()
        if not end.done():
            end.set_result(None)
            num_woken += 1
    if waiting:
        asyncio.get_running_loop().call_soon(_wake, waiting)
