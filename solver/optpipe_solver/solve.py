"""``solve``: the composition root. Bound, starts, improvement; the best, with its proof."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.errors import InputError
from optpipe.evaluate import evaluate
from optpipe.schedule import Provenance
from optpipe_solver.bounds import lower_bound
from optpipe_solver.families import FAMILIES
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.milp.highs import solver_name
from optpipe_solver.portfolio import improve
from optpipe_solver.result import Result, SolveStatus
from optpipe_solver.smallest_memory import feasibility
from optpipe_solver.starts import all_starts

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe.schedule import StoppedBy
    from optpipe_solver.result import Progress

__all__ = ["METHODS", "solve"]

METHODS = ("auto", *(family.name for family in FAMILIES))
"""What ``method`` may be: ``auto`` optimises, a family's name gives that family's schedule."""


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 60.0,
    threads: int = 1,
    seed: int = 0,
    method: str = "auto",
    start: Programs | None = None,
    start_method: str = "given start",
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Result:
    """Find the best schedule within a time limit, and prove how good it is.

    Parameters
    ----------
    problem
        What is to be scheduled.
    time_limit_s
        Seconds, > 0; the call returns soon after.
    threads, seed
        For HiGHS; the same seed and threads explore in the same order.
    method
        One of `METHODS`.
    start, start_method
        Programs to start from beside the families, used if legal, and who made them.
    on_progress
        Told every improvement of schedule or bound.
    should_stop
        Asked often; True ends the solve with the best so far.

    Raises
    ------
    InputError
        For an unknown method or a time limit or thread count that is not positive.
    """
    _check_arguments(time_limit_s, threads, method)
    feasible = feasibility(problem)
    if feasible.plan is None:
        return Result(SolveStatus.INFEASIBLE, None, message=feasible.message, needs=feasible.needs)
    best = Incumbent(problem, on_progress)
    bound = lower_bound(problem)
    best.offer_bound(bound.ms, bound.method)
    if start is not None:
        best.offer(start, start_method)
    reason = _offer_starts(best, method, time_limit_s=time_limit_s, should_stop=should_stop)
    start_method, start_ms = best.method, best.objective_ms
    stopped_by: StoppedBy = "work_limit"
    if method == "auto" and best.programs is not None:
        stopped_by = improve(
            best, time_limit_s=time_limit_s, threads=threads, seed=seed, should_stop=should_stop
        )
    if best.programs is None:
        return Result(SolveStatus.UNKNOWN, None, best.bound_ms, message=reason)
    provenance = Provenance(
        method=best.method,
        start_method=start_method,
        start_objective_ms=start_ms,
        bound_method=best.bound_method or None,
        solver=solver_name() if method == "auto" else None,
        seed=seed,
        solve_seconds=round(best.seconds(), 4),
        trace=tuple(best.trace),
    )
    schedule = evaluate(
        problem, best.programs, provenance, bound_ms=best.bound_ms, stopped_by=stopped_by
    )
    return Result(SolveStatus(schedule.status), schedule, best.bound_ms)


def _check_arguments(time_limit_s: float, threads: int, method: str) -> None:
    if not time_limit_s > 0:
        raise InputError(f"time_limit_s = {time_limit_s}: must be > 0 seconds; raise it")
    if threads < 1:
        raise InputError(f"threads = {threads}: must be >= 1; raise it")
    if method not in METHODS:
        raise InputError(f"method = {method!r}: must be one of {', '.join(METHODS)}; choose one")


def _offer_starts(
    best: Incumbent,
    method: str,
    *,
    time_limit_s: float,
    should_stop: Callable[[], bool] | None,
) -> str:
    """Offer every start there is time for; return why there is none where there is none."""
    reasons = []
    for candidate in all_starts(best.problem, None if method == "auto" else (method,)):
        if candidate.programs is not None and candidate.legal:
            best.offer(candidate.programs, candidate.method)
        elif candidate.reason:
            reasons.append(f"{candidate.method}: {candidate.reason}")
        else:
            reasons.append(f"{candidate.method}: over the memory limit")
        late = best.seconds() > time_limit_s or (should_stop is not None and should_stop())
        if late and best.programs is not None:
            break
    return "; ".join(reasons)
