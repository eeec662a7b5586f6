"""Times and bytes as the whole numbers that CP-SAT wants, rounded so that bounds stay bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe import Problem

__all__ = ["Scale"]

_FINEST = 6
"""Decimal places of a millisecond below which times are cut off."""


@dataclass(frozen=True)
class Scale:
    """One unit of time for a whole problem, one unit of memory per device.

    The unit of time is the largest power of ten that expresses every duration exactly, at least
    1e-6 ms. Durations are rounded down: every schedule of the problem is then, with all starts
    rounded down likewise, no longer than in truth, so a lower bound in units is one in ms.
    """

    problem: Problem

    @cached_property
    def per_ms(self) -> int:
        """Units in a millisecond."""
        units = [int(10.0**digits) for digits in range(_FINEST + 1)]
        exact = (
            unit for unit in units if all(_is_whole(ms * unit) for ms in _durations(self.problem))
        )
        return next(exact, units[-1])

    def units(self, ms: float) -> int:
        """Return a duration in units, rounded down (1e-6 of a unit counts as rounding noise)."""
        return math.floor(ms * self.per_ms + 1e-6)

    def units_up(self, ms: float) -> int:
        """Return a horizon in units, rounded up."""
        return math.ceil(ms * self.per_ms - 1e-6)

    def ms(self, units: float) -> float:
        """Return units as ms."""
        return units / self.per_ms

    def memory(self, device: int) -> tuple[int, int]:
        """Return the unit of a device's memory in bytes, and its room in such units.

        The unit divides every size on the device, so rounding the room down loses nothing.
        """
        problem = self.problem
        sizes = [size for s in problem.stages_of[device] for size in _sizes(problem, s)]
        unit = math.gcd(*sizes) or 1
        room = problem.devices[device].usable_bytes - problem.static_bytes_of(device)
        return unit, room // unit


def _is_whole(value: float) -> bool:
    return abs(value - round(value)) <= 1e-6


def _durations(problem: Problem) -> Iterator[float]:
    for s, stage in enumerate(problem.stages):
        yield from (stage.forward_ms, stage.backward_input_ms, stage.backward_weight_ms)
        yield from (stage.fused_backward_ms, stage.grad_sync_ms, stage.recompute_ms or 0.0)
        yield from problem.boundary_ms[s]
        if problem.can_offload(s):
            yield from (problem.offload_ms(s), problem.reload_ms(s))


def _sizes(problem: Problem, s: int) -> Iterator[int]:
    stage = problem.stages[s]
    yield from (stage.activation_bytes, stage.weight_context_bytes, stage.checkpoint_bytes or 0)
    yield from (stage.forward_workspace_bytes, stage.backward_input_workspace_bytes)
    yield from (stage.backward_weight_workspace_bytes, stage.backward_workspace_bytes)
    yield from (stage.recompute_workspace_bytes, stage.offload_bytes)
