"""What is left of a turn, and when it is over."""

from math import inf

import pytest

from optpipe_solver.budget import Stop


def test_a_turn_is_a_share_of_the_work_where_that_is_limited() -> None:
    """Else of the seconds; and never more than what is asked for at most."""
    limited, timed = Stop(100.0, work=4.0), Stop(100.0)
    assert limited.turn(0.5).work == 2.0
    assert limited.turn(0.5, at_most=1.5).work == 1.5
    assert limited.turn(0.5).limit_s == pytest.approx(100.0, abs=0.1)
    assert timed.turn(0.5).work is None
    assert timed.turn(0.5).limit_s == pytest.approx(50.0, abs=0.1)
    assert timed.turn(0.5, at_most=2.0).limit_s == 2.0
    assert timed.left_work == inf


def test_a_turn_in_steps_has_whole_ones_and_at_least_one() -> None:
    """What it spends is spent above, in the unit there."""
    whole = Stop(100.0, work=4.0)
    turn = whole.turn(0.25, steps=10)
    assert turn.work == 10
    turn.spend(5)
    assert (turn.left_work, whole.spent, whole.left) == (5, 0.5, 3.5)
    again = whole.turn(0.001, steps=10)
    assert again.work == 1
    again.spend(1)
    assert whole.spent == pytest.approx(0.6)
    assert again.is_over()
    assert not whole.is_over()


def test_a_turn_ends_with_what_it_is_a_turn_of() -> None:
    """By its time, its work, or because somebody says stop; its own end is its own."""
    is_stopped = False
    whole = Stop(100.0, work=4.0, should_stop=lambda: is_stopped)
    turn = whole.turn(should_stop=lambda: True)
    assert turn.is_told()
    assert not whole.is_told()
    turn = whole.turn()
    assert not turn.is_over()
    is_stopped = True
    assert turn.is_told()
    assert Stop(0.0).turn().is_over()


def test_threads_and_seed_are_handed_down() -> None:
    """Unless the turn has its own."""
    whole = Stop(1.0, threads=3, seed=7)
    assert (whole.turn().threads, whole.turn().seed) == (3, 7)
    assert (whole.turn(threads=1).threads, whole.turn(seed=9).seed) == (1, 9)
