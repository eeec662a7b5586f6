"""The smallest memory at a given period, by local search: for sizes where the MILP is slow.

The limit is lowered step by step, each time a circle is found that keeps it within the period; a
step that fails is made smaller. Nothing is proven here.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np

from optpipe_solver.families.building_blocks import candidate_blocks
from optpipe_solver.improve.circular.search import CircularSearch

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe_solver.improve.circular.kernel import Circle
    from optpipe_solver.milp.periodic.block import PeriodicBlock

__all__ = ["small_memory"]

_FIRST_STEP, _LAST_STEP, _SMALLER = 0.08, 0.004, 0.6
_STARTS = 64


def small_memory(
    problem: Problem, period_ms: float, *, num_moves: int, seed: int, tries: int = 2
) -> PeriodicBlock | None:
    """Return a block of at most this period whose largest device peak is small.

    Parameters
    ----------
    problem
        Its limits play no part, nor do its fused backwards, offload and recompute.
    period_ms
        Per micro-batch, at least the load bound.
    num_moves, tries
        Moves per step, and how many times a step is tried before a smaller one.
    seed
        What is tried is a function of it.

    Returns
    -------
    PeriodicBlock or None
        None where no start has so short a period.
    """
    search = CircularSearch(problem, fused=False)
    static = [problem.static_bytes_of(device) for device in range(len(problem.devices))]
    circle = _start(search, period_ms, static)
    if circle is None:
        return None
    step = _FIRST_STEP
    runs = 0
    while step > _LAST_STEP:
        peak = _peak(search, circle, static)
        aim = _limited(search, period_ms, static, int(peak * (1 - step)))
        for _ in range(tries):
            runs += 1
            found, judged = aim.improved(circle, num_moves=num_moves, seed=seed + runs)
            if judged <= aim.rules.least:
                circle = found
                break
        else:
            step *= _SMALLER
    return search.block_of(circle)


def _start(search: CircularSearch, period_ms: float, static: list[int]) -> Circle | None:
    """Return the building block of the smallest peak that keeps the period."""
    unlimited = _limited(search, period_ms, static, 2**60)
    circles = [search.from_times(block) for block in candidate_blocks(search.problem)[:_STARTS]]
    fast = [c for c in circles if unlimited.charged_ms(c) <= unlimited.rules.least]
    if not fast:
        found = [unlimited.improved(c, num_moves=2000, seed=n) for n, c in enumerate(circles[:8])]
        fast = [c for c, judged in found if judged <= unlimited.rules.least]
    return min(fast, key=lambda c: _peak(search, c, static), default=None)


def _peak(search: CircularSearch, circle: Circle, static: list[int]) -> int:
    """Return the largest peak of a device in bytes, static bytes included."""
    over = [
        search.excess(circle, device) + int(search.rules.limit[device]) + static[device]
        for device in range(len(static))
    ]
    return max(over)


def _limited(
    search: CircularSearch, period_ms: float, static: list[int], limit: int
) -> CircularSearch:
    """Return the search with one limit for all devices, in which any period up to this is best."""
    other = copy.copy(search)
    least = max(search.rules.least, period_ms) * (1 + 1e-9)
    room = np.array([limit - held for held in static], dtype=np.int64)
    other.rules = search.rules._replace(limit=room, least=least)
    return other
