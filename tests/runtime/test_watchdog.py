"""A rank that waits for one that has failed ends, and nobody else does."""

from __future__ import annotations

import threading
import time

import pytest

from optpipe.runtime.runner import Watchdog


class _World:
    """A group in which a failure may be reported, and what was done about it."""

    def __init__(self) -> None:
        self.failure: str | None = None
        self.cut = threading.Event()
        self.ended = threading.Event()
        self.looks = 0
        self.causes: list[str] = []

    def find_failure(self) -> str | None:
        self.looks += 1
        return self.failure

    def end(self, cause: str) -> None:
        self.causes.append(cause)
        self.ended.set()


@pytest.fixture
def world() -> _World:
    return _World()


@pytest.fixture
def watch(world, request):
    """With a grace in seconds; one of 3 is used up by no busy machine."""
    grace_s = getattr(request, "param", 0.2)
    made = Watchdog(world.find_failure, world.cut.set, world.end, poll_s=0.01, grace_s=grace_s)
    yield made
    made.stop()


patient = pytest.mark.parametrize("watch", [3], indirect=True)


def test_a_rank_stuck_in_a_step_is_cut_off_and_ended_with_the_cause(world, watch):
    with watch:
        world.failure = "rank 1, step 3: boom"
        assert world.cut.wait(5)
        assert world.ended.wait(5)
    assert world.causes == ["rank 1, step 3: boom"]


@patient
def test_cutting_the_connections_is_enough_where_it_frees_the_rank(world, watch):
    with watch:
        world.failure = "boom"
        assert world.cut.wait(10)
    time.sleep(2)
    assert not world.ended.is_set()


@patient
def test_a_rank_that_leaves_its_step_by_itself_is_left_alone(world, watch):
    with watch:
        world.failure = "boom"
        time.sleep(0.05)
    time.sleep(2)
    assert not world.cut.is_set()
    assert not world.ended.is_set()


def test_between_steps_nobody_looks(world, watch):
    with watch:
        pass
    time.sleep(0.05)
    before = world.looks
    time.sleep(0.1)
    assert world.looks == before


def test_without_a_failure_steps_go_on(world, watch):
    for _ in range(3):
        with watch:
            time.sleep(0.05)
    assert world.looks > 3
    assert not world.cut.is_set()


def test_a_store_that_is_gone_ends_the_watch_quietly(world):
    def gone() -> str | None:
        raise RuntimeError("connection reset")

    watch = Watchdog(gone, world.cut.set, world.end, poll_s=0.01, grace_s=0.1)
    with watch:
        time.sleep(0.1)
    assert watch._thread is not None
    watch._thread.join(5)
    assert not watch._thread.is_alive()
    assert not world.ended.is_set()
