"""Which move to try next: half of the time around a longest path, else anywhere in the focus."""
# ruff: noqa: PLR0917 - compiled code takes its arguments by position

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.improve.compiled.kernel import (
    FULL_BACKWARD,
    OFFLOAD,
    RELOAD,
)
from optpipe_solver.improve.moves import draws, modes, order, waves
from optpipe_solver.lean import lean

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from optpipe_solver.improve.board.board import Board, Undo
    from optpipe_solver.improve.compiled.kernel import Memory, Times
    from optpipe_solver.improve.search.rules import Rules

    Draw = NDArray[np.uint64]

__all__ = ["propose"]

_ON_PATH = 0.5
_TWICE = 0.1
"""Share of proposals that make two moves at once: some doors need two keys."""

_TRIES = 3
"""Most tries to find a move that changes anything; one that fails half-way ends them."""

_PASSES = 0.7
"""Share of choices of a transfer where a pass of its cell is moved instead: transfers settle."""

_FAR = 63
"""Farthest that single actions are moved, in places."""

_REVERSALS = 0.24
"""Up to here moves in order that are neither ripples, fills nor shifts reverse a segment."""

_MODES, _WAVES = 0.12, 0.03
"""Shares of moves that change what becomes of activations, and of those along many micro-batches.

The latter cost as much as hundreds of the others where batches are long.
"""


@lean
def propose(
    board: Board,
    undo: Undo,
    times: Times,
    memory: Memory,
    rules: Rules,
    path: NDArray[np.int64],
    path_size: int,
    focus: NDArray[np.int64],
    draw: Draw,
) -> bool:
    """Change the board by a random move; whether it may be worth timing.

    ``focus`` has, by device, the first place that is moved from and the one behind the last.
    """
    changed = False
    for _ in range(_TRIES):
        code = _somewhere(board, times, path, path_size, focus, draw)
        changed = code >= 0 and _move(board, undo, times, memory, rules, code, draw)
        if changed or undo.sizes[0] > 0:
            break
    if not changed:
        return False
    if draws.unit(draw) < _TWICE:
        code = _somewhere(board, times, path, path_size, focus, draw)
        return code >= 0 and _move(board, undo, times, memory, rules, code, draw)
    return True


