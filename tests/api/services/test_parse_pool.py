"""Bodies are read in a thread or in a process; neither may take the server down with it."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from optpipe.errors import InputError, ProblemError
from optpipe_api.errors import BodyTooHeavyError, TooManyBodiesError
from optpipe_api.services.parse_pool import ParsePool
from tests.api import heavy
from tests.api.fleet import is_running
from tests.api.live import until

LARGE = b"x" * 300_000
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pool():
    with closing(ParsePool(cpu_s=1.0)) as pool:
        yield pool


def spin(pool: ParsePool) -> None:
    with pytest.raises(BodyTooHeavyError):
        pool.run_from_thread(heavy.spin, LARGE)


@pytest.mark.parametrize("body", [b"x" * 10, LARGE])
def test_small_bodies_are_read_here_and_large_ones_elsewhere(pool, body: bytes) -> None:
    pid, length = asyncio.run(pool.run(heavy.measure, body))
    assert length == len(body)
    assert (pid == os.getpid()) is (body is not LARGE)


@pytest.mark.parametrize("body", [b"x", LARGE])
def test_an_error_of_ours_arrives_as_what_it_is(pool, body: bytes) -> None:
    with pytest.raises(ProblemError, match="bytes: one too many"):
        pool.run_from_thread(heavy.refuse, body)


def test_an_error_that_says_more_than_a_message_keeps_its_message(pool) -> None:
    with pytest.raises(InputError, match="two"):
        pool.run_from_thread(heavy.refuse_with_more, LARGE)


@pytest.mark.parametrize("function", [heavy.spin, heavy.eat, heavy.die])
def test_what_takes_too_much_is_refused_and_the_next_body_is_read(
    pool, function: Callable[[bytes], Any]
) -> None:
    with pytest.raises(BodyTooHeavyError, match="1 s or 2147483648 bytes"):
        pool.run_from_thread(function, LARGE)
    assert pool.run_from_thread(heavy.measure, LARGE)[1] == len(LARGE)


def test_a_process_is_kept_whatever_its_parent_has(pool) -> None:
    """Linux counts what the parent had into the most that the child ever had."""
    ballast = bytearray(b"x" * 500_000_000)
    before, _ = pool.run_from_thread(heavy.measure, LARGE)
    assert pool.run_from_thread(heavy.measure, LARGE)[0] == before
    assert ballast


def test_a_process_that_has_grown_is_replaced(pool) -> None:
    before, _ = pool.run_from_thread(heavy.hoard, LARGE)
    assert pool.run_from_thread(heavy.measure, LARGE)[0] != before


def test_a_fault_of_ours_is_one(pool) -> None:
    with pytest.raises(ZeroDivisionError):
        pool.run_from_thread(heavy.fail, LARGE)


def test_what_is_printed_is_no_answer(pool, capfd) -> None:
    assert pool.run_from_thread(heavy.talk, LARGE) == "said"
    assert capfd.readouterr().out == ""


def test_a_queue_of_large_bodies_ends_somewhere(pool) -> None:
    """And a body whose process is ended meanwhile takes no other one with it."""
    began, refused, lengths = threading.Barrier(30), [], []

    def submit() -> None:
        began.wait()
        try:
            lengths.append(pool.run_from_thread(heavy.measure, LARGE)[1])
        except TooManyBodiesError as error:
            refused.append(error.retry_after_s)

    threads = [threading.Thread(target=submit) for _ in range(30)]
    blocker = threading.Thread(target=spin, args=(pool,))
    for thread in (blocker, *threads):
        thread.start()
    for thread in (blocker, *threads):
        thread.join()
    assert refused.count(5) == len(refused) < 30
    assert lengths == [len(LARGE)] * (30 - len(refused))


def test_whoever_gives_up_leaves_the_queue(pool) -> None:
    """As a request does whose key is revoked: places that are never free again end in refusals."""

    async def give_up() -> None:
        busy = [asyncio.create_task(pool.run(heavy.spin, LARGE)) for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.to_thread(until, lambda: pool.num_waiting == 0)
        waiting = [asyncio.create_task(pool.run(heavy.measure, LARGE)) for _ in range(3)]
        await asyncio.sleep(0)
        assert pool.num_waiting == 3
        for task in waiting:
            task.cancel()
        await asyncio.gather(*busy, *waiting, return_exceptions=True)

    asyncio.run(give_up())
    assert pool.num_waiting == 0


SERVER = """
import time
from optpipe_api.services.parse_pool import ParsePool
from tests.api import heavy
from tests.api.fleet import is_running
if __name__ == "__main__":
    print(ParsePool().run_from_thread(heavy.measure, b"x" * 300_000)[0], flush=True)
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
    pid, _ = pool.run_from_thread(heavy.measure, LARGE)
    thread = threading.Thread(target=spin, args=(pool,))
    thread.start()
    time.sleep(0.5)
    pool.close()
    thread.join(60)
    assert not thread.is_alive()
    assert not is_running(pid)
