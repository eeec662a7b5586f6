"""``solve`` and ``compare``: never worse than a start, honest about what is proven."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings

from optpipe import InputError, Problem, check_schedule, simulate
from optpipe_solver import Progress, SolveStatus, solve
from optpipe_solver.starts import all_starts
from tests.building import UNIT, bus, problem, stage
from tests.solver.test_milp import parked_problem
from tests.strategies import Case, cases


def offload_problem(m: int = 8) -> Problem:
    """Four devices with one and a half activations of memory, transfers half a forward."""
    held = {
        "activation_bytes": 10 * UNIT,
        "weight_context_bytes": 5 * UNIT,
        "offload_bytes": 10 * UNIT,
    }
    return problem(
        [stage(d, 18.5, 18.1, 9.3, **held) for d in range(4)],
        [bus(memory_bytes=15 * UNIT) for _ in range(4)],
        m=m,
    )


def recompute_problem() -> Problem:
    """The same without transfers: what recomputation can do is hard to bound."""
    held = {
        "activation_bytes": 10 * UNIT,
        "weight_context_bytes": 5 * UNIT,
        "recompute_ms": 18.5,
        "checkpoint_bytes": UNIT,
    }
    stages = [stage(d, 18.5, 18.1, 9.3, **held) for d in range(4)]
    return problem(stages, [bus(memory_bytes=15 * UNIT) for _ in range(4)], m=12)


@settings(max_examples=25)
@given(cases(tight=True))
def test_never_worse_than_any_start_and_never_below_the_bound(case: Case) -> None:
    """On random problems whose limits some schedule just meets."""
    result = solve(case.problem, time_limit_s=0.5)
    assert result.schedule is not None
    check_schedule(case.problem, result.schedule)
    run = simulate(case.problem, result.schedule.programs)
    assert result.schedule.objective_ms == run.objective_ms(case.problem.objective)
    for start in all_starts(case.problem):
        if start.programs is not None and start.legal:
            assert result.schedule.objective_ms <= start.objective_ms * (1 + 1e-9)
    assert result.schedule.bound_ms is not None
    assert result.schedule.bound_ms <= result.schedule.objective_ms * (1 + 1e-9)
    given_ms = simulate(case.problem, case.programs).objective_ms(case.problem.objective)
    assert result.schedule.bound_ms <= given_ms * (1 + 1e-9) + 1e-9


def test_offload_is_used_where_memory_is_short() -> None:
    """The schedule fits and contains OFFLOAD, RELEASE and RELOAD."""
    given = offload_problem()
    result = solve(given, time_limit_s=2)
    assert result.schedule is not None
    kinds = {action.type for program in result.schedule.programs for action in program}
    assert {"OFFLOAD", "RELEASE", "RELOAD"} <= kinds


def test_progress_tells_every_improvement_in_order() -> None:
    """Objectives fall, bounds rise, the last one is the result."""
    told: list[Progress] = []
    result = solve(parked_problem(), time_limit_s=30, on_progress=told.append)
    objectives = [p.objective_ms for p in told if p.programs is not None]
    assert objectives == sorted(objectives, key=lambda ms: -(ms or 0.0))
    bounds = [p.bound_ms or 0.0 for p in told]
    assert bounds == sorted(bounds)
    assert result.schedule is not None
    assert objectives[-1] == result.schedule.objective_ms
    assert len(result.schedule.provenance.trace) == len(told)


def test_it_returns_at_its_time_limit_and_when_told_to_stop() -> None:
    """A problem nobody can finish so soon: the limit holds, and so does cancellation."""
    given = recompute_problem()
    began = time.perf_counter()
    result = solve(given, time_limit_s=2)
    assert time.perf_counter() - began < 10
    assert result.schedule is not None
    assert result.schedule.stopped_by == "time_limit"
    cancelled = solve(given, time_limit_s=60, should_stop=lambda: True)
    assert cancelled.schedule is not None
    assert cancelled.schedule.stopped_by == "cancelled"


def test_the_same_seed_gives_the_same_programs() -> None:
    """Solved to the end, so no clock is involved."""
    results = [solve(parked_problem(), time_limit_s=60, seed=3).schedule for _ in range(2)]
    assert results[0] is not None
    assert results[1] is not None
    assert results[0].programs == results[1].programs


def test_the_same_work_gives_the_same_programs() -> None:
    """Far from the end, limited by work: no clock is involved, so nothing differs."""
    given = recompute_problem()
    results = [solve(given, time_limit_s=600, work_limit=0.5, seed=3).schedule for _ in range(2)]
    assert results[0] is not None
    assert results[1] is not None
    assert results[0].stopped_by == "work_limit"
    assert results[0].programs == results[1].programs
    assert results[0].bound_ms == results[1].bound_ms


def test_two_threads_find_and_prove_the_same_optimum() -> None:
    """Search and proof side by side."""
    result = solve(parked_problem(), time_limit_s=60, threads=2)
    assert result.status is SolveStatus.OPTIMAL
    assert result.schedule is not None
    assert result.schedule.objective_ms == 136


def test_a_gap_that_is_good_enough_ends_the_solve() -> None:
    """Within half of the bound, and not proven optimal."""
    result = solve(offload_problem(m=4), time_limit_s=60, gap=0.5)
    assert result.schedule is not None
    assert result.schedule.stopped_by == "gap"
    assert result.schedule.gap is not None
    assert 1e-6 < result.schedule.gap <= 0.5


def test_contributions_sum_up_to_what_was_gained() -> None:
    """From the first schedule's objective to the last, from no bound to the last."""
    schedule = solve(parked_problem(), time_limit_s=60).schedule
    assert schedule is not None
    parts = schedule.provenance.contributions
    first = next(t.objective_ms for t in schedule.provenance.trace if t.objective_ms is not None)
    assert sum(part.objective_gain_ms for part in parts) == first - schedule.objective_ms
    assert sum(part.bound_gain_ms for part in parts) == schedule.bound_ms
    assert len({part.method for part in parts}) == len(parts)


