"""The actions that a schedule's length is made of: only changing them, or room for them, helps.

A longest path runs from the last end backwards through whatever each action waited for last (Balas
1969; the critical path of job-shop local search). Moves that leave all of it alone cannot shorten
the schedule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.improve.board.edit import backward_of
from optpipe_solver.improve.compiled.kernel import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OFFLOAD,
    RECOMPUTE,
    RELEASE,
    RELOAD,
)
from optpipe_solver.lean import lean

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from optpipe_solver.improve.board.board import Board
    from optpipe_solver.improve.compiled.kernel import Times, Work

__all__ = ["longest_path", "set_out"]


@lean
def longest_path(board: Board, times: Times, by_span: bool, path: NDArray[np.int64]) -> int:
    """Write the actions of a longest path into ``path``, last one first; return how many.

    ``by_span``: from the device whose last end minus first start is largest. Ties go to the
    predecessor in the same program.
    """
    device = 0
    longest = -1.0
    for d in range(board.counts.size):
        taken = board.last[d] - (board.first[d] if by_span else 0.0)
        if board.counts[d] > 0 and taken > longest:
            device, longest = d, taken
    code = board.actions[device, board.counts[device] - 1]
    size = 0
    while code >= 0 and size < path.size:
        path[size] = code
        size += 1
        code = _waited_for(board, times, code)
    return size


@lean
def _waited_for(board: Board, times: Times, code: int) -> int:
    """Return the action whose end this one waited for last, -1 for none."""
    cells, m = times.num_cells, times.num_microbatches
    kind = code // cells
    cell = code - kind * cells
    stage = cell // m
    device = times.device_of[stage]
    place = board.at[code]
    before = board.actions[device, place - 1] if place > 0 else -1
    ready = board.clock[before] if before >= 0 else 0.0
    if kind in (OFFLOAD, RELOAD):
        lane = 0.0
        if before >= 0:
            lane = board.out[before] if kind == OFFLOAD else board.back[before]
        return _same_lane(board, device, place, kind, cells) if lane > ready else before
    if kind == RELEASE:
        transfer = OFFLOAD * cells + cell
        return transfer if board.end[transfer] > ready else before
    best = before
    if kind == FORWARD and stage > 0:
        if board.end[cell - m] + times.there[stage - 1] > ready:
            best = cell - m
    elif kind in (BACKWARD_INPUT, FULL_BACKWARD):
        if stage == times.num_stages - 1:
            arrived, source = board.end[cell], cell
        else:
            arrived = board.end[cells + cell + m] + times.back[stage]
            there = times.device_of[stage + 1]
            source = board.actions[there, backward_of(board, cells, cell + m)]
        if arrived > ready:
            best, ready = source, arrived
        reload = RELOAD * cells + cell
        if board.at[reload] >= 0 and board.end[reload] > ready:
            best = reload
    return best


@lean
def _same_lane(board: Board, device: int, place: int, kind: int, cells: int) -> int:
    row = board.actions[device]
    for k in range(place - 1, -1, -1):
        if row[k] // cells == kind:
            return row[k]
    return -1


@lean
def set_out(board: Board, times: Times, work: Work) -> None:
    """Write the times of a whole simulation on the board, where none are kept move by move."""
    cells = times.num_cells
    for device in range(board.counts.size):
        row = board.actions[device]
        clock = out = back = 0.0
        for place in range(board.counts[device]):
            code = row[place]
            kind = code // cells
            cell = code - kind * cells
            if kind == FORWARD:
                clock = board.end[code] = work.end[cell]
            elif kind in (BACKWARD_INPUT, FULL_BACKWARD):
                clock = board.end[cells + cell] = work.end[cells + cell]
            elif kind == OFFLOAD:
                out = board.end[code] = work.end[2 * cells + cell]
            elif kind == RELOAD:
                back = board.end[code] = work.end[3 * cells + cell]
            elif kind == RELEASE:
                clock = max(clock, work.end[2 * cells + cell])
            elif kind in (BACKWARD_WEIGHT, RECOMPUTE):
                clock += times.duration[code]
            board.clock[code], board.out[code], board.back[code] = clock, out, back
        board.first[device], board.last[device] = work.first[device], work.last[device]
