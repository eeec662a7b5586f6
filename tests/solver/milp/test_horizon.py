"""The MILP: its hand-over to HiGHS, its lowering, and what it finds and proves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import highspy
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from optpipe import Problem, check, simulate
from optpipe_solver import SolveStatus, solve
from optpipe_solver.budget import Stop
from optpipe_solver.families.classic import build_serial
from optpipe_solver.milp.highs import (
    LinearProgram,
    MilpModel,
    MilpStatus,
    RowByRow,
    _options,
    at_least,
    scale_for,
    scaled,
    solve_milp,
    total,
)
from optpipe_solver.milp.horizon import model
from optpipe_solver.milp.horizon.model import (
    HorizonModel,
    improve_by_milp,
    lower,
)
from tests.building import problem, stage
from tests.solver.exhaustive import optimum
from tests.solver.milp.rows import broken, shares_lanes, values_of
from tests.solver.starting import schedule_of, started
from tests.strategies import Case, cases, few

if TYPE_CHECKING:
    from collections.abc import Callable


def offloading_problem(m: int = 8) -> Problem:
    """Four devices, two activations, offload: with eight micro-batches no proof in seconds."""
    sizes = {"activation_bytes": 10, "weight_context_bytes": 5, "offload_bytes": 10}
    stages = [stage(d, 4, 4, 2, **sizes) for d in range(4)]
    device = {"memory_bytes": 20, "d2h_gb_per_s": 2.5e-6, "h2d_gb_per_s": 2.5e-6}
    return problem(stages, [device] * 4, m=m)


def parked_problem(m: int = 7) -> Problem:
    """Four devices, two activations: every start is beaten by the MILP.

    With eight micro-batches no bound but the MILP's is 150.
    """
    stages = [stage(d, 4, 4, 2, activation_bytes=10, weight_context_bytes=5) for d in range(4)]
    return problem(stages, [{"memory_bytes": 20} for _ in range(4)], m=m)


def test_any_seed_reaches_highs() -> None:
    """Its own seeds are 32-bit integers; it would refuse others and go on with its default."""
    highs = highspy.Highs()
    for seed, theirs in ((0, 0), (2**31 - 1, 2**31 - 1), (2**31, 0), (2**40 + 7, 7)):
        options = _options(Stop(1.0, seed=seed))
        taken = highs.setOptionValue("random_seed", options["random_seed"])
        assert taken == highspy.HighsStatus.kOk
        assert highs.getOptionValue("random_seed")[1] == theirs
        assert solve_milp(_knapsack(6), Stop(5, seed=seed)).status is MilpStatus.OPTIMAL


def test_a_time_limit_is_not_called_optimal() -> None:
    """PuLP labels HiGHS's time-limit stop `Optimal`; we read HiGHS itself."""
    model = _knapsack(60)
    outcome = solve_milp(model, Stop(0.01))
    assert outcome.status is MilpStatus.UNDECIDED


def test_columns_are_mapped_by_index() -> None:
    """x10 comes before x2 by name, not by index: each value belongs to its own variable."""
    model = MilpModel("order")
    xs = [model.continuous(f"x{i}", 0, 100) for i in range(12)]
    model.minimise(total(list(reversed(xs))))
    for i, x in enumerate(xs):
        model.add(at_least(x, i))
    outcome = solve_milp(model, Stop(5))
    assert outcome.values is not None
    assert [outcome.values[x] for x in xs] == pytest.approx(list(range(12)))


def test_a_linear_program_grows_row_by_row() -> None:
    """Each row is kept: of 2 x + y within 3 units each, then 4 together, then x at most 1."""
    program = LinearProgram([2.0, 1.0], [3.0, 3.0])
    assert program.best() == pytest.approx([3, 3])
    program.add_at_most({0: 1.0, 1: 1.0}, 4.0)
    assert program.best() == pytest.approx([3, 1])
    program.add_at_most({0: 1.0}, 1.0)
    assert program.best() == pytest.approx([1, 3])


def test_runs_of_a_thread_may_ask_for_different_numbers_of_threads() -> None:
    """HiGHS alone refuses the second: its scheduler would be that of the first for good."""
    model = _knapsack(6)
    for threads in (2, 1, 3):
        rows = RowByRow(model)
        assert rows.solve(Stop(5, threads=threads), integer=True).status is MilpStatus.OPTIMAL
        assert LinearProgram([1.0], [3.0]).best() == pytest.approx([3])


