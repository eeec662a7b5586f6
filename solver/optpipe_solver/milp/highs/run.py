"""One run of HiGHS: a model in, news while it goes on, the outcome out.

PuLP's own HiGHS class has no warm start and labels a time-limit stop ``Optimal``: so PuLP builds
the model, and everything else - start, callbacks, status, bound - goes through highspy.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import highspy
import numpy as np
import pulp

from optpipe_solver.milp.highs.status import STATUS_OF, MilpStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from optpipe_solver.milp.highs.model import Model, Variable

__all__ = ["MilpOutcome", "solve_milp", "solver_name"]

_MIP_TOLERANCE = 1e-7
"""Feasibility tolerance. Larger, times a big-M, it lets orders overlap visibly; at 1e-9 HiGHS 1.15
was seen to prove what is not so (a bound of 4.5 where 4.0 is feasible, in 8 of 128 runs)."""

_LOOK_S, _GRACE_S = 0.05, 0.3
"""Seconds between two looks at whether to stop, and those HiGHS is given to end by itself."""


_SEEDS = 2**31
"""HiGHS's seed is a 32-bit integer; larger ones of ours come round again."""


@dataclass(frozen=True, slots=True)
class MilpOutcome:
    """The end of a run.

    ``bound`` is HiGHS's dual bound of the minimised objective, None when it has none;
    ``values`` are by PuLP variable, None when no solution was found.
    """

    status: MilpStatus
    bound: float | None
    values: dict[Variable, float] | None
    num_nodes: int


@dataclass(frozen=True, slots=True)
class _Ears:
    """Who is told and asked during a run (see `solve_milp`)."""

    on_solution: Callable[[Mapping[Variable, float]], None] | None
    on_bound: Callable[[float], None] | None
    better: Callable[[], Mapping[Variable, float] | None] | None
    should_stop: Callable[[], bool] | None


def solver_name() -> str:
    """Return name and version, e.g. ``highs 1.15.1``."""
    highs: Any = highspy.Highs
    return f"highs {highs().version()}"


