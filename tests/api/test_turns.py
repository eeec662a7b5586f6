"""What hundreds want at once is done a few at a time, and whatever else is due comes in between."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from optpipe_api import Settings, create_app
from optpipe_api.turns import InTurns, Turns, wake

if TYPE_CHECKING:
    from collections.abc import Callable

MOST = 8


class Loop:
    """Counts what is done in each turn of the event loop, and notes the order."""

    def __init__(self) -> None:
        self.counts = [0]
        self.done: list[int] = []
        self._task = asyncio.create_task(self._turn())

    async def _turn(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.counts.append(0)

    def note(self, number: int) -> None:
        self.counts[-1] += 1
        self.done.append(number)

    def stop(self) -> None:
        self._task.cancel()


def run(scene: Callable[[Loop], Any]) -> None:
    async def on_stage() -> None:
        loop = Loop()
        try:
            await asyncio.wait_for(scene(loop), 10)
        finally:
            loop.stop()

    asyncio.run(on_stage())


def requests(loop: Loop) -> Callable[[int], asyncio.Task[None]]:
    """Return what starts a request of some number at an application in turns."""

    async def answer(scope: Any, _receive: Any, _send: Any) -> None:
        loop.note(scope["number"])

    app = InTurns(answer, turns=Turns())
    unused: Any = None

    def ask(number: int) -> asyncio.Task[None]:
        scope = {"type": "http", "number": number}
        return asyncio.create_task(app(scope, unused, unused))

    return ask


def test_requests_that_come_together_begin_a_few_at_a_time_in_order() -> None:
    async def scene(loop: Loop) -> None:
        ask = requests(loop)
        await asyncio.gather(*(ask(number) for number in range(200)))
        assert max(loop.counts) <= MOST
        assert loop.done == list(range(200))
        # And as many as may: nobody waits longer than that takes.
        assert sum(count > 0 for count in loop.counts) <= 200 / MOST + 2

    run(scene)


def test_the_service_begins_its_requests_in_turns() -> None:
    """Before anything else is done about them."""
    outermost: object = create_app(Settings()).user_middleware[0].cls
    assert outermost is InTurns


def test_a_request_that_comes_alone_begins_at_once() -> None:
    async def scene(loop: Loop) -> None:
        ask = requests(loop)
        for number in range(20):
            asked = ask(number)
            await asyncio.sleep(0)
            assert loop.done == list(range(number + 1))
            await asked
            await asyncio.sleep(0.002)

    run(scene)


def test_those_who_hang_up_before_their_turn_hold_up_nobody() -> None:
    async def scene(loop: Loop) -> None:
        ask = requests(loop)
        asked = [ask(number) for number in range(60)]
        await asyncio.sleep(0)
        left = asked[MOST:40]
        for task in left:
            task.cancel()
        for task in left:
            with suppress(asyncio.CancelledError):
                await task
        await asyncio.wait_for(asyncio.gather(*asked[:MOST], *asked[40:]), 2)
        assert loop.done[-20:] == list(range(40, 60))
        await asyncio.wait_for(ask(60), 2)

    run(scene)


def test_other_scopes_are_passed_on() -> None:
    """The application's own start and end wait for no turn."""

    async def scene(_loop: Loop) -> None:
        seen: list[str] = []

        async def answer(scope: Any, _receive: Any, _send: Any) -> None:
            seen.append(scope["type"])

        unused: Any = None
        await InTurns(answer, turns=Turns())({"type": "lifespan"}, unused, unused)
        assert seen == ["lifespan"]

    run(scene)


def test_many_who_wait_for_the_same_news_hear_it_a_few_at_a_time() -> None:
    async def scene(loop: Loop) -> None:
        ends = [asyncio.get_running_loop().create_future() for _ in range(100)]

        async def hear(number: int) -> None:
            await ends[number]
            loop.note(number)

        ends[3].cancel()
        hearing = [asyncio.create_task(hear(number)) for number in range(100)]
        await asyncio.sleep(0)
        wake(ends)
        await asyncio.gather(*hearing, return_exceptions=True)
        assert max(loop.counts) <= MOST
        assert loop.done == [number for number in range(100) if number != 3]

    run(scene)
