"""Raise the bound by the model on counts: it asks whether everything can end by some time.

From just below the best schedule known down to the bound.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from optpipe_solver.bounds.heads_tails import ANYTIME, drain, heads, refill, tails
from optpipe_solver.bounds.relaxation import relaxed
from optpipe_solver.exact.device_subsets import SMALL
from optpipe_solver.feasibility import fifo_loses_nothing, usable_modes
from optpipe_solver.incumbent import Goal
from optpipe_solver.milp.counts.constraints import count_model
from optpipe_solver.milp.counts.items import CountProblem, EventTimes, step_ms
from optpipe_solver.milp.highs import MilpStatus, solve_milp

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe_solver.budget import Stop
    from optpipe_solver.incumbent import Incumbent

__all__ = ["CountAnswer", "counts_may_prove", "ends_within", "event_times", "improve_by_counts"]

_METHOD = "counts"
_MOST_STEPS = 150
"""A grid that is coarser than the times' own loses what they are rounded down by."""

_MOST_COLUMNS = 6_000
"""Beyond, the first linear program alone takes seconds."""

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


def ends_within(
    problem: Problem, horizon_ms: float, stop: Stop, *, step: float | None = None
) -> CountAnswer:
    """Ask whether everything can end within ``horizon_ms``; ``NO`` is one run's word.

    Parameters
    ----------
    problem, horizon_ms
        What is asked of; ms of the problem's objective.
    stop
        As of `solve_milp`.
    step
        Of the grid in ms; chosen where None.
    """
    if step is None:
        step = step_ms(problem, horizon_ms, _MOST_STEPS)
    given = CountProblem(problem, step, horizon_ms, *event_times(problem))
    model, is_complete = count_model(given, stop.is_over)
    if model is not None and len(model.tops) > _MOST_COLUMNS:
        return CountAnswer.UNKNOWN
    if model is None:
        return CountAnswer.NO if is_complete else CountAnswer.UNKNOWN
    outcome = solve_milp(model, stop)
    if outcome.status is MilpStatus.INFEASIBLE:
        return CountAnswer.NO
    return CountAnswer.YES if outcome.status is MilpStatus.OPTIMAL else CountAnswer.UNKNOWN


def counts_may_prove(problem: Problem) -> bool:
    """Whether a problem is small, and has what every other exact search relaxes.

    That is a host that could be full, links that queue, one mode for all micro-batches of a stage,
    or gradient reductions that wait for each other; and modes are free, or span is asked for.
    """
    is_hard = problem.objective == "span" or not fifo_loses_nothing(problem)
    reduces = [stage.device for stage in problem.stages if stage.grad_sync_ms > 0]
    relaxed_elsewhere = (
        problem.queues
        or any(stage.uniform_modes for stage in problem.stages)
        or len(set(reduces)) < len(reduces)
        or _may_fill_a_host(problem)
    )
    cells = len(problem.stages) * problem.num_microbatches
    return is_hard and relaxed_elsewhere and not problem.pairs and cells <= SMALL


def _may_fill_a_host(problem: Problem) -> bool:
    most: Counter[str] = Counter()
    for s, stage in enumerate(problem.stages):
        moved = (problem.menus[s][k].offload_bytes for k in usable_modes(problem, s))
        most[problem.devices[stage.device].host] += max(moved) * problem.num_microbatches
    return any(
        host.memory_bytes is not None and most[host.name] > host.memory_bytes
        for host in problem.hosts
    )


def improve_by_counts(best: Incumbent, stop: Stop) -> None:
    """Raise the bound below the best schedule known; work is counted in branch-and-bound nodes.

    A horizon is refuted only where two runs with different seeds agree: HiGHS 1.15.1 was seen to
    deny what exists in one run of some 500, but never with two seeds on one model
    (`benchmarks/RESULTS.md`). Where work is limited the run is a function of problem, start and
    seed, as long as time does not end it.
    """
    if best.programs is not None and counts_may_prove(best.problem):
        _CountQuestions(best, stop).ask_all()
    if not stop.spent:
        stop.spend(1)


class _CountQuestions:
    """Questions between the bound and the best schedule known: each NO raises the bound."""

    def __init__(self, best: Incumbent, stop: Stop) -> None:
        self.best = best
        self.stop = stop
        self.goal = Goal.of(best.problem, best.objective_ms)

    def ask_all(self) -> None:
        """Just below the best schedule; if that is open, halfway down to the bound, and so on."""
        high_ms = self.goal.horizon_ms
        answer = self._ask(high_ms, _FIRST)
        for number in range(_HALVINGS if answer is not CountAnswer.NO else 0):
            middle_ms = self.goal.between(self.best.bound_ms, high_ms)
            if not self.best.bound_ms < middle_ms < high_ms or self._is_over():
                return
            if self._ask(middle_ms, 1.0 / (_HALVINGS - number)) is not CountAnswer.NO:
                high_ms = middle_ms

    def _ask(self, horizon_ms: float, share: float) -> CountAnswer:
        """Ask, and once more where the answer is NO; offer what both deny."""
        answer = CountAnswer.UNKNOWN
        if self._is_over() or horizon_ms <= self.best.bound_ms:
            return answer
        turn = self.stop.turn(share)
        for seed in (self.stop.seed, self.stop.seed + 1):
            once = turn.turn(seed=seed, threads=1)
            answer = ends_within(self.best.problem, horizon_ms, once)
            if answer is not CountAnswer.NO:
                return answer
        if horizon_ms >= self.best.objective_ms:
            # Another thread has found what both runs denied.
            return CountAnswer.UNKNOWN
        self.best.offer_bound(min(self.goal.proven(horizon_ms), self.best.objective_ms), _METHOD)
        return answer

    def _is_over(self) -> bool:
        return self.best.is_optimal or self.stop.is_over()
