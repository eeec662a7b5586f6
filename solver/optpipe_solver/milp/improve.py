"""Let the full-horizon MILP improve the best schedule known, where its size allows."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optpipe.schedule import OPTIMAL_GAP
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


_FIRST = 0.6
"""Share of the time or nodes for the first run; the rest confirms what it proved."""


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
    that others offer meanwhile reach HiGHS.

    A bound counts only where two runs of different seeds agree: HiGHS 1.15.1 was seen to deny
    schedules that exist in one run of some 500, whatever its options, but never with two seeds on
    one model (`benchmarks/false_proofs.py`). With ``work_limit`` (most branch-and-bound nodes) the
    run is a function of problem, start, seed and threads, as long as time does not end it.
    """
    problem = best.problem
    if best.programs is None:
        return 0
    loses_nothing = fifo_loses_nothing(problem)
    tricks = tricks or Tricks()
    fifo = (loses_nothing and tricks.fifo) or num_order_pairs(problem, fifo=False) > _MAX_FREE_PAIRS
    run = _Runs(
        best=best,
        fifo=fifo,
        proves=loses_nothing or not fifo,
        tricks=tricks,
        threads=threads,
        should_stop=should_stop or (lambda: False),
    )
    end = time.perf_counter() + time_limit_s
    nodes = None if work_limit is None else max(1, int(_FIRST * work_limit))
    first, used = run.once(_FIRST * time_limit_s if run.proves else time_limit_s, seed, nodes)
    left_s = end - time.perf_counter()
    if not run.proves or first <= best.bound_ms or left_s <= 0:
        return used
    if first > best.objective_ms * (1 + OPTIMAL_GAP):
        # It denied a schedule that exists by now: a run that was wrong confirms nothing.
        return used
    if work_limit is not None and used >= work_limit:
        return used
    nodes = None if work_limit is None else work_limit - used
    _, more = run.once(left_s, seed + 1, nodes, confirms_ms=first)
    return used + more


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of one model, each from the best schedule known by then."""

    best: Incumbent
    fifo: bool
    proves: bool
    tricks: Tricks
    threads: int
    should_stop: Callable[[], bool]

    @property
    def name(self) -> str:
        """The method that schedules and bounds are offered as."""
        return "milp" if self.proves else "milp-fifo"

    def once(
        self, time_limit_s: float, seed: int, work_limit: int | None, confirms_ms: float = 0.0
    ) -> tuple[float, int]:
        """Return the bound in ms, 0 where there is none, and the nodes used.

        What this run and the one before (``confirms_ms``) both prove is offered while it runs.
        """
        best = self.best
        programs = best.programs or ()
        news = News(best, programs)
        scale = scale_for(best.objective_ms)

        def offer(found: Programs) -> None:
            if best.offer(found, self.name):
                news.known = best.programs

        def prove(bound_ms: float) -> None:
            agreed_ms = min(bound_ms / scale, confirms_ms, best.objective_ms)
            if agreed_ms > 0:
                best.offer_bound(agreed_ms, self.name)

        outcome = solve_horizon(
            scaled(best.problem, scale),
            programs,
            best.objective_ms * scale,
            Search(
                time_limit_s=time_limit_s,
                threads=self.threads,
                seed=seed,
                work_limit=work_limit,
                on_programs=offer,
                on_bound=prove,
                better=news.ask,
                should_stop=self.should_stop,
            ),
            fifo=self.fifo,
            floor_ms=best.bound_ms * scale,
            tricks=self.tricks,
        )
        bound_ms = outcome.bound_ms or 0.0
        prove(bound_ms)
        return bound_ms / scale, max(1, outcome.num_nodes)


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
