"""Threads of a solve run side by side, end when told, and say what went wrong."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from optpipe_solver.portfolio import run_threads


def test_threads_run_side_by_side() -> None:
    """Each waits for the other: one after another would never end."""
    meet = threading.Barrier(2, timeout=30)

    def work() -> None:
        meet.wait()

    run_threads([work, work], lambda: False, threading.Event())
    assert not meet.broken


def test_a_thread_that_hears_nothing_is_left_behind() -> None:
    """The call returns while it still runs."""
    release = threading.Event()
    ended = threading.Event()

    def deaf() -> None:
        release.wait()
        ended.set()

    run_threads([deaf], lambda: True, threading.Event())
    assert not ended.is_set()
    release.set()
    assert ended.wait(30)


def test_threads_are_told_to_stop() -> None:
    """A thread that listens has ended when the call returns."""
    end, ended = threading.Event(), threading.Event()

    def listening() -> None:
        while not end.is_set():
            pass
        ended.set()

    run_threads([listening], lambda: True, end)
    assert ended.is_set()


def test_what_a_thread_raises_is_raised_and_stops_the_others() -> None:
    """The caller sees the error itself."""
    end, ended = threading.Event(), threading.Event()

    def broken() -> None:
        raise ValueError("broken")

    def listening() -> None:
        while not end.is_set():
            pass
        ended.set()

    with pytest.raises(ValueError, match="broken"):
        run_threads([listening, broken], lambda: False, end)
    assert ended.wait(30)


_LEFT_IN_HIGHS = """
import random
import threading
import time
from optpipe_solver.portfolio import run_threads
from optpipe_solver.milp.highs import LinearProgram

draw = random.Random(1)
columns = range(400)
began = []

def add(program):
    terms = {draw.choice(columns): 1 + draw.random() for _ in range(60)}
    program.add_at_most(terms, 5.0)

def work():
    program = LinearProgram([1 + draw.random() for _ in columns], [1.0] * len(columns))
    for _ in range(400):
        add(program)
    began.append(time.monotonic())
    while time.monotonic() < began[0] + 1.5:
        program.best()
        add(program)

run_threads([work], lambda: bool(began), threading.Event())
print("returned", flush=True)
"""


def test_an_interpreter_ends_well_beside_a_thread_that_was_left_in_highs() -> None:
    """No thread is cut inside C++, which would abort the process after its work was done."""
    ended = subprocess.run(
        [sys.executable, "-c", _LEFT_IN_HIGHS], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "returned\n", "")
