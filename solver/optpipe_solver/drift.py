"""Whether a running schedule is still good under measured times.

Longer times alone are no reason to solve again: if every pass takes a tenth longer, the best
schedule takes longer, too. Let O be the length of the running schedule under the planned times, for
which it was made. Let L be a proven lower bound, from work and memory. O / L(planned) is the
quality of the schedule, and

    the expected length: ``O * L(measured) / L(planned)``

is the length of a schedule of the same quality under the measured times. O is at least L(planned),
so the expected length is at least L(measured). Drift is the share by which the running schedule
exceeds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.answers import Drift
from optpipe.measurements import measured_problem, named_times
from optpipe.simulate import simulate
from optpipe_solver.bounds import Paths
from optpipe_solver.bounds.energy import energy_ms

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe.requests import FollowRequest
    from optpipe.schedule import Programs

__all__ = ["bound_ms", "find_drift", "largest_change"]


def find_drift(request: FollowRequest) -> tuple[Drift, Problem]:
    """Return the drift of the running schedule, and the problem with the measured times.

    Raises `MeasurementError` if a measured link joins devices that do not exist.
    """
    planned, programs = request.problem, request.schedule.programs
    measured = measured_problem(planned, request.measurements)
    planned_ms, current_ms = _length_ms(planned, programs), _length_ms(measured, programs)
    before_ms, after_ms = bound_ms(planned), bound_ms(measured)
    growth = after_ms / before_ms if before_ms > 0 and after_ms > 0 else 1.0
    expected_ms = planned_ms * growth
    drift = current_ms / expected_ms - 1 if expected_ms > 0 else 0.0
    is_solved = drift > request.threshold
    expected = f"the {expected_ms:.6g} ms of one as good for them as it was for the planned times"
    if is_solved:
        reason = (
            f"{largest_change(planned, measured)}; the running schedule takes {current_ms:.6g} ms "
            f"under the measured times, {drift:.1%} more than {expected}: solved again"
        )
    else:
        reason = (
            f"the running schedule takes {current_ms:.6g} ms under the measured times, at most "
            f"{request.threshold:.2%} (the threshold) more than {expected}: not solved again"
        )
    found = Drift(
        planned_ms=planned_ms,
        current_ms=current_ms,
        expected_ms=expected_ms,
        drift=drift,
        threshold=request.threshold,
        is_solved=is_solved,
        reason=reason,
        step=request.step,
        step_ms=request.step_ms,
    )
    return found, measured


def _length_ms(problem: Problem, programs: Programs) -> float:
    return simulate(problem, programs).objective_ms(problem.objective)


def bound_ms(problem: Problem) -> float:
    """Return a proven lower bound of a problem's objective, in ms."""
    return energy_ms(Paths(problem), makespan=problem.objective == "makespan")


def largest_change(planned: Problem, measured: Problem) -> str:
    """Return a clause on the time that changed by the most milliseconds."""
    changes = [
        (abs(after - before), what, before, after)
        for (what, before), (_, after) in zip(
            named_times(planned), named_times(measured), strict=True
        )
    ]
    _, what, before, after = max(changes, key=lambda change: change[0])
    if before <= 0:
        return f"{what} takes {after:.4g} ms instead of none"
    share = after / before - 1
    return f"{what} takes {abs(share):.0%} {'longer' if share >= 0 else 'less'} than planned"
