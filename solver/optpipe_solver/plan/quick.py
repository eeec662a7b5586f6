"""A quick value of a candidate: the families that are cheap, programs of relatives, a search."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.families import FAMILIES
from optpipe_solver.improve.search.local_search import improve_by_local_search
from optpipe_solver.starts import all_starts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from optpipe.action import Programs
    from optpipe_solver.plan.candidate import Candidate

__all__ = ["judge_quickly", "search"]

_SLOW = frozenset({"greedy"})
_SLOW_FROM_CELLS = 300
"""Families that take longer than all others together, and from which size on they are left out."""


def judge_quickly(
    candidate: Candidate,
    *,
    relatives: Iterable[Programs] = (),
    search_s: float,
    seed: int,
    should_stop: Callable[[], bool],
) -> None:
    """Find programs for a candidate and its ``quick_ms``, unless nothing fits.

    Parameters
    ----------
    candidate
        Any.
    relatives
        Programs of cuts with the same placement: they are programs of this one too, and often
        within its memory. Where one is, families are left out.
    search_s
        Seconds of local search.
    seed
        Of the local search.
    should_stop
        Asked between families once something is known, and by the search.
    """
    best = candidate.best
    for programs in relatives:
        best.offer(programs, "neighbour")
    if best.programs is None:
        _try_families(candidate, should_stop)
    search(candidate, search_s, seed, should_stop)
    if best.programs is not None:
        candidate.quick_ms = best.objective_ms


def search(
    candidate: Candidate, seconds: float, seed: int, should_stop: Callable[[], bool]
) -> None:
    """Improve a candidate's programs by local search."""
    if candidate.best.programs is not None and seconds > 0:
        improve_by_local_search(
            candidate.best, time_limit_s=seconds, seed=seed, should_stop=should_stop
        )


def _try_families(candidate: Candidate, should_stop: Callable[[], bool]) -> None:
    problem = candidate.problem
    cells = len(problem.stages) * problem.num_microbatches
    names = [
        family.name for family in FAMILIES if family.name not in _SLOW or cells < _SLOW_FROM_CELLS
    ]
    for start in all_starts(problem, names):
        if start.programs is not None and start.legal:
            candidate.best.offer(start.programs, start.method)
        if candidate.best.programs is not None and should_stop():
            return
