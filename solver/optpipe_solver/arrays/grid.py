"""The grid of objectives: where all times are multiples of one, so is every schedule's length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optpipe.schedule import OPTIMAL_GAP

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.problem import Problem

__all__ = ["Goal", "grid_ms"]


_LEAST_GRID = 1e-4
"""Times that are multiples of less than this share of the objective are no grid worth using."""

_UNIT_MS = 1e-6
_EXACT = 1e-9


def grid_ms(problem: Problem) -> float:
    """Return the largest time in ms, a whole number of ns, of which all times are multiples; or 0.

    Every start is a sum of durations and delays, because everything runs as soon as possible; so
    the objective is a multiple too, and of two different objectives one is better by at least it.
    """
    common = 0
    for value in _times(problem):
        units = round(value / _UNIT_MS)
        if abs(units * _UNIT_MS - value) > _EXACT * max(1.0, value):
            return 0.0
        common = math.gcd(common, units)
    return common * _UNIT_MS


@dataclass(frozen=True, slots=True)
class Goal:
    """What is looked for, given a schedule of ``incumbent_ms``, and what it proves to fail.

    ``horizon_ms``: only schedules with at most this objective are looked for. If there are none,
    ``proven_ms`` is a lower bound.
    """

    incumbent_ms: float
    horizon_ms: float
    proven_ms: float
    grid: float

    @classmethod
    def of(cls, problem: Problem, incumbent_ms: float) -> Goal:
        """Return the goal of being better by one step of the grid, else by a hair.

        The hair is half of the gap that counts as none.
        """
        grid = grid_ms(problem)
        if grid > 0.0 and grid >= _LEAST_GRID * incumbent_ms:
            return cls(incumbent_ms, incumbent_ms - grid / 2, incumbent_ms, grid)
        hair = incumbent_ms * (1 - OPTIMAL_GAP / 2)
        return cls(incumbent_ms, hair, hair, 0.0)

    def proven(self, bound_ms: float) -> float:
        """Return the bound of all schedules, given one of those looked for."""
        if self.grid > 0.0:
            # The next value on the grid, rounding aside.
            bound_ms = self.grid * math.ceil(bound_ms / self.grid - 1e-5)
        return min(bound_ms, self.proven_ms)


def _times(problem: Problem) -> Iterator[float]:
    for s, stage in enumerate(problem.stages):
        yield from (stage.forward_ms, stage.backward_input_ms, stage.backward_weight_ms)
        yield from (stage.fused_backward_ms, stage.recompute_ms or 0.0, stage.grad_sync_ms)
        if problem.can_offload(s):
            yield from (problem.offload_ms(s), problem.reload_ms(s))
    for there, back in problem.boundary_ms:
        yield from (there, back)
