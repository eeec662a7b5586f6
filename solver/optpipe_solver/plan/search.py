"""The search over cuts: gather by bound, judge quickly, move cut points, halve, solve the last.

Nothing is dropped as proven but by its lower bound against a schedule that exists. What is dropped
because a short search left it behind is said to be just that.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from optpipe_solver.plan.bounds import any_cut_bound
from optpipe_solver.plan.candidate import Candidate
from optpipe_solver.plan.cuts import best_cuts, even_cut, roomiest_cut
from optpipe_solver.plan.lines import Line, natural_order
from optpipe_solver.plan.quick import judge_quickly, search
from optpipe_solver.plan.runs import RunTable
from optpipe_solver.plan.start import cut_of
from optpipe_solver.result import Progress
from optpipe_solver.solve import solve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe.action import Programs
    from optpipe.model import Model
    from optpipe.problem import Problem
    from optpipe_solver.plan.clock import Clock
    from optpipe_solver.plan.lines import Lines

__all__ = ["Search"]

_GATHER, _JUDGE, _MOVE, _HALVE = 0.2, 0.25, 0.25, 0.35
"""Shares of the time left at its start that a phase may take; the rest solves the finalists."""

_EXPLORE = 0.6
"""While more than this share is left, the first three phases are repeated for lines not yet cut."""

_SEARCH_SHARE, _SEARCH_MOST_S = 0.005, 0.5
"""Local search per candidate in the quick judgement, as a share of the time and in seconds."""

_LINE_TURN = 0.25
"""Share of what is left for gathering that one line may take."""

_CUTS_PER_LINE, _CENTRES, _TRIED_NEIGHBOURS = 3, 3, 12
_SEMIFINALISTS, _FINALISTS = 8, 2


class Search:
    """All candidates of a model, and the best of them.

    Parameters
    ----------
    model
        What is cut.
    lines
        Where its stages may go.
    clock
        The time there is.
    threads, seed
        Of the final solves; the seed also of the local searches.
    on_progress
        Told every improvement of the best schedule over all candidates.
    """

    def __init__(
        self,
        model: Model,
        lines: Lines,
        clock: Clock,
        *,
        threads: int,
        seed: int,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self.model, self.lines, self.clock = model, lines.lines, clock
        self.threads, self.seed, self.on_progress = threads, seed, on_progress
        self.candidates: dict[tuple[tuple[int, ...], tuple[int, ...]], Candidate] = {}
        self.best: Candidate | None = None
        self.line_bounds = {line: any_cut_bound(model, line.order) for line in self.lines}
        self.pending = sorted(self.lines, key=lambda line: self.line_bounds[line])
        self.num_cut_lines = 0
        self.table = RunTable(model)
        self.even = self._add(*self._naive(), is_even=True)

    def run(self) -> None:
        """Search until the time is over or nothing better can exist in the set."""
        self._judge(self.even)
        while not self.is_finished:
            self._gather(self.clock.turn(_GATHER))
            self._judge_all(self.clock.turn(_JUDGE))
            self._move(self.clock.turn(_MOVE))
            is_late = self.clock.left() <= _EXPLORE * self.clock.limit_s
            if is_late or self.clock.asked() or not self.pending:
                break
        self._halve(self.clock.turn(_HALVE))
        self._solve_finalists()

    def adopt(self, problem: Problem, programs: Programs) -> None:
        """Begin with what an earlier search found, where it is a cut of a line of this one."""
        sizes = cut_of(self.model, problem)
        lines = (self.even.line, *self.lines)
        line = next((held for held in lines if held.placement == problem.placement), None)
        if sizes is not None and line is not None:
            candidate = self._add(line, sizes)
            candidate.best.offer(programs, "given start")
            self._tell(candidate)

    @property
    def objective_ms(self) -> float:
        """The best objective over all candidates; inf where there is none."""
        return math.inf if self.best is None else self.best.objective_ms

    @property
    def bound_ms(self) -> float:
        """What no schedule of any cut of any line searched, nor of the even cut, can beat."""
        return min(*self.line_bounds.values(), self.even.bound_ms, self.objective_ms)

    @property
    def is_finished(self) -> bool:
        """Whether the best known is proven the best of the set."""
        return self.bound_ms >= self.objective_ms * (1 - 1e-9)

    @property
    def nothing_fits(self) -> bool:
        """Whether every cut of every line searched is proven to exceed some device."""
        fits = any(bound < math.inf for bound in self.line_bounds.values())
        return bool(self.even.misfit) and not fits

    def _naive(self) -> tuple[Line, tuple[int, ...]]:
        order = natural_order(self.model)
        return Line("linear", 1, order), even_cut(self.model.num_layers, len(order))

    def _add(self, line: Line, sizes: tuple[int, ...], *, is_even: bool = False) -> Candidate:
        key = (line.placement, sizes)
        if key not in self.candidates:
            self.candidates[key] = Candidate(self.model, line, sizes, is_even=is_even)
        return self.candidates[key]

    def _gather(self, phase: Clock) -> None:
        """Add the best cuts of every line, and raise the lines' bounds."""
        while self.pending and not phase.is_over() and not self.is_finished:
            line = self.pending.pop(0)
            if self.line_bounds[line] >= self.objective_ms:
                continue
            turn = phase.turn(_LINE_TURN)
            cuts = best_cuts(self.table, line, cap_ms=self.objective_ms, should_stop=turn.is_over)
            self.num_cut_lines += 1
            self.line_bounds[line] = cuts.bound_ms
            if not cuts.sizes and cuts.bound_ms < self.objective_ms:
                self._add(line, even_cut(self.model.num_layers, len(line.placement)))
            for sizes in cuts.sizes[:_CUTS_PER_LINE]:
                self._descend(self._add(line, sizes), turn)
            if line.chunks == 1:
                self._add(line, roomiest_cut(self.table, line)[0])

    def _descend(self, centre: Candidate, turn: Clock) -> None:
        """Add neighbours while their whole bound gets better: it knows memory, the measure not."""
        while not turn.is_over():
            near = []
            for sizes in _neighbours(centre.sizes):
                near.append(self._add(centre.line, sizes))
                if turn.is_over():
                    break
            best = min(near, key=_by_bound, default=centre)
            if best.bound_ms >= centre.bound_ms:
                return
            centre = best

    def _judge_all(self, phase: Clock) -> None:
        """Judge the few best cuts of each line by bound."""
        tried: Counter[Line] = Counter()
        for candidate in sorted(self.candidates.values(), key=_by_bound):
            if phase.is_over() and self.best is not None:
                return
            if tried[candidate.line] < _CUTS_PER_LINE:
                self._judge(candidate)
            tried[candidate.line] += 1

    def _judge(self, candidate: Candidate, parent: Candidate | None = None) -> None:
        """Give a candidate a quick value where its bound leaves a chance."""
        if candidate.quick_ms is not None or not self._is_open(candidate):
            return
        programs = None if parent is None else parent.best.programs
        judge_quickly(
            candidate,
            relatives=() if programs is None else (programs,),
            search_s=min(_SEARCH_SHARE * self.clock.limit_s, _SEARCH_MOST_S),
            seed=self.seed,
            should_stop=self.clock.is_over,
        )
        self._tell(candidate)

    def _is_open(self, candidate: Candidate) -> bool:
        return not candidate.misfit and not candidate.cannot_beat(self.objective_ms)

    def _tell(self, candidate: Candidate) -> None:
        """Make a candidate the best if it is."""
        if candidate.objective_ms >= self.objective_ms:
            return
        self.best = candidate
        if self.on_progress is not None:
            method = f"{candidate.name} {candidate.best.method}"
            now, best = self.clock.seconds(), candidate.best
            found = (best.objective_ms, self.bound_ms, best.programs, candidate.problem)
            self.on_progress(Progress(now, method, *found))

    def _ranked(self) -> list[Candidate]:
        known = [held for held in self.candidates.values() if held.best.programs is not None]
        return sorted(known, key=lambda held: (held.objective_ms, held.bound_ms))

    def _move(self, phase: Clock) -> None:
        """Move cut points of the best candidates of different lines while that helps."""
        centres = self._ranked()[:_CENTRES]
        while centres and not phase.is_over() and not self.is_finished:
            centre = centres.pop(0)
            better = self._best_neighbour(centre, phase)
            if better is not None:
                centres.append(better)

    def _best_neighbour(self, centre: Candidate, phase: Clock) -> Candidate | None:
        near = [self._add(centre.line, sizes) for sizes in _neighbours(centre.sizes)]
        promising = sorted((held for held in near if held.quick_ms is None), key=_by_bound)
        found = None
        for candidate in promising[:_TRIED_NEIGHBOURS]:
            if phase.is_over():
                break
            self._judge(candidate, centre)
            if candidate.objective_ms < (found or centre).objective_ms:
                found = candidate
        return found

    def _halve(self, phase: Clock) -> None:
        """Search the best ones longer and longer, half as many each time; the even cut stays."""
        pool = self._ranked()[:_SEMIFINALISTS]
        while len(pool) > _FINALISTS and not phase.is_over() and not self.is_finished:
            rounds = math.ceil(math.log2(len(pool) / _FINALISTS))
            entered = [*pool, *({self.even} - set(pool))]
            seconds = phase.left() / rounds / len(entered)
            for candidate in filter(self._is_open, entered):
                search(candidate, seconds, self.seed + rounds, self.clock.asked)
                self._tell(candidate)
            pool = sorted(pool, key=lambda held: held.objective_ms)
            pool = pool[: max(_FINALISTS, len(pool) // 2)]

    def _solve_finalists(self) -> None:
        """Solve the best two with everything, sharing the time; then others, if any is left."""
        for number in range(len(self.candidates)):
            waiting = next(self._unsolved(), None)
            if waiting is None or self.clock.is_over() or self.is_finished:
                return
            self._solve(waiting, self.clock.left() / max(1, _FINALISTS - number))

    def _unsolved(self) -> Iterator[Candidate]:
        """Yield who may still win or improve: the best known first, then those never judged."""
        unjudged = [held for held in self.candidates.values() if held.best.programs is None]
        for candidate in [*self._ranked(), *sorted(unjudged, key=_by_bound)]:
            done = candidate.is_solved or candidate.best.is_optimal
            if not done and (candidate is self.best or self._is_open(candidate)):
                yield candidate

    def _solve(self, candidate: Candidate, seconds: float) -> None:
        result = solve(
            candidate.problem,
            time_limit_s=max(seconds, 0.01),
            threads=self.threads,
            seed=self.seed,
            start=candidate.best.programs,
            start_method=candidate.best.method,
            on_progress=partial(self._hear, candidate),
            should_stop=self.clock.asked,
        )
        candidate.is_solved = True
        if result.schedule is not None:
            candidate.best.offer(result.schedule.programs, result.schedule.provenance.method)
            if result.bound_ms is not None:
                candidate.bound_ms = max(candidate.bound_ms, result.bound_ms)
                candidate.best.offer_bound(result.bound_ms, "solve")
        self._tell(candidate)

    def _hear(self, candidate: Candidate, news: Progress) -> None:
        """Take what a solve finds as soon as it does."""
        if news.programs is not None and candidate.best.offer(news.programs, news.method):
            self._tell(candidate)


def _by_bound(candidate: Candidate) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
    return (candidate.bound_ms, candidate.line.placement, candidate.sizes)


def _neighbours(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the cuts with one layer less on one stage and one more on another."""
    for giver, size in enumerate(sizes):
        for taker in range(len(sizes)):
            if giver != taker and size > 1:
                moved = list(sizes)
                moved[giver] -= 1
                moved[taker] += 1
                yield tuple(moved)
