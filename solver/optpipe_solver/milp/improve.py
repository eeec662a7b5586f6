"""Let the full-horizon MILP improve the best schedule known, where its size allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.milp.horizon.items import memory_binds
from optpipe_solver.milp.horizon.model import Search, num_order_pairs, solve_horizon
from optpipe_solver.milp.horizon.tricks import Tricks
from optpipe_solver.milp.scaling import scale_for, scaled

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe_solver.incumbent import Incumbent

__all__ = ["News", "fifo_loses_nothing", "improve_by_milp", "milp_fits"]

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
    work_limit: int | None = None,
    tricks: Tricks | None = None,
) -> int:
    """Run the model from the best schedule known for a number of seconds; return the nodes used.

    What it finds is offered as ``milp``, or as ``milp-fifo`` where micro-batches are restricted to
    first in, first out although that may lose something: then nothing is proven. Better schedules
    that others offer meanwhile reach HiGHS. With ``work_limit`` (most branch-and-bound nodes) the
    run is a function of problem, start, seed and threads, as long as time does not end it.
    """
    problem = best.problem
    programs = best.programs
    if programs is None:
        return 0
    loses_nothing = fifo_loses_nothing(problem)
    tricks = tricks or Tricks()
    fifo = (loses_nothing and tricks.fifo) or num_order_pairs(problem, fifo=False) > _MAX_FREE_PAIRS
    proves = loses_nothing or not fifo
    name = "milp" if proves else "milp-fifo"
    news = News(best, programs)

    def offer(found: Programs) -> None:
        if best.offer(found, name):
            news.known = best.programs

    def prove(bound_ms: float) -> None:
        if proves:
            best.offer_bound(min(bound_ms / scale, best.objective_ms), name)

    scale = scale_for(best.objective_ms)
    outcome = solve_horizon(
        scaled(problem, scale),
        programs,
        best.objective_ms * scale,
        Search(
            time_limit_s=time_limit_s,
            threads=threads,
            seed=seed,
            work_limit=work_limit,
            on_programs=offer,
            on_bound=prove,
            better=news.ask,
            should_stop=should_stop or (lambda: False),
        ),
        fifo=fifo,
        floor_ms=best.bound_ms * scale,
        tricks=tricks,
    )
    if outcome.bound_ms is not None:
        prove(outcome.bound_ms)
    return max(1, outcome.num_nodes)


class News:
    """Hands on, once each, the best programs that others have found since the start."""

    def __init__(self, best: Incumbent, known: Programs) -> None:
        self.best = best
        self.known: Programs | None = known

    def ask(self) -> Programs | None:
        """Return what is new, None where nothing is."""
        programs = self.best.programs
        if programs is self.known:
            return None
        self.known = programs
        return programs


def fifo_loses_nothing(problem: Problem) -> bool:
    """Identical micro-batches may be relabelled pass by pass where each is treated alike.

    That is so where no device can profit from offload or recompute (DESIGN section 6).
    """
    return not any(
        memory_binds(problem, stage.device) and (problem.can_offload(s) or stage.can_recompute)
        for s, stage in enumerate(problem.stages)
    )