@lean
def _somewhere(
    board: Board,
    times: Times,
    path: NDArray[np.int64],
    path_size: int,
    focus: NDArray[np.int64],
    draw: Draw,
) -> int:
    """Return an action to move, -1 where the choice is void."""
    if path_size > 0 and draws.unit(draw) < _ON_PATH:
        code = path[draws.below(draw, path_size)]
        device = times.device_of[code % times.num_cells // times.num_microbatches]
        return code if focus[device, 0] <= board.at[code] < focus[device, 1] else -1
    device = draws.below(draw, board.counts.size)
    low, high = focus[device, 0], min(focus[device, 1], board.counts[device])
    if high - low < 2:
        return -1
    return board.actions[device, low + draws.below(draw, high - low)]


@lean
def _move(
    board: Board, undo: Undo, times: Times, memory: Memory, rules: Rules, code: int, draw: Draw
) -> bool:
    """Make a random move of or around an action."""
    cell = code % times.num_cells
    device = times.device_of[cell // times.num_microbatches]
    if OFFLOAD <= code // times.num_cells <= RELOAD and draws.unit(draw) < _PASSES:
        code = cell + times.num_cells * draws.below(draw, FULL_BACKWARD)
        if board.at[code] < 0:
            return False
    choice = draws.unit(draw)
    if choice < _MODES:
        if _can_choose(memory, rules, times, board, cell):
            return _choose_mode(board, undo, times, memory, rules, device, cell, draw)
    elif choice < _MODES + _WAVES:
        if times.num_microbatches > 2:
            return _make_wave(board, undo, times, memory, code, draw)
    elif choice < 0.25:
        return _move_backwards(board, undo, times, device, cell, draw)
    return _move_in_order(board, undo, times, device, code, draw)


@lean
def _move_in_order(
    board: Board, undo: Undo, times: Times, device: int, code: int, draw: Draw
) -> bool:
    """Move an action, or some of them, within programs."""
    cells, place = times.num_cells, board.at[code]
    choice = draws.unit(draw)
    if choice < 0.05 and code // cells <= FULL_BACKWARD:
        step = 1 if draws.unit(draw) < 0.5 else -1
        most = 2 + draws.below(draw, times.num_stages)
        return order.ripple(board, undo, times, code, step, most, _signed(draw, 7))
    if choice < 0.10:
        return order.fill_idle(board, undo, cells, device, place, 2 * _FAR)
    if choice < 0.22:
        width = 2 + draws.below(draw, 4)
        return order.shift_block(board, undo, cells, device, place, width, _signed(draw, _FAR))
    if choice < _REVERSALS:
        width, in_turn = 2 + order.some_distance(draw, 14), draws.unit(draw) < 0.5
        return order.reverse(board, undo, times, device, place, width, in_turn)
    if choice < 0.30:
        return order.swap(board, undo, cells, device, place, order.some_distance(draw, 15))
    return order.shift(board, undo, cells, device, place, _signed(draw, _FAR))


@lean
def _move_backwards(
    board: Board, undo: Undo, times: Times, device: int, cell: int, draw: Draw
) -> bool:
    """Park a cell's whole backward earlier or later, or in another's place."""
    cells, m = times.num_cells, times.num_microbatches
    if draws.unit(draw) < 0.5:
        sign = 1 if draws.unit(draw) < 0.6 else -1
        distance = sign * order.some_distance(draw, board.counts[device])
        return order.park(board, undo, cells, device, cell, distance, draws.below(draw, 8))
    other = cell + _signed(draw, m)
    if other < 0 or other // m != cell // m:
        return False
    return order.trade_backwards(board, undo, cells, device, cell, other)


@lean
def _signed(draw: Draw, most: int) -> int:
    distance = order.some_distance(draw, most)
    return distance if draws.unit(draw) < 0.5 else -distance


@lean
def _can_choose(memory: Memory, rules: Rules, times: Times, board: Board, cell: int) -> bool:
    """Whether anything but keeping the activation and a split backward is possible."""
    stage = cell // times.num_microbatches
    fused = rules.fused[stage] or board.at[FULL_BACKWARD * times.num_cells + cell] >= 0
    return memory.may_offload[stage] or memory.may_recompute[stage] or fused


@lean
def _choose_mode(
    board: Board,
    undo: Undo,
    times: Times,
    memory: Memory,
    rules: Rules,
    device: int,
    cell: int,
    draw: Draw,
) -> bool:
    """Change how a cell's activation is kept, or whether its backward is fused."""
    cells, m = times.num_cells, times.num_microbatches
    stage = cell // m
    fused = rules.fused[stage] or board.at[FULL_BACKWARD * cells + cell] >= 0
    may = memory.may_offload[stage] or memory.may_recompute[stage]
    if fused and (not may or draws.unit(draw) < 0.2):
        late = order.some_distance(draw, 15)
        return modes.toggle_fused(board, undo, cells, device, cell, late)
    if draws.unit(draw) < 0.4:
        other = board.actions[device, draws.below(draw, board.counts[device])] % cells
        mode, wanted = modes.mode_of(board, cells, cell), modes.mode_of(board, cells, other)
        if not (_may(memory, stage, wanted) and _may(memory, other // m, mode)):
            return False
        return modes.exchange(board, undo, cells, device, cell, other)
    mode = _some_mode(memory, stage, modes.mode_of(board, cells, cell), draw)
    early = order.some_distance(draw, 31) - 1
    late = order.some_distance(draw, 31 if draws.unit(draw) < 0.5 else 3) - 1
    return modes.place_mode(board, undo, cells, device, cell, mode, early, late)


@lean
def _may(memory: Memory, stage: int, mode: int) -> bool:
    if mode == modes.AWAY:
        return memory.may_offload[stage]
    return mode == modes.KEPT or memory.may_recompute[stage]


@lean
def _some_mode(memory: Memory, stage: int, known: int, draw: Draw) -> int:
    """Return a mode the stage may have, a third as often the one it has."""
    mode = draws.below(draw, 3)
    if mode == known and draws.unit(draw) < 0.7:
        mode = (mode + 1 + draws.below(draw, 2)) % 3
    while not _may(memory, stage, mode):
        mode = (mode + 1) % 3
    return mode


@lean
def _make_wave(
    board: Board, undo: Undo, times: Times, memory: Memory, code: int, draw: Draw
) -> bool:
    """Change many micro-batches alike."""
    cells, m = times.num_cells, times.num_microbatches
    cell = code % cells
    stage = cell // m
    count = 1 + order.some_distance(draw, m - 1)
    if draws.unit(draw) < 0.2 and (memory.may_offload[stage] or memory.may_recompute[stage]):
        mode = _some_mode(memory, stage, modes.mode_of(board, cells, cell), draw)
        early = order.some_distance(draw, 31) - 1
        late = order.some_distance(draw, 31) - 1
        stride = 1 + draws.below(draw, 3)
        return waves.mode_wave(board, undo, times, cell, count, stride, mode, early, late)
    most = 1 if draws.unit(draw) < 0.5 else 1 + draws.below(draw, times.num_stages)
    width = 1 if draws.unit(draw) < 0.6 else 2 + draws.below(draw, 2)
    return waves.wave(board, undo, times, code, count, most, width, _signed(draw, 7))
