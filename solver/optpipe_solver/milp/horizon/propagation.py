"""Compiled deductions about items: windows shrink, orders follow, until nothing more follows.

Per sweep: data arrives (longest paths both ways); two items of a device of which one order is
impossible stand in the other; what surely stands before an item takes its time first (one-machine
heads and tails, Carlier and Pinson 1989); no set of items may need more time than its windows
leave; what memory forces (`memory_rules`). `shave` tries each open order and reverses it where
that ends in a contradiction (Martin and Shmoys 1996). Every deduction holds in every schedule
whose ends lie within the windows given at first, so nothing as good as the incumbent is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba

from optpipe_solver.milp.horizon.knowledge import Known, put_before
from optpipe_solver.milp.horizon.memory_rules import order_by_memory
from optpipe_solver.milp.horizon.time_rules import (
    is_overloaded,
    order_by_time,
    shrink_by_arcs,
    shrink_by_loads,
)

if TYPE_CHECKING:
    from optpipe_solver.milp.horizon.knowledge import Cells, Facts

__all__ = ["propagate", "shave"]

_MAX_SWEEPS = 200


@numba.njit(cache=True, nogil=True)
def propagate(facts: Facts, cells: Cells, known: Known) -> bool:
    """Deduce until nothing follows any more; False = no schedule is left."""
    for _ in range(_MAX_SWEEPS):
        changed = shrink_by_arcs(facts, known)
        if changed < 0:
            return False
        if facts.orders:
            more = order_by_time(facts, known)
            if more < 0 or is_overloaded(facts, known):
                return False
            changed += more + shrink_by_loads(facts, known)
        if facts.memory:
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


@numba.njit(cache=True, nogil=True)
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


@numba.njit(cache=True, nogil=True)
def _is_open_pair(facts: Facts, known: Known, a: int, b: int) -> bool:
    certain = facts.certain[a] and facts.certain[b]
    return bool(certain and not known.before[a, b] and not known.before[b, a])


@numba.njit(cache=True, nogil=True)
def _try_both(facts: Facts, cells: Cells, known: Known, a: int, b: int) -> int:
    """Fix the order of two items if the other is impossible: 1; 0 = still open; -1 = neither."""
    for first, second in ((a, b), (b, a)):
        if _contradicts(facts, cells, known, first, second):
            if put_before(facts, known, second, first) < 0:
                return -1
            return 1 if propagate(facts, cells, known) else -1
    return 0


@numba.njit(cache=True, nogil=True)
def _contradicts(facts: Facts, cells: Cells, known: Known, first: int, second: int) -> bool:
    trial = Known(known.earliest.copy(), known.latest.copy(), known.before.copy())
    return put_before(facts, trial, first, second) < 0 or not propagate(facts, cells, trial)
