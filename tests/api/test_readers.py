"""Bodies are read in a thread or in a process; neither may take the server down with it."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import closing
from typing import Any

import pytest

from optpipe.errors import ProblemError
from optpipe_api.desk.readers import Readers
from optpipe_api.errors import BodyTooHeavyError, TooManyBodiesError

LARGE = b"x" * 300_000


@pytest.fixture(scope="module")
def readers():
    with closing(Readers(cpu_s=1.0)) as readers:
        yield readers


def ask(readers: Readers, function: str, body: bytes = LARGE) -> Any:
    return readers.ask(f"tests.api.heavy:{function}", body)


def spin(readers: Readers) -> None:
    with pytest.raises(BodyTooHeavyError):
        ask(readers, "spin")


@pytest.mark.parametrize("body", [b"x" * 10, LARGE])
def test_small_bodies_are_read_here_and_large_ones_elsewhere(readers, body: bytes) -> None:
    reading = asyncio.run(readers.read("tests.api.heavy:measure", body))
    assert reading.documents == ("", "a\N{LATIN SMALL LETTER A WITH DIAERESIS}", str(len(body)))
    assert reading.header["bytes"] == len(body)
    assert (reading.header["pid"] == os.getpid()) is (body is not LARGE)


@pytest.mark.parametrize("body", [b"x", LARGE])
def test_an_error_of_ours_arrives_as_what_it_is(readers, body: bytes) -> None:
    with pytest.raises(ProblemError, match="bytes: one too many"):
        ask(readers, "refuse", body)


def test_a_process_is_kept(readers) -> None:
    assert len({ask(readers, "measure").header["pid"] for _ in range(3)}) == 1


@pytest.mark.parametrize("function", ["spin", "eat", "die"])
def test_what_takes_too_much_is_refused_and_the_next_body_is_read(readers, function: str) -> None:
    with pytest.raises(BodyTooHeavyError, match="1 s or 2147483648 bytes"):
        ask(readers, function)
    assert ask(readers, "measure").header["bytes"] == len(LARGE)


def test_a_process_is_kept_whatever_its_parent_holds(readers) -> None:
    """Linux counts what the parent held into the most that the child ever held."""
    held = bytearray(b"x" * 500_000_000)
    before = ask(readers, "measure").header["pid"]
    assert ask(readers, "measure").header["pid"] == before
    assert held


def test_a_process_that_has_grown_is_replaced(readers) -> None:
    before = ask(readers, "hoard").header["pid"]
    assert ask(readers, "measure").header["pid"] != before


def test_a_fault_of_ours_is_one(readers) -> None:
    with pytest.raises(RuntimeError, match="log says why"):
        ask(readers, "fail")


def test_what_is_printed_is_no_answer(readers) -> None:
    assert ask(readers, "talk").header == {"said": True}


def test_a_queue_of_large_bodies_ends_somewhere(readers) -> None:
    began, refused = threading.Barrier(30), []

    def submit() -> None:
        began.wait()
        try:
            ask(readers, "measure")
        except TooManyBodiesError as error:
            refused.append(error.retry_after_s)

    threads = [threading.Thread(target=submit) for _ in range(30)]
    blocker = threading.Thread(target=spin, args=(readers,))
    for thread in (blocker, *threads):
        thread.start()
    for thread in (blocker, *threads):
        thread.join()
    assert refused.count(5) == len(refused) < 30
    assert ask(readers, "measure").header["bytes"] == len(LARGE)


def test_closing_ends_what_is_read() -> None:
    readers = Readers(cpu_s=60.0)
    thread = threading.Thread(target=spin, args=(readers,))
    thread.start()
    while not readers._processes:
        time.sleep(0.01)
    (process,) = readers._processes
    readers.close()
    thread.join(60)
    assert not thread.is_alive()
    assert not process.is_alive
