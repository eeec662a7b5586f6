"""Compiled moves on one device's program; each changes a row in place and returns its new length.

A move keeps the order of a cell's own actions (F, OFFLOAD, RELEASE, RELOAD or RECOMPUTE, I, W);
whether the result fits memory and does not wait in a circle is the caller's to ask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba

from optpipe_solver.improve.kernel import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OFFLOAD,
    RECOMPUTE,
    RELEASE,
    RELOAD,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

__all__ = ["find", "shift", "toggle_fused", "toggle_offload", "toggle_recompute"]


@numba.njit(cache=True)
def shift(
    row: NDArray[np.int64], count: int, at: int, width: int, distance: int, cells: int
) -> bool:
    """Move ``width`` actions at a position by a distance, as far as their own cells allow.

    Returns False where nothing moved.
    """
    if at + width > count:
        return False
    moved = 0
    if distance > 0:
        while moved < distance and at + width < count:
            code = row[at + width]
            if _touches(row, at, width, code % cells, cells):
                break
            for k in range(at + width, at, -1):
                row[k] = row[k - 1]
            row[at] = code
            at += 1
            moved += 1
    else:
        while moved < -distance and at > 0:
            code = row[at - 1]
            if _touches(row, at, width, code % cells, cells):
                break
            for k in range(at - 1, at + width - 1):
                row[k] = row[k + 1]
            row[at + width - 1] = code
            at -= 1
            moved += 1
    return moved > 0


@numba.njit(cache=True)
def _touches(row: Ints, at: int, width: int, cell: int, cells: int) -> bool:
    for k in range(at, at + width):
        if row[k] % cells == cell:
            return True
    return False


@numba.njit(cache=True)
def find(row: Ints, count: int, code: int) -> int:
    """Return where an action stands, -1 where it does not."""
    for at in range(count):
        if row[at] == code:
            return at
    return -1


@numba.njit(cache=True)
def _insert(row: Ints, count: int, at: int, code: int) -> int:
    for k in range(count, at, -1):
        row[k] = row[k - 1]
    row[at] = code
    return count + 1


@numba.njit(cache=True)
def _remove(row: Ints, count: int, at: int) -> int:
    for k in range(at, count - 1):
        row[k] = row[k + 1]
    return count - 1


@numba.njit(cache=True)
def _backward_at(row: Ints, count: int, cell: int, cells: int) -> int:
    at = find(row, count, BACKWARD_INPUT * cells + cell)
    if at < 0:
        at = find(row, count, FULL_BACKWARD * cells + cell)
    return at


@numba.njit(cache=True)
def toggle_offload(
    row: NDArray[np.int64], count: int, cell: int, cells: int, early: int, late: int
) -> int:
    """Offload a kept cell, or keep an offloaded one; returns the new length.

    RELEASE goes ``early`` places behind the OFFLOAD, RELOAD ``late`` places before the backward.
    The cell must not be recomputed.
    """
    away = find(row, count, OFFLOAD * cells + cell)
    if away >= 0:
        count = _remove(row, count, away)
        count = _remove(row, count, find(row, count, RELEASE * cells + cell))
        return _remove(row, count, find(row, count, RELOAD * cells + cell))
    made = find(row, count, FORWARD * cells + cell)
    needed = _backward_at(row, count, cell, cells)
    released = min(made + 1 + early, needed)
    reloaded = max(released, needed - late)
    count = _insert(row, count, reloaded, RELOAD * cells + cell)
    count = _insert(row, count, released, RELEASE * cells + cell)
    return _insert(row, count, made + 1, OFFLOAD * cells + cell)


@numba.njit(cache=True)
def toggle_recompute(
    row: NDArray[np.int64], count: int, cell: int, cells: int, again: NDArray[np.bool_], late: int
) -> int:
    """Recompute a kept cell ``late`` places before its backward, or keep a recomputed one.

    The cell must not be offloaded; ``again`` is kept up to date.
    """
    at = find(row, count, RECOMPUTE * cells + cell)
    if at >= 0:
        again[cell] = False
        return _remove(row, count, at)
    made = find(row, count, FORWARD * cells + cell)
    needed = _backward_at(row, count, cell, cells)
    again[cell] = True
    return _insert(row, count, max(made + 1, needed - late), RECOMPUTE * cells + cell)


@numba.njit(cache=True)
def toggle_fused(row: NDArray[np.int64], count: int, cell: int, cells: int) -> int:
    """Replace I and W by B where the I stands, or B by I with its W right behind."""
    at = find(row, count, FULL_BACKWARD * cells + cell)
    if at >= 0:
        row[at] = BACKWARD_INPUT * cells + cell
        return _insert(row, count, at + 1, BACKWARD_WEIGHT * cells + cell)
    at = find(row, count, BACKWARD_INPUT * cells + cell)
    row[at] = FULL_BACKWARD * cells + cell
    return _remove(row, count, find(row, count, BACKWARD_WEIGHT * cells + cell))
