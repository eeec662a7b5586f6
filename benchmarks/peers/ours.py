"""The optimizer of the house, as ``optpipe solve`` runs it."""

from __future__ import annotations

from benchmarks.jobs import Answer, Job, TracePoint
from optpipe_solver.solve import solve

__all__ = ["answer"]


def answer(job: Job) -> Answer:
    """Solve without a given start: families, bounds and improvement are all within the time."""
    result = solve(job.problem, time_limit_s=job.seconds, threads=job.threads, seed=job.seed)
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
        extra={"start": provenance.start_method, "bound": provenance.bound_method},
    )
