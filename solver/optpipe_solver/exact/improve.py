"""Prove as much as can be proven about a problem without HiGHS's branch and bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.exact.configurations import configurations_ms
from optpipe_solver.exact.counts import Answer, counts_can_search, search_counts
from optpipe_solver.exact.few_devices import prove_by_few_devices
from optpipe_solver.milp.horizon.deadline import Deadline
from optpipe_solver.milp.horizon.grid import Goal

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_solver.incumbent import Incumbent

__all__ = ["improve_by_exact_search"]

_METHOD = "branch-and-bound"
_MOST_STATES = 50_000_000
_MOST_IN_LAYER = 200_000
_COUNTS_SHARE = 0.6
"""Share of time or states for the search over counts, where few devices may prove as much."""

_FIRST = 10_000
_TRIALS = 6


def improve_by_exact_search(
    best: Incumbent,
    *,
    time_limit_s: float,
    threads: int,
    seed: int,
    should_stop: Callable[[], bool] | None = None,
    work_limit: int | None = None,
) -> int:
    """Raise the bound, and find what is better, within a number of seconds; return the states met.

    First the configuration bound; then, where a problem is one of counts, the search over these:
    below the best schedule known, and where that is too much at horizons nearer to the bound; then
    searches over few devices, which know offload, recompute and any order of micro-batches. Nothing
    here is random or parallel: ``threads`` and ``seed`` are those of every other part. With
    ``work_limit`` (most states) the run is a function of problem and start, as long as time does
    not end it.
    """
    del threads, seed
    end = Deadline(time_limit_s, should_stop or (lambda: False))
    bound_ms = configurations_ms(best.problem, should_stop=end.is_over)
    best.offer_bound(min(bound_ms, best.objective_ms), "configurations")
    if best.programs is None or best.is_optimal:
        return 1
    most, met = _MOST_STATES if work_limit is None else work_limit, 0
    if counts_can_search(best.problem):
        share = Deadline(_COUNTS_SHARE * end.left_s(), end.is_over)
        trials = _Trials(best, share, int(_COUNTS_SHARE * most))
        trials.run()
        met = trials.num_states
    met += prove_by_few_devices(best, most_states=most - met, should_stop=end.is_over)
    return max(1, met)


class _Trials:
    """Searches at one horizon after another.

    A search that ends in no schedule proves its horizon, one that finds a schedule lowers the goal.
    """

    def __init__(self, best: Incumbent, end: Deadline, most_states: int) -> None:
        self.best = best
        self.end = end
        self.most_states = most_states
        self.num_states = 0
        self.floor = best.bound_ms

    def run(self) -> None:
        """Search below the best schedule with ever more states allowed, and between by halves."""
        most = _FIRST
        while most <= _MOST_IN_LAYER and not self._is_over():
            answer = Answer.FOUND
            while answer is Answer.FOUND and not self._is_over():
                answer = self._below(1.0, most)
            self._between(most)
            most *= 4

    def _between(self, most: int) -> None:
        """Raise the bound by halving what lies between it and the best schedule."""
        self.floor = self.best.bound_ms
        low, high = 0.0, 1.0
        for _ in range(_TRIALS):
            if self._is_over():
                return
            middle = (low + high) / 2
            answer = self._below(middle, most)
            if answer is Answer.FOUND:
                return
            low, high = (middle, high) if answer is Answer.NONE else (low, middle)

    def _below(self, share: float, most_in_layer: int) -> Answer:
        """Look for a schedule that lies below a share of the gap; offer what comes of it."""
        best = self.best
        goal = Goal.of(best.problem, best.objective_ms, cutoff=True)
        horizon = self.floor + share * (goal.horizon_ms - self.floor)
        found = search_counts(
            best.problem,
            horizon,
            most_states=self.most_states - self.num_states,
            most_in_layer=most_in_layer,
            should_stop=self._is_over,
        )
        self.num_states += found.num_states
        if found.answer is Answer.NONE:
            best.offer_bound(goal.proven_ms if share == 1.0 else horizon, _METHOD)
        if found.programs is not None and not best.offer(found.programs, _METHOD):
            return Answer.UNKNOWN
        return found.answer

    def _is_over(self) -> bool:
        return self.end.is_over() or self.best.is_optimal or self.num_states > self.most_states