def test_an_error_in_a_callback_comes_out() -> None:
    """What a callback raises is not swallowed by HiGHS."""

    def broken(_: object) -> None:
        raise RuntimeError("callback")

    with pytest.raises(RuntimeError, match="callback"):
        solve_milp(_knapsack(30), Stop(10), on_solution=broken)


def test_a_bound_needs_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run denies every schedule below 149, the second those below 130: 130 is proven."""
    said = iter([149.0, 130.0])
    seeds = []

    def run(*given: Any, on_bound: Callable[[float], None], **_: Any) -> float:
        seeds.append(given[2].seed)
        bound = next(said)
        on_bound(bound)
        return bound

    monkeypatch.setattr(model, "solve_horizon", run)
    best = started(parked_problem(8))
    improve_by_milp(best, Stop(5))
    assert seeds == [0, 1]
    assert best.bound_ms == 130.0


def test_a_run_that_denied_what_exists_confirms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first run denied all below 150, somebody found one: its word is worth nothing."""
    best = started(parked_problem(8))
    seeds = []

    def run(*given: Any, **_: Any) -> float:
        seeds.append(given[2].seed)
        best.objective_ms = 148.0
        return 150.0

    monkeypatch.setattr(model, "solve_horizon", run)
    improve_by_milp(best, Stop(5))
    assert seeds == [0]
    assert best.bound_method != "milp"


def test_the_milp_beats_every_start() -> None:
    """138 by the best start, 136 by the MILP, proven; without the MILP this is red."""
    best = started(parked_problem())
    start_ms = best.objective_ms
    improve_by_milp(best, Stop(200))
    assert best.objective_ms < start_ms - 1
    assert best.method == "milp"
    assert best.is_optimal


@pytest.mark.extended
def test_the_milp_proves_what_no_bound_does() -> None:
    """150 is optimal; the best bound of another kind is 146."""
    best = started(parked_problem(8))
    assert best.objective_ms == 150
    improve_by_milp(best, Stop(60))
    assert best.is_optimal
    assert best.bound_method == "milp"


def test_what_fits_in_neither_order_does_not_exist_together() -> None:
    """14.5, found and proven; while a W and a later B could overlap, 17 was all that came of it."""
    sizes = {"weight_context_bytes": 5, "backward_ms": 2.25}
    stages = [stage(0, 2, 1, 1, **sizes), stage(1, 1, 2.5, 2.5, **sizes)]
    best = started(problem(stages, [{"memory_bytes": 20}, {"memory_bytes": 15}], m=3))
    assert best.objective_ms == 15
    improve_by_milp(best, Stop(30))
    assert best.objective_ms == 14.5
    assert best.is_optimal


def test_the_same_work_is_the_same_run() -> None:
    """A work limit, and no clock, decides where a run ends: same programs, same bound."""
    runs = []
    for _ in range(2):
        best = started(offloading_problem(4))
        stop = Stop(600, seed=5, work=0)
        improve_by_milp(best, stop)
        nodes = stop.spent
        runs.append((nodes, best.objective_ms, best.bound_ms, best.programs))
    assert runs[0] == runs[1]


def test_a_stop_takes_half_a_second_at_most() -> None:
    """Also while the model is written, in HiGHS's presolve and in its root relaxation.

    Of processor time, which others on the machine do not take.
    """
    best = started(offloading_problem())

    def late_s(after: float) -> float:
        end = time.process_time() + after
        improve_by_milp(best, Stop(60, should_stop=lambda: time.process_time() > end))
        return time.process_time() - end

    for after in (0.05, 0.5, 1.5):
        # A busy machine only adds to what a stop takes, so the least of three counts.
        assert min(late_s(after) for _ in range(3)) < 0.5


