"""Questions to the periodic model: smallest memory, shortest period, shortest way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from optpipe_solver.milp.highs import MilpStatus
from optpipe_solver.milp.periodic.agreement import answer
from optpipe_solver.milp.periodic.items import Modes, load_ms
from optpipe_solver.milp.periodic.model import PeriodicModel
from optpipe_solver.milp.periodic.objective import highest_rate, largest_peak, way

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.problem import Problem
    from optpipe_solver.milp.highs import MilpOutcome
    from optpipe_solver.milp.periodic.block import PeriodicBlock

__all__ = [
    "Budget",
    "Found",
    "num_order_pairs",
    "shortest_period",
    "shortest_way",
    "smallest_memory",
]

_LOOSER = 1 + 1e-6


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one question; ``work_limit`` counts branch-and-bound nodes.

    ``proves``: whether two runs share them, so that what both prove is proven; else one run has
    them all, and nothing is.
    """

    time_limit_s: float = 60.0
    threads: int = 1
    seed: int = 0
    work_limit: int | None = None
    should_stop: Callable[[], bool] | None = None
    proves: bool = True

    def is_over(self) -> bool:
        """Whether somebody says stop."""
        return self.should_stop is not None and self.should_stop()

    def half(self) -> Budget:
        """Return one of two equal parts."""
        nodes = None if self.work_limit is None else self.work_limit // 2
        return replace(self, time_limit_s=self.time_limit_s / 2, work_limit=nodes)


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to a question.

    ``bound`` is proven for every block of so many micro-batches per period, in the unit of the
    question (bytes, or ms per micro-batch), by two runs of HiGHS (`agreement`) or by the load; None
    where nothing was proven. Where ``status`` is infeasible there is no such block at all.
    ``is_optimal``: the block attains the bound.
    """

    status: MilpStatus
    block: PeriodicBlock | None
    bound: float | None
    num_nodes: int

    @property
    def is_optimal(self) -> bool:
        """Whether the block is proven to be the best there is."""
        return self.status is MilpStatus.OPTIMAL


def num_order_pairs(problem: Problem, copies: int = 1) -> int:
    """Return how many order binaries the model has, optional items aside: its size."""
    sizes = [3 * copies * len(held) - 1 for held in problem.stages_of if held]
    return sum(size * (size - 1) // 2 for size in sizes)


def smallest_memory(
    problem: Problem,
    period_ms: float,
    budget: Budget,
    modes: Modes | None = None,
    *,
    start: PeriodicBlock | None = None,
) -> Found:
    """Return the block whose largest device peak is smallest, and a bound of it in bytes.

    Parameters
    ----------
    problem
        Its memory limits are kept too: give it plenty to ask for the smallest of all.
    period_ms
        Per micro-batch, at least the load bound: there, no device is idle in the steady state.
    start
        A block to start from: HiGHS then knows it from the beginning.
    """
    model = PeriodicModel(problem, modes or Modes(), shortest_ms=period_ms, longest_ms=period_ms)
    model.minimise(largest_peak(model.variables))
    outcome = answer(model, budget, start)
    bound = None if outcome.bound is None else model.bound(outcome.bound)
    return _found(model, outcome, bound and bound * model.variables.unit_bytes)


def shortest_period(
    problem: Problem,
    longest_ms: float,
    budget: Budget,
    modes: Modes | None = None,
    *,
    start: PeriodicBlock | None = None,
) -> Found:
    """Return the block with the shortest period within the memory limits, and a bound in ms.

    The load bound is tried first, with a model for that period alone, whose relaxation is far
    tighter; where no block of that period is found, a model of all periods up to
    ``longest_ms`` follows, which ``start`` is a start of. All are per micro-batch.
    """
    modes = modes or Modes()
    load = load_ms(problem) * _LOOSER
    exact = PeriodicModel(problem, modes, shortest_ms=load, longest_ms=load)
    exact.minimise(way(exact.variables))
    # A block at the load bound needs no other proof, and whatever is denied here is asked again.
    outcome = answer(exact, replace(budget.half(), proves=False), None)
    if outcome.values is not None:
        return Found(
            MilpStatus.OPTIMAL, exact.block(outcome.values), load_ms(problem), outcome.num_nodes
        )
    if longest_ms <= load and not budget.proves:
        return Found(outcome.status, None, None, outcome.num_nodes)
    longest_ms = max(longest_ms, load)
    model = PeriodicModel(problem, modes, shortest_ms=load_ms(problem), longest_ms=longest_ms)
    model.minimise(highest_rate(model.variables))
    second = answer(model, budget.half(), start)
    rate = None if second.bound is None else -model.bound(second.bound)
    bound = load_ms(problem) / rate if rate is not None and rate > 0 else None
    found = _found(model, second, bound)
    return Found(found.status, found.block, found.bound, found.num_nodes + outcome.num_nodes)


def shortest_way(
    problem: Problem,
    period_ms: float,
    budget: Budget,
    modes: Modes | None = None,
    *,
    start: PeriodicBlock | None = None,
) -> Found:
    """Return the block of this period with the shortest way of a micro-batch; bound in ms."""
    model = PeriodicModel(problem, modes or Modes(), shortest_ms=period_ms, longest_ms=period_ms)
    model.minimise(way(model.variables))
    outcome = answer(model, budget, start)
    bound = None if outcome.bound is None else model.bound(outcome.bound)
    return _found(model, outcome, bound and bound * period_ms / model.variables.turn)


def _found(model: PeriodicModel, outcome: MilpOutcome, bound: float | None) -> Found:
    block = None if outcome.values is None else model.block(outcome.values)
    return Found(outcome.status, block, bound, outcome.num_nodes)
