"""Times and memory kept up to date move by move: to the last bit those of a fresh simulation."""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Problem, check, simulate
from optpipe.memory import host_walk
from optpipe_solver.arrays.encoding import CompiledProblem
from optpipe_solver.arrays.simulate import (
    BACKWARD_INPUT,
    FORWARD,
    FULL_BACKWARD,
    OFFLOAD,
    RELOAD,
)
from optpipe_solver.jit import seeded
from optpipe_solver.local_search.annealing import anneal, best_rows, course_of, table_for
from optpipe_solver.local_search.board import rows_on
from tests.building import UNIT
from tests.strategies import Case, cases, documents, few, random_programs, tightened

if TYPE_CHECKING:
    from optpipe_solver.arrays import Floats, Ints
    from optpipe_solver.jit import Draw
    from optpipe_solver.local_search.annealing import Course
    from optpipe_solver.local_search.board import Table

MOVES = 60
WHOLE = 1 << 30
LOOK, STAY = 1 << 30, 0
"""Ages of a longest path: it is looked for before the move, or not."""


@st.composite
def kept_move_by_move(draw: st.DrawFn) -> Case:
    """Devices that do not share lanes, passes that take time: `can_propagate`; much is offloaded.

    Of `cases` one in five is so, and of these hardly any offloads.
    """
    document = draw(documents(menus=True).filter(lambda one: len(one["devices"]) > 1))
    document |= {"num_microbatches": draw(st.integers(2, 5))}
    drawn = Problem.parse(document if draw(st.booleans()) else document | {"links": []})
    passes = ("forward_ms", "backward_input_ms", "backward_ms")
    stages = [
        one_stage.model_copy(
            update={
                name: max(1.0, ms)
                for name in passes
                if (ms := getattr(one_stage, name)) is not None
            }
            | ({} if one_stage.modes else {"activation_bytes": 4 * UNIT, "offload_bytes": 4 * UNIT})
        )
        for one_stage in drawn.stages
    ]
    rates = {"d2h_gb_per_s": draw(st.sampled_from([0.5, 4.0])), "h2d_gb_per_s": 2.0}
    lanes = {**rates, "half_duplex": False, "pcie_group": None}
    devices = [device.model_copy(update=lanes) for device in drawn.devices]
    drawn = drawn.model_copy(update={"stages": stages, "devices": devices})
    case = Case(drawn, random_programs(drawn, random.Random(draw(st.integers(0, 2**32)))))
    return tightened(case) if draw(st.booleans()) else case


def move_once(table: Table, course: Course, ms: float, draw: Draw, age: int) -> bool:
    """Anneal for one move at the temperature; return whether the move was taken.

    One by one and in Python they would be compiled for this test alone, which takes half a minute.
    """
    course.counts[2] = age
    anneal(table, course, ms, ms, WHOLE, int(course.counts[0]) + 1, draw)
    return int(course.counts[2]) != 0


