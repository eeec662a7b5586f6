"""Deductions from time: data arrives, one item of a device at a time, windows hold their load."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.jit import jitted

if TYPE_CHECKING:
    from optpipe_solver.arrays import Flags, Floats, Ints

__all__ = [
    "Cells",
    "Facts",
    "Known",
    "is_overloaded",
    "order_by_memory",
    "order_by_time",
    "propagate",
    "put_before",
    "shave",
    "shrink_by_arcs",
    "shrink_by_loads",
]


# --- What the compiled deductions work on: facts, cells, and what is known so far; orders noted.


class Facts(NamedTuple):
    """What never changes; items of one device stand together, from ``low`` to ``high``.

    ``arcs`` holds two producers and two consumers each (-1 = none, two = alternatives) and
    ``delay`` the ms between; ``pushes`` and ``pulls`` whether the producer, the consumer surely
    exists where the other does. ``room`` is per device, ``extra`` the least bytes an item takes.
    """

    duration: Floats
    certain: Flags
    device: Ints
    low: Ints
    high: Ints
    arcs: Ints
    delay: Floats
    pushes: Flags
    pulls: Flags
    extra: Ints
    room: Ints
    tolerance: float


class Cells(NamedTuple):
    """(stage, micro-batch) pairs by device: chain of F, I, W, the alternative B, bytes by state.

    A cell has done none, F, F and I, or all: states 0 to 3. ``cost`` is the least the cell adds to
    its device in a state. Cells of one ``lot`` go first in, first out (-1: in any order).
    """

    low: Ints
    high: Ints
    chain: Ints
    fused: Ints
    cost: Ints
    lot: Ints


class Known(NamedTuple):
    """What is known so far: windows of starts in ms, and ``before[a, b]``."""

    earliest: Floats
    latest: Floats
    before: Flags


@jitted
def put_before(facts: Facts, known: Known, a: int, b: int) -> int:
    """Note that a stands before b, and what follows by transitivity; -1 = impossible.

    An order passes through an item only if that surely exists.
    """
    before, certain = known.before, facts.certain
    low, high = facts.low[facts.device[a]], facts.high[facts.device[a]]
    for x in range(low, high):
        if x != a and not (before[x, a] and certain[a]):
            continue
        for y in range(low, high):
            if y != b and not (before[b, y] and certain[b]):
                continue
            if certain[x] and certain[y] and (x == y or before[y, x]):
                return -1
            before[x, y] = x != y
    return 1


@jitted
def shrink_by_arcs(facts: Facts, known: Known) -> int:
    """Apply every arc both ways; return how many windows shrank, -1 = a needed pass has none."""
    changed = 0
    for k in range(facts.delay.size):
        if facts.pushes[k]:
            changed += _push(facts, known, k)
        if facts.pulls[k]:
            changed += _pull(facts, known, k)
        if changed and not _is_finite(known, facts, k):
            return -1
    return changed


@jitted
def _push(facts: Facts, known: Known, k: int) -> int:
    """What waits for an arc starts after the earliest of the alternatives that make its input."""
    there, changed = np.inf, 0
    for side in range(2):
        a = facts.arcs[k, side]
        if a >= 0 and known.earliest[a] <= known.latest[a] + facts.tolerance:
            there = min(there, known.earliest[a] + facts.duration[a])
    there += facts.delay[k]
    for side in range(2, 4):
        b = facts.arcs[k, side]
        if b >= 0 and known.earliest[b] < there - facts.tolerance:
            known.earliest[b] = there
            changed += 1
    return changed


@jitted
def _pull(facts: Facts, known: Known, k: int) -> int:
    """What an arc's input is made by ends before the latest of the alternatives that need it."""
    needed, changed = -np.inf, 0
    for side in range(2, 4):
        b = facts.arcs[k, side]
        if b >= 0 and known.earliest[b] <= known.latest[b] + facts.tolerance:
            needed = max(needed, known.latest[b])
    needed -= facts.delay[k]
    for side in range(2):
        a = facts.arcs[k, side]
        if a >= 0 and known.latest[a] + facts.duration[a] > needed + facts.tolerance:
            known.latest[a] = needed - facts.duration[a]
            changed += 1
    return changed


@jitted
def _is_finite(known: Known, facts: Facts, k: int) -> bool:
    """Whether no item that surely exists lost its window to an arc without partner."""
    for side in range(4):
        item = facts.arcs[k, side]
        lost = item >= 0 and (known.earliest[item] == np.inf or known.latest[item] == -np.inf)
        if lost and facts.certain[item]:
            return False
    return True


@jitted
def order_by_time(facts: Facts, known: Known) -> int:
    """Note orders of which the other way round is impossible in time."""
    earliest, latest, before = known.earliest, known.latest, known.before
    changed = 0
    for device in range(facts.low.size):
        for a in range(facts.low[device], facts.high[device]):
            for b in range(facts.low[device], facts.high[device]):
                if a == b or before[a, b]:
                    continue
                if earliest[b] + facts.duration[b] > latest[a] + facts.tolerance:
                    if put_before(facts, known, a, b) < 0:
                        return -1
                    changed += 1
    return changed


