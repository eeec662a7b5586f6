"""Deductions from time: data arrives, one item of a device at a time, windows hold their load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba
import numpy as np

from optpipe_solver.milp.horizon.knowledge import put_before

if TYPE_CHECKING:
    from optpipe_solver.milp.horizon.knowledge import Facts, Known

__all__ = ["is_overloaded", "order_by_time", "shrink_by_arcs", "shrink_by_loads"]


@numba.njit(cache=True, nogil=True)
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


@numba.njit(cache=True, nogil=True)
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


@numba.njit(cache=True, nogil=True)
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


@numba.njit(cache=True, nogil=True)
def _is_finite(known: Known, facts: Facts, k: int) -> bool:
    """Whether no item that surely exists lost its window to an arc without partner."""
    for side in range(4):
        item = facts.arcs[k, side]
        lost = item >= 0 and (known.earliest[item] == np.inf or known.latest[item] == -np.inf)
        if lost and facts.certain[item]:
            return False
    return True


@numba.njit(cache=True, nogil=True)
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


@numba.njit(cache=True, nogil=True)
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


@numba.njit(cache=True, nogil=True)
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
