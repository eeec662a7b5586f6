"""Local search around the best schedules known, for a given time: annealing with restarts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from optpipe_solver.arrays.encoding import CompiledProblem
from optpipe_solver.feasibility import refuse_unless
from optpipe_solver.jit import seeded
from optpipe_solver.local_search.annealing import anneal, best_rows, course_of, table_for
from optpipe_solver.local_search.board import rows_on
from optpipe_solver.local_search.propose import some_stretch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe_solver.arrays.encoding import Rows
    from optpipe_solver.budget import Stop
    from optpipe_solver.incumbent import Incumbent

__all__ = ["improve_by_local_search", "improve_by_stretches", "local_search_can_improve"]


_FIRST_WORK, _SLICE_WORK = 50_000, 1_000_000
"""Minimum of actions simulated between two offers.

The first slices are shorter, each twice the one before, so that the first gains arrive early.
"""

_LOOK_S, _LEAST_WORK = 0.05, 5_000
"""Seconds between two checks of clock and stop, by the speed seen; minimum work."""

_COLD, _SMALL_COLD = 0.002, 0.01
_COOLINGS = ((0.05, 1), (0.15, 1), (0.5, 1), (0.02, 1), (1.0, 1))
_SMALL_COOLINGS = ((0.05, 1), (0.4, 2), (0.2, 2), (1.0, 4), (0.4, 2), (1.0, 8))
"""Start temperature of each cooling, and its length as a multiple of a short one.

Temperatures are fractions of the mean duration of a forward, an input and a weight gradient; all
fall to the same. Cold coolings polish, and a large problem has time for no others. Coolings from
the middle keep half of their start. From 1.0 nothing of it is left, and only a long cooling is as
good. On a V with offload (4 devices, 8 micro-batches) one of 0.3 s ends 15% above the best known.
One of 2.5 s ends at most 2% above (measured).
"""

_STRETCH_COOLINGS, _STRETCH_COLD = ((0.3, 0.2), (0.2, 0.2)), 0.03
"""The same for coolings of one stretch of time each: short, as so few actions move.

They find schedules that differ on every device, but only for a while. A cold cooling of all places
does not reach these, and a hot one loses them.
"""

_SMALL, _LEAST_CHAINS = 100, 3
"""Cells up to which a problem is small; minimum number of schedules that it keeps apart."""

_CYCLE_PER_CELL, _CYCLE_WORK = 100_000, 30_000_000
"""Actions simulated in one cooling from hot to cold: per cell, at most.

The next cooling starts again from one of the best.
"""

_DECODE_S = 2e-6
"""Seconds per action to write an offer down, in addition to evaluating it, until one was timed."""

_OFFER_WORK = 1000
"""Actions simulated between two offers, for each action offered: about five times an offer's cost.

