"""Find what is better by beam searches below the best schedule known, each wider than the last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.exact.beam import beam_can_search, search_beam
from optpipe_solver.exact.counts import Answer
from optpipe_solver.milp.horizon.deadline import Deadline
from optpipe_solver.milp.horizon.grid import Goal

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_solver.incumbent import Incumbent

__all__ = ["improve_by_beam"]

_METHOD = "beam"
_FIRST, _MOST, _WIDEN = 500, 128_000, 4.0
"""States of one layer that are expanded: at first, at most, and how many times more than before."""

_LEAST, _SURE = 1.5, 0.8
"""No search is worth it that is less than so many times wider; share of what is left to use."""


def improve_by_beam(
    best: Incumbent,
    *,
    time_limit_s: float,
    threads: int,
    seed: int,
    should_stop: Callable[[], bool] | None = None,
    work_limit: int | None = None,
) -> int:
    """Search below the best schedule known, wider each time nothing is found; return the states.

    Where no state had to be left out nothing shorter exists, which is offered as a bound. Nothing
    here is random or parallel: ``threads`` and ``seed`` are those of every other part. With
    ``work_limit`` (states) the run is a function of problem and start, as long as time does not end
    it.
    """
    del threads, seed
    if best.programs is None or best.is_optimal or not beam_can_search(best.problem):
        return 0
    told = should_stop or (lambda: False)
    end = Deadline(time_limit_s, lambda: best.is_optimal or told())
    # The first call in a process loads compiled code, which says nothing of how long others take.
    search_beam(best.problem, 0.0, 1)
    width, num_states = _FIRST, 0
    while width <= _MOST:
        began = end.left_s()
        answer, met = _below(best, width, end)
        num_states += met
        if answer is Answer.NONE or end.is_over():
            break
        left = end.left_s() / max(1e-6, began - end.left_s())
        if work_limit is not None:
            left = (work_limit - num_states) / met
        if left < _LEAST / _SURE:
            break
        if answer is not Answer.FOUND:
            width = int(width * min(_WIDEN, _SURE * left))
    return max(1, num_states)


def _below(best: Incumbent, width: int, end: Deadline) -> tuple[Answer, int]:
    """Search once; the answer is that something was found only where it is better."""
    goal = Goal.of(best.problem, best.objective_ms, cutoff=True)
    found = search_beam(best.problem, goal.horizon_ms, width, should_stop=end.is_over)
    if found.answer is Answer.NONE:
        best.offer_bound(min(goal.proven_ms, best.objective_ms), _METHOD)
    if found.programs is not None and not best.offer(found.programs, _METHOD):
        return Answer.UNKNOWN, found.num_states
    return found.answer, found.num_states
