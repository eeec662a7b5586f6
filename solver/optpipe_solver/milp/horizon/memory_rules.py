"""Deductions from memory: the states that a device's cells can be in where an item begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba
import numpy as np

from optpipe_solver.milp.horizon.knowledge import put_before

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe_solver.milp.horizon.knowledge import Cells, Facts, Known

    Flags = NDArray[np.bool_]

__all__ = ["order_by_memory"]

_NO_STATE = 2**55
"""More bytes than any: what a cell without a possible state would hold."""


@numba.njit(cache=True, nogil=True)
def order_by_memory(facts: Facts, cells: Cells, known: Known) -> int:
    """Note orders without which an item would find less room than it needs.

    Where item b begins, every cell of its device is in some state. If a cell in state k, all
    others in their cheapest possible ones, leaves b no room, the cell is not in state k.
    """
    changed = 0
    for b in range(facts.duration.size):
        if facts.extra[b] <= 0:
            continue
        device = facts.device[b]
        possible = _possible_states(cells, known.before, b, device)
        if not _exclude_states(cells, possible, device, facts.room[device] - facts.extra[b]):
            if facts.certain[b]:
                return -1
            continue
        for cell in range(cells.low[device], cells.high[device]):
            states = possible[cell - cells.low[device]]
            more = _order_by_states(facts, cells, known, (b, cell), states)
            if more < 0:
                return -1
            changed += more
    return changed


@numba.njit(cache=True, nogil=True)
def _possible_states(cells: Cells, before: Flags, b: int, device: int) -> Flags:
    """Return, by cell of a device and state, whether the cell may be in it where b begins."""
    low, high = cells.low[device], cells.high[device]
    possible = np.zeros((high - low, 4), dtype=np.bool_)
    for cell in range(low, high):
        fused = cells.fused[cell]
        for state in range(cells.first[cell], cells.last[cell] + 1):
            reached, left = True, True
            if state > cells.first[cell]:
                made = cells.chain[cell, state - 1]
                reached = made != b and not before[b, made]
                if state == 3 and fused >= 0 and not reached:
                    reached = fused != b and not before[b, fused]
            if state < cells.last[cell]:
                left = not before[cells.chain[cell, state], b]
                if state == 1 and fused >= 0 and not left:
                    left = not before[fused, b]
            possible[cell - low, state] = reached and left
    return possible


@numba.njit(cache=True, nogil=True)
def _exclude_states(cells: Cells, possible: Flags, device: int, room: int) -> bool:
    """Strike out states that leave no room; False = some cell has none left."""
    for cell in range(cells.low[device], cells.high[device]):
        row = possible[cell - cells.low[device]]
        some = False
        for state in range(4):
            if row[state]:
                row[state] = _least_held(cells, possible, device, (cell, state)) <= room
                some = some or row[state]
        if not some:
            return False
    return True


@numba.njit(cache=True, nogil=True)
def _least_held(cells: Cells, possible: Flags, device: int, fixed: tuple[int, int]) -> int:
    """Return the least bytes with one cell in a state, all others in possible ones.

    Under first in, first out no later cell of a lot is further than an earlier one.
    """
    chosen, state = fixed
    held = 0
    for cell in range(cells.low[device], cells.high[device]):
        same_lot = cells.lot[cell] >= 0 and cells.lot[cell] == cells.lot[chosen]
        least = _NO_STATE
        for k in range(4):
            too_far = same_lot and cell >= chosen and k > state
            too_near = same_lot and cell <= chosen and k < state
            other = cell == chosen and k != state
            if possible[cell - cells.low[device], k] and not (too_far or too_near or other):
                least = min(least, cells.cost[cell, k])
        held += least
    return int(held)


@numba.njit(cache=True, nogil=True)
def _order_by_states(
    facts: Facts, cells: Cells, known: Known, at: tuple[int, int], possible: Flags
) -> int:
    """Note orders between an item and those of a cell that the cell's possible states force."""
    b, cell = at
    lowest, highest = 3, 0
    for state in range(4):
        if possible[state]:
            lowest, highest = min(lowest, state), max(highest, state)
    changed = 0
    for k in range(cells.first[cell], cells.last[cell]):
        if k > 0 and cells.fused[cell] >= 0:
            continue
        item = cells.chain[cell, k]
        if item == b:
            continue
        if k < lowest and not known.before[item, b]:
            if put_before(facts, known, item, b) < 0:
                return -1
            changed += 1
        elif k >= highest and not known.before[b, item]:
            if put_before(facts, known, b, item) < 0:
                return -1
            changed += 1
    return changed