def ends_of(table: Table, codes: Ints) -> Floats:
    """When actions end as the board has it; copies on their own lane."""
    copies = np.isin(codes // table.times.num_cells, [OFFLOAD, RELOAD])
    return np.where(copies, table.board.end[np.where(copies, codes, 0)], table.board.clock[codes])


def assert_is_longest(table: Table, path_size: int, *, by_span: bool) -> None:
    """A path leads from an action that starts at 0 to where the objective ends; time flows.

    Each of its actions starts when the one before has ended, where nothing is sent between them.
    """
    board = table.board
    path = table.path[:path_size]
    taken = board.last - board.first * by_span
    device = int(
        table.times.device_of[path[0] % table.times.num_cells // table.times.num_microbatches]
    )
    assert path[0] == board.actions[device, board.counts[device] - 1]
    assert taken[device] == max(taken[board.counts > 0])
    assert len(set(path.tolist())) == path_size
    assert (np.diff(board.clock[path]) <= 0).all()
    times = table.times
    assert board.clock[path[-1]] == times.duration[path[-1]]
    if times.there.any() or times.back.any() or not table.rules.incremental:
        return
    ends = ends_of(table, path)
    starts = (ends - times.duration[path])[:-1]
    early = np.minimum(abs(starts - ends[1:]), abs(starts - board.clock[path[1:]]))
    assert (early < 1e-9).all()


def tails_of(table: Table) -> dict[int, float]:
    """From the start of each action to the very end, through what it leads to."""
    board, times = table.board, table.times
    cells, m, last = times.num_cells, times.num_microbatches, times.num_stages - 1

    def backward(cell: int) -> int:
        split = BACKWARD_INPUT * cells + cell
        return split if board.at[split] >= 0 else FULL_BACKWARD * cells + cell

    def leads_to(kind: int, cell: int) -> tuple[int, float]:
        row, stage = times.row[cell], cell // m
        if kind == FORWARD:
            return (cell + m, times.there[row]) if stage < last else (backward(cell), 0.0)
        if kind in {BACKWARD_INPUT, FULL_BACKWARD} and stage > 0:
            return backward(cell - m), times.back[times.row[cell - m]]
        return -1, 0.0

    @cache
    def tail(code: int) -> float:
        kind, cell = divmod(code, cells)
        row = board.actions[times.device_of[cell // m]]
        behind = board.at[code] + 1
        onward = (
            tail(int(row[behind])) if behind < board.counts[times.device_of[cell // m]] else 0.0
        )
        if kind in {OFFLOAD, RELOAD}:
            return onward
        needed, transit = leads_to(kind, cell)
        onward = max(onward, transit + tail(int(needed))) if needed >= 0 else onward
        return float(onward + times.duration[code])

    return {code: tail(code) for code in np.flatnonzero(board.at >= 0).tolist()}


def board_state(table: Table) -> list[list[float]]:
    """Everything a fresh board would hold, by action in program order."""
    board = table.board
    found: list[list[float]] = [board.counts.tolist()]
    if table.rules.hosts_limited:
        found += [board.hosts.tolist()]
    if table.rules.incremental:
        found += [board.first.tolist(), board.last.tolist()]
    for row, count in zip(board.actions, board.counts, strict=True):
        codes = row[:count]
        found += [codes.tolist(), board.at[codes].tolist(), board.held_bytes[codes].tolist()]
        if table.rules.incremental:
            columns = (board.clock, board.out, board.back, board.end)
            found += [column[codes].tolist() for column in columns]
    return found


@given(kept_move_by_move() | cases(menus=True), st.integers(0, 2**32), st.floats(0.0, 2.0))
def test_after_any_moves_the_board_is_that_of_a_fresh_start(
    case: Case, seed: int, slack: float
) -> None:
    """Random moves, taken or undone; shared lanes included; passes without a duration take some.

    The first quarter is made anywhere, the others half of the time around a longest path.
    """
    compiled = CompiledProblem.of(case.problem)
    table = table_for(compiled, compiled.encode(case.programs))
    by_span = case.problem.objective == "span"
    draw = seeded(seed)
    start_ms = simulate(case.problem, case.programs).objective_ms(case.problem.objective)
    course = course_of(table, start_ms)
    for move in range(MOVES):
        before = board_state(table)
        if move % (MOVES // 4) == MOVES // 4 - 1:
            focus = table.focus.copy()
            table.focus[:] = 0
            assert not move_once(table, course, 1.0, draw, LOOK)
            assert_is_longest(table, int(course.counts[3]), by_span=by_span)
            if table.rules.incremental:
                assert all(table.board.tail[code] == ms for code, ms in tails_of(table).items())
            table.focus[:] = focus
        if not move_once(table, course, slack * start_ms + 0.01, draw, STAY):
            assert board_state(table) == before
            continue
        rows = rows_on(table.board)
        assert course.values[1] == compiled.length_ms(rows, table.times.duration)[by_span]
        assert board_state(table) == board_state(table_for(compiled, rows))
    programs = compiled.decode(rows_on(table.board))
    check(case.problem, programs)
    run = simulate(case.problem, programs)
    assert compiled.length_ms(rows_on(table.board)) == (run.makespan_ms, run.span_ms)
    late_ms = float((table.times.duration - compiled.durations(rows_on(table.board))).sum())
    assert late_ms <= 1e-9 * table.rules.mean_pass_ms * table.times.duration.size
    for device, program in enumerate(programs):
        if table.rules.incremental:
            ends = ends_of(table, table.board.actions[device, : len(program)])
            known = [one.end for one in run.times[device]]
            assert ends == pytest.approx(known, rel=0, abs=2 * late_ms)
        host_bytes = max(host_walk(case.problem, program), default=0)
        assert table.board.hosts[device] == host_bytes or not table.rules.hosts_limited


@given(cases(menus=True), st.integers(0, 2**32))
def test_out_of_focus_nothing_moves(case: Case, seed: int) -> None:
    """Where no place is in focus no move is made."""
    compiled = CompiledProblem.of(case.problem)
    table = table_for(compiled, compiled.encode(case.programs))
    table.focus[:] = 0
    draw, course = seeded(seed), course_of(table, 1.0)
    before = board_state(table)
    for move in range(20):
        assert not move_once(table, course, 1e9, draw, STAY if move else LOOK)
        assert table.undo.sizes[0] == 0
    assert board_state(table) == before


@few(25)
@given(cases(menus=True), st.integers(0, 2**32), st.lists(st.integers(1, 2_000), max_size=6))
def test_where_a_cooling_is_cut_makes_no_difference(case: Case, seed: int, cuts: list[int]) -> None:
    """In slices of any sizes or in one go: the same moves, board and best schedule."""
    compiled = CompiledProblem.of(case.problem)
    start_ms = simulate(case.problem, case.programs).objective_ms(case.problem.objective)
    found = []
    for stops in ([10_000], [*sorted(cuts), 10_000]):
        table = table_for(compiled, compiled.encode(case.programs))
        course, draw = course_of(table, start_ms), seeded(seed)
        for until in stops:
            anneal(table, course, 3.0, 0.01, 10_000, until, draw)
        best = best_rows(table)
        found.append((board_state(table), compiled.decode(best), course.values.tolist()))
    assert found[0] == found[1]
