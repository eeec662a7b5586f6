"""The contestants of the house: published schedules, ``optpipe solve``, and its MILP alone."""

from __future__ import annotations

from benchmarks.jobs import BestLegal, PeerAnswer, PeerJob, judge
from optpipe_solver.bounds import lower_bound
from optpipe_solver.milp.horizon.items import MOST_PAIRS, num_order_pairs
from optpipe_solver.portfolio import all_starts
from optpipe_solver.solve import solve

__all__ = ["families", "milp", "one_f_one_b", "ours"]


def families(job: PeerJob) -> PeerAnswer:
    """Offer every family, fitted into memory; ``extra`` holds the objective of each legal one."""
    best = BestLegal(job.problem)
    values: dict[str, float] = {}
    for start in all_starts(job.problem):
        objective = judge(job.problem, start.programs) if start.legal else None
        if objective is not None and start.programs is not None:
            values[start.method] = objective
            best.offer(start.programs, start.method)
    bound = lower_bound(job.problem)
    status = "feasible" if best.programs is not None else "unknown"
    return best.answer(bound_ms=bound.ms, status=status, extra={"values": values})


def ours(job: PeerJob, method: str = "auto") -> PeerAnswer:
    """Solve without a given start: families, bounds and improvement are all within the time."""
    result = solve(
        job.problem,
        time_limit_s=job.seconds,
        work_limit=job.work,
        threads=job.threads,
        seed=job.seed,
        method=method,
    )
    if result.schedule is None:
        return PeerAnswer(programs=None, bound_ms=result.bound_ms, status=result.status.value)
    provenance = result.schedule.provenance
    return PeerAnswer(
        programs=result.schedule.programs,
        bound_ms=result.bound_ms,
        status=result.status.value,
        method=provenance.method,
        trace=provenance.trace,
        bound_method=provenance.bound_method or "",
        cpu_seconds=provenance.cpu_seconds or {},
        extra={"start": provenance.start_method},
    )


def one_f_one_b(job: PeerJob) -> PeerAnswer:
    """Offer the 1F1B schedule, where it fits."""
    return ours(job, "1f1b")


def milp(job: PeerJob) -> PeerAnswer:
    """Let the full-horizon model improve on the families, where its size allows."""
    pairs = num_order_pairs(job.problem, fifo=True)
    if pairs > MOST_PAIRS:
        return PeerAnswer(programs=None, status=f"too large: {pairs} pairs")
    return ours(job, "milp")
