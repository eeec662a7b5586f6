"""Bounds: below every schedule, and exact where they should be."""

from __future__ import annotations

import pytest
from hypothesis import given

from optpipe import simulate
from optpipe_solver.bounds import lower_bound, lower_bounds
from tests.building import problem, stage
from tests.strategies import Case, cases


@given(cases())
def test_every_bound_is_below_every_schedule(case: Case) -> None:
    """Each argument alone, under both objectives."""
    length = simulate(case.problem, case.programs).objective_ms(case.problem.objective)
    for bound in lower_bounds(case.problem):
        assert bound.ms <= length * (1 + 1e-9) + 1e-9, bound.method


@given(cases(tight=True))
def test_every_bound_is_below_schedules_that_fill_the_memory(case: Case) -> None:
    """Limits are exactly what the schedule needs: the memory arguments are at their sharpest."""
    length = simulate(case.problem, case.programs).objective_ms(case.problem.objective)
    for bound in lower_bounds(case.problem):
        assert bound.ms <= length * (1 + 1e-9) + 1e-9, bound.method


def test_load_bound_is_head_plus_work() -> None:
    """The last stage of three waits 2 x 5 ms, then works 4 x 13 ms."""
    given = problem([stage(d, 5, 5, 3) for d in range(3)], m=4)
    assert {b.method: b.ms for b in lower_bounds(given)}["load"] == pytest.approx(2 * 5 + 4 * 13)


def test_way_back_bound_is_head_plus_passes_plus_tail() -> None:
    """The last stage's last input gradient still has to go back to stage 0, whose W comes last."""
    given = problem([stage(d, 5, 5, 3) for d in range(3)], m=4)
    assert lower_bound(given).ms == pytest.approx(2 * 5 + 4 * 10 + 2 * 5 + 3)


def test_memory_energy_binds_where_memory_is_scarce() -> None:
    """One activation per device: micro-batches pass one by one."""
    given = problem([stage(d, 1, 1, 1) for d in range(4)], [{"memory_bytes": 10}] * 4, m=8)
    bound = lower_bound(given)
    assert bound.method == "memory-energy"
    # Stage 0 holds each micro-batch through 4 F, 4 I and its own W: 9 ms, 8 times.
    assert bound.ms == pytest.approx(72)
