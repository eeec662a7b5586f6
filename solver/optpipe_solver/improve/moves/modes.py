"""Compiled moves on what a cell's activation does between F and backward, and on fused backwards.

A cell is kept, offloaded or recomputed. As with all moves the order of a cell's own actions holds
afterwards; whether the result fits memory and does not wait in a circle is the caller's to ask.
"""
# ruff: noqa: PLR0917 - compiled code takes its arguments by position

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.improve.board.board import note
from optpipe_solver.improve.board.edit import backward_of, insert, remove
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
    from optpipe_solver.improve.board.board import Board, Undo

__all__ = ["AGAIN", "AWAY", "KEPT", "exchange", "mode_of", "place_mode", "toggle_fused"]

KEPT, AWAY, AGAIN = 0, 1, 2
"""What becomes of an activation: it stays, is offloaded, is recomputed."""


@lean
def mode_of(board: Board, cells: int, cell: int) -> int:
    """Return which of the three a cell is."""
    if board.at[OFFLOAD * cells + cell] >= 0:
        return AWAY
    return AGAIN if board.again[cell] else KEPT


@lean
def place_mode(
    board: Board, undo: Undo, cells: int, device: int, cell: int, mode: int, early: int, late: int
) -> bool:
    """Keep, offload or recompute a cell, whatever it was; the same again means other places.

    RELEASE goes ``early`` places behind the OFFLOAD, RELOAD or RECOMPUTE ``late`` places before the
    backward.
    """
    if mode == KEPT and mode_of(board, cells, cell) == KEPT:
        return False
    _clear(board, undo, cells, device, cell)
    released = board.at[FORWARD * cells + cell] + 1 + early
    _set(board, undo, cells, device, cell, mode, released, backward_of(board, cells, cell) - late)
    return True


@lean
def exchange(board: Board, undo: Undo, cells: int, device: int, cell: int, other: int) -> bool:
    """Let two cells of a device swap what becomes of them, at about the same places."""
    mode, wanted = mode_of(board, cells, cell), mode_of(board, cells, other)
    if mode == wanted:
        return False
    released, returned = _places(board, cells, cell, mode)
    freed, back = _places(board, cells, other, wanted)
    _clear(board, undo, cells, device, cell)
    _clear(board, undo, cells, device, other)
    _set(board, undo, cells, device, other, mode, released, returned)
    _set(board, undo, cells, device, cell, wanted, freed, back)
    return True


@lean
def _places(board: Board, cells: int, cell: int, mode: int) -> tuple[int, int]:
    """Return where a cell's bytes go and come back, not counting its own actions before."""
    if mode == AWAY:
        return board.at[RELEASE * cells + cell] - 1, board.at[RELOAD * cells + cell] - 2
    return 0, board.at[RECOMPUTE * cells + cell]


@lean
def _clear(board: Board, undo: Undo, cells: int, device: int, cell: int) -> None:
    """Keep a cell, whatever it was."""
    for kind in (RELOAD, RELEASE, OFFLOAD):
        place = board.at[kind * cells + cell]
        if place >= 0:
            remove(board, undo, device, place)
    if board.again[cell]:
        remove(board, undo, device, board.at[RECOMPUTE * cells + cell])
        _flip(board, undo, cells, device, cell)


@lean
def _set(
    board: Board,
    undo: Undo,
    cells: int,
    device: int,
    cell: int,
    mode: int,
    released: int,
    returned: int,
) -> None:
    """Offload or recompute a kept cell, as near to the wanted places as its own order allows."""
    made, needed = board.at[FORWARD * cells + cell], backward_of(board, cells, cell)
    if mode == AWAY:
        released = min(max(released, made + 1), needed)
        returned = min(max(returned, released), needed)
        insert(board, undo, device, returned, RELOAD * cells + cell)
        insert(board, undo, device, released, RELEASE * cells + cell)
        insert(board, undo, device, made + 1, OFFLOAD * cells + cell)
    elif mode == AGAIN:
        returned = min(max(returned, made + 1), needed)
        insert(board, undo, device, returned, RECOMPUTE * cells + cell)
        _flip(board, undo, cells, device, cell)


@lean
def _flip(board: Board, undo: Undo, cells: int, device: int, cell: int) -> None:
    """Change whether a cell is recomputed: its F then holds other bytes."""
    board.again[cell] = not board.again[cell]
    undo.flipped[undo.sizes[2]] = cell
    undo.sizes[2] += 1
    made = board.at[FORWARD * cells + cell]
    note(undo, device, made, made + 1)


@lean
def toggle_fused(board: Board, undo: Undo, cells: int, device: int, cell: int, late: int) -> bool:
    """Replace I and W by B where the I stands, or B by I with its W ``late`` places behind."""
    fused = board.at[FULL_BACKWARD * cells + cell]
    if fused >= 0:
        remove(board, undo, device, fused)
        place = min(fused + late, board.counts[device])
        insert(board, undo, device, place, BACKWARD_WEIGHT * cells + cell)
        insert(board, undo, device, fused, BACKWARD_INPUT * cells + cell)
        return True
    at = board.at[BACKWARD_INPUT * cells + cell]
    remove(board, undo, device, board.at[BACKWARD_WEIGHT * cells + cell])
    remove(board, undo, device, at)
    insert(board, undo, device, at, FULL_BACKWARD * cells + cell)
    return True
