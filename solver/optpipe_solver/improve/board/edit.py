"""The three changes of a program that all moves are made of; each keeps places and undo right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.improve.board.board import begin, note
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

__all__ = ["backward_of", "ceiling", "floor", "insert", "is_ordered", "put_back", "remove", "slide"]

_CHAIN = (
    FORWARD,
    OFFLOAD,
    RELEASE,
    RELOAD,
    RECOMPUTE,
    BACKWARD_INPUT,
    FULL_BACKWARD,
    BACKWARD_WEIGHT,
)
"""The order of a cell's own actions."""


@lean
def slide(board: Board, undo: Undo, device: int, source: int, target: int) -> None:
    """Move the action at a place to another place; those between make room."""
    begin(board, undo, device)
    row = board.actions[device]
    code = row[source]
    step = 1 if target > source else -1
    for place in range(source, target, step):
        row[place] = row[place + step]
        board.at[row[place]] = place
    row[target] = code
    board.at[code] = target
    note(undo, device, min(source, target), max(source, target) + 1)


@lean
def insert(board: Board, undo: Undo, device: int, place: int, code: int) -> None:
    """Put an action at a place; those from there on move up."""
    begin(board, undo, device)
    row, count = board.actions[device], board.counts[device]
    for k in range(count, place, -1):
        row[k] = row[k - 1]
        board.at[row[k]] = k
    row[place] = code
    board.at[code] = place
    board.counts[device] = count + 1
    high = undo.high[device]
    note(undo, device, place, high + 1 if high > place else place + 1)


@lean
def remove(board: Board, undo: Undo, device: int, place: int) -> None:
    """Take the action at a place out."""
    begin(board, undo, device)
    row, count = board.actions[device], board.counts[device]
    board.at[row[place]] = -1
    for k in range(place, count - 1):
        row[k] = row[k + 1]
        board.at[row[k]] = k
    board.counts[device] = count - 1
    high = undo.high[device]
    undo.high[device] = max(high - 1, place) if high > place else place
    undo.low[device] = min(undo.low[device], place)


@lean
def put_back(board: Board, undo: Undo, device: int) -> None:
    """Restore the program that `begin` remembered."""
    row, count, old = board.actions[device], board.counts[device], undo.counts[device]
    stop = undo.high[device] if count == old else max(count, old)
    for place in range(undo.low[device], min(stop, count)):
        board.at[row[place]] = -1
    for place in range(undo.low[device], min(stop, old)):
        row[place] = undo.rows[device, place]
        board.at[row[place]] = place
    board.counts[device] = old


@lean
def backward_of(board: Board, cells: int, cell: int) -> int:
    """Return where the I or B of a cell stands."""
    place = board.at[BACKWARD_INPUT * cells + cell]
    return place if place >= 0 else board.at[FULL_BACKWARD * cells + cell]


@lean
def floor(board: Board, cells: int, code: int) -> int:
    """Return the first place an action may move to: just behind its cell's action before it."""
    kind = code // cells
    cell = code - kind * cells
    found = -1
    for other in _CHAIN:
        if other == kind:
            return found + 1
        place = board.at[other * cells + cell]
        if place >= 0:
            found = place
    return found + 1


@lean
def ceiling(board: Board, cells: int, code: int, count: int) -> int:
    """Return the last place an action may move to: just before its cell's action after it."""
    kind = code // cells
    cell = code - kind * cells
    behind = False
    for other in _CHAIN:
        if other == kind:
            behind = True
        elif behind:
            place = board.at[other * cells + cell]
            if place >= 0:
                return place - 1
    return count - 1


@lean
def is_ordered(board: Board, cells: int, cell: int) -> bool:
    """Whether a cell's actions stand in their order."""
    found = -1
    for kind in _CHAIN:
        place = board.at[kind * cells + cell]
        if place >= 0:
            if place < found:
                return False
            found = place
    return True
