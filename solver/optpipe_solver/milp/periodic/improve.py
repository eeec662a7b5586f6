"""The portfolio's part: periodic blocks, unrolled, squeezed and offered as ``periodic``.

First the local search over circular orders from building blocks (any size) for the shortest period,
then the MILP where its size allows. The rest of the time blocks are polished for the length of what
they are squeezed to, and, where activations can be offloaded or recomputed, blocks that need more
memory are polished and made to fit. Work is counted in moves of the local search.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.improve.circular import CircularSearch
from optpipe_solver.milp.periodic.items import load_ms
from optpipe_solver.milp.periodic.rounds import CircularRounds, FitRounds, PolishRounds
from optpipe_solver.milp.periodic.run import METHOD, PeriodicRun

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_solver.incumbent import Incumbent

__all__ = ["METHOD", "improve_by_periodic"]


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
    _find_periods(run)
    _polish(run)
    return run.work


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


def _polish(run: PeriodicRun) -> None:
    """Polish in turn until the budget is at its end."""
    kinds = run.backward_kinds()
    parts: list[PolishRounds | FitRounds] = [PolishRounds(run, fused=fused) for fused in kinds]
    if run.may_shrink():
        parts += [FitRounds(run, fused=fused) for fused in kinds]
    while any([part.next() for part in parts]):  # noqa: C419 - all in turn
        pass
