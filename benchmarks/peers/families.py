"""The best published schedule: every family, fitted into memory where it does not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.jobs import Answer, Job, Judged, answer_of, judge
from optpipe_solver.bounds import lower_bound
from optpipe_solver.portfolio import all_starts

if TYPE_CHECKING:
    from optpipe_solver.portfolio import FamilyStart

__all__ = ["OFFLOADING", "answer"]

OFFLOADING = ("po-h", "po-f", "ada-offload")
"""The published families that offload, which idle time is compared with."""


def answer(job: Job) -> Answer:
    """Offer every legal start; ``extra`` holds the best objective per method."""
    best = Judged(job.problem)
    values: dict[str, float] = {}
    for start in all_starts(job.problem):
        objective = _value(job, start)
        if objective is not None and start.programs is not None:
            values[start.method] = objective
            best.offer(start.programs, start.method)
    bound = lower_bound(job.problem)
    status = "feasible" if best.programs is not None else "unknown"
    return answer_of(best, bound_ms=bound.ms, status=status, extra={"values": values})


def _value(job: Job, start: FamilyStart) -> float | None:
    return judge(job.problem, start.programs) if start.legal else None
