"""The portfolio's part: periodic blocks, unrolled, squeezed and offered as ``periodic``.

Where activations can be offloaded or recomputed, circles are searched with these choices in them.
Then the local search over plain circles from building blocks (any size) looks for the shortest
period, and the MILP where its size allows. The rest of the time blocks are polished for the length
of what they are squeezed to, the search with choices goes on, and blocks that need more memory are
polished and made to fit. Work is counted in moves of the local search.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.improve.circular.search import CircularSearch
from optpipe_solver.milp.periodic.items import load_ms
from optpipe_solver.milp.periodic.rounds import FIT_WORK, CircularRounds, FitRounds, PolishRounds
from optpipe_solver.milp.periodic.run import METHOD, PeriodicRun
from optpipe_solver.milp.periodic.shrink import ShrinkRounds

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_solver.incumbent import Incumbent

__all__ = ["METHOD", "improve_by_periodic"]

_FIRST_ROUNDS = 4


def improve_by_periodic(
    best: Incumbent,
    *,
    time_limit_s: float,
    threads: int,
    seed: int,
    should_stop: Callable[[], bool] | None = None,
    work_limit: int | None = None,
) -> int:
    """Offer unrolled blocks to the incumbent; return the work done.

    Parameters
    ----------
    best
        Need not hold a schedule yet.
    time_limit_s
        Seconds from now.
    threads, seed
        For HiGHS and the local search.
    work_limit
        Most moves, a node counting `run.NODE_WORK`; where it ends the search before the clock does,
        what is offered is the same every time for one seed and thread count.
    """
    if load_ms(best.problem) <= 0.0:
        return 0
    run = PeriodicRun(
        best,
        time_limit_s=time_limit_s,
        threads=threads,
        seed=seed,
        should_stop=should_stop,
        work_limit=work_limit,
    )
    shrinking = _shrinking(run)
    _find_periods(run)
    _polish(run, shrinking)
    return run.work


def _shrinking(run: PeriodicRun) -> list[ShrinkRounds]:
    """Search circles with offload and recompute a little: where there is any, it pays soonest."""
    if not run.may_shrink():
        return []
    # More copies per period shorten it now and then, but no schedule that was measured.
    parts = [
        ShrinkRounds(run, fused=fused, fit_work=FIT_WORK, copies=(1,))
        for fused in run.backward_kinds()
    ]
    for _ in range(_FIRST_ROUNDS):
        for part in parts:
            part.next()
    return parts


def _find_periods(run: PeriodicRun) -> None:
    """Look for the shortest period: local search, MILP, local search."""
    kinds = run.backward_kinds()
    rounds = [CircularRounds(run, CircularSearch(run.best.problem, fused=f)) for f in kinds]
    for each in rounds:
        each.first()
    if run.milp_fits():
        run.ask_milp()
    for each in rounds:
        each.to_the_end()


def _polish(run: PeriodicRun, shrinking: list[ShrinkRounds]) -> None:
    """Polish in turn until the budget is at its end."""
    kinds = run.backward_kinds()
    parts: list[PolishRounds | FitRounds | ShrinkRounds] = [
        PolishRounds(run, fused=fused) for fused in kinds
    ]
    if shrinking:
        parts += [FitRounds(run, fused=fused) for fused in kinds]
        parts += shrinking
    while any([part.next() for part in parts]):  # noqa: C419 - all in turn
        pass
