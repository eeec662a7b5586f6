"""The beam of the general search: what it finds can be run, and it denies nothing that exists."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from optpipe import Problem, find_violations, simulate
from optpipe_solver.budget import Stop
from optpipe_solver.exact.beam import beam_can_search, improve_by_beam, search_beam
from optpipe_solver.exact.fifo_search import HorizonAnswer
from optpipe_solver.families.classic import build_serial
from optpipe_solver.incumbent import Incumbent
from tests.building import UNIT, bus, offloadable, problem, stage
from tests.solver.exact.test_device_subsets import REAL, real_problem
from tests.solver.exact.test_general_search import three_in_room_for_two, tiny_problems
from tests.solver.exhaustive import optimum
from tests.strategies import Case, cases

AGAIN = {"recompute_ms": 29.718, "checkpoint_bytes": 372_454_195}


def is_said_in_full(given: Problem) -> bool:
    """Whether states relax nothing: no copies, and reductions that cannot queue."""
    copies = any(given.can_offload(s) for s in range(len(given.stages)))
    return not copies and all(s.grad_sync_ms == 0 for s in given.stages)


def serially(given: Problem) -> Incumbent:
    """One micro-batch after the other: legal, and long."""
    best = Incumbent(given)
    best.offer(build_serial(given), "serial")
    return best


@given(cases())
def test_what_it_finds_can_be_run(case: Case) -> None:
    """Legal but for hosts, and within the length of any schedule where nothing is relaxed."""
    if not beam_can_search(case.problem):
        return
    length = simulate(case.problem, case.programs).objective_ms(case.problem.objective)
    found = search_beam(case.problem, length, 300)
    assert found.answer is not HorizonAnswer.NONE
    if found.programs is None:
        return
    assert {v.code for v in find_violations(case.problem, found.programs)} <= {"memory.host"}
    if is_said_in_full(case.problem):
        run = simulate(case.problem, found.programs)
        assert run.objective_ms(case.problem.objective) <= length * (1 + 1e-9)


def test_what_was_left_out_proves_nothing() -> None:
    """Ten states per layer do not lead to the schedule of 908.25, and do not deny it either."""
    found = search_beam(real_problem(1.5, 8, **AGAIN), 908.25 + 1e-6, 10)
    assert found.answer is HorizonAnswer.UNKNOWN


@given(tiny_problems())
def test_wide_enough_it_finds_the_optimum(tiny: Problem) -> None:
    """At the optimum that exhaustive search knows, where states relax nothing."""
    if not (beam_can_search(tiny) and is_said_in_full(tiny)):
        return
    least = optimum(tiny)
    assert search_beam(tiny, least, 1).answer is not HorizonAnswer.NONE
    found = search_beam(tiny, least, 10_000)
    assert found.programs is not None
    assert simulate(tiny, found.programs).objective_ms(tiny.objective) == pytest.approx(least)


@pytest.mark.parametrize(
    "fields",
    [{}, {"offload_bytes": 0, "recompute_ms": 1, "checkpoint_bytes": 0}, {"backward_ms": 2.0}],
)
def test_copies_and_recomputes_are_written_down(fields: dict[str, Any]) -> None:
    """Three micro-batches in room for two: shorter than the room allows, and legal."""
    given = three_in_room_for_two(**fields)
    plain = three_in_room_for_two(offload_bytes=0)
    best, other = serially(given), serially(plain)
    for incumbent in (best, other):
        improve_by_beam(incumbent, Stop(60))
    assert best.objective_ms < other.objective_ms


def test_a_release_stands_before_what_needs_its_bytes() -> None:
    """Copies that take long: memory is never exceeded, though states count ended copies alone."""
    held = offloadable(0, 2, 2, 1, offload_bytes=5 * UNIT)
    given = problem([held, stage(1, 9, 9, 1)], [bus(memory_bytes=17 * UNIT), bus()], m=4)
    best = serially(given)
    improve_by_beam(best, Stop(60))
    assert best.programs is not None
    assert any("RELEASE" in str(action) for action in best.programs[0])
    assert best.method == "beam"


def test_it_finds_what_differs_on_every_device() -> None:
    """Recompute, 1.5 activations: 908.25, which local search and windows miss (909.143)."""
    best = serially(real_problem(1.5, 8, **AGAIN))
    improve_by_beam(best, Stop(600, work=700_000))
    assert best.objective_ms == pytest.approx(908.25)


def test_where_nothing_is_left_out_it_proves() -> None:
    """A small problem: the last search holds all states and finds none."""
    given = real_problem(1.5, 2, **AGAIN)
    best = serially(given)
    improve_by_beam(best, Stop(600))
    assert best.is_optimal
    assert best.bound_method == "beam"


def test_the_same_work_is_the_same_run() -> None:
    """A limit on states, and no clock, decides where a run ends."""
    runs = []
    for _ in range(2):
        best = serially(real_problem(2.0, 4, **AGAIN, offload_bytes=REAL["activation_bytes"] // 2))
        stop = Stop(600, work=60_000)
        improve_by_beam(best, stop)
        met = stop.spent
        runs.append((met, best.programs))
    assert runs[0] == runs[1]


def test_told_to_stop_it_stops() -> None:
    """One layer at most, and nothing found."""
    best = serially(real_problem(1.5, 8, **AGAIN))
    before = best.objective_ms
    stop = Stop(600, should_stop=lambda: True)
    improve_by_beam(best, stop)
    met = stop.spent
    assert met == 1
    assert best.objective_ms == before


def test_problems_it_has_nothing_to_do_for() -> None:
    """Several devices under span, a device without a stage, and no schedule to be better than."""
    span = problem([stage(0), stage(1)], objective="span")
    assert not beam_can_search(span)
    assert not beam_can_search(problem([stage(0)], [bus(), bus()]))
    stop = Stop(60)
    improve_by_beam(Incumbent(span), stop)
    assert stop.spent == 0
    stop = Stop(60)
    improve_by_beam(serially(span), stop)
    assert stop.spent == 0
