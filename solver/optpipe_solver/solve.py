"""``solve``: find a bound, build starts, improve them; return the best schedule with its proof."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from optpipe.errors import FieldError, FieldRef, nearest_names
from optpipe.schedule import OPTIMAL_GAP, Contribution, Provenance, Schedule, gap_of
from optpipe_solver.bounds import lower_bounds
from optpipe_solver.budget import Limits, Result, SolveStatus, Stop, Stopped, stopped_by
from optpipe_solver.families import FAMILIES
from optpipe_solver.families.classic import build_serial
from optpipe_solver.feasibility import exact_parts_know, feasibility
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.last_steps import choose_robust, lower_peaks, peaks_can_fall
from optpipe_solver.milp.highs import solver_name
from optpipe_solver.milp.horizon.items import MOST_PAIRS, num_order_pairs
from optpipe_solver.portfolio import (
    MILP_PLAN,
    all_starts,
    improve,
    is_large,
    plans,
    rule_starts,
    run_threads,
)
from optpipe_solver.warm import ensure_warm, warm_in_background

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from optpipe.problem import Problem
    from optpipe.schedule import Programs, StoppedBy, TraceEntry
    from optpipe_solver.budget import Progress, RobustChoice
    from optpipe_solver.last_steps import Robust
    from optpipe_solver.portfolio import FamilyStart, SearchPlan

__all__ = ["METHODS", "contributions", "record", "solve"]

_log = logging.getLogger(__name__)


METHODS = ("auto", "milp", *(family.name for family in FAMILIES))
"""Values of ``method``: ``auto`` optimises, ``milp`` improves on the families by the full-horizon
model alone, and a family's name gives that family's schedule."""

_OPTIMISE = ("auto", "milp")

_MOST_THREADS = 128
"""Limit for HiGHS: version 1.15 with 257 threads aborts the process at its end."""

_LOOK_S = 0.02

_MOMENT_S = 0.2
"""Time in which a stopped solve may still choose among its schedules."""

_GRACE_S = 3.0
"""Maximum delay of the choice under noise; after it the shortest schedule stays."""

_LAST_SHARE = 0.1
"""Share of time and work that is kept for less memory at the same objective.

