"""Compiled moves on many micro-batches at once: the same change all along a repeating pattern.

In the steady state of a long batch no single move gains anything: the period is as long as before.
Applied to a run of micro-batches, on one or more stages, it changes the pattern itself.
"""
# ruff: noqa: PLR0917 - compiled code takes its arguments by position

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.improve.moves.modes import place_mode
from optpipe_solver.improve.moves.order import shift, shift_block
from optpipe_solver.lean import lean

if TYPE_CHECKING:
    from optpipe_solver.improve.board.board import Board, Undo
    from optpipe_solver.improve.compiled.kernel import Times

__all__ = ["mode_wave", "wave"]


@lean
def wave(
    board: Board,
    undo: Undo,
    times: Times,
    code: int,
    count: int,
    most: int,
    width: int,
    distance: int,
) -> bool:
    """Shift the same pass of ``count`` micro-batches on up to ``most`` stages by a distance.

    With it go the ``width - 1`` actions behind it. What moves later moves last one first, so that
    the micro-batches keep their order.
    """
    m, cells = times.num_microbatches, times.num_cells
    first = (code % cells) // m
    j = code % m
    count = min(count, m - j)
    changed = False
    for stage in range(first, min(first + most, times.num_stages)):
        device = times.device_of[stage]
        lead = code + (stage - first) * m
        for i in range(count):
            place = board.at[lead + (count - 1 - i if distance > 0 else i)]
            if place < 0:
                continue
            if width > 1:
                moved = shift_block(board, undo, cells, device, place, width, distance)
            else:
                moved = shift(board, undo, cells, device, place, distance)
            changed = changed or moved
    return changed


@lean
def mode_wave(
    board: Board,
    undo: Undo,
    times: Times,
    cell: int,
    count: int,
    stride: int,
    mode: int,
    early: int,
    late: int,
) -> bool:
    """Keep, offload or recompute every ``stride``-th of ``count`` micro-batches of a stage."""
    m, cells = times.num_microbatches, times.num_cells
    device = times.device_of[cell // m]
    changed = False
    for i in range(0, min(count, m - cell % m), stride):
        moved = place_mode(board, undo, cells, device, cell + i, mode, early, late)
        changed = changed or moved
    return changed
