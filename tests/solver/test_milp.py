"""The MILP: its hand-over to HiGHS, its starts and lowering, and that it is worth having."""

from __future__ import annotations

import highspy
import pytest
from hypothesis import event, given, settings

from optpipe import Problem, check, simulate
from optpipe_solver import SolveStatus, solve
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.milp.highs import (
    STATUS_OF,
    MilpStatus,
    Model,
    Variable,
    at_least,
    solve_milp,
    total,
    value_of,
)
from optpipe_solver.milp.horizon.model import HorizonModel
from optpipe_solver.milp.improve import improve_by_milp
from optpipe_solver.starts import all_starts
from tests.building import problem, stage
from tests.strategies import Case, cases


def parked_problem() -> Problem:
    """Four devices, seven micro-batches, two activations: every start is beaten by the MILP."""
    stages = [stage(d, 4, 4, 2, activation_bytes=10, weight_context_bytes=5) for d in range(4)]
    return problem(stages, [{"memory_bytes": 20} for _ in range(4)], m=7)


def test_every_highs_status_has_one_meaning() -> None:
    """The table is complete: a new HiGHS status turns this red instead of passing unseen."""
    statuses = {
        value
        for name, value in vars(highspy.HighsModelStatus).items()
        if isinstance(value, highspy.HighsModelStatus) and not name.startswith("_")
    }
    assert statuses == set(STATUS_OF)


def test_a_time_limit_is_not_called_optimal() -> None:
    """PuLP labels HiGHS's time-limit stop `Optimal`; we read HiGHS itself."""
    model = _knapsack(60)
    outcome = solve_milp(model, time_limit_s=0.01)
    assert outcome.status is MilpStatus.TIME_LIMIT


def test_columns_are_mapped_by_index() -> None:
    """x10 comes before x2 by name, not by index: each value belongs to its own variable."""
    model = Model("order")
    xs = [model.continuous(f"x{i}", 0, 100) for i in range(12)]
    model.minimise(total(list(reversed(xs))))
    for i, x in enumerate(xs):
        model.add(at_least(x, i))
    outcome = solve_milp(model, time_limit_s=5)
    assert outcome.values is not None
    assert [outcome.values[x] for x in xs] == pytest.approx(list(range(12)))


def test_a_start_is_used() -> None:
    """Given the optimum and no time to find it, HiGHS returns it; without the start it has none."""
    best = solve_milp(_knapsack(30), time_limit_s=30)
    assert best.status is MilpStatus.OPTIMAL
    assert best.values is not None
    by_name = {variable.name: value for variable, value in best.values.items()}
    model = _knapsack(30)
    start = {variable: by_name[variable.name] for variable in model.problem.variables()}
    first: list[float] = []
    solve_milp(
        model,
        time_limit_s=30,
        start=start,
        on_solution=lambda values: first.append(value_of(model.problem.objective, values)),
    )
    assert first[0] == pytest.approx(value_of(model.problem.objective, start))


def test_should_stop_ends_the_run() -> None:
    """The run ends as soon as it is told to."""
    outcome = solve_milp(_knapsack(60), time_limit_s=60, should_stop=lambda: True)
    assert outcome.status in (MilpStatus.INTERRUPTED, MilpStatus.OPTIMAL)


def test_an_error_in_a_callback_comes_out() -> None:
    """What a callback raises is not swallowed by HiGHS."""

    def broken(_: object) -> None:
        raise RuntimeError("callback")

    with pytest.raises(RuntimeError, match="callback"):
        solve_milp(_knapsack(30), time_limit_s=10, on_solution=broken)


def test_the_milp_beats_every_start() -> None:
    """140 by the best start, 136 by the MILP, proven; without the MILP this is red."""
    best = Incumbent(parked_problem())
    for start in all_starts(best.problem):
        if start.programs is not None and start.legal:
            best.offer(start.programs, start.method)
    start_ms = best.objective_ms
    improve_by_milp(best, time_limit_s=60, threads=1, seed=0)
    assert best.objective_ms < start_ms - 1
    assert best.method == "milp"
    assert best.is_optimal


def test_solve_proves_by_the_milp() -> None:
    """Whoever finds the optimum, the proof is the MILP's."""
    result = solve(parked_problem(), time_limit_s=60)
    assert result.status is SolveStatus.OPTIMAL
    assert result.schedule is not None
    assert result.schedule.provenance.bound_method == "milp"


@settings(max_examples=40)
@given(cases())
def test_every_legal_schedule_is_a_solution_of_the_model(case: Case) -> None:
    """Programs -> values satisfies every constraint: so the model's bound is a bound.

    And values -> programs gives back a legal schedule that is no worse. Only schedules that use a
    choice known to be pointless (offload where memory does not bind, say) are left out.
    """
    objective = simulate(case.problem, case.programs).objective_ms(case.problem.objective)
    model = HorizonModel(case.problem, objective, fifo=False)
    values = model.values_of(case.programs)
    if values is None:
        event("uses a pointless choice")
        return
    assert not _broken(model.model, values)
    lowered = model.lowered(values)
    check(case.problem, lowered)
    again = simulate(case.problem, lowered).objective_ms(case.problem.objective)
    if not _shares_lanes(case.problem):
        assert again <= objective * (1 + 1e-9)


def _shares_lanes(problem: Problem) -> bool:
    """Whether transfers of different devices or directions compete (the model is then relaxed)."""
    return any(d.half_duplex or d.pcie_group is not None for d in problem.devices)


def _broken(model: Model, values: dict[Variable, float]) -> list[str]:
    broken = [
        str(constraint) for constraint in model.constraints if value_of(constraint, values) < -1e-6
    ]
    for variable in model.problem.variables():
        low, high = variable.lowBound, variable.upBound
        if not low - 1e-6 <= values[variable] <= high + 1e-6:
            broken.append(f"{variable} = {values[variable]} outside {low} .. {high}")
    return broken


def _knapsack(n: int) -> Model:
    """A knapsack that takes branch and bound a while."""
    model = Model("knapsack")
    xs = [model.binary(f"x{i}") for i in range(n)]
    model.minimise(total([-float(1000 + (i * 7919) % 501) * x for i, x in enumerate(xs)]))
    for k in range(5):
        weights = [1000.0 + (i * 104729 + k * 31337) % 733 for i in range(n)]
        held = total([-w * x for w, x in zip(weights, xs, strict=True)])
        model.add(at_least(held, -sum(weights) // 2))
    return model
