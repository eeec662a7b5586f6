"""Another unit of time is the same problem."""

from __future__ import annotations

from hypothesis import given

from optpipe import Problem, simulate
from optpipe_solver import SolveStatus, solve
from optpipe_solver.milp.highs import scale_for, scaled
from tests.solver.milp.test_horizon import parked_problem
from tests.strategies import Case, cases


@given(cases())
def test_a_power_of_two_scales_every_schedule_exactly(case: Case) -> None:
    """Transfers and links too."""
    before = simulate(case.problem, case.programs)
    after = simulate(scaled(case.problem, 2.0**-20), case.programs)
    assert after.makespan_ms == before.makespan_ms * 2.0**-20
    assert after.span_ms == before.span_ms * 2.0**-20


def test_the_scale_brings_an_objective_near_a_second() -> None:
    """And leaves alone what is near enough."""
    assert scale_for(1000.0) == scale_for(0.0) == 1.0
    for objective in (1e-6, 1.0, 1e6, 1e12):
        assert 512 <= objective * scale_for(objective) <= 2048


def test_a_proof_holds_in_any_unit() -> None:
    """The parked problem in units of 1e-9 and 1e9 ms."""
    for factor in (2.0**-30, 2.0**30):
        result = solve(scaled(parked_problem(), factor), time_limit_s=60)
        assert result.status is SolveStatus.OPTIMAL
        assert result.schedule is not None
        assert result.schedule.objective_ms == 136 * factor


def test_a_variable_in_no_constraint_is_lowered_too() -> None:
    """One micro-batch: the starts of some items are free, and PuLP hands them to nobody."""
    zero: dict[str, float] = {"forward_ms": 0, "backward_input_ms": 0, "backward_weight_ms": 0}
    stages: list[dict[str, float]] = [
        {"device": 0, **zero, "forward_ms": 1, "activation_bytes": 3},
        {"device": 1, **zero, "activation_bytes": 3, "weight_context_bytes": 1},
        {"device": 1, **zero, "forward_ms": 1, "backward_input_ms": 2.5, "activation_bytes": 3},
        {"device": 0, **zero, "activation_bytes": 4},
    ]
    stages[1] |= {"recompute_ms": 1, "checkpoint_bytes": 1}
    stages[2] |= {"recompute_ms": 0, "checkpoint_bytes": 1}
    devices = [{"memory_bytes": 7}, {"memory_bytes": 4}]
    given_problem = {
        "num_microbatches": 1,
        "objective": "span",
        "devices": devices,
        "stages": stages,
    }
    result = solve(Problem.parse(given_problem), time_limit_s=5)
    assert result.schedule is not None
