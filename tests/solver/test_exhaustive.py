"""A proven optimum is the least over all programs there are."""

import pytest
from hypothesis import given

from optpipe import Problem
from optpipe_solver import SolveStatus, solve
from tests.building import UNIT, bus, problem, stage
from tests.solver.exact.test_cell_search import EXACT
from tests.solver.exhaustive import optimum, tiny_problems_with_pairs
from tests.solver.starting import schedule_of
from tests.strategies import few

# That copies queue is not proven within the time; the search by cell alone knows it.
CASES = {name: given for name, given in EXACT.items() if name != "reloads queue"} | {
    "fused is shorter": problem(
        [stage(d, 4, 4, 2, backward_ms=5.0, weight_context_bytes=5) for d in range(2)],
        [{"memory_bytes": 15}, bus()],
        m=2,
    ),
    "V placement": problem(
        [stage(0, 2, 3, 1), stage(1, 2, 3, 1), stage(0, 1, 2, 2, activation_bytes=6)],
        [bus(memory_bytes=26), bus(memory_bytes=20)],
        m=1,
    ),
    "latency and grad sync": problem(
        [stage(0, 2, 3, 1, grad_sync_ms=2.0, output_bytes=UNIT), stage(1, 3, 1, 2)],
        [bus(), bus()],
        m=2,
        links=[{"from": 0, "to": 1, "latency_ms": 1.0, "bandwidth_gb_per_s": 1.0}],
    ),
    "host limit": problem(
        [
            stage(0, 4, 4, 2, activation_bytes=10 * UNIT, offload_bytes=10 * UNIT),
            stage(1, 4, 4, 2, activation_bytes=10 * UNIT),
        ],
        [bus(memory_bytes=10 * UNIT, d2h_gb_per_s=5.0, h2d_gb_per_s=5.0), bus()],
        m=2,
        hosts=[{"name": "host0", "memory_bytes": 10 * UNIT}],
    ),
    "three micro-batches": problem(
        [
            stage(0, 4, 3, 2, activation_bytes=10, weight_context_bytes=5),
            stage(1, 3, 4, 2, activation_bytes=10, weight_context_bytes=5),
        ],
        [bus(memory_bytes=15), bus(memory_bytes=10)],
        m=3,
    ),
}


LONG = ("host limit", "recompute waits for a copy", "copies")
"""Cases whose exhaustive search takes long; random problems have the same."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.extended] if name in LONG else []) for name in CASES],
)
def test_the_optimum_is_the_least_over_all_programs(name: str) -> None:
    """Order, fused or split, offload and recompute: nothing better exists, and it is proven."""
    given = CASES[name]
    found = schedule_of(given, time_limit_s=20, seed=1)
    assert found.status == "optimal"
    assert found.objective_ms == pytest.approx(optimum(given), rel=1e-6)


_RELAXED_IN_THE_MODEL = ("half duplex", "host limit", "span")


@pytest.mark.extended
@pytest.mark.parametrize("name", [n for n, given in CASES.items() if not given.has_modes])
def test_the_full_horizon_model_alone_says_the_same(name: str) -> None:
    """Found and proven by ``milp``; where it relaxes something, nothing false is proven.

    tests/solver/milp/test_horizon.py asks the same of random problems in the gate.
    """
    given = CASES[name]
    result, least = solve(given, time_limit_s=60, method="milp"), optimum(given)
    assert result.schedule is not None
    assert result.bound_ms is not None
    assert result.bound_ms <= least * (1 + 1e-9)
    assert result.schedule.objective_ms >= least * (1 - 1e-9)
    if name not in _RELAXED_IN_THE_MODEL:
        assert result.status is SolveStatus.OPTIMAL


@few(5)
@given(tiny_problems_with_pairs())
def test_nothing_with_pairs_is_better_than_what_is_proven(given: Problem) -> None:
    """All orders, fused or split, and all choices of pairs; more pairs allowed never hurt."""
    best = optimum(given)
    reached = []
    for some in (given.pairs, given.pairs[:1], ()):
        result = solve(given.model_copy(update={"pairs": some}), work_limit=0.2)
        assert result.schedule is not None
        assert result.bound_ms is not None
        reached.append(result.schedule.objective_ms)
        if some == given.pairs:
            assert result.bound_ms <= best * (1 + 1e-9)
            assert reached[0] >= best - 1e-9
            if result.status is SolveStatus.OPTIMAL:
                assert reached[0] == pytest.approx(best, rel=1e-6)
    assert reached[0] == pytest.approx(best)
    assert reached[0] <= reached[1] + 1e-9 <= reached[2] + 2e-9
