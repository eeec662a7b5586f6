"""When a training run switches its schedule: the part of both clients that needs no network."""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Any

from optpipe.client.transport import drop_none
from optpipe.measurements import Measurements, measured_problem
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
        Problem of the running schedule; None before the first schedule.
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
        return found

    def _length_ms(self, schedule: Schedule) -> float:
        """Return the length of a schedule under the newest measured times, if there are any."""
        problem = self.problem
        if problem is None:
            return schedule.objective_ms
        if self._reports:
            problem = measured_problem(problem, Measurements.medians_of(self._reports))
        return simulate(problem, schedule.programs).objective_ms(problem.objective)