The choice under noise, if there is one, has as much."""


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
    robust: Robust | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Result:
    """Find the best schedule within a budget, and prove how good it is.

    Parameters
    ----------
    problem
        The problem to schedule.
    time_limit_s, work_limit, threads, seed, gap
        As in `Limits`.
    method
        One of `METHODS`.
    start, start_method
        Programs to start from in addition to the families, used if legal, and their method.
    robust
        Return, of the schedules that the search has met, the one that is best at a percentile of
        the objective under noise, instead of the shortest; bound and gap stay those without noise.
    on_progress
        Called with every improvement of schedule or bound, on the thread that found it.
    should_stop
        Called often; True ends the solve with the best schedule so far, at least the serial one.

    The solve waits for its threads: none is left when it returns. That takes up to half a second
    on small problems, and seconds on problems with a million actions.

    Raises
    ------
    InputError
        For an unknown method, a problem that is too large for ``milp``, or as `Limits`.
    """
    limits = Limits(
        time_limit_s=time_limit_s, work_limit=work_limit, threads=threads, seed=seed, gap=gap
    )
    if method not in METHODS:
        near = nearest_names(method, METHODS, 1)
        fix = f"did you mean {near[0]}?" if near else "choose one"
        raise FieldError(
            FieldRef("method", method), f": must be one of {', '.join(METHODS)}; {fix}"
        )
    if method == "milp" and (pairs := num_order_pairs(problem, fifo=True)) > MOST_PAIRS:
        raise FieldError(
            FieldRef("method", method),
            f": {pairs} pairs of actions have an order to choose; at most {MOST_PAIRS} are worth a "
            "model; choose 'auto'",
        )
    if method == "milp" and not exact_parts_know(problem):
        raise FieldError(
            FieldRef("method", method),
            ": the full-horizon model knows no pairs, no unequal micro-batches, and no menus but "
            "keep, offload and recompute; choose 'auto'",
        )
    feasible = feasibility(problem)
    if feasible.plan is None:
        status = SolveStatus.INFEASIBLE if feasible.needs else SolveStatus.UNKNOWN
        return Result(status, None, message=feasible.message, needs=feasible.needs)
    if work_limit is None:
        is_warm = warm_in_background(problem)
    else:
        # The result must not depend on when a part has been compiled.
        ensure_warm()
        is_warm = _always
    best = Incumbent(problem, on_progress, pools=robust is not None)
    run = _SolveRun(best, limits, method, should_stop or (lambda: False), is_warm, robust=robust)
    if start is not None:
        run.best.offer(start, start_method)
    run.to_the_end()
    return run.result()


def _always() -> bool:
    return True


class _SolveRun:
    """One solve: its threads, and what they have found when it ends."""

    def __init__(
        self,
        best: Incumbent,
        limits: Limits,
        method: str,
        should_stop: Callable[[], bool],
        is_warm: Callable[[], bool] = _always,
        *,
        robust: Robust | None = None,
    ) -> None:
        self.best = best
        self.best.work = None if limits.work_limit is None else 0.0
        self.limits = limits
        self.method = method
        self.should_stop = should_stop
        self.is_warm = is_warm
        self.ended = threading.Event()
        self.lowers = method == "auto" and peaks_can_fall(best.problem)
        self.robust = robust
        self.choice: RobustChoice | None = None
        self.peak_bytes_before: tuple[int, ...] = ()
        share = 1.0 - _LAST_SHARE * (self.lowers + (robust is not None))
        self.stop = Stop(
            share * limits.time_limit_s,
            work=None if limits.work_limit is None else share * limits.work_limit,
            seed=limits.seed,
            should_stop=self.ended.is_set,
        )
        self.start: tuple[str, float] | None = None
        self.family_ms: dict[str, float] = {}
        self.started = threading.Event()
        self.reasons: list[str] = []
        self.stopped_by: StoppedBy = "work_limit"

    def to_the_end(self) -> None:
        """Run all threads until the limits are reached, the gap is closed, or told to stop."""
        work = [self._starts]
        if self.method in _OPTIMISE:
            problem = self.best.problem
            # Build the serial schedule first, so that even an immediate cancel returns a schedule.
            self.best.offer(build_serial(problem), "serial")
            found = (MILP_PLAN,) if self.method == "milp" else plans(problem, self.limits)
            threads = min(max(1, self.limits.threads + 1 - len(found)), _MOST_THREADS)
            work = [partial(self._first, found[0], threads)]
            work += [partial(self._improve, plan, threads) for plan in found[1:]]
        run_threads(work, self._should_end, self.ended)
        self._note_why()
        is_warm = self.is_warm()
        if self.method in _OPTIMISE and not is_warm and self.stopped_by == "time_limit":
            _log.warning(
                "the search did not start: its kernels are still being compiled; solve again later"
            )
        if self.lowers and is_warm and self.stopped_by != "cancelled":
            self._lower_peaks()
        if self.robust is not None:
            self._choose_robust(self.robust)
        self.best.close()

    def _lower_peaks(self) -> None:
        """Look for the same objective with less memory, for the share of time and work kept for it.

        It never changes why the search ended.
        """
        limits, ended = self.limits, threading.Event()
        left_s = limits.time_limit_s - self.best.seconds() - 0.3 * self.best.evaluate_s
        work = None
        if limits.work_limit is None:
            left_s = min(left_s, _LAST_SHARE * limits.time_limit_s)
        else:
            work = _LAST_SHARE * limits.work_limit
        stop = Stop(left_s, work=work, seed=limits.seed, should_stop=ended.is_set)
        if self.best.work is not None:
            self.best.work = self.stop.spent

        before = self.best.metrics

        def lower() -> None:
            with self.best.clocked("less memory"):
                lower_peaks(self.best, stop, self.family_ms)

        run_threads([lower], lambda: stop.left_s() <= 0.0 or self.should_stop(), ended)
        if before is not None and self.best.metrics is not before:
            self.peak_bytes_before = before.peak_bytes

    def _choose_robust(self, robust: Robust) -> None:
        """Choose among the schedules under noise; a cancelled solve has ``_MOMENT_S`` for it."""
        left_s = self.limits.time_limit_s - self.best.seconds()
        if self.limits.work_limit is None:
            left_s = min(left_s, _LAST_SHARE * self.limits.time_limit_s)
        if self.stopped_by == "cancelled":
            left_s = min(left_s, _MOMENT_S)
        stop = Stop(left_s)
        latest_s = left_s + _GRACE_S
        with suppress(Stopped), stopped_by(lambda: stop.seconds() > latest_s):
            self.choice = choose_robust(self.best, robust, stop)

    def _first(self, plan: SearchPlan, threads: int) -> None:
        self._starts()
        self.started.set()
        self._improve(plan, threads)

    def _improve(self, plan: SearchPlan, threads: int) -> None:
        while not (self.stop.is_told() or (self.started.wait(_LOOK_S) and self.is_warm())):
            time.sleep(_LOOK_S)
        turn = self.stop.turn(threads=threads)
        improve(self.best, plan, turn, good_gap=self.limits.good_gap)

    def _starts(self) -> None:
        """Offer the schedule that is built fastest, then bounds, then all other starts.

        For a large problem the serial one is no answer: slow steps come after a better schedule. No
        start is begun that would take longer than the time left. The first start loads compiled
        code, so its time is not used for this estimate.
        """
        best, stop = self.best, self.stop
        starts = all_starts(best.problem, None if self.method in _OPTIMISE else (self.method,))
        if self.method in _OPTIMISE:
            starts = chain(starts, rule_starts(best.problem, self.limits.seed))
        seconds: list[float] = []
        with best.clocked("starts"):
            while self._has_no_answer() and (start := next(starts, None)) is not None:
                self._take(start)
                seconds += [start.seconds] * (start.programs is not None)
                del start
        with best.clocked("bounds"):
            for bound in lower_bounds(best.problem, should_stop=stop.is_told):
                best.offer_bound(bound.ms, bound.method)
        with best.clocked("starts"):
            while not stop.is_told() and stop.left_s() > max(seconds[1:], default=0.0):
                if (start := next(starts, None)) is None:
                    return
                self._take(start)
                seconds += [start.seconds] * (start.programs is not None)
                del start

    def _has_no_answer(self) -> bool:
        """Whether there is no start, or only the serial one of a large problem and time is left."""
        if self.start is None:
            return True
        is_poor = self.start[0] == "serial" and is_large(self.best.problem)
        return is_poor and not self.stop.is_told()

    def _take(self, start: FamilyStart) -> None:
        """Offer a start; remember the best, or why there is none."""
        if start.programs is None or not start.legal:
            self.reasons.append(f"{start.method}: {start.reason or 'over the memory limit'}")
            return
        self.best.offer(start.programs, start.method, expected_ms=start.objective_ms)
        self.best.keep(start.programs, start.objective_ms, start.method)
        known_ms = self.family_ms.get(start.family, start.objective_ms)
        self.family_ms[start.family] = min(known_ms, start.objective_ms)
        if self.start is None or start.objective_ms < self.start[1]:
            self.start = start.method, start.objective_ms

    def _should_end(self) -> bool:
        # With limited work, a thread reads the gap between turns. Here the clock would decide when
        # it is read, and a turn would end at another place each time.
        is_good = self.limits.work_limit is None and self.best.gap <= self.limits.good_gap
        return is_good or self._is_late() or self.should_stop()

    def _note_why(self) -> None:
        if self.best.is_optimal:
            self.stopped_by = "optimal"
        elif self.best.gap <= self.limits.good_gap:
            self.stopped_by = "gap"
        elif self.should_stop():
            self.stopped_by = "cancelled"
        elif self._is_late() or (self.method in _OPTIMISE and self.limits.work_limit is None):
            # A part ends slightly early if it knows that the budget left is too small for it.
            self.stopped_by = "time_limit"

    def _is_late(self) -> bool:
        """Whether the time left is needed to count the bytes of the result."""
        return self.stop.left_s() <= 0.3 * self.best.evaluate_s

    def result(self) -> Result:
        """Return the best schedule with its proof and its provenance."""
        best = self.best
        if best.programs is None:
            message = "; ".join(self.reasons) or "stopped before it had one; allow more time"
            return Result(SolveStatus.UNKNOWN, None, best.bound_ms, message=message)
        start_method, start_ms = self.start or (None, None)
        # Clocks differ from run to run, but results with limited work must not.
        cpu_seconds = None
        if best.work is None:
            cpu_seconds = {part: round(spent, 3) for part, spent in best.cpu_seconds.items()}
        method = best.method
        if self.choice is not None:
            method = f"{method}, P{self.choice.percent:g} {self.choice.late_ms:,.1f} ms"
        provenance = Provenance(
            method=method,
            start_method=start_method,
            start_objective_ms=start_ms,
            bound_method=best.bound_method or None,
            solver=solver_name() if self.method in _OPTIMISE else None,
            seed=self.limits.seed,
            solve_seconds=round(best.seconds(), 4) if best.work is None else 0.0,
            cpu_seconds=cpu_seconds,
            contributions=contributions(best.trace),
            trace=tuple(best.trace),
        )
        schedule = record(best, provenance, self.stopped_by)
        return Result(
            SolveStatus(schedule.status),
            schedule,
            best.bound_ms,
            robust=self.choice,
            problem=best.problem,
            # The choice under noise may be another schedule.
            peak_bytes_before=() if self.choice is not None else self.peak_bytes_before,
        )


# --- The end of a solve as a schedule: its numbers as they are known, not evaluated once more.


def record(best: Incumbent, provenance: Provenance, stopped_by: StoppedBy) -> Schedule:
    """Return the best schedule with its proof, as `optpipe.evaluate.evaluate` would.

    ``stopped_by`` becomes ``optimal`` if the gap is closed. It becomes ``gap`` if only the gap of
    another schedule, which is longer under noise, is closed.

    Raises
    ------
    ValueError
        If there is no schedule.
    """
    programs, metrics = best.programs, best.metrics
    if programs is None or metrics is None:
        raise ValueError("best.programs = None: there must be a schedule; solve until there is one")
    gap = gap_of(metrics.objective_ms(best.problem.objective), best.bound_ms)
    optimal = gap is not None and gap <= OPTIMAL_GAP
    return Schedule(
        problem_hash=best.problem.problem_hash,
        placement=best.problem.placement,
        programs=programs,
        objective=best.problem.objective,
        makespan_ms=metrics.makespan_ms,
        span_ms=metrics.span_ms,
        bound_ms=best.bound_ms,
        gap=gap,
        peak_bytes=metrics.peak_bytes,
        host_peak_bytes=metrics.host_peak_bytes,
        status="optimal" if optimal else "feasible",
        stopped_by="optimal" if optimal else "gap" if stopped_by == "optimal" else stopped_by,
        provenance=provenance,
    )


# --- What each method contributed to a solve, from its trace.


def contributions(trace: Iterable[TraceEntry]) -> tuple[Contribution, ...]:
    """Sum up a trace by method, in the order of their first improvement.

    The first schedule gains nothing, because no schedule precedes it.
    """
    found: dict[str, Contribution] = {}
    objective: float | None = None
    bound = 0.0
    for entry in trace:
        known = found.get(entry.method, Contribution(method=entry.method))
        gain = 0.0
        if objective is not None and entry.objective_ms is not None:
            gain = max(0.0, objective - entry.objective_ms)
        risen = max(0.0, (entry.bound_ms or 0.0) - bound)
        found[entry.method] = known.model_copy(
            update={
                "objective_ms": entry.objective_ms
                if entry.objective_ms != objective
                else known.objective_ms,
                "objective_gain_ms": known.objective_gain_ms + gain,
                "bound_ms": entry.bound_ms if risen > 0 else known.bound_ms,
                "bound_gain_ms": known.bound_gain_ms + risen,
            }
        )
        objective, bound = entry.objective_ms, entry.bound_ms or bound
    return tuple(found.values())