@jitted
def shrink_by_loads(facts: Facts, known: Known) -> int:
    """What surely stands before an item runs first, one after another; and behind it likewise."""
    earliest, latest, duration = known.earliest, known.latest, facts.duration
    changed = 0
    for device in range(facts.low.size):
        low, high = facts.low[device], facts.high[device]
        # Copies: an order by heads that change meanwhile would count idle time that is none.
        heads, ends = earliest[low:high].copy(), latest[low:high] + duration[low:high]
        by_head, by_tail = np.argsort(heads), np.argsort(-ends)
        for b in range(low, high):
            ready, due = -np.inf, np.inf
            for a in by_head:
                if known.before[low + a, b] and facts.certain[low + a]:
                    ready = max(ready, heads[a]) + duration[low + a]
            for a in by_tail:
                if known.before[b, low + a] and facts.certain[low + a]:
                    due = min(due, ends[a]) - duration[low + a]
            if ready > earliest[b] + facts.tolerance:
                earliest[b] = ready
                changed += 1
            if due < latest[b] + duration[b] - facts.tolerance:
                latest[b] = due - duration[b]
                changed += 1
    return changed


@jitted
def is_overloaded(facts: Facts, known: Known) -> bool:
    """Whether some items of a device need more time than lies between their windows' ends."""
    earliest, latest, duration = known.earliest, known.latest, facts.duration
    for device in range(facts.low.size):
        low, high = facts.low[device], facts.high[device]
        by_head = np.argsort(-earliest[low:high]) + low
        for last in range(low, high):
            if not facts.certain[last]:
                continue
            due = latest[last] + duration[last]
            load = 0.0
            for a in by_head:
                if facts.certain[a] and latest[a] + duration[a] <= due:
                    load += duration[a]
                    if earliest[a] + load > due + facts.tolerance * 10:
                        return True
    return False


# --- Compiled deductions about items: windows shrink, orders follow, until nothing more follows.
# Per sweep: data arrives (longest paths both ways); two items of a device of which one order is
# impossible stand in the other; what surely stands before an item takes its time first (one-machine
# heads and tails, Carlier and Pinson 1989); no set of items may need more time than its windows
# leave; what memory forces (`memory_rules`). `shave` tries each open order and reverses it where
# that ends in a contradiction (Martin and Shmoys 1996). Every deduction holds in every schedule
# whose ends lie within the windows given at first, so nothing as good as the incumbent is lost.

_MAX_SWEEPS = 200


@jitted
def propagate(facts: Facts, cells: Cells, known: Known) -> bool:
    """Deduce until nothing follows any more; False = no schedule is left."""
    for _ in range(_MAX_SWEEPS):
        changed = shrink_by_arcs(facts, known)
        if changed < 0:
            return False
        more = order_by_time(facts, known)
        if more < 0 or is_overloaded(facts, known):
            return False
        changed += more + shrink_by_loads(facts, known)
        more = order_by_memory(facts, cells, known)
        if more < 0:
            return False
        changed += more
        for item in range(facts.duration.size):
            gone = known.earliest[item] > known.latest[item] + facts.tolerance
            if gone and facts.certain[item]:
                return False
        if changed == 0:
            return True
    return True


@jitted
def shave(
    facts: Facts, cells: Cells, known: Known, first: int, num_trials: int
) -> tuple[int, int, int]:
    """Try open orders of pairs that surely exist, the pairs counted item by item from ``first``.

    Returns the pair to go on with, the trials left and the number of orders fixed, -1 where that
    shows that there is no schedule. After the last pair comes number items x items.
    """
    count = facts.duration.size
    fixed = 0
    for pair in range(first, count * count):
        a, b = pair // count, pair % count
        if b <= a or facts.device[a] != facts.device[b] or not _is_open_pair(facts, known, a, b):
            continue
        if num_trials <= 0:
            return pair, 0, fixed
        num_trials -= 2
        more = _try_both(facts, cells, known, a, b)
        if more < 0:
            return pair, num_trials, -1
        fixed += more
    return count * count, num_trials, fixed


@jitted
def _is_open_pair(facts: Facts, known: Known, a: int, b: int) -> bool:
    certain = facts.certain[a] and facts.certain[b]
    return bool(certain and not known.before[a, b] and not known.before[b, a])


@jitted
def _try_both(facts: Facts, cells: Cells, known: Known, a: int, b: int) -> int:
    """Fix the order of two items if the other is impossible: 1; 0 = still open; -1 = neither."""
    for first, second in ((a, b), (b, a)):
        if _contradicts(facts, cells, known, first, second):
            if put_before(facts, known, second, first) < 0:
                return -1
            return 1 if propagate(facts, cells, known) else -1
    return 0


@jitted
def _contradicts(facts: Facts, cells: Cells, known: Known, first: int, second: int) -> bool:
    trial = Known(known.earliest.copy(), known.latest.copy(), known.before.copy())
    return put_before(facts, trial, first, second) < 0 or not propagate(facts, cells, trial)


# --- Deductions from memory: the states that a device's cells can be in where an item begins.

_NO_STATE = 2**55
"""More bytes than any: what a cell without a possible state would hold."""


@jitted
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


@jitted
def _possible_states(cells: Cells, before: Flags, b: int, device: int) -> Flags:
    """Return, by cell of a device and state, whether the cell may be in it where b begins."""
    low, high = cells.low[device], cells.high[device]
    possible = np.zeros((high - low, 4), dtype=np.bool_)
    for cell in range(low, high):
        fused = cells.fused[cell]
        for state in range(4):
            reached, left = True, True
            if state > 0:
                made = cells.chain[cell, state - 1]
                reached = made != b and not before[b, made]
                if state == 3 and fused >= 0 and not reached:
                    reached = fused != b and not before[b, fused]
            if state < 3:
                left = not before[cells.chain[cell, state], b]
                if state == 1 and fused >= 0 and not left:
                    left = not before[fused, b]
            possible[cell - low, state] = reached and left
    return possible


@jitted
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


@jitted
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


@jitted
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
    for k in range(3):
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