def test_a_given_start_is_kept_when_it_is_the_best() -> None:
    """The optimum as a start, a family as the method: the start wins."""
    given = parked_problem()
    best = solve(given, time_limit_s=60).schedule
    assert best is not None
    again = solve(given, time_limit_s=1, method="greedy", start=best.programs).schedule
    assert again is not None
    assert again.objective_ms == best.objective_ms
    assert again.provenance.method == "given start"


def test_a_method_by_name_gives_that_family() -> None:
    """No optimisation where a family was asked for."""
    result = solve(problem([stage(0), stage(1)], m=3), method="1f1b")
    assert result.schedule is not None
    assert result.schedule.provenance.method == "1f1b"


def test_a_family_that_does_not_fit_is_unknown_with_a_reason() -> None:
    """1F1B over the limit and nothing to offload: nothing found, nothing proven."""
    result = solve(parked_problem(), method="1f1b")
    assert result.status is SolveStatus.UNKNOWN
    assert "memory limit" in result.message


def test_who_stops_at_once_hears_why_there_is_nothing() -> None:
    """Whether the family came so far as to have a reason of its own or not."""
    result = solve(parked_problem(), method="1f1b", should_stop=lambda: True)
    assert result.status is SolveStatus.UNKNOWN
    assert result.message


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"time_limit_s": 0}, "time_limit_s = 0"),
        ({"threads": 0}, "threads = 0"),
        ({"work_limit": 0}, "work_limit = 0"),
        ({"seed": -1}, "seed = -1"),
        ({"gap": 1}, "gap = 1"),
        ({"method": "best"}, "method = 'best'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], said: str) -> None:
    """Value, rule, fix."""
    with pytest.raises(InputError, match=said):
        solve(parked_problem(), **options)  # type: ignore[arg-type]
