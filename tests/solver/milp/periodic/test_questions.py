"""What the periodic MILP calls proven is what two runs of different seeds prove."""

from __future__ import annotations

from typing import Any

import pytest

from optpipe_solver.budget import Stop
from optpipe_solver.milp.highs import MilpModel, MilpOutcome, MilpStatus, solve_milp, value_of
from optpipe_solver.milp.periodic import questions
from optpipe_solver.milp.periodic.items import Modes
from optpipe_solver.milp.periodic.model import PeriodicModel
from optpipe_solver.milp.periodic.objective import largest_peak
from optpipe_solver.milp.periodic.questions import (
    agreed,
    shortest_period,
    shortest_way,
    smallest_memory,
)
from tests.solver.milp.periodic.equal import equal

DENIED = MilpOutcome(MilpStatus.INFEASIBLE, None, None, 1)


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds that HiGHS is run with."""
    used: list[int] = []

    def noted(model: MilpModel, stop: Stop, **options: Any) -> MilpOutcome:
        used.append(stop.seed)
        return solve_milp(model, stop, **options)

    monkeypatch.setattr(questions, "solve_milp", noted)
    return used


def the_first_run_says(said: MilpOutcome, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, runs with seed 0 end like this; others are HiGHS's."""

    def run(model: MilpModel, stop: Stop, **options: Any) -> MilpOutcome:
        return said if stop.seed == 0 else solve_milp(model, stop, **options)

    monkeypatch.setattr(questions, "solve_milp", run)


def test_a_proof_takes_two_seeds(seeds: list[int]) -> None:
    """The smallest memory, the shortest way, and that no block fits."""
    assert smallest_memory(equal(4, "v"), 6.0, Stop(60.0)).is_optimal
    assert seeds == [0, 1]
    seeds.clear()
    assert shortest_way(equal(2, "v"), 6.0, Stop(60.0, seed=7)).is_optimal
    assert seeds == [7, 8]
    seeds.clear()
    found = shortest_period(equal(2, "v", limit=1), 30.0, Stop(60.0))
    assert found.status is MilpStatus.INFEASIBLE
    assert seeds == [0, 0, 1]


def test_the_load_bound_takes_none(seeds: list[int]) -> None:
    """A block that is never idle is there: nothing has to be denied twice."""
    assert shortest_period(equal(4, "v"), 30.0, Stop(60.0)).is_optimal
    assert seeds == [0]


def test_who_asks_for_no_proof_gets_none(seeds: list[int]) -> None:
    """One run, and what it found; the portfolio asks so."""
    found = smallest_memory(equal(4, "v"), 6.0, Stop(60.0), proves=False)
    assert seeds == [0]
    assert found.block is not None
    assert found.bound is None
    assert not found.is_optimal


def test_one_run_alone_proves_nothing() -> None:
    """Where the first run takes all the nodes, no second confirms it."""
    found = smallest_memory(equal(4, "v"), 6.0, Stop(60.0, work=0))
    assert found.bound is None
    assert not found.is_optimal


def test_a_bound_that_one_run_alone_has_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run proves 4 activations, ended by its time, the second 8: 4 are proven."""
    given = equal(4, "v")
    model = PeriodicModel(given, Modes(), shortest_ms=6.0, longest_ms=6.0)
    half = 0.01 * 4 / model.variables.unit_bytes
    the_first_run_says(MilpOutcome(MilpStatus.TIME_LIMIT, half, None, 1), monkeypatch)
    found = smallest_memory(given, 6.0, Stop(60.0))
    assert found.block is not None
    assert max(found.block.peaks(given)) == 8
    assert found.bound == pytest.approx(4)
    assert found.status is MilpStatus.TIME_LIMIT


@pytest.mark.parametrize("bound", [None, 1.0])
def test_a_run_that_denies_what_there_is_proves_nothing(
    bound: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run denies any block, or what is as small as the second's: no bound is left."""
    said = DENIED if bound is None else MilpOutcome(MilpStatus.OPTIMAL, bound, None, 1)
    the_first_run_says(said, monkeypatch)
    found = smallest_memory(equal(4, "v"), 6.0, Stop(60.0))
    assert found.block is not None
    assert max(found.block.peaks(equal(4, "v"))) == 8
    assert found.bound is None
    assert found.status is MilpStatus.LIMIT


def test_what_two_runs_agree_on() -> None:
    """The better solution, the weaker bound, whichever run comes first."""
    model = PeriodicModel(equal(2, "v"), Modes(), shortest_ms=6.0, longest_ms=6.0)
    model.minimise(largest_peak(model.variables))
    best = solve_milp(model.model, Stop(30))
    assert best.values is not None
    least = value_of(model.model.problem.objective, best.values)
    weak = MilpOutcome(MilpStatus.TIME_LIMIT, least / 2, None, 3)
    for runs in ((best, weak), (weak, best)):
        both = agreed(model, *runs)
        assert both.values is best.values
        assert both.bound == least / 2
        assert both.status is MilpStatus.TIME_LIMIT
        assert both.num_nodes == best.num_nodes + 3
    assert agreed(model, best, best).status is MilpStatus.OPTIMAL
    assert agreed(model, DENIED, DENIED).status is MilpStatus.INFEASIBLE
    assert agreed(model, DENIED, weak).bound == least / 2
    silent = MilpOutcome(MilpStatus.INTERRUPTED, None, None, 0)
    assert agreed(model, DENIED, silent) == MilpOutcome(MilpStatus.INTERRUPTED, None, None, 1)
