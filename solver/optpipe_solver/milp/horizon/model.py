"""The full-horizon model, built and solved from a start schedule.

Joint choice of compute order, fused or split backward, offload, transfer times and lanes, and
recompute, under device and host memory (OptPipe, arXiv 2510.05186, generalised to any placement,
unequal stages and mixed hardware). Its dual bound is a proven lower bound of the objective unless
micro-batches are restricted to first-in-first-out where that loses something, or a context fixes
part of the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from optpipe_solver.milp.highs import MilpStatus, Model, solve_milp
from optpipe_solver.milp.horizon.constraints import all_constraints
from optpipe_solver.milp.horizon.deadline import Deadline
from optpipe_solver.milp.horizon.grid import Goal
from optpipe_solver.milp.horizon.lowering import lower
from optpipe_solver.milp.horizon.objective import length
from optpipe_solver.milp.horizon.orders import HorizonItems
from optpipe_solver.milp.horizon.start import start_values
from optpipe_solver.milp.horizon.tricks import Tricks
from optpipe_solver.milp.horizon.variables import HorizonVariables

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe_solver.milp.highs import Variable
    from optpipe_solver.milp.horizon.context import Context

__all__ = ["HorizonModel", "HorizonOutcome", "Search", "num_order_pairs", "solve_horizon"]

_ROWS_BETWEEN_LOOKS = 500


@dataclass(frozen=True, slots=True)
class HorizonOutcome:
    """The end of a run; ``bound_ms`` is None where nothing new was proven."""

    status: MilpStatus
    bound_ms: float | None
    num_nodes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """How a model is searched, by whom it is interrupted and whom it tells.

    Attributes
    ----------
    time_limit_s, threads, seed, work_limit
        Seconds from now, HiGHS's threads and seed, most branch-and-bound nodes.
    on_programs, on_bound
        Told the programs of every improving solution (not yet checked) and every better bound.
    better
        Asked for programs found elsewhere since it was last asked.
    should_stop
        True ends the run.
    """

    time_limit_s: float
    threads: int = 1
    seed: int = 0
    work_limit: int | None = None
    on_programs: Callable[[Programs], None]
    on_bound: Callable[[float], None] = lambda _: None
    better: Callable[[], Programs | None] | None = None
    should_stop: Callable[[], bool] = lambda: False


def num_order_pairs(problem: Problem, *, fifo: bool) -> int:
    """Return how many pairs of items would need an order binary: the size of the model."""
    m = problem.num_microbatches
    pairs = 0
    for held in problem.stages_of:
        count = m * sum(3 + problem.can_offload(s) + problem.stages[s].can_recompute for s in held)
        pairs += count * (count - 1) // (3 if fifo and m > 1 else 2)
    return pairs


class HorizonModel:
    """Variables and constraints of one problem below one horizon.

    Parameters
    ----------
    problem
        What is to be scheduled.
    horizon_ms
        Only schedules with at most this objective are looked for: that of a schedule already known.
    fifo, tricks, context, alike
        See `HorizonItems`.
    floor_ms
        A proven lower bound of the objective.
    should_stop
        Asked while constraints are written; True leaves the model incomplete.
    """

    def __init__(
        self,
        problem: Problem,
        horizon_ms: float,
        *,
        fifo: bool,
        floor_ms: float = 0.0,
        tricks: Tricks | None = None,
        context: Context | None = None,
        alike: bool = False,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.problem = problem
        # The known schedule must stay inside its own windows, which come from sums in another
        # order; a relative 1e-9 covers their rounding.
        self.items = HorizonItems(
            problem,
            horizon_ms * (1 + 1e-9),
            fifo=fifo,
            tricks=tricks,
            context=context,
            alike=alike,
            should_stop=should_stop,
        )
        self.model = Model("horizon")
        self.is_complete = False
        if self.items.is_empty or should_stop():
            return
        self.variables = HorizonVariables(problem, self.items, self.model)
        self.variables.length.lowBound = floor_ms
        self.model.minimise(length(self.variables))
        for number, constraint in enumerate(all_constraints(self.variables)):
            self.model.add(constraint)
            if number % _ROWS_BETWEEN_LOOKS == 0 and should_stop():
                return
        self.is_complete = True

    def lowered(self, values: Mapping[Variable, float]) -> Programs:
        """Return the programs a solution stands for."""
        return lower(self.variables, values)

    def values_of(self, programs: Programs) -> dict[Variable, float] | None:
        """Return the solution legal programs stand for, None where the model excludes them."""
        return start_values(self.variables, programs)


def solve_horizon(
    problem: Problem,
    incumbent: Programs,
    incumbent_ms: float,
    search: Search,
    *,
    fifo: bool,
    floor_ms: float = 0.0,
    tricks: Tricks | None = None,
    context: Context | None = None,
    alike: bool = False,
) -> HorizonOutcome:
    """Improve on an incumbent and prove how good it is.

    Parameters
    ----------
    incumbent, incumbent_ms
        A legal schedule and its objective.
    search
        Limits and listeners.
    fifo
        Restrict to first-in-first-out micro-batches; the caller knows whether that loses anything
        and may then not use the bound.
    floor_ms
        A proven lower bound.
    tricks, context, alike
        See `HorizonItems`.
    """
    tricks = tricks or Tricks()
    end = Deadline(search.time_limit_s, search.should_stop)
    goal = Goal.of(problem, incumbent_ms, cutoff=tricks.cutoff)
    horizon = HorizonModel(
        problem,
        goal.horizon_ms,
        fifo=fifo,
        floor_ms=floor_ms,
        tricks=tricks,
        context=context,
        alike=alike,
        should_stop=end.is_over,
    )
    if horizon.items.is_empty:
        return HorizonOutcome(MilpStatus.INFEASIBLE, goal.proven_ms, 0)
    if not horizon.is_complete:
        return HorizonOutcome(end.status(), None, 0)

    return _minimised(horizon, goal, incumbent, search, tricks=tricks, time_limit_s=end.left_s())


def _minimised(
    horizon: HorizonModel,
    goal: Goal,
    incumbent: Programs,
    search: Search,
    *,
    tricks: Tricks,
    time_limit_s: float,
) -> HorizonOutcome:
    """Hand a complete model to HiGHS; return how that ended."""
    outcome = solve_milp(
        horizon.model,
        time_limit_s=time_limit_s,
        threads=search.threads,
        seed=search.seed,
        work_limit=search.work_limit,
        start=horizon.values_of(incumbent) if tricks.start and not tricks.cutoff else None,
        on_solution=lambda values: search.on_programs(horizon.lowered(values)),
        on_bound=lambda bound: search.on_bound(goal.proven(bound)),
        better=_handed_in(horizon, search) if tricks.hand_in else None,
        should_stop=search.should_stop,
    )
    if outcome.values is not None:
        search.on_programs(horizon.lowered(outcome.values))
    bound = None if outcome.bound is None else goal.proven(outcome.bound)
    if outcome.status is MilpStatus.INFEASIBLE:
        bound = goal.proven_ms
    return HorizonOutcome(outcome.status, bound, outcome.num_nodes)


def _handed_in(
    horizon: HorizonModel, search: Search
) -> Callable[[], dict[Variable, float] | None] | None:
    """Return what asks for programs found elsewhere and reads them as a solution."""
    better = search.better
    if better is None:
        return None

    def ask() -> dict[Variable, float] | None:
        programs = better()
        return None if programs is None else horizon.values_of(programs)

    return ask
