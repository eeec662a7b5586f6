"""Compiled moves on programs; each says whether it changed anything.

A move keeps the order of a cell's own actions (F, OFFLOAD, RELEASE, RELOAD or RECOMPUTE, I, W);
whether the result fits memory and does not wait in a circle is the caller's to ask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.improve.board.board import begin, note
from optpipe_solver.improve.board.edit import backward_of, ceiling, floor, is_ordered, slide
from optpipe_solver.improve.compiled.kernel import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FULL_BACKWARD,
    RECOMPUTE,
    RELOAD,
)
from optpipe_solver.improve.moves import draws
from optpipe_solver.lean import lean

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from optpipe_solver.improve.board.board import Board, Undo
    from optpipe_solver.improve.compiled.kernel import Times

    Draw = NDArray[np.uint64]

__all__ = [
    "fill_idle",
    "park",
    "reverse",
    "ripple",
    "shift",
    "shift_block",
    "some_distance",
    "swap",
    "trade_backwards",
]


@lean
def some_distance(draw: NDArray[np.uint64], most: int) -> int:
    """Return a distance of 1 or more, small ones likelier: each size class 1, 2-3, ... alike."""
    classes = 1
    while (1 << classes) <= most:
        classes += 1
    size = 1 << draws.below(draw, classes)
    return size + draws.below(draw, size)


@lean
def shift(board: Board, undo: Undo, cells: int, device: int, place: int, distance: int) -> bool:
    """Move one action by a distance, as far as its own cell allows."""
    count = board.counts[device]
    code = board.actions[device, place]
    if distance > 0:
        target = min(place + distance, ceiling(board, cells, code, count))
    else:
        target = max(place + distance, floor(board, cells, code))
    if target == place:
        return False
    slide(board, undo, device, place, target)
    return True


@lean
def shift_block(
    board: Board, undo: Undo, cells: int, device: int, place: int, width: int, distance: int
) -> bool:
    """Move ``width`` actions at a place by a distance, until a cell's own order is in the way."""
    count = board.counts[device]
    row = board.actions[device]
    if place + width > count:
        return False
    moved = 0
    if distance > 0:
        while moved < distance and place + width < count:
            if floor(board, cells, row[place + width]) > place:
                break
            slide(board, undo, device, place + width, place)
            place += 1
            moved += 1
    else:
        while moved < -distance and place > 0:
            if ceiling(board, cells, row[place - 1], count) < place + width - 1:
                break
            slide(board, undo, device, place - 1, place + width - 1)
            place -= 1
            moved += 1
    return moved > 0


@lean
def swap(board: Board, undo: Undo, cells: int, device: int, place: int, distance: int) -> bool:
    """Let an action and one ``distance`` places behind it change places."""
    count = board.counts[device]
    other = place + distance
    if other >= count:
        return False
    row = board.actions[device]
    if ceiling(board, cells, row[place], count) < other or floor(board, cells, row[other]) > place:
        return False
    slide(board, undo, device, place, other)
    if distance > 1:
        slide(board, undo, device, other - 1, place)
    return True


