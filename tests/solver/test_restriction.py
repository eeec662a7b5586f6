"""What is allowed need not be used: programs without offload or recompute are met as well."""

import pytest
from hypothesis import given

from optpipe import Problem, find_violations, simulate
from optpipe_solver import portfolio
from optpipe_solver.budget import Limits, Stop
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.portfolio import (
    FamilyStart,
    SearchPlan,
    _find,
    all_starts,
    improve,
    improve_by_restrictions,
    plans,
    restrictions,
)
from tests.building import UNIT, bus, problem, stage
from tests.solver.starting import serially
from tests.strategies import Case, cases, few

QUICK = 0.1
"""Units of work."""


def slow_bus(m: int = 8) -> Problem:
    """Two and a half activations of memory, and copies that last as long as two forwards.

    The families that offload what does not fit are worse than those that can only recompute it.
    """
    sizes = {
        "activation_bytes": 10 * UNIT,
        "weight_context_bytes": 5 * UNIT,
        "offload_bytes": 10 * UNIT,
        "recompute_ms": 7,
        "checkpoint_bytes": UNIT,
    }
    device = bus(memory_bytes=25 * UNIT, d2h_gb_per_s=0.5, h2d_gb_per_s=0.5)
    return problem([stage(d, 10, 9, 5, **sizes) for d in range(3)], [device] * 3, m=m)


def legal_starts(given: Problem) -> list[FamilyStart]:
    """The families that keep the limits."""
    return [start for start in all_starts(given) if start.programs is not None and start.legal]


def nothing(*_: object) -> None:
    """Find nothing in a restriction beside its families."""


def test_each_restriction_has_a_name_that_says_what_it_goes_without() -> None:
    """All subsets of what any stage can do; what has no schedule is no restriction."""
    both = slow_bus()
    names = [less.name for less in restrictions(both)]
    assert names == ["without offload and recompute", "without offload", "without recompute"]
    without_recompute = restrictions(both)[2].problem
    assert [less.name for less in restrictions(without_recompute)] == ["without offload"]
    assert restrictions(restrictions(both)[0].problem) == ()
    tight = [{"memory_bytes": 12}, {"memory_bytes": 12}]
    again = {"recompute_ms": 1.0, "checkpoint_bytes": 1}
    needed = problem([stage(0, **again), stage(1, **again), stage(0, **again)], tight, m=2)
    assert restrictions(needed) == ()


@few(6)
@given(cases(tight=True, menus=True))
def test_programs_of_a_restriction_are_as_long_for_the_problem(case: Case) -> None:
    """Legal once its modes are named, with the same times to the last bit."""
    for less in restrictions(case.problem):
        for start in legal_starts(less.problem):
            assert start.programs is not None
            programs = less.lift(start.programs)
            assert not find_violations(case.problem, programs)
            run = simulate(case.problem, programs)
            assert run.objective_ms(case.problem.objective) == start.objective_ms


@few(6)
@given(cases(tight=True, menus=True))
def test_never_worse_than_what_is_found_in_a_restriction(case: Case) -> None:
    """Families and whatever the search finds, up to the tolerance of what is optimal."""
    best, found = serially(case.problem), []

    def find(inner: Incumbent, stop: Stop) -> None:
        _find(inner, stop)
        found.append(inner.objective_ms)

    improve_by_restrictions(best, Stop(600, work=QUICK), find)
    for less in restrictions(case.problem):
        found += [start.objective_ms for start in legal_starts(less.problem)]
    assert all(best.objective_ms <= ms * (1 + 1e-6) for ms in found)
    assert best.bound_ms == 0.0


@pytest.mark.parametrize("threads", [1, 2])
def test_a_solve_begins_with_the_families_of_restrictions(threads: int) -> None:
    """All that is allowed makes the families longer; the solve has taken the shorter ones in."""
    given = slow_bus()
    least = min(s.objective_ms for less in restrictions(given) for s in legal_starts(less.problem))
    best = serially(given)
    for start in legal_starts(given):
        best.offer(start.programs or (), start.method)
    assert least < best.objective_ms
    limits = Limits(work_limit=QUICK if threads == 1 else None, threads=threads)
    before = SearchPlan(before=plans(given, limits)[-1].before)
    stop = Stop(60, work=limits.work_limit, should_stop=lambda: best.objective_ms <= least)
    improve(best, before, stop)
    assert best.objective_ms <= least
    assert best.method.endswith("without offload")


def test_a_bound_of_the_problem_is_one_of_each_restriction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no bound of its own is known, it has the problem's."""
    monkeypatch.setattr(portfolio, "lower_bounds", lambda *_, **__: ())
    best, bounds = serially(slow_bus()), []
    best.offer_bound(100.0, "proof")
    improve_by_restrictions(best, Stop(600), lambda inner, *_: bounds.append(inner.bound_ms))
    assert set(bounds) == {100.0}


def test_a_restriction_whose_bound_is_no_better_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not even its families are built."""
    best = serially(slow_bus())
    improve_by_restrictions(best, Stop(600), nothing)
    built: list[Problem] = []

    def build(given: Problem) -> tuple[()]:
        built.append(given)
        return ()

    monkeypatch.setattr(portfolio, "all_starts", build)
    improve_by_restrictions(best, Stop(600), nothing)
    keeping, recomputing, _ = (less.problem for less in restrictions(best.problem))
    assert recomputing in built
    assert keeping not in built


def test_work_is_counted_and_shared() -> None:
    """What is spent in restrictions is told, and no more than allowed but for a move.

    Bounds of restrictions, which are known, stay there.
    """
    best, stop = serially(slow_bus()), Stop(600, work=QUICK)
    improve_by_restrictions(best, stop, _find)
    assert 0.5 * QUICK < stop.spent < 1.01 * QUICK
    assert best.bound_ms == 0.0


@pytest.mark.parametrize("is_large", [True, False])
def test_large_problems_and_who_is_out_of_time_look_at_no_restriction(
    is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where families take long, nobody waits for those of restrictions."""
    best, stop = serially(slow_bus()), Stop(600, should_stop=lambda: not is_large)
    if is_large:
        monkeypatch.setattr(portfolio, "_LARGE", 0)
    before = best.objective_ms
    improve_by_restrictions(best, stop, nothing)
    assert stop.spent == 0.0
    assert best.objective_ms == before
