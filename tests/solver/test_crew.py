"""Lanes run side by side, end when told, and say what went wrong."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from optpipe_solver.crew import run_lanes

if TYPE_CHECKING:
    from collections.abc import Callable


def test_lanes_run_side_by_side() -> None:
    """Each waits for the other: one after another would never end."""
    meet = threading.Barrier(2, timeout=30)

    def lane(_: Callable[[], bool]) -> None:
        meet.wait()

    run_lanes([lane, lane], lambda: False)
    assert not meet.broken


def test_a_lane_that_hears_nothing_is_left_behind() -> None:
    """The call returns while the lane still runs."""
    release = threading.Event()
    ended = threading.Event()

    def deaf(_: Callable[[], bool]) -> None:
        release.wait()
        ended.set()

    run_lanes([deaf], lambda: True)
    assert not ended.is_set()
    release.set()
    assert ended.wait(30)


def test_lanes_are_told_to_stop() -> None:
    """A lane that listens has ended when the call returns."""
    ended = threading.Event()

    def listening(stop: Callable[[], bool]) -> None:
        while not stop():
            pass
        ended.set()

    run_lanes([listening], lambda: True)
    assert ended.is_set()


def test_what_a_lane_raises_is_raised_and_stops_the_others() -> None:
    """The caller sees the error itself."""
    ended = threading.Event()

    def broken(_: Callable[[], bool]) -> None:
        raise ValueError("broken")

    def listening(stop: Callable[[], bool]) -> None:
        while not stop():
            pass
        ended.set()

    with pytest.raises(ValueError, match="broken"):
        run_lanes([listening, broken], lambda: False)
    assert ended.wait(30)


_LEFT_IN_HIGHS = """
import random
import time
from optpipe_solver.crew import run_lanes
from optpipe_solver.milp.highs import LinearProgram

draw = random.Random(1)
columns = range(400)
began = []

def add(program):
    terms = {draw.choice(columns): 1 + draw.random() for _ in range(60)}
    program.add_at_most(terms, 5.0)

def lane(stop):
    program = LinearProgram([1 + draw.random() for _ in columns], [1.0] * len(columns))
    for _ in range(400):
        add(program)
    began.append(time.monotonic())
    while time.monotonic() < began[0] + 1.5:
        program.best()
        add(program)

run_lanes([lane], lambda: bool(began))
print("returned", flush=True)
"""


def test_an_interpreter_ends_well_beside_a_lane_that_was_left_in_highs() -> None:
    """No thread is cut inside C++, which would abort the process after its work was done."""
    ended = subprocess.run(
        [sys.executable, "-c", _LEFT_IN_HIGHS], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "returned\n", "")
