"""The end of a solve as a schedule: the numbers its judge found, not judged a second time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.schedule import OPTIMAL_GAP, Schedule, gap_of

if TYPE_CHECKING:
    from optpipe.schedule import Provenance, StoppedBy
    from optpipe_solver.incumbent import Incumbent

__all__ = ["record"]


def record(best: Incumbent, provenance: Provenance, stopped_by: StoppedBy) -> Schedule:
    """Return the best schedule with its proof, as `optpipe.evaluate.evaluate` would.

    ``stopped_by`` is replaced by ``optimal`` where the gap says so.

    Raises
    ------
    ValueError
        If there is no schedule.
    """
    programs, verdict = best.programs, best.verdict
    if programs is None or verdict is None:
        raise ValueError("best.programs = None: there must be a schedule; solve until there is one")
    gap = gap_of(best.objective_ms, best.bound_ms)
    optimal = gap is not None and gap <= OPTIMAL_GAP
    return Schedule(
        problem_hash=best.problem.problem_hash,
        placement=best.problem.placement,
        programs=programs,
        objective=best.problem.objective,
        makespan_ms=verdict.makespan_ms,
        span_ms=verdict.span_ms,
        bound_ms=best.bound_ms,
        gap=gap,
        peak_bytes=verdict.peak_bytes,
        host_peak_bytes=verdict.host_peak_bytes,
        status="optimal" if optimal else "feasible",
        stopped_by="optimal" if optimal else stopped_by,
        provenance=provenance,
    )
