"""Turns of callers: a place is given back once."""

from __future__ import annotations

import asyncio

from optpipe_api.services.turns import Turns


def test_a_caller_that_leaves_when_a_place_is_freed_frees_no_other() -> None:
    async def most_running() -> int:
        turns, num_running, most = Turns(1, 8, lambda _: RuntimeError()), 0, 0

        async def hold(ends: asyncio.Event) -> None:
            nonlocal num_running, most
            async with turns.turn("", is_read=False):
                num_running += 1
                most = max(most, num_running)
                await ends.wait()
                num_running -= 1

        first_ends, ends = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(hold(first_ends))
        await asyncio.sleep(0)
        leaving = asyncio.create_task(hold(ends))
        await asyncio.sleep(0)
        first_ends.set()
        leaving.cancel()
        await asyncio.gather(first, leaving, return_exceptions=True)
        others = [asyncio.create_task(hold(ends)) for _ in range(3)]
        for _ in range(5):
            await asyncio.sleep(0)
        ends.set()
        await asyncio.gather(*others)
        return most

    assert asyncio.run(most_running()) == 1
