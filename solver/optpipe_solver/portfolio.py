"""How the time of a solve is shared: local search finds, the MILP finds and proves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.improve.local_search import improve_by_local_search
from optpipe_solver.milp.improve import improve_by_milp, milp_fits

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.schedule import StoppedBy
    from optpipe_solver.incumbent import Incumbent

__all__ = ["improve"]

_FIRST_SEARCH = 0.2
_FIRST_SEARCH_S = 3.0
_MILP = 0.6
"""Shares of the time: a short search, then the model where its size allows, then search again."""


def improve(
    best: Incumbent,
    *,
    time_limit_s: float,
    threads: int,
    seed: int,
    should_stop: Callable[[], bool] | None = None,
) -> StoppedBy:
    """Improve the best schedule known until the time is over or it is proven optimal.

    ``time_limit_s`` counts from the start of the solve. Returns why it ended.
    """

    def left() -> float:
        return time_limit_s - best.seconds()

    def stop() -> bool:
        return should_stop is not None and should_stop()

    if milp_fits(best.problem):
        first = min(_FIRST_SEARCH * left(), _FIRST_SEARCH_S)
        improve_by_local_search(best, time_limit_s=first, seed=seed, should_stop=stop)
        if not best.is_optimal and not stop() and left() > 0:
            share = _MILP * left()
            improve_by_milp(best, time_limit_s=share, threads=threads, seed=seed, should_stop=stop)
    improve_by_local_search(best, time_limit_s=left(), seed=seed + 1, should_stop=stop)
    if best.is_optimal:
        return "optimal"
    return "cancelled" if stop() else "time_limit"