It counts work, not seconds: otherwise the machine's speed would choose among equal offers.
"""


def local_search_can_improve(problem: Problem) -> bool:
    """Whether the moves cover all programs of a problem: they make no pairs."""
    return not problem.pairs


def _refuse_pairs(problem: Problem, part: str) -> None:
    rule = "problems without pairs, for which improve_by_pairing is made"
    refuse_unless(local_search_can_improve(problem), part, problem, rule)


def improve_by_local_search(best: Incumbent, stop: Stop) -> None:
    """Search until the turn is over or the optimum is proven.

    Coolings start from the best schedule and its runners-up. The seed and these starts decide the
    moves and their order; time only decides where the search ends. Work is counted in actions
    simulated.
    """
    _refuse_pairs(best.problem, "improve_by_local_search")
    if best.programs is not None:
        _search(_LocalSearch(best, stop.seed, best.runners_up()), stop)


def improve_by_stretches(best: Incumbent, stop: Stop) -> None:
    """Search as `improve_by_local_search`, one stretch of time after the other, from the best.

    Only small problems are searched: others take longer to cool than there is time.
    """
    _refuse_pairs(best.problem, "improve_by_stretches")
    if best.programs is not None and _is_small(best.problem):
        _search(_Stretches(best, stop.seed, ()), stop)


def _search(search: _LocalSearch, stop: Stop) -> None:
    most = stop.left_work
    is_told = False
    while not search.best.is_optimal and search.work < most and not is_told:
        left_s = stop.left_s() - search.offer_s * search.has_news
        if left_s <= 0:
            break
        is_told = stop.is_told()
        if not is_told:
            search.run(min(left_s, _LOOK_S), most)
    if not is_told:
        search.offer()
    stop.spend(search.work)


def _is_small(problem: Problem) -> bool:
    return len(problem.stages) * problem.num_microbatches <= _SMALL


class _Elite(NamedTuple):
    """Programs worth starting from, and their objective in ms."""

    rows: Rows
    objective_ms: float


class _LocalSearch:
    def __init__(self, best: Incumbent, seed: int, starts: Sequence[Programs]) -> None:
        self.best = best
        self.draw = seeded(seed)
        self.compiled = CompiledProblem.of(best.problem)
        cells = self.compiled.times.num_cells
        self.adopted = best.programs
        self.elites = [self._elite(programs) for programs in (best.programs, *starts) if programs]
        self.current = 0
        if _is_small(best.problem):
            self.elites += self.elites[:1] * (_LEAST_CHAINS - len(self.elites))
        self.table = table_for(self.compiled, self.elites[0].rows)
        self.course = course_of(self.table, self.elites[0].objective_ms)
        is_small = _is_small(best.problem)
        self.coolings: Sequence[tuple[float, float]] = _SMALL_COOLINGS if is_small else _COOLINGS
        self.cold = _SMALL_COLD if is_small else _COLD
        self.short_work = _CYCLE_PER_CELL * cells
        self.work = self.cycle = self.before = 0
        self.slice_work = self.slice_end = _FIRST_WORK
        self.speed = 0.0
        self.has_news = False
        num_actions = int(self.table.board.counts.sum())
        self.offer_s = best.evaluate_s + _DECODE_S * num_actions
        self.offer_work, self.next_offer = _OFFER_WORK * num_actions, 0

    def run(self, seconds: float, most_work: float) -> None:
        """Anneal for about some seconds; offer better schedules at a slice's end, not too often."""
        chunk = max(_LEAST_WORK, int(seconds * self.speed))
        until = int(min(self.work + chunk, self.slice_end, most_work))
        began = time.perf_counter()
        self._anneal(until - self.before)
        took = time.perf_counter() - began
        self.speed = (self.before + int(self.course.counts[0]) - self.work) / max(took, 1e-4)
        self.work = self.before + int(self.course.counts[0])
        self.has_news = self.has_news or self.objective_ms < self.best.objective_ms
        if self.work >= self.slice_end:
            self._end_slice()

    def _anneal(self, until: int) -> None:
        scale_ms = self.table.rules.mean_pass_ms
        hot = self.coolings[self.cycle % len(self.coolings)][0] * scale_ms
        cold = self.cold * scale_ms
        anneal(self.table, self.course, hot, cold, self.cycle_work, until, self.draw)

    def _end_slice(self) -> None:
        """Update the starts: always after the same work, so that the seed decides the result."""
        if self.work >= self.next_offer:
            self.offer()
        if self.course.counts[0] >= self.cycle_work:
            self._next_elite()
        self.slice_work = min(2 * self.slice_work, _SLICE_WORK)
        self.slice_end = min(self.work + self.slice_work, self.before + self.cycle_work)

    @property
    def cycle_work(self) -> int:
        """Actions to simulate in this cooling."""
        times = self.coolings[self.cycle % len(self.coolings)][1]
        return min(_CYCLE_WORK, int(times * self.short_work))

    @property
    def objective_ms(self) -> float:
        """The best objective of this cooling's start and all it has seen, in ms."""
        return float(self.course.values[2])

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
        self.offer_s = time.perf_counter() - began
        self.next_offer = self.work + self.offer_work

    def _found(self) -> _Elite:
        return _Elite(best_rows(self.table), self.objective_ms)

    def _next_elite(self) -> None:
        """Record the result, add schedules found elsewhere, and go on from another start.

        Every second cooling starts from the best, the others from each start in turn.
        """
        self.elites[self.current] = self._found()
        news = self.best.programs
        if news is not None and news is not self.adopted:
            self.adopted = news
            known = min(elite.objective_ms for elite in self.elites)
            if self.best.objective_ms < known * (1 - 1e-12):
                self.elites[0] = self._elite(news)
        self.cycle += 1
        self.before = self.work
        ranks = sorted(range(len(self.elites)), key=lambda i: self.elites[i].objective_ms)
        self.current = self._choose(ranks)
        chosen = self.elites[self.current]
        self.table = table_for(self.compiled, chosen.rows, self.table)
        self.course = course_of(self.table, chosen.objective_ms)

    def _choose(self, ranks: list[int]) -> int:
        """Return the number of the start that the next cooling has, of all from best to worst."""
        return ranks[0] if self.cycle % 2 == 0 else (self.cycle // 2) % len(self.elites)

    def _elite(self, programs: Programs) -> _Elite:
        rows = self.compiled.encode(programs)
        return _Elite(rows, self.compiled.objective_ms(rows))


class _Stretches(_LocalSearch):
    """A search that moves actions of one stretch of time, then of another, always from the best.

    If a cooling ends as good as its best, the next one starts from its end. Equally good schedules
    differ, and so do the improvements after them.
    """

    def __init__(self, best: Incumbent, seed: int, starts: Sequence[Programs]) -> None:
        super().__init__(best, seed, starts)
        self.coolings, self.cold = _STRETCH_COOLINGS, _STRETCH_COLD
        self._look_at_a_stretch()

    def _next_elite(self) -> None:
        super()._next_elite()
        self._look_at_a_stretch()

    def _look_at_a_stretch(self) -> None:
        rows, scratch = self.elites[self.current].rows, self.table.work
        self.table.focus[:] = some_stretch(self.compiled, rows, scratch, self.draw)

    def _choose(self, ranks: list[int]) -> int:
        return ranks[0]

    def _found(self) -> _Elite:
        _, objective, best = self.course.values
        if objective > best:
            return super()._found()
        return _Elite(rows_on(self.table.board), self.objective_ms)
