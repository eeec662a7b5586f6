"""Local search around the best schedules known, for a given time: annealing with restarts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from optpipe_solver.improve import draws
from optpipe_solver.improve.annealing import anneal
from optpipe_solver.improve.compiled import CompiledProblem, Rows
from optpipe_solver.improve.table import table_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optpipe.action import Programs
    from optpipe_solver.incumbent import Incumbent

__all__ = ["improve_by_local_search"]

_FIRST_WORK, _SLICE_WORK = 50_000, 1_000_000
"""Actions simulated between two looks at the clock and whether to stop: up to about 0.1 s.

The first slices are shorter, each twice the one before, so that the first gains come at once.
"""

_HOT, _COLD = (0.05, 0.15, 0.5, 0.02, 1.0), 0.002
"""Temperatures as fractions of the mean duration of a forward, an input and a weight gradient.

Each cooling starts hotter or colder than the one before: cold ones polish and are all that a large
problem has time for, hot ones leave the valley of the start.
"""

_CYCLE = 30
"""Slices of one cooling from hot to cold; then it starts again from one of the best."""

_OFFER_S = 15e-6
"""Seconds per action that the check of an offered schedule takes, until one was timed."""

_OFFER_SHARE = 5
"""Between two offers pass as many times their cost in seconds."""


def improve_by_local_search(
    best: Incumbent,
    *,
    time_limit_s: float,
    seed: int,
    should_stop: Callable[[], bool] | None = None,
    work_limit: int | None = None,
    starts: Sequence[Programs] = (),
) -> int:
    """Search until the time is over, the optimum is proven, or told to stop.

    Parameters
    ----------
    best
        Holds a schedule to start from; improvements go there.
    time_limit_s
        Seconds from now.
    seed
        What is tried, and in which order, is a function of it and of the starts; time only decides
        where that ends.
    work_limit
        Most actions to simulate; with it and time enough, the result is a function of the seed.
    starts
        More legal schedules, best first, from which some of the coolings start.

    Returns
    -------
    The actions simulated, the search's unit of work.
    """
    if best.programs is None:
        return 0
    end = time.perf_counter() + time_limit_s
    search = _Search(best, seed, starts)
    while not best.is_optimal:
        left = end - time.perf_counter() - search.offer_s * search.has_news
        if left <= 0 or (work_limit is not None and search.work >= work_limit):
            break
        if should_stop is not None and should_stop():
            return search.work
        search.run_slice(work_limit)
    search.offer()
    return search.work


class _Elite(NamedTuple):
    """Programs worth starting from, and their objective in ms."""

    rows: Rows
    objective_ms: float


class _Search:
    def __init__(self, best: Incumbent, seed: int, starts: Sequence[Programs]) -> None:
        self.best = best
        self.draw = draws.seeded(seed)
        self.compiled = CompiledProblem.of(best.problem)
        self.by_span = best.problem.objective == "span"
        self.adopted = best.programs
        self.elites = [self._elite(programs) for programs in (best.programs, *starts) if programs]
        self.current = 0
        self.table = table_for(self.compiled, self.elites[0].rows)
        self.objective_ms = self.elites[0].objective_ms
        self.work = self.slices = self.tried = 0
        self.has_news = False
        self.offer_s = _OFFER_S * int(self.table.board.counts.sum())
        self.offered_at = 0.0
        self.scale_ms = self.table.rules.mean_pass_ms

    def run_slice(self, work_limit: int | None) -> None:
        """Anneal for about one slice; offer what got better, but not too often."""
        cycle, step = divmod(self.slices, _CYCLE)
        if step == 0 and self.slices:
            self._next_elite()
        hottest = _HOT[cycle % len(_HOT)]
        cooling = (_COLD / hottest) ** (1 / _CYCLE)
        hot = self.scale_ms * hottest * cooling**step
        budget = min(_SLICE_WORK, _FIRST_WORK << min(self.slices, 10))
        if work_limit is not None:
            budget = min(budget, work_limit - self.work)
        found, work, tried = anneal(
            self.table, self.objective_ms, hot, hot * cooling, budget, self.draw
        )
        self.slices += 1
        self.work += work
        self.tried += tried
        self.objective_ms = found
        self.has_news = self.has_news or found < self.best.objective_ms
        if time.perf_counter() - self.offered_at > _OFFER_SHARE * self.offer_s:
            self.offer()

    def offer(self) -> None:
        """Offer the best schedule if it is better than the incumbent."""
        if not self.has_news:
            return
        self.has_news = False
        best = min((*self.elites, self._found()), key=lambda elite: elite.objective_ms)
        if best.objective_ms >= self.best.objective_ms:
            return
        began = time.perf_counter()
        self.best.offer(self.compiled.decode(best.rows), "local-search")
        self.offered_at = time.perf_counter()
        self.offer_s = self.offered_at - began

    def _found(self) -> _Elite:
        return _Elite(Rows(self.table.best_actions, self.table.best_counts), self.objective_ms)

    def _next_elite(self) -> None:
        """Put down what was found, take in news from elsewhere, and go on from another start.

        Every second cooling starts from the best, the others from each start in turn.
        """
        self.elites[self.current] = self._found()
        news = self.best.programs
        if news is not None and news is not self.adopted:
            self.adopted = news
            known = min(elite.objective_ms for elite in self.elites)
            if self.best.objective_ms < known * (1 - 1e-12):
                self.elites[0] = self._elite(news)
        cycle = self.slices // _CYCLE
        ranks = sorted(range(len(self.elites)), key=lambda i: self.elites[i].objective_ms)
        self.current = ranks[0] if cycle % 2 == 0 else (cycle // 2) % len(self.elites)
        chosen = self.elites[self.current]
        self.table = table_for(self.compiled, chosen.rows, self.table)
        self.objective_ms = chosen.objective_ms

    def _elite(self, programs: Programs) -> _Elite:
        rows = self.compiled.encode(programs)
        return _Elite(rows, self.compiled.length_ms(rows)[self.by_span])
