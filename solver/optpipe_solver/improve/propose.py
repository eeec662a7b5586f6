"""Which move to try next: half of the time around a longest path, else anywhere."""
# ruff: noqa: PLR0917 - compiled code takes its arguments by position

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.improve import draws, moves
from optpipe_solver.improve.kernel import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OFFLOAD,
)
from optpipe_solver.lean import lean

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from optpipe_solver.improve.board import Board, Undo
    from optpipe_solver.improve.kernel import Memory, Times
    from optpipe_solver.improve.rules import Rules

    Draw = NDArray[np.uint64]

__all__ = ["propose"]

_ON_PATH = 0.5
_FAR = 63
"""Farthest that single actions are moved, in places."""


@lean
def propose(
    board: Board,
    undo: Undo,
    times: Times,
    memory: Memory,
    rules: Rules,
    path: NDArray[np.int64],
    path_size: int,
    draw: NDArray[np.uint64],
) -> bool:
    """Change the board by a random move; whether anything changed."""
    cells, m = times.num_cells, times.num_microbatches
    if path_size > 0 and draws.unit(draw) < _ON_PATH:
        code = path[draws.below(draw, path_size)]
        place = board.at[code]
        if place < 0:
            return False
        device = times.device_of[(code % cells) // m]
    else:
        device = draws.below(draw, board.counts.size)
        if board.counts[device] < 2:
            return False
        place = draws.below(draw, board.counts[device])
        code = board.actions[device, place]
    kind = code // cells
    cell = code - kind * cells
    choice = draws.unit(draw)
    if choice < 0.10:
        if _choose_other_mode(board, undo, times, memory, rules, device, cell, choice, draw):
            return True
    elif choice < 0.13:
        sign = 1 if draws.unit(draw) < 0.6 else -1
        distance = sign * moves.some_distance(draw, board.counts[device])
        return moves.park(board, undo, cells, device, cell, distance, draws.below(draw, 8))
    elif choice < 0.17 and kind in (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FULL_BACKWARD):
        step = 1 if draws.unit(draw) < 0.5 else -1
        most = 2 + draws.below(draw, times.num_stages)
        return moves.ripple(board, undo, times, code, step, most, _signed(draw, 7))
    elif choice < 0.21:
        return moves.fill_idle(board, undo, cells, device, place, 2 * _FAR)
    elif choice < 0.31:
        width = 2 + draws.below(draw, 4)
        return moves.shift_block(board, undo, cells, device, place, width, _signed(draw, _FAR))
    return moves.shift(board, undo, cells, device, place, _signed(draw, _FAR))


@lean
def _signed(draw: Draw, most: int) -> int:
    distance = moves.some_distance(draw, most)
    return distance if draws.unit(draw) < 0.5 else -distance


@lean
def _choose_other_mode(
    board: Board,
    undo: Undo,
    times: Times,
    memory: Memory,
    rules: Rules,
    device: int,
    cell: int,
    choice: float,
    draw: Draw,
) -> bool:
    """Change how a cell's activation is kept, or whether its backward is fused."""
    cells = times.num_cells
    stage = cell // times.num_microbatches
    offloaded = board.at[OFFLOAD * cells + cell] >= 0
    if choice < 0.06:
        if not memory.may_offload[stage] or board.again[cell]:
            return False
        if offloaded and draws.unit(draw) < 0.4:
            place = draws.below(draw, board.counts[device])
            other = board.actions[device, place] % cells
            if memory.may_offload[other // times.num_microbatches]:
                return moves.hand_over(board, undo, cells, device, cell, other)
            return False
        early = moves.some_distance(draw, 31) - 1
        late = moves.some_distance(draw, 31) - 1
        return moves.toggle_offload(board, undo, cells, device, cell, early, late)
    if choice < 0.08:
        if not memory.may_recompute[stage] or offloaded:
            return False
        late = moves.some_distance(draw, 7) - 1
        return moves.toggle_recompute(board, undo, cells, device, cell, late)
    if rules.fused[stage] or board.at[FULL_BACKWARD * cells + cell] >= 0:
        return moves.toggle_fused(board, undo, cells, device, cell)
    return False