@lean
def reverse(
    board: Board,
    undo: Undo,
    times: Times,
    device: int,
    place: int,
    width: int,
    in_turn: bool,
) -> bool:
    """Reverse up to ``width`` actions from a place on, until a cell would come twice.

    ``in_turn``: only which passes stand where is reversed, and the micro-batches of each pass of a
    stage keep their order.
    """
    m, count = times.num_microbatches, board.counts[device]
    row, stop = board.actions[device], place + 1
    while stop < min(count, place + width) and floor(board, times.num_cells, row[stop]) <= place:
        stop += 1
    if stop - place < 2:
        return False
    begin(board, undo, device)
    for i in range((stop - place) // 2):
        row[place + i], row[stop - 1 - i] = row[stop - 1 - i], row[place + i]
    if in_turn:
        _back_in_turn(board, m, device, place, stop)
    changed = False
    for k in range(place, stop):
        changed = changed or board.at[row[k]] != k
    for k in range(place, stop):
        board.at[row[k]] = k
    note(undo, device, place, stop)
    return changed


@lean
def _back_in_turn(board: Board, m: int, device: int, place: int, stop: int) -> None:
    """Sort the actions of each pass of a stage among themselves by where they stood."""
    row = board.actions[device]
    for k in range(place, stop):
        first = k
        for other in range(k + 1, stop):
            if row[other] // m == row[k] // m and board.at[row[other]] < board.at[row[first]]:
                first = other
        row[k], row[first] = row[first], row[k]


@lean
def trade_backwards(
    board: Board, undo: Undo, cells: int, device: int, cell: int, other: int
) -> bool:
    """Let two cells of a device change places from what brings them back to their W.

    Both must be kept, offloaded or recomputed alike, and fused or split alike.
    """
    if cell == other:
        return False
    begin(board, undo, device)
    row = board.actions[device]
    for kind in (RELOAD, RECOMPUTE, BACKWARD_INPUT, FULL_BACKWARD, BACKWARD_WEIGHT):
        one, two = kind * cells + cell, kind * cells + other
        here, there = board.at[one], board.at[two]
        if (here < 0) != (there < 0):
            return False
        if here >= 0:
            row[here], row[there] = two, one
            board.at[one], board.at[two] = there, here
            note(undo, device, min(here, there), max(here, there) + 1)
    return is_ordered(board, cells, cell) and is_ordered(board, cells, other)


@lean
def fill_idle(board: Board, undo: Undo, cells: int, device: int, place: int, reach: int) -> bool:
    """Bring the next W behind a place, whose I is before it, right before that place."""
    row, count = board.actions[device], board.counts[device]
    for k in range(place + 1, min(count, place + 1 + reach)):
        if row[k] // cells == BACKWARD_WEIGHT and floor(board, cells, row[k]) <= place:
            slide(board, undo, device, k, place)
            return True
    return False


@lean
def park(
    board: Board, undo: Undo, cells: int, device: int, cell: int, distance: int, late: int
) -> bool:
    """Run a cell's whole backward, with what brings it back, earlier or later."""
    count = board.counts[device]
    at = backward_of(board, cells, cell)
    target = min(max(at + distance, 0), count - 1)
    if distance > 0:
        weight = board.at[BACKWARD_WEIGHT * cells + cell]
        if 0 <= weight <= target:
            slide(board, undo, device, weight, target)
            target -= 1
        slide(board, undo, device, at, target)
    for kind in (RELOAD, RECOMPUTE):
        code = kind * cells + cell
        place = board.at[code]
        if place >= 0:
            wanted = min(
                max(target - late, floor(board, cells, code)), backward_of(board, cells, cell)
            )
            if wanted > place:
                wanted -= 1
            if wanted != place:
                slide(board, undo, device, place, wanted)
    if distance < 0:
        code = board.actions[device, backward_of(board, cells, cell)]
        low = max(target, floor(board, cells, code))
        if low < board.at[code]:
            slide(board, undo, device, board.at[code], low)
        weight = board.at[BACKWARD_WEIGHT * cells + cell]
        if weight > low + 1:
            slide(board, undo, device, weight, low + 1)
    return True


@lean
def ripple(
    board: Board,
    undo: Undo,
    times: Times,
    code: int,
    step: int,
    most: int,
    distance: int,
) -> bool:
    """Shift the same pass of a micro-batch on up to ``most`` stages in a row by a distance."""
    cells, m = times.num_cells, times.num_microbatches
    kind = code // cells
    stage = (code - kind * cells) // m
    changed = False
    for _ in range(most):
        if stage < 0 or stage >= times.num_stages:
            break
        place = board.at[code]
        if place >= 0:
            device = times.device_of[stage]
            changed = shift(board, undo, cells, device, place, distance) or changed
        stage += step
        code += step * m
    return changed
