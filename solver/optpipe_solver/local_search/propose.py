"""Which move to try next: half of the time around a longest path, else anywhere in the focus."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optpipe_solver.arrays import simulate
from optpipe_solver.arrays.simulate import FULL_BACKWARD, OFFLOAD, RELOAD
from optpipe_solver.feasibility import fusing_may_pay
from optpipe_solver.jit import below, lean, unit
from optpipe_solver.local_search import moves
from optpipe_solver.local_search.board import MoveShares, SearchRules
from optpipe_solver.local_search.times import can_propagate

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe_solver.arrays import Flags, Floats, Ints
    from optpipe_solver.arrays.encoding import CompiledProblem, Rows
    from optpipe_solver.arrays.simulate import MemoryArrays, SimulationScratch, TimeArrays
    from optpipe_solver.jit import Draw
    from optpipe_solver.local_search.board import Table

__all__ = [
    "everywhere",
    "least_tails",
    "propose",
    "rules_of",
    "some_stretch",
]


# --- What a search may do and how it judges, fixed for one problem.


def rules_of(compiled: CompiledProblem) -> SearchRules:
    """Return the rules of a problem."""
    problem, times = compiled.problem, compiled.times
    by_cost = [problem.alike(cost) for cost in range(problem.num_costs)]
    return SearchRules(
        by_span=problem.objective == "span",
        incremental=can_propagate(times),
        has_sync=bool((times.grad_sync > 0).any()),
        hosts_limited=any(host.memory_bytes is not None for host in problem.hosts),
        fused=np.array(
            [any(fusing_may_pay(alike, s) for alike in by_cost) for s in range(len(problem.stages))]
        ),
        tails=least_tails(problem.least),
        mean_pass_ms=_mean_pass_ms(compiled),
        offloads=_offloads(compiled),
        relabels=problem.num_costs > 1 and problem.order == "free" and not problem.has_samples,
        in_turn=bool(problem.forward_turns),
        turns=_turns(problem),
        shares=MoveShares(),
    )


def _turns(problem: Problem) -> Ints:
    turns = np.full((4, problem.num_microbatches), -1, dtype=np.int64)
    for at, pairs in ((0, problem.forward_turns), (2, problem.backward_turns)):
        for earlier, later in pairs:
            turns[at, later], turns[at + 1, earlier] = earlier, later
    return turns


def _offloads(compiled: CompiledProblem) -> Flags:
    flags = np.zeros(len(compiled.problem.devices), dtype=np.bool_)
    memory = compiled.memory
    goes = (memory.may & (memory.adds[RELOAD] > 0)).any(axis=1)
    num_costs = compiled.problem.num_costs
    np.logical_or.at(flags, np.tile(compiled.times.device_of, num_costs), goes)
    return flags


def _mean_pass_ms(compiled: CompiledProblem) -> float:
    mean = float(np.mean(compiled.times.duration[: 3 * compiled.times.num_cells]))
    return mean if mean > 0 else 1.0


def least_tails(problem: Problem) -> Floats:
    """Return the minimum time in ms from an action's end to the end of all, by kind and stage.

    A micro-batch still has to run the later forwards, then its backwards to the first stage; where
    a backward is split, its own W too. Links count, waiting does not: this is a lower bound. It is
    reduced by a thousand-millionth for rounding.
    """
    stages = problem.stages
    tails = np.zeros((8, len(stages)))
    for s, stage in enumerate(stages):
        weight = stage.backward_weight_ms
        onward = problem.boundary_ms[s - 1][1] + _backward_ms(problem, tails, s - 1) if s else 0.0
        tails[simulate.BACKWARD_INPUT, s] = max(weight, onward)
        tails[simulate.FULL_BACKWARD, s] = onward
    for s in range(len(stages) - 1, -1, -1):
        if s == len(stages) - 1:
            tails[simulate.FORWARD, s] = _backward_ms(problem, tails, s)
        else:
            there = problem.boundary_ms[s][0] + stages[s + 1].forward_ms
            tails[simulate.FORWARD, s] = there + tails[simulate.FORWARD, s + 1]
    return tails * (1 - 1e-9)


def _backward_ms(problem: Problem, tails: Floats, s: int) -> float:
    """Return the minimum time from the start of a stage's backward to the end of all."""
    stage = problem.stages[s]
    split = stage.backward_input_ms + float(tails[simulate.BACKWARD_INPUT, s])
    return min(split, stage.fused_backward_ms + float(tails[simulate.FULL_BACKWARD, s]))


