"""Lanes run side by side, end when told, and say what went wrong."""

from __future__ import annotations

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
