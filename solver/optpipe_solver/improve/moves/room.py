"""Memory after a move, looked at only where the program changed; and moves that make room.

Behind the changed places a program holds what it held before, because a move keeps the sum of what
its actions add and free: moving keeps the actions, and each toggle adds as much as it frees.
"""
# ruff: noqa: PLR0917 - compiled code takes its arguments by position

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.improve.board.edit import ceiling, floor, slide
from optpipe_solver.improve.compiled import kernel
from optpipe_solver.improve.compiled.kernel import BACKWARD_WEIGHT, FORWARD, RELEASE, RELOAD
from optpipe_solver.improve.moves import draws
from optpipe_solver.lean import lean

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from optpipe_solver.improve.board.board import Board, Undo
    from optpipe_solver.improve.compiled.kernel import Memory, Times

__all__ = ["commit", "hosts_fit", "make_room", "overflow"]

_REPAIRS = 4
_REACH = 60
"""Places looked along for an action that frees memory."""


@lean
def _adds(board: Board, memory: Memory, kind: int, cell: int, stage: int) -> int:
    if kind == FORWARD and board.again[cell]:
        return memory.checkpoint[stage]
    return memory.delta[kind, stage]


@lean
def overflow(board: Board, times: Times, memory: Memory, device: int, low: int, high: int) -> int:
    """Return the first of places low .. high - 1 whose action exceeds the limit, -1 for none."""
    row = board.actions[device]
    held = board.held[row[low - 1]] if low > 0 else 0
    limit = memory.limit[device]
    for place in range(low, high):
        kind = row[place] // times.num_cells
        cell = row[place] - kind * times.num_cells
        stage = cell // times.num_microbatches
        adds = _adds(board, memory, kind, cell, stage)
        if max(held, held + adds) + memory.workspace[kind, stage] > limit:
            return place
        held += adds
    return -1


@lean
def commit(board: Board, times: Times, memory: Memory, device: int, low: int, high: int) -> None:
    """Write down the bytes held behind the changed places."""
    row = board.actions[device]
    held = board.held[row[low - 1]] if low > 0 else 0
    for place in range(low, high):
        kind = row[place] // times.num_cells
        cell = row[place] - kind * times.num_cells
        held += _adds(board, memory, kind, cell, cell // times.num_microbatches)
        board.held[row[place]] = held


@lean
def make_room(
    board: Board,
    undo: Undo,
    times: Times,
    memory: Memory,
    device: int,
    draw: NDArray[np.uint64],
) -> bool:
    """Whether a changed program fits, after a few repairs if need be.

    A repair brings the next RELEASE or W forward to where memory runs out, or puts the last RELOAD
    before it off until behind.
    """
    for _ in range(_REPAIRS):
        at = overflow(board, times, memory, device, undo.low[device], undo.high[device])
        if at < 0:
            return True
        if not _repair(board, undo, times, device, at, draw):
            return False
    return overflow(board, times, memory, device, undo.low[device], undo.high[device]) < 0


@lean
def _repair(
    board: Board, undo: Undo, times: Times, device: int, at: int, draw: NDArray[np.uint64]
) -> bool:
    first = draws.below(draw, 3)
    for turn in range(3):
        choice = (first + turn) % 3
        if choice == 0 and _bring_forward(board, undo, times, device, at, RELEASE):
            return True
        if choice == 1 and _bring_forward(board, undo, times, device, at, BACKWARD_WEIGHT):
            return True
        if choice == 2 and _put_off(board, undo, times, device, at):
            return True
    return False


@lean
def _bring_forward(board: Board, undo: Undo, times: Times, device: int, at: int, kind: int) -> bool:
    row, cells = board.actions[device], times.num_cells
    for place in range(at + 1, min(board.counts[device], at + 1 + _REACH)):
        if row[place] // cells == kind and floor(board, cells, row[place]) <= at:
            slide(board, undo, device, place, at)
            return True
    return False


@lean
def _put_off(board: Board, undo: Undo, times: Times, device: int, at: int) -> bool:
    row, cells = board.actions[device], times.num_cells
    for place in range(at - 1, max(-1, at - 1 - _REACH), -1):
        if row[place] // cells == RELOAD and (
            ceiling(board, cells, row[place], board.counts[device]) >= at
        ):
            slide(board, undo, device, place, at)
            return True
    return False


@lean
def hosts_fit(board: Board, times: Times, memory: Memory, device: int) -> bool:
    """Whether the device's host still holds what its devices send there; keeps ``hosts``."""
    board.hosts[device] = kernel.host_peak(
        board.actions[device], board.counts[device], times, memory, board.away
    )
    host = memory.host_of[device]
    held = 0
    for other in range(board.counts.size):
        if memory.host_of[other] == host:
            held += board.hosts[other]
    return held <= memory.host_limit[host]
