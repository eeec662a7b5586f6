"""Raise the bound by the model on counts: it asks whether everything can end by some time.

From just below the best schedule known down to the bound, by linear or by integer programs.
"""

from __future__ import annotations

from enum import StrEnum
from math import floor
from typing import TYPE_CHECKING

import numpy as np

from optpipe_solver.bounds.heads_tails import ANYTIME, drain, heads, refill, tails
from optpipe_solver.bounds.relaxation import relaxed
from optpipe_solver.incumbent import Goal
from optpipe_solver.milp.counts.items import CountProblem, EventTimes, step_ms
from optpipe_solver.milp.counts.model import CountModel
from optpipe_solver.milp.highs import MilpStatus, solve_milp

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe_solver.budget import Stop
    from optpipe_solver.incumbent import Incumbent

__all__ = [
    "CountAnswer",
    "counts_may_prove",
    "ends_within",
    "event_times",
    "improve_by_counts",
    "improve_by_linear_counts",
]

_METHOD = "counts"
_MOST_STEPS = 150
"""A grid that is coarser than the times' own loses what they are rounded down by."""

_MOST_MODES_BY_STEPS = 3_000
"""Modes of all stages x steps up to which a linear program takes a few seconds at most."""

_MOST_ROWS = 3_000
"""Rows up to which an integer question is asked where work is limited and not time."""

_HALVINGS = 5
_FIRST = 0.6
"""Share of a turn for the first question, which settles the problem."""


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


def counts_may_prove(problem: Problem, horizon_ms: float) -> bool:
    """Whether the model is small enough to be worth a question."""
    step = step_ms(problem, horizon_ms, _MOST_STEPS)
    modes = sum(len(menu) for menu in problem.menus)
    span = 2 if problem.objective == "span" else 1
    return span * modes * horizon_ms / step <= _MOST_MODES_BY_STEPS


def ends_within(
    problem: Problem, horizon_ms: float, stop: Stop, *, integer: bool, step: float | None = None
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
    step
        Of the grid in ms; chosen where None.
    """
    if step is None:
        step = step_ms(problem, horizon_ms, _MOST_STEPS)
    given = CountProblem(problem, step, horizon_ms, *event_times(problem))
    counts = CountModel(given, should_stop=stop.is_over)
    if counts.is_empty:
        return CountAnswer.NO
    if not counts.is_complete:
        return CountAnswer.UNKNOWN
    if integer and stop.work is not None and counts.num_rows > _MOST_ROWS:
        return CountAnswer.UNKNOWN
    outcome = solve_milp(counts.model, stop, integer=integer)
    if outcome.status is MilpStatus.INFEASIBLE:
        return CountAnswer.NO
    return CountAnswer.YES if outcome.status is MilpStatus.OPTIMAL else CountAnswer.UNKNOWN


def improve_by_linear_counts(best: Incumbent, stop: Stop) -> None:
    """Ask one linear program whether anything is better than the best schedule known."""
    _improve(best, stop, integer=False)


def improve_by_counts(best: Incumbent, stop: Stop) -> None:
    """Raise the bound below the best schedule known; work is counted in branch-and-bound nodes.

    A horizon is refuted only where two runs with different seeds agree: HiGHS 1.15.1 was seen to
    deny what exists in one run of some 500, but never with two seeds on one model
    (`benchmarks/RESULTS.md`). Where work is limited the run is a function of problem, start and
    seed, as long as time does not end it.
    """
    _improve(best, stop, integer=True)


def _improve(best: Incumbent, stop: Stop, *, integer: bool) -> None:
    if best.programs is None or not counts_may_prove(best.problem, best.objective_ms):
        return
    _CountQuestions(best, stop, integer=integer).ask_all()
    if not stop.spent:
        stop.spend(1)


class _CountQuestions:
    """Questions between the bound and the best schedule known: each NO raises the bound."""

    def __init__(self, best: Incumbent, stop: Stop, *, integer: bool) -> None:
        self.best = best
        self.stop = stop
        self.integer = integer
        self.goal = Goal.of(best.problem, best.objective_ms)

    def ask_all(self) -> None:
        """Just below the best schedule; where integer, then halfway down to the bound, and so on.

        There linear programs go first.
        """
        top_ms = self.goal.horizon_ms
        if not self._refutes(top_ms, _FIRST, integer=self.integer) and self.integer:
            self._halve(top_ms, integer=False)
            self._halve(top_ms, integer=True)

    def _halve(self, high_ms: float, *, integer: bool) -> None:
        for number in range(_HALVINGS):
            middle_ms = (self.best.bound_ms + high_ms) / 2
            if self.goal.grid > 0:
                middle_ms = self.goal.grid * (floor(middle_ms / self.goal.grid) + 0.5)
            if not self.best.bound_ms < middle_ms < high_ms or self._is_over():
                return
            if not self._refutes(middle_ms, 1.0 / (_HALVINGS - number), integer=integer):
                high_ms = middle_ms

    def _refutes(self, horizon_ms: float, share: float, *, integer: bool) -> bool:
        """Ask, and once more where the answer is NO; offer what both deny."""
        if self._is_over() or horizon_ms <= self.best.bound_ms:
            return False
        turn = self.stop.turn(share)
        for seed in (self.stop.seed, self.stop.seed + 1):
            once = turn.turn(seed=seed, threads=1)
            answer = ends_within(self.best.problem, horizon_ms, once, integer=integer)
            if answer is not CountAnswer.NO:
                return False
        if horizon_ms >= self.best.objective_ms:
            # Another thread has found what both runs denied.
            return False
        self.best.offer_bound(min(self.goal.proven(horizon_ms), self.best.objective_ms), _METHOD)
        return True

    def _is_over(self) -> bool:
        return self.best.is_optimal or self.stop.is_over()