_TWICE = 0.1
"""Share of proposals that make two moves together: some improvements need both."""

_TRIES = 3
"""Maximum tries to find a move that changes anything; a move that fails half-way ends them."""

_PASSES = 0.7
"""Share of choices of a transfer where a pass of its cell is moved instead: transfers settle."""

_FAR = 63
"""Maximum distance that a single action moves, in places."""

_REVERSALS = 0.24
"""Upper limit of the draw at which a move in order reverses a segment: no ripple, fill or shift."""

_V1_MODES, _IMITATED = 3, 0.5
"""Modes of v1's menus, at most; and the share of choices from larger ones that imitate."""

_UNLIKE = 4
"""Tries to find two micro-batches that differ."""


@lean
def propose(table: Table, path_size: int, draw: Draw) -> bool:
    """Change the board by a random move; return whether it may be worth timing.

    ``focus`` has, by device, the first place to move from and the one after the last.
    """
    changed = False
    for _ in range(_TRIES):
        code = _somewhere(table, path_size, draw)
        changed = code >= 0 and _move(table, code, draw)
        if changed or table.undo.sizes[0] > 0:
            break
    if not changed:
        return False
    if unit(draw) < _TWICE:
        code = _somewhere(table, path_size, draw)
        return code >= 0 and _move(table, code, draw)
    return True


