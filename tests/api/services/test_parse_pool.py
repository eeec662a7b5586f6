"""Bodies are read in a thread or in a process; neither may take the server down with it."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import pytest

from optpipe.errors import InputError, ProblemError
from optpipe_api.access import ANYBODY, Principal, Role
from optpipe_api.errors import BodyTooHeavyError, TooManyBodiesError
from optpipe_api.services.parse_pool import ParsePool, Turns
from tests.api import heavy
from tests.api.fleet import is_running
from tests.api.live import until

T = TypeVar("T")
LARGE = b"x" * 300_000
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pool():
    with closing(ParsePool(cpu_s=1.0)) as pool:
        yield pool


def run(pool: ParsePool, function: Callable[[bytes], T], body: bytes = LARGE) -> T:
    """What the pool makes of a body."""
    return asyncio.run(pool.run(function, body, caller=ANYBODY))


@pytest.mark.parametrize("body", [b"x" * 10, LARGE])
def test_small_bodies_are_read_here_and_large_ones_elsewhere(pool, body: bytes) -> None:
    pid, length = run(pool, heavy.measure, body)
    assert length == len(body)
    assert (pid == os.getpid()) is (body is not LARGE)


@pytest.mark.parametrize("body", [b"x", LARGE])
def test_an_error_of_ours_arrives_as_what_it_is(pool, body: bytes) -> None:
    with pytest.raises(ProblemError, match="bytes: one too many"):
        run(pool, heavy.refuse, body)


def test_an_error_that_says_more_than_a_message_keeps_its_message(pool) -> None:
    with pytest.raises(InputError, match="two"):
        run(pool, heavy.refuse_with_more)


@pytest.mark.parametrize("function", [heavy.spin, heavy.eat, heavy.die])
def test_what_takes_too_much_is_refused_and_the_next_body_is_read(
    pool, function: Callable[[bytes], Any]
) -> None:
    with pytest.raises(BodyTooHeavyError, match="1 s or 2147483648 bytes"):
        run(pool, function)
    assert run(pool, heavy.measure)[1] == len(LARGE)


def test_a_process_is_kept_whatever_its_parent_has(pool) -> None:
    """Linux counts what the parent had into the most that the child ever had."""
    ballast = bytearray(b"x" * 500_000_000)
    before, _ = run(pool, heavy.measure)
    assert run(pool, heavy.measure)[0] == before
    assert ballast


def test_ctrl_c_in_the_terminal_of_a_server_ends_no_process(pool) -> None:
    before, _ = run(pool, heavy.measure)
    os.kill(before, signal.SIGINT)
    assert run(pool, heavy.measure)[0] == before


def test_a_process_that_has_grown_is_replaced(pool) -> None:
    before, _ = run(pool, heavy.hoard)
    assert run(pool, heavy.measure)[0] != before


def test_a_fault_of_ours_is_one(pool) -> None:
    with pytest.raises(ZeroDivisionError):
        run(pool, heavy.fail)


def test_what_is_printed_is_no_answer(pool, capfd) -> None:
    assert run(pool, heavy.talk) == "said"
    assert capfd.readouterr().out == ""


def test_submissions_are_read_beside_any_number_of_estimates(pool) -> None:
    """Of 80 estimates of one key some are refused. All 40 submissions of another key are read."""
    reader, submitter = Principal("reader", Role.READ), Principal("submitter", Role.SUBMIT)

    async def read_all() -> list[Any]:
        options: dict[str, Any] = {"is_heavy": True}
        reads = [pool.run(heavy.measure, b"r", caller=reader, **options) for _ in range(80)]
        submissions = [
            pool.run(heavy.measure, b"s", caller=submitter, is_read=False, **options)
            for _ in range(40)
        ]
        return await asyncio.gather(*reads, *submissions, return_exceptions=True)

    found = asyncio.run(read_all())
    assert [type(one) for one in found].count(TooManyBodiesError) == 14
    assert all(isinstance(one, tuple) for one in found[80:])


def test_a_large_body_takes_a_place_for_each_megabyte(pool) -> None:
    """A process that is ended meanwhile ends no other call."""
    body = b"x" * 8_000_000

    async def read_all() -> list[Any]:
        calls = [pool.run(heavy.measure, body, caller=ANYBODY) for _ in range(12)]
        blocker = pool.run(heavy.die, LARGE, caller=ANYBODY)
        return await asyncio.gather(blocker, *calls, return_exceptions=True)

    dead, *found = asyncio.run(read_all())
    assert isinstance(dead, BodyTooHeavyError)
    assert [isinstance(one, TooManyBodiesError) for one in found].count(True) == 3
    assert [one for one in found if isinstance(one, tuple) and one[1] != len(body)] == []


@pytest.mark.extended
def test_whoever_gives_up_leaves_the_queue(pool) -> None:
    """As a request does whose key is revoked: places that are never free again end in refusals."""

    async def give_up() -> None:
        busy = [asyncio.create_task(pool.run(heavy.spin, LARGE, caller=ANYBODY)) for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.to_thread(until, lambda: pool.num_waiting == 0)
        calls = [pool.run(heavy.measure, LARGE, caller=ANYBODY) for _ in range(3)]
        waiting = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0)
        assert pool.num_waiting == 3
        for task in waiting:
            task.cancel()
        await asyncio.gather(*busy, *waiting, return_exceptions=True)

    asyncio.run(give_up())
    assert pool.num_waiting == 0


SERVER = """
import asyncio, time
from optpipe_api.access import ANYBODY
from optpipe_api.services.parse_pool import ParsePool
from tests.api import heavy
if __name__ == "__main__":
    body = b"x" * 300_000
    print(asyncio.run(ParsePool().run(heavy.measure, body, caller=ANYBODY))[0], flush=True)
    time.sleep(600)
"""


def test_a_process_ends_with_its_server_however_that_ended() -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, cwd=ROOT)
    assert server.stdout is not None
    with server.stdout as lines:
        pid = int(lines.readline())
    server.kill()
    server.wait()
    until(lambda: not is_running(pid))


def test_closing_ends_what_is_read() -> None:
    pool = ParsePool(cpu_s=60.0)
    pid, _ = run(pool, heavy.measure)

    def spin() -> None:
        with pytest.raises(BodyTooHeavyError):
            run(pool, heavy.spin)

    thread = threading.Thread(target=spin)
    thread.start()
    time.sleep(0.5)
    pool.close()
    thread.join(60)
    assert not thread.is_alive()
    assert not is_running(pid)


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
