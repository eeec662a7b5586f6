"""The full-horizon model, built and solved from a start schedule.

Joint choice of compute order, fused or split backward, offload, transfer times and lanes, and
recompute, under device and host memory (OptPipe, arXiv 2510.05186, generalised to any placement,
unequal stages and mixed hardware). Its dual bound is a proven lower bound of the objective unless
micro-batches are restricted to first-in-first-out where that loses something.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from optpipe_solver.milp.highs import MilpStatus, Model, solve_milp
from optpipe_solver.milp.horizon.constraints import all_constraints
from optpipe_solver.milp.horizon.items import HorizonItems
from optpipe_solver.milp.horizon.lowering import lower
from optpipe_solver.milp.horizon.objective import length
from optpipe_solver.milp.horizon.start import start_values
from optpipe_solver.milp.horizon.variables import HorizonVariables

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe_solver.milp.highs import Variable

__all__ = ["HorizonModel", "HorizonOutcome", "num_order_pairs", "solve_horizon"]


@dataclass(frozen=True, slots=True)
class HorizonOutcome:
    """The end of a run; ``bound_ms`` is None where nothing new was proven."""

    status: MilpStatus
    bound_ms: float | None
    num_nodes: int


def num_order_pairs(problem: Problem, *, fifo: bool) -> int:
    """Return how many pairs of items would need an order binary: the size of the model."""
    items = HorizonItems(problem, _long(problem), fifo=fifo)
    m = problem.num_microbatches
    return sum(len(row) * (len(row) - 1) // (3 if fifo and m > 1 else 2) for row in items.by_device)


def _long(problem: Problem) -> float:
    return 3.0 * problem.num_microbatches * (1.0 + sum(stage.busy_ms for stage in problem.stages))


class HorizonModel:
    """Variables and constraints of one problem below one horizon.

    Parameters
    ----------
    problem
        What is to be scheduled.
    horizon_ms
        The objective of a schedule already known: only schedules at least as good are looked for.
    fifo
        See `HorizonItems`.
    floor_ms
        A proven lower bound of the objective.
    """

    def __init__(
        self, problem: Problem, horizon_ms: float, *, fifo: bool, floor_ms: float = 0.0
    ) -> None:
        self.problem = problem
        # The known schedule must stay inside its own windows, which come from sums in another
        # order; a relative 1e-9 covers their rounding.
        items = HorizonItems(problem, horizon_ms * (1 + 1e-9), fifo=fifo)
        self.model = Model("horizon")
        self.variables = HorizonVariables(problem, items, self.model)
        self.variables.length.lowBound = floor_ms
        self.model.minimise(length(self.variables))
        for constraint in all_constraints(self.variables):
            self.model.add(constraint)

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
    *,
    fifo: bool,
    floor_ms: float,
    time_limit_s: float,
    threads: int = 1,
    seed: int = 0,
    on_programs: Callable[[Programs], None],
    on_bound: Callable[[float], None],
    should_stop: Callable[[], bool] | None = None,
) -> HorizonOutcome:
    """Improve on an incumbent and prove how good it is.

    Parameters
    ----------
    incumbent, incumbent_ms
        A legal schedule and its objective.
    fifo
        Restrict to first-in-first-out micro-batches; the caller knows whether that loses anything
        and may then not use the bound.
    floor_ms
        A proven lower bound.
    on_programs, on_bound
        Told the programs of every improving solution (not yet checked) and every better bound.
    """
    horizon = HorizonModel(problem, incumbent_ms, fifo=fifo, floor_ms=floor_ms)
    outcome = solve_milp(
        horizon.model,
        time_limit_s=time_limit_s,
        threads=threads,
        seed=seed,
        start=horizon.values_of(incumbent),
        on_solution=lambda values: on_programs(horizon.lowered(values)),
        on_bound=on_bound,
        should_stop=should_stop,
    )
    if outcome.values is not None:
        on_programs(horizon.lowered(outcome.values))
    return HorizonOutcome(outcome.status, outcome.bound, outcome.num_nodes)
