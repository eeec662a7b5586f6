"""Blocks improved by what they are for: the length of their squeezed schedule.

Annealing (Kirkpatrick et al. 1983) on the waits of one micro-batch along its chain and on the
period; the squeeze decodes them. So warm-up and cool-down count as they are, and memory limits are
kept whatever is tried. Large problems are judged by fewer micro-batches: the block does not change.
"""

from __future__ import annotations

from math import exp
from typing import TYPE_CHECKING

import numpy as np

from optpipe_solver.families.repeat_and_squeeze import Block, Early, Policy, Squeezer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe.problem import Problem
    from optpipe_solver.families.repeat_and_squeeze import Squeezed

__all__ = ["Polisher"]

_POLICIES = (
    Policy(Early.BEFORE_WEIGHT, 1.0),
    Policy(Early.AFTER_WEIGHT, 1.0),
    Policy(Early.AFTER_WEIGHT, 0.5),
    Policy(Early.BEFORE_WEIGHT, 0.0),
    Policy(Early.NEVER, 1.0),
)
_FEWEST = 24
_HOT, _COLD = 2e-3, 1e-4


class Polisher:
    """Anneals one block.

    Parameters
    ----------
    problem
        Its limits are kept.
    fused
        Whether B stands for I and W.
    block
        Where it starts.
    seed
        What is tried is a function of it.
    """

    def __init__(self, problem: Problem, block: Block, *, fused: bool, seed: int) -> None:
        self.problem = problem
        self.num_stages = len(problem.stages)
        self.by_span = problem.objective == "span"
        self.squeezer = Squeezer.in_bytes(problem, fused=fused)
        self.few = min(problem.num_microbatches, max(_FEWEST, 3 * len(problem.devices)))
        self.draw = np.random.default_rng(seed)
        self.waits = np.diff(_times(block), prepend=0.0)
        self.period = block.period
        self.policy = 0
        self.length_ms = self._judge(self.waits, self.period, self.policy)
        self.best_ms = self.length_ms
        self.best = (self.waits, self.period, self.policy)

    def run(self, num_moves: int) -> bool:
        """Make moves, cooling down once; return whether the best got better."""
        before = self.best_ms
        cooling = (_COLD / _HOT) ** (1 / max(1, num_moves))
        temperature = _HOT * min(self.length_ms, 1e300)
        for _ in range(num_moves):
            temperature *= cooling
            waits, period, policy = self._neighbour()
            length = self._judge(waits, period, policy)
            worse = length - self.length_ms
            if worse <= 0 or self.draw.random() < exp(-worse / max(temperature, 1e-300)):
                self.waits, self.period, self.policy = waits, period, policy
                self.length_ms = length
                if length < self.best_ms * (1 - 1e-12):
                    self.best_ms, self.best = length, (waits, period, policy)
        return self.best_ms < before

    def result(self) -> Squeezed | None:
        """Return the best block squeezed for all micro-batches; None where none fitted."""
        waits, period, policy = self.best
        return self.squeezer.squeeze(self._block(waits, period), _POLICIES[policy])

    def current(self) -> Squeezed | None:
        """Return the block where the search stands, squeezed for all micro-batches."""
        return self.squeezer.squeeze(self._block(self.waits, self.period), _POLICIES[self.policy])

    def _neighbour(self) -> tuple[NDArray[np.float64], float, int]:
        """Return the waits, the period and the policy with one of them changed."""
        waits, period, policy = self.waits.copy(), self.period, self.policy
        kind = self.draw.random()
        if kind < 0.05:
            return waits, period, int(self.draw.integers(len(_POLICIES)))
        if kind < 0.15:
            return waits, period * float(np.exp(self.draw.normal(0.0, 0.03))), policy
        first = int(self.draw.integers(waits.size))
        length = 1 if kind < 0.6 else int(self.draw.integers(2, 3 + waits.size // 4))
        step = self.draw.normal(0.0, 0.25) * self.period / 2
        changed = slice(first, first + length)
        if kind < 0.4 and first + 1 < waits.size:
            # One pass earlier or later, all others in place.
            step = float(np.clip(step, -waits[first], waits[first + 1]))
            waits[first] += step
            waits[first + 1] -= step
            return waits, period, policy
        waits[changed] = np.maximum(waits[changed] + step / length, 0.0)
        return waits, period, policy

    def _judge(self, waits: NDArray[np.float64], period: float, policy: int) -> float:
        made = self.squeezer.squeeze(self._block(waits, period), _POLICIES[policy], self.few)
        if made is None:
            return float("inf")
        return made.span_ms if self.by_span else made.makespan_ms

    def _block(self, waits: NDArray[np.float64], period: float) -> Block:
        times = np.cumsum(waits)
        return Block(times[: self.num_stages], times[self.num_stages :][::-1], period)


def _times(block: Block) -> NDArray[np.float64]:
    """Return the starts along the chain: forwards in model order, then backwards in reverse."""
    chain = np.concatenate([block.forward, block.backward[::-1]])
    return np.asarray(chain - block.forward[0], dtype=np.float64)
