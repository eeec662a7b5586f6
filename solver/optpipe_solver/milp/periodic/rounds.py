"""The parts of the periodic search that go on in rounds, each with its turn."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from optpipe.simulate import simulate
from optpipe_solver.families.building_blocks import candidate_blocks
from optpipe_solver.fit.fit import fit_memory
from optpipe_solver.milp.periodic.polish import Polisher
from optpipe_solver.milp.periodic.run import METHOD
from optpipe_solver.milp.periodic.shrink import with_memory

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe_solver.families.repeat_and_squeeze import Squeezed
    from optpipe_solver.improve.circular.kernel import Circle
    from optpipe_solver.improve.circular.search import CircularSearch
    from optpipe_solver.milp.periodic.block import PeriodicBlock
    from optpipe_solver.milp.periodic.run import PeriodicRun

__all__ = ["FIT_WORK", "POLISH_WORK", "CircularRounds", "FitRounds", "PolishRounds"]

POLISH_WORK = 20
"""Moves of the local search that count as much work as one move of polishing."""

FIT_WORK = 1000
"""The same for fitting one schedule into memory."""

_LOOKED_AT = 64
_STARTS = 4
_IDLE_ROUNDS = 6
_POLISHED = 3
_POLISH_ROUND = 200
_POLISH_ACTIONS = 300_000
_BEATEN = 1.1
_RELAXED = (2.0, 4.0, 1.5, 8.0, 3.0)


class CircularRounds:
    """The local search in rounds: from each start in turn, until many rounds brought nothing."""

    def __init__(self, run: PeriodicRun, search: CircularSearch) -> None:
        self.run = run
        self.search = search
        self.pool: list[tuple[float, Circle]] = []
        self.rounds = 0
        self.idle = 0

    def first(self) -> None:
        """Look at building blocks, keep the best as starts, and search once from each."""
        looked = [
            self.search.from_times(block)
            for block in candidate_blocks(self.run.best.problem)[:_LOOKED_AT]
        ]
        ranked = sorted(((self.search.charged_ms(c), n) for n, c in enumerate(looked)))
        self.pool = [(ms, looked[n]) for ms, n in ranked[:_STARTS] if ms < inf]
        for _ in range(len(self.pool)):
            self.next()

    def to_the_end(self) -> None:
        """Search until rounds bring nothing any more, for at most half of the time left.

        The MILP's blocks are starts too.
        """
        for block in self.run.blocks:
            self._add(block)
        end = 0.5 * self.run.left_s()
        work = 0.5 * self.run.left_work()
        while self.run.left_s() > end and self.run.left_work() > work and self.next():
            pass

    def _add(self, block: PeriodicBlock) -> None:
        circle = self.search.from_block(block)
        if circle is not None:
            self.pool.insert(0, (self.search.charged_ms(circle), circle))

    def next(self) -> bool:
        """Search from one start; return whether another round is worth it."""
        if self.run.is_over() or not self.pool or self.idle >= _IDLE_ROUNDS:
            return False
        at = self.rounds % len(self.pool)
        ms, circle = self.pool[at]
        moves = int(min(self.search.moves_per_slice, self.run.left_work()))
        seed = self.run.seed * 1_000_003 + self.rounds
        found, judged = self.search.improved(circle, num_moves=moves, seed=seed)
        self.run.work += moves
        self.rounds += 1
        if judged <= ms:
            self.pool[at] = (judged, found)
        self.idle = 0 if self._offered(found) or judged < ms * (1 - 1e-9) else self.idle + 1
        return True

    def _offered(self, circle: Circle) -> bool:
        block = self.search.block_of(circle)
        if block is None:
            return False
        self.run.note(block, self.search.judged_ms(circle))
        return self.run.offer(block)


class PolishRounds:
    """Polishing in rounds, of the blocks whose squeezed schedules are shortest."""

    def __init__(self, run: PeriodicRun, *, fused: bool) -> None:
        self.run = run
        self.moves = _moves(run.best.problem)
        self.polishers = _polishers(run, run.best.problem, fused=fused, most=_POLISHED)
        self.rounds = 0

    def next(self) -> bool:
        """Polish one block for a round, offer it where it got better; return whether to go on."""
        if self.run.is_over() or not self.polishers or self._is_beaten():
            return False
        polisher = self.polishers[self.rounds % len(self.polishers)]
        better = polisher.run(self.moves)
        self.run.work += POLISH_WORK * self.moves
        self.rounds += 1
        if better or self.rounds <= len(self.polishers):
            made = polisher.result()
            if made is not None:
                self.run.offer_squeezed(made)
        return True

    def _is_beaten(self) -> bool:
        """Whether something offloaded is so much better that this will not catch up."""
        return self.polishers[0].best_ms > _BEATEN * self.run.best.objective_ms


class FitRounds:
    """Blocks that take more memory than there is, polished, then offloaded and recomputed to fit.

    A relaxed problem, of a few times the memory, is polished; `fit.fit_memory` moves what is too
    much to the host, or drops it. How much too much pays is tried.
    """

    def __init__(self, run: PeriodicRun, *, fused: bool) -> None:
        self.run = run
        self.fused = fused
        self.moves = max(2, _moves(run.best.problem) // 4)
        self.polishers: list[Polisher | None] = [None] * len(_RELAXED)
        self.fitted_ms = [inf] * len(_RELAXED)
        self.rounds = 0

    def next(self) -> bool:
        """Polish and fit at one relaxation; return whether to go on."""
        if self.run.is_over():
            return False
        at = self._turn()
        self.rounds += 1
        polisher = self.polishers[at]
        if polisher is None:
            relaxed = with_memory(self.run.best.problem, _RELAXED[at])
            found = _polishers(self.run, relaxed, fused=self.fused, most=1)
            if not found:
                return self.rounds < len(_RELAXED)
            polisher = self.polishers[at] = found[0]
        else:
            polisher.run(self.moves)
            self.run.work += POLISH_WORK * self.moves
        self._offer(at, polisher.current())
        return True

    def _turn(self) -> int:
        """Return whose turn it is: each first, then every other time the best so far."""
        if self.rounds < len(_RELAXED) or self.rounds % 2 == 0:
            return self.rounds // (1 if self.rounds < len(_RELAXED) else 2) % len(_RELAXED)
        return min(range(len(_RELAXED)), key=self.fitted_ms.__getitem__)

    def _offer(self, at: int, made: Squeezed | None) -> None:
        self.run.work += FIT_WORK
        if made is None:
            return
        problem = self.run.best.problem
        fitted = fit_memory(problem, made.programs(len(problem.stages)), tries=2)
        if fitted is None:
            return
        length = simulate(problem, fitted).objective_ms(problem.objective)
        self.fitted_ms[at] = min(self.fitted_ms[at], length)
        if length < self.run.best.objective_ms:
            self.run.best.offer(fitted, METHOD)


def _moves(problem: Problem) -> int:
    actions = 3 * len(problem.stages) * problem.num_microbatches
    return max(4, min(_POLISH_ROUND, _POLISH_ACTIONS // actions))


def _polishers(run: PeriodicRun, problem: Problem, *, fused: bool, most: int) -> list[Polisher]:
    """Return polishers of the blocks whose squeezed schedules are shortest, best first."""
    actions = 3 * len(problem.stages) * problem.num_microbatches
    looked = max(3, min(_LOOKED_AT, _POLISH_ACTIONS // actions))
    plain = [block.squeezable(problem) for block in run.blocks if block.is_plain]
    found: list[Polisher] = []
    for number, block in enumerate([*plain, *candidate_blocks(problem)[:looked]]):
        if run.is_over():
            break
        seed = run.seed * 1_000_003 + number
        found.append(Polisher(problem, block, fused=fused, seed=seed))
        run.work += POLISH_WORK
    return sorted(found, key=lambda polisher: polisher.best_ms)[:most]