@st.composite
def tiny_problems(draw: st.DrawFn) -> Problem:
    """One micro-batch on a V, or two on one device that may be offloaded or recomputed."""
    placement, m = draw(st.sampled_from([((0, 1, 0), 1), ((0,), 2)]))
    numbers = st.integers(1, 4)
    extra = {"offload_bytes": 10, "recompute_ms": 2, "checkpoint_bytes": 3} if m > 1 else {}
    sizes = {"activation_bytes": 10, "weight_context_bytes": draw(st.integers(2, 12))}
    stages = [
        stage(d, draw(numbers), draw(numbers), draw(numbers), **sizes, **(extra if d == 0 else {}))
        for d in placement
    ]
    room = draw(st.integers(24, 40) if m == 1 else st.integers(12, 24))
    device = {"memory_bytes": room, "d2h_gb_per_s": 5e-6, "h2d_gb_per_s": 5e-6}
    objective = draw(st.sampled_from(["makespan", "span"]))
    return problem(stages, [device] * (1 + max(placement)), m=m, objective=objective)


@few(10)
@given(tiny_problems())
def test_the_optimum_is_that_of_exhaustive_search(tiny: Problem) -> None:
    """Proven optimal means that no program set is better; a bound is never above the optimum.

    Under span the model may delay a device's first action, which programs cannot: no proof then.
    """
    best = started(tiny)
    improve_by_milp(best, Stop(20))
    least = optimum(tiny)
    assert best.bound_ms <= least * (1 + 1e-9)
    assert best.is_optimal or tiny.objective == "span"
    if best.is_optimal:
        assert best.objective_ms == pytest.approx(least)


@few(60)
@given(cases())
def test_every_legal_schedule_is_a_solution_of_the_model(case: Case) -> None:
    """Programs -> values satisfies every constraint: so the model's bound is a bound.

    And values -> programs gives back a legal schedule that is no worse. Only schedules that use a
    choice known to be pointless (offload where memory does not bind, say) are left out.
    """
    objective = simulate(case.problem, case.programs).objective_ms(case.problem.objective)
    model = HorizonModel(case.problem, objective, fifo=False)
    assert not model.items.is_empty
    values = values_of(model.variables, case.programs)
    if values is None:
        event("uses a pointless choice")
        return
    assert not broken(model.model, values)
    lowered = lower(model.variables, values)
    check(case.problem, lowered)
    again = simulate(case.problem, lowered).objective_ms(case.problem.objective)
    if not shares_lanes(case.problem):
        assert again <= objective * (1 + 1e-9)


def test_under_span_other_devices_may_end_after_the_horizon() -> None:
    """Device 1 begins 1 ms after device 0 and works on for 12: no clock shows more than 12 ms."""
    given = problem([stage(0, 1, 1, 0), stage(1, 1, 1, 10)], m=1, objective="span")
    rows = build_serial(given)
    run = simulate(given, rows)
    assert (run.span_ms, run.makespan_ms) == (12, 13)
    model = HorizonModel(given, 12.0, fifo=False)
    assert not model.items.is_empty
    values = values_of(model.variables, rows)
    assert values is not None
    assert not broken(model.model, values)


def _knapsack(n: int) -> MilpModel:
    """A knapsack that takes branch and bound a while."""
    model = MilpModel("knapsack")
    xs = [model.binary(f"x{i}") for i in range(n)]
    model.minimise(total([-float(1000 + (i * 7919) % 501) * x for i, x in enumerate(xs)]))
    for k in range(5):
        weights = [1000.0 + (i * 104729 + k * 31337) % 733 for i in range(n)]
        weight = total([-w * x for w, x in zip(weights, xs, strict=True)])
        model.add(at_least(weight, -sum(weights) // 2))
    return model


# --- Another unit of time is the same problem.


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
        result = solve(scaled(parked_problem(), factor), time_limit_s=600)
        assert result.status is SolveStatus.OPTIMAL
        assert result.schedule is not None
        assert result.schedule.objective_ms == 136 * factor


def test_a_variable_in_no_constraint_is_lowered_too() -> None:
    """One micro-batch: the starts of some items are free, and PuLP hands them to nobody."""
    again = {"checkpoint_bytes": 1, "activation_bytes": 3}
    stages = [
        stage(0, 1, 0, 0, activation_bytes=3),
        stage(1, 0, 0, 0, weight_context_bytes=1, recompute_ms=1, **again),
        stage(1, 1, 2.5, 0, recompute_ms=0, **again),
        stage(0, 0, 0, 0, activation_bytes=4),
    ]
    devices = [{"memory_bytes": 7}, {"memory_bytes": 4}]
    given_problem = problem(stages, devices, objective="span")
    check(given_problem, schedule_of(given_problem, time_limit_s=5).programs)