def solve_milp(
    model: Model,
    *,
    time_limit_s: float,
    threads: int = 1,
    seed: int = 0,
    gap: float = 1e-7,
    work_limit: int | None = None,
    start: Mapping[Variable, float] | None = None,
    on_solution: Callable[[Mapping[Variable, float]], None] | None = None,
    on_bound: Callable[[float], None] | None = None,
    better: Callable[[], Mapping[Variable, float] | None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> MilpOutcome:
    """Minimise a model.

    HiGHS runs in a thread of its own, because its presolve and its root LP may not look at
    anything for seconds: the call returns 0.3 s after it is told to stop, and HiGHS itself ends
    in the background at its next look.

    Parameters
    ----------
    model
        A bounded minimisation model; not to be changed any more.
    time_limit_s, threads, seed, gap
        HiGHS's limits; ``gap`` is relative. Any seed >= 0: HiGHS gets it modulo 2^31.
    work_limit
        Most branch-and-bound nodes; where they end a run before the clock does, it is the same run
        every time for one seed and thread count.
    start
        A solution to start from, complete or not.
    on_solution, on_bound
        Told every improving solution and every better dual bound while the run goes on.
    better
        Asked often for a solution found elsewhere since it was last asked; None = nothing new.
    should_stop
        Asked often; True ends the run.

    All four are called in the thread that called this function, and what they raise comes out.
    """
    run = _Run(model, _Ears(on_solution, on_bound, better, should_stop))
    options = _options(time_limit_s, threads, seed, gap, work_limit)
    return run.watched(options, start, time.perf_counter() + time_limit_s)


def _options(
    time_limit_s: float, threads: int, seed: int, gap: float, work_limit: int | None
) -> dict[str, Any]:
    options: dict[str, Any] = {
        "output_flag": False,
        "time_limit": max(0.01, time_limit_s),
        "threads": threads,
        "random_seed": seed % _SEEDS,
        "mip_rel_gap": gap,
        "mip_abs_gap": 1e-9,
        "mip_feasibility_tolerance": _MIP_TOLERANCE,
        "primal_feasibility_tolerance": _MIP_TOLERANCE,
    }
    if threads > 1:
        options["parallel"] = "on"
    if work_limit is not None:
        options["mip_max_nodes"] = max(0, work_limit)
    return options


class _Run:
    """One run: HiGHS in a thread, its callbacks' news through a queue, the caller listening."""

    def __init__(self, model: Model, ears: _Ears) -> None:
        self.model = model
        self.ears = ears
        self.variables: list[Variable] = []
        self.news: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.stop = threading.Event()
        self.handed_in: Mapping[Variable, float] | None = None
        self.bound = -math.inf
        self.num_nodes = 0
        self.values: dict[Variable, float] | None = None
        self.outcome: MilpOutcome | None = None
        self.error: BaseException | None = None

    def watched(
        self, options: dict[str, Any], start: Mapping[Variable, float] | None, end: float
    ) -> MilpOutcome:
        """Run to the end, or until told to stop, or a little after the time limit."""
        # No daemon: an interpreter that ends must not cut a thread that is inside C++.
        thread = threading.Thread(target=self._minimise, args=(options, start))
        self._ask_for_better()
        thread.start()
        try:
            why = self._listen(thread, end + _GRACE_S)
        finally:
            self.stop.set()
        thread.join(0.0 if why is MilpStatus.TIME_LIMIT else _GRACE_S)
        self._hear_all()
        if self.error is not None:
            raise self.error
        if self.outcome is not None:
            return self.outcome
        bound = self.bound if math.isfinite(self.bound) else None
        return MilpOutcome(why, bound, self.values, self.num_nodes)

    def _listen(self, thread: threading.Thread, end: float) -> MilpStatus:
        """Tell and ask until the thread ends; return why listening ended where it did not."""
        ears = self.ears
        while thread.is_alive():
            self._hear_next(_LOOK_S)
            if ears.should_stop is not None and ears.should_stop():
                return MilpStatus.INTERRUPTED
            if time.perf_counter() > end:
                return MilpStatus.TIME_LIMIT
            self._ask_for_better()
        return MilpStatus.FAILED

    def _ask_for_better(self) -> None:
        better = self.ears.better() if self.ears.better is not None else None
        if better is not None:
            self.handed_in = better

    def _hear_all(self) -> None:
        while not self.news.empty():
            self._hear_next(0.0)

    def _hear_next(self, wait_s: float) -> None:
        try:
            kind, what = self.news.get(timeout=wait_s) if wait_s else self.news.get_nowait()
        except queue.Empty:
            return
        if kind == "solution":
            self.values = dict(zip(self.variables, what, strict=True))
            if self.ears.on_solution is not None:
                self.ears.on_solution(self.values)
        elif self.ears.on_bound is not None:
            self.ears.on_bound(what)

    def _minimise(self, options: dict[str, Any], start: Mapping[Variable, float] | None) -> None:
        try:
            highs, self.variables = _built(self.model)
            for name, value in options.items():
                highs.setOptionValue(name, value)
            if start is not None:
                solution = highspy.HighsSolution()
                solution.col_value = list(_columns(self.variables, start))
                highs.setSolution(solution)
            self._attach(highs)
            if not self.stop.is_set():
                highs.run()
                self.outcome = _outcome(highs, self.variables)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self.error = error

    def _attach(self, highs: Any) -> None:
        if self.ears.on_solution is not None:
            highs.cbMipImprovingSolution += self._improving
        if self.ears.better is not None:
            highs.cbMipUserSolution += self._user_solution
        highs.cbMipInterrupt += self._interrupt
        highs.cbSimplexInterrupt += self._only_interrupt

    def _improving(self, event: Any) -> None:
        self.news.put(("solution", [float(value) for value in event.data_out.mip_solution]))

    def _interrupt(self, event: Any) -> None:
        bound = float(event.data_out.mip_dual_bound)
        self.num_nodes = max(self.num_nodes, int(event.data_out.mip_node_count))
        if math.isfinite(bound) and bound > self.bound:
            self.bound = bound
            self.news.put(("bound", bound))
        self._only_interrupt(event)

    def _only_interrupt(self, event: Any) -> None:
        if self.stop.is_set():
            event.interrupt()

    def _user_solution(self, event: Any) -> None:
        handed_in, self.handed_in = self.handed_in, None
        if handed_in is not None:
            event.data_in.setSolution(_columns(self.variables, handed_in))


def _built(model: Model) -> tuple[Any, list[Variable]]:
    """Let PuLP write the model into a highspy object; columns stand in PuLP's index order."""
    writer = pulp.HiGHS(msg=False)
    writer.createAndConfigureSolver(model.problem)
    writer.buildSolverModel(model.problem)
    variables = sorted(model.problem.variables(), key=lambda variable: variable.index)
    return model.problem.solverModel, variables


def _columns(variables: list[Variable], values: Mapping[Variable, float]) -> Any:
    return np.array([float(values.get(variable, 0.0)) for variable in variables])


def _outcome(highs: Any, variables: list[Variable]) -> MilpOutcome:
    status = STATUS_OF[highs.getModelStatus()]
    info = highs.getInfo()
    bound = float(info.mip_dual_bound)
    if not any(variable.cat == pulp.LpInteger for variable in variables):
        # Without integers HiGHS solves a linear program, whose optimum is its own bound.
        is_optimal = status is MilpStatus.OPTIMAL
        bound = float(info.objective_function_value) if is_optimal else -math.inf
    solution = highs.getSolution()
    found = bool(solution.value_valid) and info.primal_solution_status == 2
    values = dict(zip(variables, map(float, solution.col_value), strict=True)) if found else None
    return MilpOutcome(
        status=status,
        bound=bound if math.isfinite(bound) else None,
        values=values,
        num_nodes=max(0, int(info.mip_node_count)),
    )
