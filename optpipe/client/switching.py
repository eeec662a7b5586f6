"""When a training run switches its schedule: the part of both clients that needs no network."""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from optpipe.client.transport import drop_none
from optpipe.measurements import Measurements, measured_problem, named_times
from optpipe.requests import DEFAULT_THRESHOLD
from optpipe.simulate import simulate

if TYPE_CHECKING:
    from optpipe.client.arguments import SolveArguments
    from optpipe.problem import Problem
    from optpipe.schedule import Schedule

__all__ = ["RunState"]

_SWITCH_EVERY_S = 5.0
"""Minimum time between two switches of a training run while a job searches."""
_NUM_REPORTS = 5
"""Measured times are medians over so many reports, so that one slow step changes none of them."""
_MAX_SOLVED = 8
"""The times that a schedule was made for, and the newest ones that were solved without a switch."""


class _Solved(NamedTuple):
    problem: Problem
    job_id: str


class RunState:
    """State of a training run: its schedule, its problem and its jobs.

    Attributes
    ----------
    job_id
        The job whose problem and schedule a stopped run continues with. Store it in checkpoints.
    comparison_id
        The newest job of kind `follow`; None before the first report. An older one that found no
        drift is deleted, so that a long run does not fill the service.
    problem
        Problem of the running schedule, with the times from which drift counts; None before the
        first schedule.
    tags
        Tags of the jobs that this run submits, which are those of its first job. A tag of the run
        finds its history: `AsyncClient.jobs`.
    """

    def __init__(self, job_id: str, threshold: float | None, options: SolveArguments) -> None:
        self.job_id = job_id
        self.comparison_id: str | None = None
        self.tags: tuple[str, ...] = ()
        self._threshold = DEFAULT_THRESHOLD if threshold is None else threshold
        self._options: dict[str, Any] = drop_none(**options)
        self.problem: Problem | None = None
        self._running: Schedule | None = None
        # The problems that were solved for the running schedule, oldest first.
        self._solved: list[_Solved] = []
        # The job that may still find a better schedule, and its best so far that was not returned.
        self._search: str | None = None
        self._without_drift: str | None = None
        self._number = 0
        self._candidate: Schedule | None = None
        self._next_switch_s = 0.0
        self._reports: deque[Measurements] = deque(maxlen=_NUM_REPORTS)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.job_id!r})"

    def _take_candidate(self, running: Schedule, *, is_over: bool) -> Schedule | None:
        """Return the candidate if the run switches to it now.

        It must be shorter by the threshold than the running schedule, under the newest measured
        times. Until the job that searches is over, a run switches at most every few seconds.
        """
        found = self._candidate
        if found is None or not (is_over or monotonic() >= self._next_switch_s):
            return None
        self._candidate = None
        if found.programs == running.programs:
            self._running = found
            return None
        if self._length_ms(found) >= self._length_ms(running) * (1 - self._threshold):
            return None
        self._running, self._next_switch_s = found, monotonic() + _SWITCH_EVERY_S
        del self._solved[:-1]
        return found

    def _add_solved(self, problem: Problem, job_id: str) -> None:
        """Note a problem that was solved for the running schedule, and its job."""
        self._solved.append(_Solved(problem, job_id))
        del self._solved[1 : 1 - _MAX_SOLVED]
        self.problem, self.job_id = problem, job_id

    def _choose_solved(self) -> None:
        """Let drift count from the solved times that are nearest to the measured ones."""
        measured = Measurements.medians_of(self._reports)

        def distance_ms(solved: _Solved) -> float:
            found = measured_problem(solved.problem, measured)
            pairs = zip(named_times(solved.problem), named_times(found), strict=True)
            return sum(abs(after - before) for (_, before), (_, after) in pairs)

        self.problem, self.job_id = min(self._solved, key=distance_ms)

    def _length_ms(self, schedule: Schedule) -> float:
        """Return the length of a schedule under the newest measured times, if there are any."""
        problem = self.problem
        if problem is None:
            return schedule.objective_ms
        if self._reports:
            problem = measured_problem(problem, Measurements.medians_of(self._reports))
        return simulate(problem, schedule.programs).objective_ms(problem.objective)
