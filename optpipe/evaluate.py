"""From programs to a schedule whose numbers are true: checked, then simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.check import check
from optpipe.memory import device_peak_bytes, host_peak_bytes
from optpipe.schedule import OPTIMAL_GAP, Provenance, Schedule, StoppedBy, gap_of
from optpipe.simulate import simulate

if TYPE_CHECKING:
    from optpipe.action import Programs
    from optpipe.problem import Problem

__all__ = ["evaluate"]


def evaluate(
    problem: Problem,
    programs: Programs,
    provenance: Provenance,
    *,
    bound_ms: float | None = None,
    stopped_by: StoppedBy = "work_limit",
) -> Schedule:
    """Return the schedule these programs are.

    Parameters
    ----------
    problem
        The problem the programs solve.
    programs
        One program per device.
    provenance
        Where they come from.
    bound_ms
        Proven lower bound of the problem's objective, in ms; None = nothing proven.
    stopped_by
        Why the search ended; replaced by ``optimal`` when the gap says so.

    Raises
    ------
    IllegalScheduleError
        If the programs break a rule.
    """
    check(problem, programs)
    run = simulate(problem, programs)
    objective_ms = run.objective_ms(problem.objective)
    gap = gap_of(objective_ms, bound_ms)
    optimal = gap is not None and gap <= OPTIMAL_GAP
    return Schedule(
        problem_hash=problem.problem_hash,
        placement=problem.placement,
        programs=programs,
        objective=problem.objective,
        makespan_ms=run.makespan_ms,
        span_ms=run.span_ms,
        bound_ms=bound_ms,
        gap=gap,
        peak_bytes=tuple(
            device_peak_bytes(problem, device, program) for device, program in enumerate(programs)
        ),
        host_peak_bytes=host_peak_bytes(problem, programs),
        status="optimal" if optimal else "feasible",
        stopped_by="optimal" if optimal else stopped_by,
        provenance=provenance,
    )
