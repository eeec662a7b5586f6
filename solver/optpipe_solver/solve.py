"""``solve``: the composition root. Bound, starts, improvement; the best, with its proof."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

from optpipe.errors import InputError
from optpipe.schedule import OPTIMAL_GAP, Provenance
from optpipe_solver.bounds import lower_bounds
from optpipe_solver.budget import Budget
from optpipe_solver.contributions import contributions
from optpipe_solver.crew import Lane, run_lanes
from optpipe_solver.families import FAMILIES
from optpipe_solver.families.serial import build_serial
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.milp.highs import solver_name
from optpipe_solver.portfolio import improve, plans
from optpipe_solver.record import record
from optpipe_solver.result import Result, SolveStatus
from optpipe_solver.smallest_memory import feasibility
from optpipe_solver.starts import all_starts
from optpipe_solver.warm import ensure_warm

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe.schedule import StoppedBy
    from optpipe_solver.portfolio import Plan
    from optpipe_solver.result import Progress
    from optpipe_solver.starts import Start

__all__ = ["METHODS", "solve"]

METHODS = ("auto", *(family.name for family in FAMILIES))
"""What ``method`` may be: ``auto`` optimises, a family's name gives that family's schedule."""

_MOST_THREADS = 128
"""Of HiGHS: 1.15 given 257 aborts the process when it ends, after all that was printed."""

_SMALL = 20_000
"""Cells up to which the serial schedule is made in a tenth of a second."""


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 60.0,
    work_limit: float | None = None,
    threads: int = 1,
    seed: int = 0,
    gap: float = OPTIMAL_GAP,
    method: str = "auto",
    start: Programs | None = None,
    start_method: str = "given start",
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Result:
    """Find the best schedule within a budget, and prove how good it is.

    Parameters
    ----------
    problem
        What is to be scheduled.
    time_limit_s, work_limit, threads, seed, gap
        As in `Budget`.
    method
        One of `METHODS`.
    start, start_method
        Programs to start from beside the families, used if legal, and who made them.
    on_progress
        Told every improvement of schedule or bound, from the threads that made it.
    should_stop
        Asked often; True ends the solve within half a second with the best so far.

    Raises
    ------
    InputError
        For an unknown method, or as `Budget`.
    """
    budget = Budget(
        time_limit_s=time_limit_s, work_limit=work_limit, threads=threads, seed=seed, gap=gap
    )
    if method not in METHODS:
        raise InputError(f"method = {method!r}: must be one of {', '.join(METHODS)}; choose one")
    feasible = feasibility(problem)
    if feasible.plan is None:
        return Result(SolveStatus.INFEASIBLE, None, message=feasible.message, needs=feasible.needs)
    ensure_warm()
    run = _Run(Incumbent(problem, on_progress), budget, method, should_stop or (lambda: False))
    if start is not None:
        run.best.offer(start, start_method)
    run.to_the_end()
    return run.result()


class _Run:
    """One solve: its lanes, and what they have found when it ends."""

    def __init__(
        self, best: Incumbent, budget: Budget, method: str, should_stop: Callable[[], bool]
    ) -> None:
        self.best = best
        self.best.work = None if budget.work_limit is None else 0.0
        self.budget = budget
        self.method = method
        self.should_stop = should_stop
        self.start: tuple[str, float] | None = None
        self.started = threading.Event()
        self.reasons: list[str] = []
        self.stopped_by: StoppedBy = "work_limit"

    def to_the_end(self) -> None:
        """Run all lanes until the budget is spent, the gap is closed, or somebody says stop."""
        if self.method == "auto":
            if len(self.best.problem.stages) * self.best.problem.num_microbatches <= _SMALL:
                # Made at once: even who stops at once gets a schedule.
                self.best.offer(build_serial(self.best.problem), "serial")
            first, *others = plans(self.best, self.budget)
            lanes: list[Lane] = [partial(self._first_lane, first)]
            lanes += [partial(self._lane, plan) for plan in others]
        else:
            lanes = [self._starts]
        run_lanes(lanes, self._should_end)
        self._note_why()
        self.best.close()

    def _first_lane(self, plan: Plan, stop: Callable[[], bool]) -> None:
        self._starts(stop)
        self.started.set()
        self._lane(plan, stop)

    def _lane(self, plan: Plan, stop: Callable[[], bool]) -> None:
        while not (self.started.wait(0.05) or stop()):
            pass
        threads = self.budget.threads if plan.is_alone else max(1, self.budget.threads - 1)
        threads = min(threads, _MOST_THREADS)
        improve(self.best, plan, self.budget, threads=threads, stop=stop)

    def _starts(self, stop: Callable[[], bool]) -> None:
        """Offer a schedule that is made at once, then bounds, then all other starts."""
        starts = all_starts(self.best.problem, None if self.method == "auto" else (self.method,))
        self._take(next(starts))
        for bound in lower_bounds(self.best.problem, should_stop=stop):
            self.best.offer_bound(bound.ms, bound.method)
        while not stop() and (made := next(starts, None)) is not None:
            self._take(made)

    def _take(self, made: Start) -> None:
        """Offer a start; remember the best, or why there is none."""
        if made.programs is None or not made.legal:
            self.reasons.append(f"{made.method}: {made.reason or 'over the memory limit'}")
            return
        self.best.offer(made.programs, made.method, expected_ms=made.objective_ms)
        self.best.keep(made.programs, made.objective_ms)
        if self.start is None or made.objective_ms < self.start[1]:
            self.start = made.method, made.objective_ms

    def _should_end(self) -> bool:
        # Where work is limited a lane looks at the gap itself, between turns: here it is seen when
        # the clock says so, and a turn would end at another place each time.
        is_good = self.budget.work_limit is None and self.best.gap <= self.budget.good_gap
        return is_good or self._is_late() or self.should_stop()

    def _note_why(self) -> None:
        if self.best.is_optimal:
            self.stopped_by = "optimal"
        elif self.best.gap <= self.budget.good_gap:
            self.stopped_by = "gap"
        elif self.should_stop():
            self.stopped_by = "cancelled"
        elif self._is_late() or (self.method == "auto" and self.budget.work_limit is None):
            # A part that knows that what is left is too little for it ends a moment before.
            self.stopped_by = "time_limit"

    def _is_late(self) -> bool:
        """Whether what is left of the time is needed to count the bytes of the result."""
        reserve_s = 0.3 * self.best.judging_s
        return self.best.seconds() + reserve_s >= self.budget.time_limit_s

    def result(self) -> Result:
        """Return the best schedule with its proof and where it comes from."""
        best = self.best
        if best.programs is None:
            message = "; ".join(self.reasons) or "stopped before it had one; allow more time"
            return Result(SolveStatus.UNKNOWN, None, best.bound_ms, message=message)
        start_method, start_ms = self.start or (None, None)
        provenance = Provenance(
            method=best.method,
            start_method=start_method,
            start_objective_ms=start_ms,
            bound_method=best.bound_method or None,
            solver=solver_name() if self.method == "auto" else None,
            seed=self.budget.seed,
            solve_seconds=round(best.seconds(), 4) if best.work is None else 0.0,
            contributions=contributions(best.trace),
            trace=tuple(best.trace),
        )
        schedule = record(best, provenance, self.stopped_by)
        return Result(SolveStatus(schedule.status), schedule, best.bound_ms)