@lean
def _somewhere(table: Table, path_size: int, draw: Draw) -> int:
    """Return an action to move, -1 where the choice is void."""
    board, times, focus = table.board, table.times, table.focus
    if path_size > 0 and unit(draw) < table.rules.shares.on_path:
        code = table.path[below(draw, path_size)]
        device = times.device_of[code % times.num_cells // times.num_microbatches]
        return code if focus[device, 0] <= board.at[code] < focus[device, 1] else -1
    device = below(draw, board.counts.size)
    low, high = focus[device, 0], min(focus[device, 1], board.counts[device])
    if high - low < 2:
        return -1
    return board.actions[device, low + below(draw, high - low)]


@lean
def _move(table: Table, code: int, draw: Draw) -> bool:
    """Make a random move of or around an action."""
    times, rules = table.times, table.rules
    cell = code % times.num_cells
    device = times.device_of[cell // times.num_microbatches]
    if OFFLOAD <= code // times.num_cells <= RELOAD and unit(draw) < _PASSES:
        code = cell + times.num_cells * below(draw, FULL_BACKWARD)
        if table.board.at[code] < 0:
            return False
    shares = rules.shares
    if rules.relabels and unit(draw) < shares.relabels:
        return _relabel(table, cell, draw)
    choice = unit(draw)
    if choice < shares.modes:
        if _can_choose(table, cell):
            return _choose_mode(table, device, cell, draw)
    elif choice < shares.modes + shares.waves:
        if times.num_microbatches > 2:
            return _make_wave(table, code, draw)
    elif choice < shares.modes + shares.waves + shares.backwards:
        return _move_backwards(table, device, cell, draw)
    return _move_in_order(table, device, code, draw)


@lean
def _relabel(table: Table, cell: int, draw: Draw) -> bool:
    """Swap the micro-batch of a cell and one of another cost everywhere."""
    times = table.times
    m = times.num_microbatches
    one = cell % m
    for _ in range(_UNLIKE):
        other = below(draw, m)
        if times.row[one] != times.row[other]:
            return moves.relabel(table, one, other)
    return False


@lean
def _move_in_order(table: Table, device: int, code: int, draw: Draw) -> bool:
    """Move an action, or some of them, within programs."""
    times = table.times
    cells, place = times.num_cells, table.board.at[code]
    choice = unit(draw)
    if choice < 0.05 and code // cells <= FULL_BACKWARD:
        step = 1 if unit(draw) < 0.5 else -1
        most = 2 + below(draw, times.num_stages)
        return moves.ripple(table, code, step, most, _signed(draw, 7))
    if choice < 0.10:
        return moves.fill_idle(table, device, place, 2 * _FAR)
    if choice < 0.22:
        width = 2 + below(draw, 4)
        return moves.shift_block(table, device, place, width, _signed(draw, _FAR))
    if choice < _REVERSALS:
        width, in_turn = 2 + moves.some_distance(draw, 14), unit(draw) < 0.5
        return moves.reverse(table, device, place, width, in_turn)
    if choice < 0.30:
        return moves.swap(table, device, place, moves.some_distance(draw, 15))
    return moves.shift(table, device, place, _signed(draw, _FAR))


@lean
def _move_backwards(table: Table, device: int, cell: int, draw: Draw) -> bool:
    """Move a cell's whole backward earlier or later, or swap it with another."""
    m = table.times.num_microbatches
    if unit(draw) < 0.5:
        sign = 1 if unit(draw) < 0.6 else -1
        distance = sign * moves.some_distance(draw, table.board.counts[device])
        return moves.park(table, device, cell, distance, below(draw, 8))
    other = cell + _signed(draw, m)
    if other < 0 or other // m != cell // m:
        return False
    return moves.trade_backwards(table, device, cell, other)


@lean
def _signed(draw: Draw, most: int) -> int:
    distance = moves.some_distance(draw, most)
    return distance if unit(draw) < 0.5 else -distance


@lean
def _can_choose(table: Table, cell: int) -> bool:
    """Whether anything but keeping the activation and a split backward is possible."""
    times = table.times
    stage = cell // times.num_microbatches
    fused = table.rules.fused[stage] or table.board.at[FULL_BACKWARD * times.num_cells + cell] >= 0
    return _has_choice(table.memory, times.row[cell]) or fused


@lean
def _has_choice(memory: MemoryArrays, stage: int) -> bool:
    """Whether a stage may use any mode but keep."""
    for mode in range(1, memory.num_modes[stage]):  # noqa: SIM110 - compiled
        if memory.may[stage, mode]:
            return True
    return False


@lean
def _choose_mode(table: Table, device: int, cell: int, draw: Draw) -> bool:
    """Change how a cell's activation is kept, or whether its backward is fused."""
    board, times, memory = table.board, table.times, table.memory
    cells, m = times.num_cells, times.num_microbatches
    stage = times.row[cell]
    fused = table.rules.fused[cell // m] or board.at[FULL_BACKWARD * cells + cell] >= 0
    may = _has_choice(memory, stage)
    if fused and (not may or unit(draw) < 0.2):
        late = moves.some_distance(draw, 15)
        return moves.toggle_fused(table, device, cell, late)
    if unit(draw) < 0.4:
        other = board.actions[device, below(draw, board.counts[device])] % cells
        mode, wanted = board.mode[cell], board.mode[other]
        if not (_may_take(memory, stage, wanted) and _may_take(memory, times.row[other], mode)):
            return False
        return moves.exchange(table, cell, other)
    mode = _some_mode(table, cell, draw)
    early = moves.some_distance(draw, 31) - 1
    late = moves.some_distance(draw, 31 if unit(draw) < 0.5 else 3) - 1
    if memory.uniform[stage] and mode != board.mode[cell]:
        first = _first_alike(times, cell)
        return moves.mode_wave(table, first, m, 1, mode, early, late)
    return moves.place_mode(table, cell, mode, early, late)


@lean
def _may_take(memory: MemoryArrays, stage: int, mode: int) -> bool:
    """Whether one cell of a stage may take over a mode of that number."""
    return mode < memory.num_modes[stage] and memory.may[stage, mode] and not memory.uniform[stage]


@lean
def _first_alike(times: TimeArrays, cell: int) -> int:
    """Return the first cell of a cell's stage that has its cost."""
    first = cell - cell % times.num_microbatches
    while times.row[first] != times.row[cell]:
        first += 1
    return first


@lean
def _some_mode(table: Table, cell: int, draw: Draw) -> int:
    """Return a mode the cell may have, a third as often the one it has; its stage must have two.

    For menus larger than v1's, half of the choices copy another micro-batch of the stage. Most
    modes of a large menu are of no use to a stage; the modes in use show which are.
    """
    board, times, memory = table.board, table.times, table.memory
    stage, known, m = times.row[cell], board.mode[cell], times.num_microbatches
    count = memory.num_modes[stage]
    if count > _V1_MODES and unit(draw) < _IMITATED:
        other = cell - cell % m + below(draw, m)
        mode = board.mode[other]
        if mode != known and times.row[other] == stage:
            return mode
    mode = below(draw, count)
    if mode == known and unit(draw) < 0.7:
        mode = (mode + 1 + below(draw, count - 1)) % count
    while not memory.may[stage, mode]:
        mode = (mode + 1) % count
    return mode


@lean
def _make_wave(table: Table, code: int, draw: Draw) -> bool:
    """Change many micro-batches alike."""
    times, memory = table.times, table.memory
    cells, m = times.num_cells, times.num_microbatches
    cell = code % cells
    stage = times.row[cell]
    count = 1 + moves.some_distance(draw, m - 1)
    if unit(draw) < 0.2 and _has_choice(memory, stage):
        mode = _some_mode(table, cell, draw)
        early = moves.some_distance(draw, 31) - 1
        late = moves.some_distance(draw, 31) - 1
        stride = 1 + below(draw, 3)
        if memory.uniform[stage] and mode != table.board.mode[cell]:
            cell, count, stride = _first_alike(times, cell), m, 1
        return moves.mode_wave(table, cell, count, stride, mode, early, late)
    most = 1 if unit(draw) < 0.5 else 1 + below(draw, times.num_stages)
    width = 1 if unit(draw) < 0.6 else 2 + below(draw, 2)
    return moves.wave(table, code, count, most, width, _signed(draw, 7))


# --- Where a cooling makes its moves: everywhere, or in a stretch of time on all devices.

_LEAST_SHARE, _MOST_SHARE = 0.25, 0.45
"""How much of the makespan a stretch takes."""

_LAST = 0.7
"""How often it is the last one at least."""


def everywhere(rows: Rows) -> Ints:
    """Return a focus on all places of all programs."""
    focus = np.zeros((rows.lengths.size, 2), dtype=np.int64)
    focus[:, 1] = rows.actions.shape[1]
    return focus


def some_stretch(
    compiled: CompiledProblem, rows: Rows, work: SimulationScratch, draw: Draw
) -> Ints:
    """Return the focus on a random stretch of time, often the last one; ``work`` is scratch.

    After the last stretch no action has to fit, so it is the freest, and the quickest to time.
    """
    ends = _ends_ms(compiled, rows, work)
    share = _LEAST_SHARE + (_MOST_SHARE - _LEAST_SHARE) * unit(draw)
    begin = 1.0 - share
    if unit(draw) >= _LAST:
        begin *= unit(draw)
    whole = max((float(row[-1]) for row in ends if row.size), default=0.0)
    return _places(ends, begin * whole, (begin + share) * whole * (1 + 1e-9))


def _ends_ms(compiled: CompiledProblem, rows: Rows, work: SimulationScratch) -> list[Floats]:
    """Return, by device, when the last F, I or B up to each action ends, in ms; 0 before one.

    One whose output waits for a link ends when that departs.
    """
    times = compiled.times._replace(duration=compiled.durations(rows))
    simulate.length(rows.actions, rows.lengths, times, work)
    cells = compiled.times.num_cells
    ends = np.zeros((8, cells))
    ends[simulate.FORWARD] = work.end[:cells]
    ends[simulate.BACKWARD_INPUT] = ends[simulate.FULL_BACKWARD] = work.end[cells : 2 * cells]
    known = ends.reshape(-1)
    return [np.maximum.accumulate(known[codes]) for codes in rows.programs()]


def _places(ends: list[Floats], low_ms: float, high_ms: float) -> Ints:
    """Return, by device, the places of what ends between two times."""
    focus = np.zeros((len(ends), 2), dtype=np.int64)
    for device, row in enumerate(ends):
        focus[device] = np.searchsorted(row, low_ms), np.searchsorted(row, high_ms, "right")
    return focus
