"""Proofs by few devices: what CP-SAT and HiGHS leave open, the same work twice, and no more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from optpipe_solver.budget import Stop
from optpipe_solver.exact.device_subsets import improve_by_exact_search, prove_by_few_devices
from optpipe_solver.local_search.search import improve_by_local_search
from tests.building import problem, stage
from tests.solver.starting import started

if TYPE_CHECKING:
    from optpipe import Problem
    from optpipe_solver.incumbent import Incumbent

REAL = {"activation_bytes": 3_724_541_952, "weight_context_bytes": 1_610_612_736}


def real_problem(limit: float, m: int, **fields: Any) -> Problem:
    """Four devices with times of a 6.2b profile and room for ``limit`` activations."""
    stages = [stage(d, 29.718, 29.444, 19.927, **{**REAL, **fields}) for d in range(4)]
    room = int(limit * REAL["activation_bytes"])
    device = {"memory_bytes": room, "d2h_gb_per_s": 20.0, "h2d_gb_per_s": 20.0}
    return problem(stages, [device] * 4, m=m)


def searched(given: Problem, steps: int) -> Incumbent:
    """The best of all starts after some steps of local search."""
    best = started(given)
    improve_by_local_search(best, Stop(600, work=steps))
    return best


OFFLOAD = {"offload_bytes": REAL["activation_bytes"] // 2}
RECOMPUTE = {"recompute_ms": 20.0, "checkpoint_bytes": 372_454_195}


@pytest.mark.parametrize("fields", [OFFLOAD, RECOMPUTE])
def test_offload_and_recompute_are_proven_optimal(fields: dict[str, Any]) -> None:
    """The bounds without search leave a gap that few devices close."""
    best = searched(real_problem(1.5, 4, **fields), 2_000_000)
    prove_by_few_devices(best, Stop(600, work=2_000_000))
    assert best.is_optimal
    assert best.bound_method == "general-search"


def test_under_span_the_cells_of_one_device_raise_the_bound() -> None:
    """The search over counts does not know that a device may begin before the first stage's."""
    offload = {"activation_bytes": 1_186_340_000, "offload_bytes": 1_186_340_000}
    given = real_problem(0.64, 8, **offload, weight_context_bytes=513_011_892)
    given = given.model_copy(update={"objective": "span"})
    best = searched(given, 2_000_000)
    improve_by_exact_search(best, Stop(600, work=100_000))
    assert best.bound_method == "cell-search"
    assert best.gap < 0.025


def test_a_later_turn_goes_on_where_the_one_before_was_over() -> None:
    """45,909 states prove it; turns of 20,000 that began anew would meet the same ones for ever."""
    best = searched(real_problem(1.5, 4, **RECOMPUTE), 2_000_000)
    for is_proven in (False, False, True):
        prove_by_few_devices(best, Stop(600, work=20_000))
        assert best.is_optimal is is_proven


def test_the_same_work_is_the_same_run() -> None:
    """A limit on states, and no clock, decides where a run ends."""
    runs = []
    for _ in range(2):
        best = searched(real_problem(2.0, 6, **OFFLOAD, **RECOMPUTE), 10_000)
        stop = Stop(600, work=20_000)
        improve_by_exact_search(best, stop)
        met = stop.spent
        runs.append((met, best.bound_ms))
    assert runs[0] == runs[1]
    assert runs[0][0] >= 20_000


def test_told_to_stop_nothing_is_searched() -> None:
    """No state is met, and nothing is proven."""
    best = searched(real_problem(1.5, 4, **OFFLOAD), 1)
    stop = Stop(600, work=10**6, should_stop=lambda: True)
    prove_by_few_devices(best, stop)
    assert stop.spent == 0
    assert best.bound_ms == 0.0
