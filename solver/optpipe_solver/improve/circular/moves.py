"""Compiled moves on circular orders: an item along its circle, a cell's mode.

Nothing is judged here: a move may leave a circle without a period, or over its memory.
"""

# Compiled code knows numpy's old generator only, and takes no keywords.
# ruff: noqa: NPY002, PLR0917

from __future__ import annotations

from typing import TYPE_CHECKING

import numba
import numpy as np

from optpipe_solver.improve.circular.kernel import (
    BACKWARD,
    FORWARD,
    OFFLOADED,
    RECOMPUTE,
    RECOMPUTED,
    RELEASE,
    RELOAD,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe_solver.improve.circular.kernel import Circle, Rules

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

__all__ = ["move", "set_mode", "some_mode"]


@numba.njit(cache=True, nogil=True)
def move(circle: Circle, device: int) -> None:
    """Move one item some places up or down its circle; over the cut it changes its index."""
    size = circle.counts[device]
    at = np.random.randint(size)
    places = np.random.randint(1, 1 + (1 << np.random.randint(0, 3)))
    step = 1 if np.random.random() < 0.5 else -1
    row = circle.rows[device]
    for _ in range(places):
        other = at + step
        if other in {-1, size}:
            # Round the cut: everything else keeps its place relative to the others.
            item = row[at]
            other = 0 if step > 0 else size - 1
            while at != other:
                row[at] = row[at - step]
                at -= step
            row[other] = item
            circle.turn[item] += step
        else:
            row[at], row[other] = row[other], row[at]
        at = other


@numba.njit(cache=True, nogil=True)
def some_mode(circle: Circle, rules: Rules, cell: int) -> int:
    """Return a mode that a cell may have: another one, or offloaded once more (other places)."""
    mode = np.random.randint(3)
    while not rules.may[cell, mode] or (mode == circle.mode[cell] and mode != OFFLOADED):
        mode = np.random.randint(3)
    return mode


@numba.njit(cache=True, nogil=True)
def set_mode(
    circle: Circle, rules: Rules, cell: int, mode: int, start: Floats, trial: float
) -> None:
    """Keep, offload or recompute a cell; ``start`` and ``trial`` are times its circle had.

    RELEASE goes where the copy out has ended by those times, RELOAD where the copy back still
    arrives in time, each a little later or earlier by chance; RECOMPUTE right before its backward.
    """
    device = rules.device[cell]
    for role in (RELEASE, RELOAD, RECOMPUTE):
        if rules.item[cell, role] >= 0:
            _take_out(circle, device, rules.item[cell, role])
    circle.mode[cell] = mode
    back = rules.item[cell, BACKWARD]
    if mode == RECOMPUTED:
        row = circle.rows[device]
        at = 0
        while row[at] != back:
            at += 1
        _put_in(circle, device, rules.item[cell, RECOMPUTE], at, circle.turn[back])
    if mode == OFFLOADED:
        forward = rules.item[cell, FORWARD]
        gone = start[forward] + trial * circle.turn[forward]
        gone += rules.duration[forward] + rules.away[cell] * (1.0 + _some())
        needed = start[back] + trial * circle.turn[back] - rules.home[cell] * (1.0 + _some())
        _put_at(circle, rules, rules.item[cell, RELEASE], gone, start, trial)
        _put_at(circle, rules, rules.item[cell, RELOAD], max(gone, needed), start, trial)


@numba.njit(cache=True, nogil=True)
def _some() -> float:
    """Return nothing half of the time, else up to one."""
    return max(0.0, 2.0 * np.random.random() - 1.0)


@numba.njit(cache=True, nogil=True)
def _take_out(circle: Circle, device: int, item: int) -> None:
    row, size = circle.rows[device], circle.counts[device]
    for at in range(size):
        if row[at] == item:
            row[at : size - 1] = row[at + 1 : size].copy()
            circle.counts[device] -= 1
            return


@numba.njit(cache=True, nogil=True)
def _put_in(circle: Circle, device: int, item: int, at: int, turn: int) -> None:
    row, size = circle.rows[device], circle.counts[device]
    row[at + 1 : size + 1] = row[at:size].copy()
    row[at] = item
    circle.turn[item] = turn
    circle.counts[device] += 1


@numba.njit(cache=True, nogil=True)
def _put_at(
    circle: Circle, rules: Rules, item: int, when: float, start: Floats, trial: float
) -> None:
    """Put an item that takes no time behind all that has started by then."""
    device = rules.device[rules.cell[item]]
    row, size = circle.rows[device], circle.counts[device]
    cut = np.inf
    for at in range(size):
        cut = min(cut, start[row[at]])
    turn = int(np.floor((when - cut) / trial + 1e-9))
    phase = when - turn * trial
    at = 0
    while at < size and start[row[at]] <= phase + 1e-9 * trial:
        at += 1
    start[item] = phase
    _put_in(circle, device, item, at, turn)
