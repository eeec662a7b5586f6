"""The model on counts, what it is asked, and what its answers prove."""

from __future__ import annotations

from enum import StrEnum
from itertools import accumulate
from math import floor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.bounds.heads_tails import ANYTIME, drain, heads, refill, tails
from optpipe_solver.bounds.relaxation import relaxed
from optpipe_solver.incumbent import Goal
from optpipe_solver.milp.counts.constraints import CountVariables, all_rows
from optpipe_solver.milp.counts.items import CountProblem, EventTimes, step_ms
from optpipe_solver.milp.highs import MilpStatus, SparseModel, solve_milp

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.problem import Problem
    from optpipe_solver.budget import Stop
    from optpipe_solver.incumbent import Incumbent

__all__ = ["CountAnswer", "counts_may_prove", "ends_within", "event_times", "improve_by_counts"]

_METHOD = "counts"
_MOST_STEPS = 150
"""A grid that is coarser than the times' own loses what they are rounded down by."""

_MOST_COLUMNS = 12_000
_ROWS_BETWEEN_LOOKS = 500


class CountAnswer(StrEnum):
    """Whether everything can end in time, as the model on counts sees it."""

    NO = "no"
    YES = "yes"
    UNKNOWN = "unknown"


def event_times(problem: Problem) -> tuple[EventTimes, EventTimes]:
    """Return heads and tails on the clock that begins with stage 0's first F, in ms.

    Under span all that is known of the end is that of stage 0's device.
    """
    model = relaxed(problem)
    begin = end = np.zeros(len(problem.stages))
    if problem.objective == "span":
        end = np.where(model.device == problem.stages[0].device, 0.0, ANYTIME)
    before, after = heads(model, refill(model), begin), tails(model, drain(model), end)
    return EventTimes(*before), EventTimes(*after)


class _Written(NamedTuple):
    """A model, None where windows or a row alone prove that nothing ends in time."""

    model: SparseModel | None
    is_complete: bool = True


def _written(given: CountProblem, should_stop: Callable[[], bool]) -> _Written:
    """Write all rows, or, where told to stop, some."""
    v = CountVariables(given)
    if v.is_empty:
        return _Written(None)
    sizes, columns, factors, limits = [0], [], [], []
    for number, (left, right) in enumerate(all_rows(v)):
        most = left.constant
        for column, factor in left.terms.items():
            most += factor * (v.tops if factor > 0 else v.lows)[column]
        if most <= right:
            continue
        if not left.terms:
            return _Written(None)
        sizes.append(len(left.terms))
        columns += left.terms.keys()
        factors += left.terms.values()
        limits.append(right - left.constant)
        if number % _ROWS_BETWEEN_LOOKS == 0 and should_stop():
            return _Written(None, is_complete=False)
    model = SparseModel(
        lows=np.array(v.lows, dtype=np.float64),
        tops=np.array(v.tops, dtype=np.float64),
        starts=np.array(list(accumulate(sizes)), dtype=np.int32),
        columns=np.array(columns, dtype=np.int32),
        factors=np.array(factors, dtype=np.float64),
        limits=np.array(limits, dtype=np.float64),
    )
    return _Written(model)


def ends_within(
    problem: Problem,
    horizon_ms: float,
    stop: Stop,
    *,
    integer: bool,
    apart: bool = False,
    step: float | None = None,
) -> CountAnswer:
    """Ask whether everything can end within ``horizon_ms``; ``NO`` is one run's word.

    Parameters
    ----------
    problem, horizon_ms
        What is asked of; ms of the problem's objective.
    stop
        As of `solve_milp`.
    integer
        Whether counts must be whole; else a linear program answers: sooner, and less often NO.
    apart
        Whether micro-batches are told apart.
    step
        Of the grid in ms; chosen where None.
    """
    if step is None:
        step = step_ms(problem, horizon_ms, _MOST_STEPS)
    given = CountProblem(problem, step, horizon_ms, *event_times(problem), apart)
    model, is_complete = _written(given, stop.is_over)
    if model is None:
        return CountAnswer.NO if is_complete else CountAnswer.UNKNOWN
    outcome = solve_milp(model, stop, integer=integer)
    if outcome.status is MilpStatus.INFEASIBLE:
        return CountAnswer.NO
    return CountAnswer.YES if outcome.status is MilpStatus.OPTIMAL else CountAnswer.UNKNOWN
