"""Coolings of one stretch of time: which places it has, and that only they are moved from."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from optpipe import find_violations, simulate
from optpipe_solver.arrays.encoding import CompiledProblem
from optpipe_solver.budget import Stop
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.local_search import moves
from optpipe_solver.local_search.annealing import look_around, table_for, take_back, try_move
from optpipe_solver.local_search.propose import everywhere, some_stretch
from optpipe_solver.local_search.search import improve_by_stretches
from tests.building import bus, problem, stage
from tests.solver.local_search.test_search import started
from tests.solver.test_solve import offload_problem
from tests.strategies import Case, cases, few


@given(cases())
def test_everywhere_has_every_place(case: Case) -> None:
    """No program is longer than its row."""
    rows = CompiledProblem.of(case.problem).encode(case.programs)
    focus = everywhere(rows)
    assert (focus[:, 0] == 0).all()
    assert (focus[:, 1] >= rows.lengths).all()


@given(cases(), st.integers(0, 2**32))
def test_a_stretch_lies_within_the_programs(case: Case, seed: int) -> None:
    """Places in order, and the same ones for the same seed."""
    compiled = CompiledProblem.of(case.problem)
    rows = compiled.encode(case.programs)
    table = table_for(compiled, rows)
    focus = some_stretch(compiled, rows, table.work, moves.seeded(seed))
    assert (focus[:, 0] >= 0).all()
    assert (focus[:, 0] <= focus[:, 1]).all()
    assert (focus[:, 1] <= rows.lengths).all()
    again = some_stretch(compiled, rows, table.work, moves.seeded(seed))
    assert np.array_equal(focus, again)


@given(cases(), st.integers(0, 2**32))
def test_what_ends_within_a_stretch_is_in_it(case: Case, seed: int) -> None:
    """An F, I or B of its places ends no earlier than any before them, on any device."""
    compiled = CompiledProblem.of(case.problem)
    rows = compiled.encode(case.programs)
    focus = some_stretch(compiled, rows, table_for(compiled, rows).work, moves.seeded(seed))
    inside: list[float] = []
    before = [0.0]
    run = simulate(case.problem, case.programs)
    for program, times, (low, high) in zip(case.programs, run.times, focus, strict=True):
        for place, (action, at) in enumerate(zip(program, times, strict=True)):
            if action.type in {"F", "I", "B"} and place < high:
                (before if place < low else inside).append(at.end)
    assert not inside or min(inside) >= max(before)


@given(cases(), st.integers(0, 2**32))
def test_out_of_focus_nothing_moves(case: Case, seed: int) -> None:
    """Where no place is in focus no move is made."""
    compiled = CompiledProblem.of(case.problem)
    table = table_for(compiled, compiled.encode(case.programs))
    table.focus[:] = 0
    draw = moves.seeded(seed)
    path_size = look_around(table)
    for _ in range(20):
        _, judged, _ = try_move(table, path_size, np.inf, draw)
        assert judged == np.inf
        assert table.undo.sizes[0] == 0
        take_back(table)


@few(30)
@given(cases(), st.integers(0, 2**32))
def test_what_it_finds_is_legal_and_no_worse(case: Case, seed: int) -> None:
    """As the reference judges it."""
    best = Incumbent(case.problem)
    best.offer(case.programs, "given")
    before = best.objective_ms
    stop = Stop(60, seed=seed, work=100_000)
    improve_by_stretches(best, stop)
    work = stop.spent
    assert work > 0 or best.is_optimal
    assert best.programs is not None
    assert not find_violations(case.problem, best.programs)
    run = simulate(case.problem, best.programs)
    assert run.objective_ms(case.problem.objective) == best.objective_ms <= before


def test_the_same_seed_finds_the_same() -> None:
    """Work, and no clock, decides where a search by stretches ends; it improves on a start."""
    found = []
    for _ in range(2):
        best = started(offload_problem())
        before = best.objective_ms
        improve_by_stretches(best, Stop(60, seed=3, work=3_000_000))
        assert best.objective_ms < before
        found.append(best.programs)
    assert found[0] == found[1]


def test_large_problems_are_left_alone() -> None:
    """More than a hundred passes of one kind."""
    best = started(problem([stage(0), stage(1)], [bus(), bus()], m=51))
    stop = Stop(60)
    improve_by_stretches(best, stop)
    assert stop.spent == 0
