"""Building blocks that need not be uniform, annealed for the length of the whole schedule.

Annealing (Kirkpatrick et al. 1983) changes the waits of one micro-batch along its chain and the
period of a building block. The list scheduler (`ListRule.BLOCK`) turns each block into a schedule.
So the cost includes warm-up and cool-down, and schedules keep the memory limits. The search space
does not grow with the number of micro-batches. It runs on problems with more than 60,000 ordering
decisions. On `6.2b-p64-m512-32.0a` it finds 65,221 ms within 30 units of work. The best family has
66,024 ms there, and the bound is 63,379 ms. On smaller problems it gained nothing (measured).
"""

from __future__ import annotations

from math import exp, inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.arrays.list_scheduler import (
    Early,
    ListRule,
    ListScheduler,
    Policy,
    SplitBackward,
)
from optpipe_solver.families.building_blocks import BuildingBlock, candidate_blocks, unroll
from optpipe_solver.families.common import fusing_pays
from optpipe_solver.feasibility import refuse_unless

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe_solver.arrays import Floats
    from optpipe_solver.arrays.list_scheduler import ListSchedule
    from optpipe_solver.budget import Stop
    from optpipe_solver.incumbent import Incumbent

__all__ = ["blocks_can_improve", "improve_by_blocks"]

_MOVE_WORK = 20
"""Units of work that a block squeezed once counts for."""

_LOOKED_AT, _POLISHED = 64, 3
"""Blocks looked at, and those of them that are polished."""

_ROUND, _ROUND_ACTIONS = 200, 300_000
"""Moves of a round at most, and actions squeezed in it: large problems get fewer moves."""

_BEATEN = 1.1
"""A block this many times longer than the best schedule, which then offloads, is given up."""


def blocks_can_improve(problem: Problem) -> bool:
    """Whether one block can be repeated: equal micro-batches in a free order, and no pairs."""
    return problem.is_even and not problem.pairs


