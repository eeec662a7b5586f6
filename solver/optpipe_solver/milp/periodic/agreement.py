"""Two runs per question: what is proven is what HiGHS proves with two seeds.

HiGHS 1.15.1 was seen to deny solutions that exist in one run of some 500, whatever its options, but
never with two seeds on one model (`benchmarks/false_proofs.py`). So a bound, an optimum, and that
there is no solution at all, count only where two runs agree.
"""

from __future__ import annotations

import time
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from optpipe_solver.milp.highs import MilpOutcome, MilpStatus, solve_milp, value_of
from optpipe_solver.milp.periodic.start import start_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optpipe_solver.milp.highs import Variable
    from optpipe_solver.milp.periodic.block import PeriodicBlock
    from optpipe_solver.milp.periodic.model import PeriodicModel
    from optpipe_solver.milp.periodic.search import Budget

__all__ = ["agreed", "answer"]

_FIRST = 0.6
"""Share of the time or nodes for the first run; the rest confirms what it proved."""

_TOLERANCE, _SMALLEST = 1e-6, 1e-3
"""Relative, ten times HiGHS's gap: within it an objective, or that much, attains a bound."""

_CONCLUSIVE = frozenset({MilpStatus.OPTIMAL, MilpStatus.INFEASIBLE})


def answer(model: PeriodicModel, budget: Budget, start: PeriodicBlock | None) -> MilpOutcome:
    """Return the best solution of two runs of different seeds, and what both of them prove.

    The second runs from what the first has found; there is none where ``budget`` asks for no proof
    or the first has left nothing of it.
    """
    end = time.perf_counter() + budget.time_limit_s
    known = None if start is None else start_of(model.variables, start)
    if not budget.proves:
        return _unproven(_run(model, budget, known))
    limit = budget.work_limit
    share = None if limit is None else int(_FIRST * limit)
    part = replace(budget, time_limit_s=_FIRST * budget.time_limit_s, work_limit=share)
    first = _run(model, part, known)
    left_s = end - time.perf_counter()
    left = None if limit is None else limit - first.num_nodes
    says_nothing = first.bound is None and first.status is not MilpStatus.INFEASIBLE
    if says_nothing or left_s <= 0 or (left is not None and left <= 0) or budget.is_over():
        return _unproven(first)
    rest = replace(budget, seed=budget.seed + 1, time_limit_s=left_s, work_limit=left)
    return agreed(model, first, _run(model, rest, first.values or known))


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


def _run(
    model: PeriodicModel, budget: Budget, start: Mapping[Variable, float] | None
) -> MilpOutcome:
    return solve_milp(
        model.model,
        time_limit_s=budget.time_limit_s,
        threads=budget.threads,
        seed=budget.seed,
        work_limit=budget.work_limit,
        should_stop=budget.should_stop,
        start=start,
    )


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
