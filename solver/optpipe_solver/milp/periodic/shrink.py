"""Circles with offload and recompute, searched in rounds, and schedules made of them.

First one micro-batch per period; when that brings nothing any more, super-periods of two and of
three, from the best of it: a fraction of the micro-batches is then treated otherwise than the rest.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from optpipe.action import ActionType
from optpipe.simulate import simulate
from optpipe_solver.families.building_blocks import candidate_blocks
from optpipe_solver.families.repeat_and_squeeze import Squeezer
from optpipe_solver.fit.fit import fit_memory
from optpipe_solver.improve.circular.search import CircularSearch
from optpipe_solver.milp.periodic.run import METHOD
from optpipe_solver.milp.periodic.unroll import POLICIES, unroll

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe_solver.improve.circular.kernel import Circle
    from optpipe_solver.milp.periodic.block import PeriodicBlock
    from optpipe_solver.milp.periodic.run import PeriodicRun

__all__ = ["ShrinkRounds", "fitted", "with_memory"]

_SHRINK_WORK = 20
_RELAXED = (1.0, 2.0, 4.0)
_LOOKED_AT = 16
_STARTS = 4
_IDLE_ROUNDS = 6
_HOT = (0.02, 0.1, 0.3)
_FIT_POLICIES = POLICIES[:2]
_MOST_CELLS = 200


class ShrinkRounds:
    """The local search with modes in rounds: from each start in turn.

    Parameters
    ----------
    run
        The budget, and where schedules are offered.
    fused
        Whether B stands for I and W.
    fit_work
        What it counts to fit one schedule into memory, in moves.
    copies
        Micro-batches per period to search with, one number after another, 1 first.
    """

    def __init__(
        self,
        run: PeriodicRun,
        *,
        fused: bool,
        fit_work: int,
        copies: tuple[int, ...] = (1, 2, 3),
    ) -> None:
        self.run = run
        self.fused = fused
        self.fit_work = fit_work
        self.copies = copies
        self.pool: list[tuple[float, Circle]] = []
        self.singles: list[PeriodicBlock] = []
        self.level = -1
        self.rounds = 0
        self.idle = 0
        self.search = self._search(1)

    def next(self) -> bool:
        """Search from one start, offer what comes of it; return whether to go on."""
        if self.run.is_over() or self.level >= len(self.copies):
            return False
        if (self.level < 0 or self.idle >= _IDLE_ROUNDS) and not self._next_level():
            self.level = len(self.copies)
            return False
        at = self.rounds % len(self.pool)
        ms, circle = self.pool[at]
        moves = int(max(1, min(self.search.moves_per_slice, self.run.left_work())))
        seed = self.run.seed * 1_000_003 + self.rounds
        hot = _HOT[self.rounds // len(self.pool) % len(_HOT)]
        found, judged = self.search.improved(circle, num_moves=moves, seed=seed, hot=hot)
        self.run.work += moves
        self.rounds += 1
        is_shorter = judged < ms * (1 - 1e-9)
        if judged <= ms:
            self.pool[at] = (judged, found)
        is_better = (is_shorter or self.rounds <= len(self.pool)) and self._offered(found)
        self.idle = 0 if is_better or is_shorter else self.idle + 1
        return True

    def _next_level(self) -> bool:
        """Go on to more micro-batches per period; return whether there is anything to search."""
        self.level += 1
        if self.level >= len(self.copies):
            return False
        copies = self.copies[self.level]
        if copies == 1:
            self.pool = self._starts()
        else:
            if copies * len(self.search.problem.stages) > _MOST_CELLS:
                return False
            self.singles = self.singles or self._best_blocks()
            self.search = self._search(copies)
            self.pool = list(self._repeated(self.singles, copies))
        self.rounds = self.idle = 0
        return bool(self.pool)

    def _search(self, copies: int) -> CircularSearch:
        problem = self.run.best.problem
        return CircularSearch(problem, fused=self.fused, copies=copies, shrinks=True)

    def _starts(self) -> list[tuple[float, Circle]]:
        """Return the best of the building blocks of several memory limits, shrunk to the real."""
        found: list[tuple[float, Circle]] = []
        for factor in _RELAXED:
            for block in candidate_blocks(with_memory(self.search.problem, factor))[:_LOOKED_AT]:
                if self.run.is_over():
                    break
                circle = self.search.shrunk(self.search.from_times(block), seed=self.run.seed)
                found.append((self.search.charged_ms(circle), circle))
                self.run.work += _SHRINK_WORK
        ranked = sorted(range(len(found)), key=lambda at: (found[at][0], at))
        distinct = {found[at][0]: found[at] for at in reversed(ranked) if found[at][0] < inf}
        return [distinct[ms] for ms in sorted(distinct)[:_STARTS]]

    def _best_blocks(self) -> list[PeriodicBlock]:
        ranked = sorted(range(len(self.pool)), key=lambda at: (self.pool[at][0], at))
        blocks = [self.search.block_of(self.pool[at][1]) for at in ranked]
        return [block for block in blocks if block is not None]

    def _repeated(self, blocks: list[PeriodicBlock], copies: int) -> Iterator[tuple[float, Circle]]:
        for block in blocks:
            circle = self.search.from_block(block.repeated(copies))
            if circle is not None:
                yield self.search.charged_ms(circle), circle

    def _offered(self, circle: Circle) -> bool:
        block = self.search.block_of(circle)
        if block is None:
            return False
        problem, better = self.run.best.problem, False
        for programs in fitted(problem, block):
            self.run.work += self.fit_work
            length = simulate(problem, programs).objective_ms(problem.objective)
            if length < self.run.best.objective_ms:
                better |= self.run.best.offer(programs, METHOD)
        return better


def fitted(problem: Problem, block: PeriodicBlock) -> Iterator[Programs]:
    """Yield schedules made of a block: as it is, and its order of F and I made to fit anew.

    Its transfers are those of the steady state. Warm-up and cool-down need fewer: for them
    `fit.fit_memory` decides again, of the order as it is and as it is squeezed.
    """
    programs = unroll(problem, block)
    yield programs
    kept = block.kept()
    orders = [unroll(problem, kept)]
    if kept.is_plain:
        relaxed = _with_room(problem, kept)
        squeezer = Squeezer.in_bytes(relaxed, fused=_is_fused(kept))
        times = kept.squeezable(relaxed)
        made = [squeezer.squeeze(times, policy) for policy in _FIT_POLICIES]
        orders += [each.programs(len(problem.stages)) for each in made if each is not None]
    for order in orders:
        found = fit_memory(problem, order, tries=2)
        if found is not None:
            yield found


def with_memory(problem: Problem, factor: float) -> Problem:
    """Return the problem with so many times the memory on every device."""
    devices = [
        device.model_copy(update={"memory_bytes": min(2**53, int(device.memory_bytes * factor))})
        for device in problem.devices
    ]
    return problem.model_copy(update={"devices": devices})


def _with_room(problem: Problem, kept: PeriodicBlock) -> Problem:
    """Return the problem with the memory that a block takes which keeps everything."""
    devices = [
        device.model_copy(
            update={"memory_bytes": max(device.memory_bytes, peak + device.reserved_bytes)}
        )
        for device, peak in zip(problem.devices, kept.peaks(problem), strict=True)
    ]
    return problem.model_copy(update={"devices": devices})


def _is_fused(block: PeriodicBlock) -> bool:
    return ActionType.BACKWARD_WEIGHT not in block.kinds()
