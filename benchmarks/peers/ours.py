"""The optimizer of the house, as ``optpipe solve`` runs it."""

from __future__ import annotations

from benchmarks.jobs import Answer, Job, TracePoint
from optpipe_solver.solve import solve

__all__ = ["answer", "answer_of_solve"]


def answer(job: Job) -> Answer:
    """Solve without a given start: families, bounds and improvement are all within the time."""
    return answer_of_solve(job)


def answer_of_solve(job: Job, method: str = "auto") -> Answer:
    """Return what a solve by one of its methods comes to."""
    result = solve(
        job.problem,
        time_limit_s=job.seconds,
        threads=job.threads,
        seed=job.seed,
        method=method,
    )
    if result.schedule is None:
        return Answer(programs=None, bound_ms=result.bound_ms, status=result.status.value)
    provenance = result.schedule.provenance
    trace = tuple(
        TracePoint(
            seconds=entry.seconds, objective_ms=entry.objective_ms, bound_ms=entry.bound_ms or 0.0
        )
        for entry in provenance.trace
    )
    return Answer(
        programs=result.schedule.programs,
        bound_ms=result.bound_ms,
        status=result.status.value,
        method=provenance.method,
        trace=trace,
        bound_method=provenance.bound_method or "",
        cpu_seconds=provenance.cpu_seconds or {},
        extra={"start": provenance.start_method},
    )