def improve_by_blocks(best: Incumbent, stop: Stop) -> None:
    """Polish building blocks and offer their squeezed schedules as ``periodic``.

    The incumbent need not hold a schedule yet. If a work limit, not a time limit, ends the search,
    the offers depend only on problem and seed.
    """
    problem = best.problem
    rule = "equal micro-batches in a free order, without pairs"
    refuse_unless(blocks_can_improve(problem), "improve_by_blocks", problem, rule)
    if not problem.busy_ms > 0:
        return
    actions = 3 * len(problem.stages) * problem.num_microbatches
    moves = max(4, min(_ROUND, _ROUND_ACTIONS // actions))
    looked = max(_POLISHED, min(_LOOKED_AT, _ROUND_ACTIONS // actions))
    groups = []
    for fused in (False, True) if fusing_pays(problem) else (False,):
        found = []
        for number, block in enumerate(candidate_blocks(problem)[:looked]):
            if stop.is_over() or best.is_optimal:
                break
            seed = stop.seed * 1_000_003 + number
            found.append(_BlockPolisher(problem, block, fused=fused, seed=seed))
            stop.spend(_MOVE_WORK)
        if found:
            groups.append(sorted(found, key=lambda polisher: polisher.best_ms)[:_POLISHED])
    rounds = 0
    while groups:
        groups = [
            polishers
            for polishers in groups
            if polishers[0].best_ms <= _BEATEN * best.objective_ms
            and _polish(best, stop, polishers, rounds, moves)
        ]
        rounds += 1


def _polish(
    best: Incumbent, stop: Stop, polishers: list[_BlockPolisher], rounds: int, moves: int
) -> bool:
    """Polish a block for a round, and offer it if it improved; False where the turn is over."""
    if stop.is_over() or best.is_optimal:
        return False
    polisher = polishers[rounds % len(polishers)]
    better = polisher.run(moves)
    stop.spend(_MOVE_WORK * moves)
    if better or rounds < len(polishers):
        squeezed = polisher.squeezed(polisher.best, None)
        objective = best.problem.objective
        if squeezed is not None and squeezed.objective_ms(objective) < best.objective_ms:
            best.offer(squeezed.programs(), "periodic")
    return True


_POLICIES = (
    Policy(ListRule.BLOCK, 1.0, early=Early.BEFORE_WEIGHT),
    Policy(ListRule.BLOCK, 1.0, early=Early.AFTER_WEIGHT),
    Policy(ListRule.BLOCK, 0.5, early=Early.AFTER_WEIGHT),
    Policy(ListRule.BLOCK, 0.0, early=Early.BEFORE_WEIGHT),
    Policy(ListRule.BLOCK, 1.0, early=Early.NEVER),
)
_FEWEST = 24
"""Micro-batches by which a large problem is evaluated, at least: the block does not change."""

_HOT, _COLD = 2e-3, 1e-4
"""Temperatures of a round, as shares of the length where it begins."""


class _BlockCourse(NamedTuple):
    """A block as it is annealed: the waits along its chain, its period, how it is squeezed."""

    waits: Floats
    period: float
    policy: int


class _BlockPolisher:
    """Anneals one block; ``best_ms`` is the length of its best schedule, inf if none fits.

    The moves depend only on ``seed``. ``fused``: whether B replaces I and W.
    """

    def __init__(self, problem: Problem, block: BuildingBlock, *, fused: bool, seed: int) -> None:
        self.problem = problem
        self.num_stages = len(problem.stages)
        self.scheduler = ListScheduler(problem)
        self.split = SplitBackward.NEVER if fused else SplitBackward.ALWAYS
        self.few = min(problem.num_microbatches, max(_FEWEST, 3 * len(problem.devices)))
        self.draw = np.random.default_rng(seed)
        chain = np.concatenate([block.forward, block.backward[::-1]]) - block.forward[0]
        self.course = self.best = _BlockCourse(np.diff(chain, prepend=0.0), block.period, 0)
        self.length_ms = self.best_ms = self._evaluate(self.course)

    def run(self, num_moves: int) -> bool:
        """Make moves, cooling down once; return whether the best got better."""
        before = self.best_ms
        cooling = (_COLD / _HOT) ** (1 / max(1, num_moves))
        temperature = _HOT * min(self.length_ms, 1e300)
        for _ in range(num_moves):
            temperature *= cooling
            course = self._neighbour()
            length = self._evaluate(course)
            worse = length - self.length_ms
            if worse <= 0 or self.draw.random() < exp(-worse / max(temperature, 1e-300)):
                self.course, self.length_ms = course, length
                if length < self.best_ms * (1 - 1e-12):
                    self.best, self.best_ms = course, length
        return self.best_ms < before

    def _neighbour(self) -> _BlockCourse:
        """Return the course with its waits, its period or its policy changed."""
        waits, period, policy = self.course
        waits = waits.copy()
        kind = self.draw.random()
        if kind < 0.05:
            return _BlockCourse(waits, period, int(self.draw.integers(len(_POLICIES))))
        if kind < 0.15:
            return _BlockCourse(waits, period * float(np.exp(self.draw.normal(0.0, 0.03))), policy)
        first = int(self.draw.integers(waits.size))
        length = 1 if kind < 0.6 else int(self.draw.integers(2, 3 + waits.size // 4))
        step = self.draw.normal(0.0, 0.25) * period / 2
        if kind < 0.4 and first + 1 < waits.size:
            # One pass earlier or later, all others in place.
            step = float(np.clip(step, -waits[first], waits[first + 1]))
            waits[first] += step
            waits[first + 1] -= step
        else:
            changed = slice(first, first + length)
            waits[changed] = np.maximum(waits[changed] + step / length, 0.0)
        return _BlockCourse(waits, period, policy)

    def _evaluate(self, course: _BlockCourse) -> float:
        squeezed = self.squeezed(course, self.few)
        return inf if squeezed is None else squeezed.objective_ms(self.problem.objective)

    def squeezed(self, course: _BlockCourse, num_microbatches: int | None) -> ListSchedule | None:
        """Return a block squeezed for some micro-batches or for all; None if it does not fit."""
        times = np.cumsum(course.waits)
        forward, backward = times[: self.num_stages], times[self.num_stages :][::-1]
        block = BuildingBlock(forward, backward, course.period)
        policy = _POLICIES[course.policy]._replace(split=self.split)
        order = unroll(self.problem, block, num_microbatches or self.problem.num_microbatches)
        return self.scheduler.run(policy, order, num_microbatches)
