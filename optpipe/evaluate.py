"""Makes a schedule of programs: checks them, then simulates them for the schedule's numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.check import check, check_schedule
from optpipe.errors import ScheduleMismatchError
from optpipe.memory import device_peak_bytes, host_peak_bytes
from optpipe.schedule import OPTIMAL_GAP, Provenance, Schedule, StoppedBy, gap_of
from optpipe.simulate import simulate

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe.simulate import Simulation

__all__ = ["evaluate", "verify"]


def evaluate(
    problem: Problem,
    programs: Programs,
    provenance: Provenance,
    *,
    bound_ms: float | None = None,
    stopped_by: StoppedBy = "work_limit",
    run: Simulation | None = None,
) -> Schedule:
    """Return the schedule that these programs make.

    Parameters
    ----------
    bound_ms
        Proven lower bound of the problem's objective, in ms; None = nothing proven. If it
        exceeds the objective only by rounding, it is lowered to the objective.
    stopped_by
        Why the search ended; ``optimal`` replaces it if the gap is closed.
    run
        The result of `simulate`, from a caller that has also checked the programs. It saves doing
        both again, which takes seconds for long programs.

    Raises
    ------
    IllegalScheduleError
        If the programs break a rule.
    ValueError
        If the bound is above the objective: one of the two is wrong.
    """
    if run is None:
        run = simulate(problem, programs, modes=check(problem, programs))
    objective_ms = run.objective_ms(problem.objective)
    if bound_ms is not None and bound_ms > objective_ms * (1 + OPTIMAL_GAP):
        raise ValueError(
            f"bound_ms = {bound_ms}: a bound may not exceed the objective of a legal schedule, "
            f"{objective_ms} ms; find out which of the two is wrong"
        )
    gap = gap_of(objective_ms, bound_ms)
    optimal = gap is not None and gap <= OPTIMAL_GAP
    return Schedule(
        problem_hash=problem.problem_hash,
        placement=problem.placement,
        programs=programs,
        objective=problem.objective,
        makespan_ms=run.makespan_ms,
        span_ms=run.span_ms,
        bound_ms=None if bound_ms is None else min(bound_ms, objective_ms),
        gap=gap,
        peak_bytes=tuple(
            device_peak_bytes(problem, device, program, run.modes[device])
            for device, program in enumerate(programs)
        ),
        host_peak_bytes=host_peak_bytes(problem, programs, run.modes),
        status="optimal" if optimal else "feasible",
        stopped_by="optimal" if optimal else stopped_by,
        provenance=provenance,
    )


def verify(problem: Problem, schedule: Schedule) -> None:
    """Accept a legal schedule of this very problem whose numbers are those of its programs.

    A bound cannot be proven again from the schedule alone; it is only held against the objective.
    Raises `ScheduleMismatchError` if it was made for another problem, or has numbers that its
    programs do not have. Raises `IllegalScheduleError` if its programs break a rule.
    """
    run = simulate(problem, schedule.programs, modes=check_schedule(problem, schedule))
    true = evaluate(problem, schedule.programs, schedule.provenance, run=run)
    for name in ("makespan_ms", "span_ms", "peak_bytes", "host_peak_bytes", "objective"):
        said, is_so = getattr(schedule, name), getattr(true, name)
        if not _same(said, is_so):
            raise ScheduleMismatchError(
                f"{name} = {said}: the programs have {is_so}; solve again, or keep the programs "
                "alone as CSV"
            )
    if schedule.bound_ms is not None and schedule.bound_ms > true.objective_ms * (1 + OPTIMAL_GAP):
        raise ScheduleMismatchError(
            f"bound_ms = {schedule.bound_ms}: no bound exceeds the objective of a legal schedule, "
            f"{true.objective_ms} ms; solve again, or keep the programs alone as CSV"
        )
    gap = gap_of(true.objective_ms, schedule.bound_ms)
    if schedule.gap != gap and not _same(schedule.gap, gap):
        raise ScheduleMismatchError(
            f"gap = {schedule.gap}: objective {true.objective_ms} ms and bound "
            f"{schedule.bound_ms} ms give {gap}; correct it"
        )


def _same(said: object, is_so: object) -> bool:
    """Whether two numbers agree to what JSON and another machine's rounding leave of them."""
    if isinstance(said, float) and isinstance(is_so, float):
        return abs(said - is_so) <= 1e-9 * max(1.0, abs(is_so))
    return said == is_so
