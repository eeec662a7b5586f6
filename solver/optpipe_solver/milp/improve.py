"""Let the full-horizon MILP improve the best schedule known, where its size allows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from optpipe_solver.milp.horizon.items import HorizonItems
from optpipe_solver.milp.horizon.model import num_order_pairs, solve_horizon

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe_solver.incumbent import Incumbent

__all__ = ["improve_by_milp", "milp_fits"]

_MAX_PAIRS = 60_000
_MAX_FREE_PAIRS = 6_000
"""Above this many pairs a free order of micro-batches is beyond HiGHS, first in, first out not."""


def milp_fits(problem: Problem) -> bool:
    """Whether the model is small enough to be worth building."""
    return num_order_pairs(problem, fifo=True) <= _MAX_PAIRS


def improve_by_milp(
    best: Incumbent,
    *,
    time_limit_s: float,
    threads: int,
    seed: int,
    should_stop: Callable[[], bool] | None = None,
) -> None:
    """Run the model from the best schedule known for a number of seconds.

    What it finds is offered as ``milp``, or as ``milp-fifo`` where micro-batches are restricted to
    first in, first out although that may lose something: then nothing is proven.
    """
    problem = best.problem
    if best.programs is None:
        return
    loses_nothing = _fifo_loses_nothing(problem)
    fifo = loses_nothing or num_order_pairs(problem, fifo=False) > _MAX_FREE_PAIRS
    proves = loses_nothing or not fifo
    name = "milp" if proves else "milp-fifo"
    outcome = solve_horizon(
        problem,
        best.programs,
        best.objective_ms,
        fifo=fifo,
        floor_ms=best.bound_ms,
        time_limit_s=time_limit_s,
        threads=threads,
        seed=seed,
        on_programs=partial(_offer, best, name),
        on_bound=lambda bound: _prove(best, bound, name) if proves else None,
        should_stop=should_stop,
    )
    if proves and outcome.bound_ms is not None:
        _prove(best, outcome.bound_ms, name)


def _offer(best: Incumbent, name: str, programs: Programs) -> None:
    best.offer(programs, name)


def _prove(best: Incumbent, bound_ms: float, name: str) -> None:
    """The model holds only schedules at least as good as its incumbent: so far it can prove."""
    best.offer_bound(min(bound_ms, best.objective_ms), name)


def _fifo_loses_nothing(problem: Problem) -> bool:
    """Identical micro-batches may be relabelled pass by pass where each is treated alike.

    That is so where no device can profit from offload or recompute (DESIGN section 6).
    """
    items = HorizonItems(problem, float("inf"), fifo=True)
    return not any(items.may_offload) and not any(items.may_recompute)
