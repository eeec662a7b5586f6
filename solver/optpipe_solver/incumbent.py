"""The best schedule and the best bound known so far, shared by all parts of a solve."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from optpipe.check import find_violations
from optpipe.schedule import OPTIMAL_GAP, TraceEntry, gap_of
from optpipe.simulate import simulate
from optpipe_solver.result import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.action import Programs
    from optpipe.problem import Problem

__all__ = ["Incumbent"]


class Incumbent:
    """Only checked and simulated programs get in, and only better ones.

    Parameters
    ----------
    problem
        What is being solved.
    on_progress
        Told every improvement of the schedule or the bound.
    """

    def __init__(
        self, problem: Problem, on_progress: Callable[[Progress], None] | None = None
    ) -> None:
        self.problem = problem
        self.on_progress = on_progress
        self.began = time.perf_counter()
        self.programs: Programs | None = None
        self.objective_ms = float("inf")
        self.method = ""
        self.bound_ms = 0.0
        self.bound_method = ""
        self.trace: list[TraceEntry] = []

    def seconds(self) -> float:
        """Return the seconds since the solve began."""
        return time.perf_counter() - self.began

    def offer(self, programs: Programs, method: str) -> bool:
        """Take programs if they are legal and better than what is known."""
        if find_violations(self.problem, programs):
            return False
        objective = simulate(self.problem, programs).objective_ms(self.problem.objective)
        if objective >= self.objective_ms:
            return False
        self.programs, self.objective_ms, self.method = programs, objective, method
        self._tell(method, programs)
        return True

    def offer_bound(self, bound_ms: float, method: str) -> bool:
        """Take a proven bound if it is better than what is known.

        Raises
        ------
        AssertionError
            If it is above a schedule that exists: one of the two is wrong, and a false proof is
            worse than no answer.
        """
        if bound_ms > self.objective_ms * (1 + OPTIMAL_GAP):
            raise AssertionError(
                f"the bound {bound_ms} ms of {method} is above the schedule of {self.method}, "
                f"{self.objective_ms} ms; please report the problem"
            )
        bound_ms = min(bound_ms, self.objective_ms)
        if bound_ms <= self.bound_ms * (1 + 1e-9):
            return False
        self.bound_ms, self.bound_method = bound_ms, method
        self._tell(method, None)
        return True

    @property
    def is_optimal(self) -> bool:
        """Whether the gap is closed."""
        gap = gap_of(self.objective_ms, self.bound_ms) if self.programs is not None else None
        return gap is not None and gap <= OPTIMAL_GAP

    def _tell(self, method: str, programs: Programs | None) -> None:
        objective = self.objective_ms if self.programs is not None else None
        now = self.seconds()
        self.trace.append(
            TraceEntry(
                seconds=round(now, 4),
                method=method,
                objective_ms=objective,
                bound_ms=self.bound_ms,
            )
        )
        if self.on_progress is not None:
            self.on_progress(Progress(now, method, objective, self.bound_ms, programs))
