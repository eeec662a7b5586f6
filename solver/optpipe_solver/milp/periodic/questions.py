"""Questions to the periodic model: smallest memory, shortest period, shortest way."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from optpipe_solver.milp.highs import MilpOutcome, MilpStatus, solve_milp, value_of
from optpipe_solver.milp.periodic.items import Modes, load_ms
from optpipe_solver.milp.periodic.model import PeriodicModel, start_of
from optpipe_solver.milp.periodic.objective import highest_rate, largest_peak, way

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe_solver.budget import Stop
    from optpipe_solver.milp.periodic.block import PeriodicBlock

__all__ = [
    "Found",
    "agreed",
    "answer",
    "num_order_pairs",
    "shortest_period",
    "shortest_way",
    "smallest_memory",
]


_LOOSER = 1 + 1e-6


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
    stop: Stop,
    modes: Modes | None = None,
    *,
    start: PeriodicBlock | None = None,
    proves: bool = True,
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
    proves
        Whether two runs share the turn, so that what both prove is proven; else one run has all of
        it, and nothing is. So for all questions.
    """
    model = PeriodicModel(problem, modes or Modes(), shortest_ms=period_ms, longest_ms=period_ms)
    model.minimise(largest_peak(model.variables))
    outcome = answer(model, stop, start, proves=proves)
    bound = None if outcome.bound is None else model.bound(outcome.bound)
    return _found(model, outcome, bound and bound * model.variables.unit_bytes)


def shortest_period(
    problem: Problem,
    longest_ms: float,
    stop: Stop,
    modes: Modes | None = None,
    *,
    start: PeriodicBlock | None = None,
    proves: bool = True,
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
    outcome = answer(exact, stop.turn(0.5), None, proves=False)
    if outcome.values is not None:
        return Found(
            MilpStatus.OPTIMAL, exact.block(outcome.values), load_ms(problem), outcome.num_nodes
        )
    if longest_ms <= load and not proves:
        return Found(outcome.status, None, None, outcome.num_nodes)
    longest_ms = max(longest_ms, load)
    model = PeriodicModel(problem, modes, shortest_ms=load_ms(problem), longest_ms=longest_ms)
    model.minimise(highest_rate(model.variables))
    second = answer(model, stop.turn(), start, proves=proves)
    rate = None if second.bound is None else -model.bound(second.bound)
    bound = load_ms(problem) / rate if rate is not None and rate > 0 else None
    found = _found(model, second, bound)
    return Found(found.status, found.block, found.bound, found.num_nodes + outcome.num_nodes)


def shortest_way(
    problem: Problem,
    period_ms: float,
    stop: Stop,
    modes: Modes | None = None,
    *,
    start: PeriodicBlock | None = None,
    proves: bool = True,
) -> Found:
    """Return the block of this period with the shortest way of a micro-batch; bound in ms."""
    model = PeriodicModel(problem, modes or Modes(), shortest_ms=period_ms, longest_ms=period_ms)
    model.minimise(way(model.variables))
    outcome = answer(model, stop, start, proves=proves)
    bound = None if outcome.bound is None else model.bound(outcome.bound)
    return _found(model, outcome, bound and bound * period_ms / model.variables.turn)


def _found(model: PeriodicModel, outcome: MilpOutcome, bound: float | None) -> Found:
    block = None if outcome.values is None else model.block(outcome.values)
    return Found(outcome.status, block, bound, outcome.num_nodes)


# --- Two runs per question: what is proven is what HiGHS proves with two seeds.
# HiGHS 1.15.1 was seen to deny solutions that exist in one run of some 500, whatever its options,
# but never with two seeds on one model (`benchmarks/RESULTS.md`). So a bound, an optimum, and
# that there is no solution at all, count only where two runs agree.

_FIRST = 0.6
"""Share of the time or nodes for the first run; the rest confirms what it proved."""

_TOLERANCE, _SMALLEST = 1e-6, 1e-3
"""Relative, ten times HiGHS's gap: within it an objective, or that much, attains a bound."""

_CONCLUSIVE = frozenset({MilpStatus.OPTIMAL, MilpStatus.INFEASIBLE})


def answer(
    model: PeriodicModel, stop: Stop, start: PeriodicBlock | None, *, proves: bool
) -> MilpOutcome:
    """Return the best solution of two runs of different seeds, and what both of them prove.

    The second runs from what the first has found; there is none where no proof is asked for or the
    first has left nothing of the turn. Work is counted in branch-and-bound nodes.
    """
    known = None if start is None else start_of(model.variables, start)
    if not proves:
        return _unproven(solve_milp(model.model, stop, start=known))
    first = solve_milp(model.model, stop.turn(_FIRST), start=known)
    says_nothing = first.bound is None and first.status is not MilpStatus.INFEASIBLE
    if says_nothing or stop.is_over():
        return _unproven(first)
    rest = stop.turn(seed=stop.seed + 1)
    return agreed(model, first, solve_milp(model.model, rest, start=first.values or known))


def agreed(model: PeriodicModel, first: MilpOutcome, second: MilpOutcome) -> MilpOutcome:
    """Return the better solution of two runs, and the weaker of their bounds.

    A run that denies the solution of the other has proven nothing: then there is no bound. Optimal
    is what attains the bound, infeasible what both say. Where that is neither, the status is that
    of a run that was ended, `MilpStatus.LIMIT` where they contradict each other.
    """
    best = min(first, second, key=lambda run: _worth(model, run))
    worth = _worth(model, best)
    nodes = first.num_nodes + second.num_nodes
    bound = min(_proven(first), _proven(second))
    if max(_proven(first), _proven(second)) > worth + _slack(worth):
        bound = -inf
    if bound == inf:
        return MilpOutcome(MilpStatus.INFEASIBLE, None, None, nodes)
    status = next(
        (run.status for run in (second, first) if run.status not in _CONCLUSIVE), MilpStatus.LIMIT
    )
    if worth <= bound + _slack(worth):
        status = MilpStatus.OPTIMAL
    return MilpOutcome(status, bound if bound > -inf else None, best.values, nodes)


def _unproven(run: MilpOutcome) -> MilpOutcome:
    """Return what a run has found, without what it alone has proven."""
    status = MilpStatus.LIMIT if run.status in _CONCLUSIVE else run.status
    return MilpOutcome(status, None, run.values, run.num_nodes)


def _worth(model: PeriodicModel, run: MilpOutcome) -> float:
    """Return the objective of a run's solution, infinite where it has none."""
    if run.values is None:
        return inf
    return value_of(model.model.problem.objective, run.values)


def _proven(run: MilpOutcome) -> float:
    """Return the bound of a run: infinite where it says that there is no solution."""
    if run.status is MilpStatus.INFEASIBLE:
        return inf
    return -inf if run.bound is None else run.bound


def _slack(worth: float) -> float:
    return 0.0 if worth == inf else _TOLERANCE * max(abs(worth), _SMALLEST)
