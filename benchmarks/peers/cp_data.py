"""What the CP-SAT peer needs of a problem and its programs without loading OR-tools."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from optpipe import Action, ActionType
from optpipe.stage import WORKSPACES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe import Problem, Programs, Stage
    from optpipe.stage import CellMode

__all__ = ["Cell", "Scale", "fusing_may_pay", "in_order", "in_order_loses_nothing",
           "memory_binds", "renamed", "usable_modes"]  # fmt: skip

Cell: TypeAlias = tuple[int, int]
"""A (stage, micro-batch)."""

# --- What is known of a problem before anything is chosen.


def memory_binds(problem: Problem, device: int) -> bool:
    """Whether keeping everything of every micro-batch could exceed a device's memory."""
    stages = [problem.stages[s] for s in problem.stages_of[device]]
    per_microbatch = sum(
        max(stage.activation_bytes, stage.weight_context_bytes) for stage in stages
    )
    room = problem.devices[device].usable_bytes - problem.static_bytes_of(device)
    workspace = max((_workspace(stage) for stage in stages), default=0)
    return problem.num_microbatches * per_microbatch + workspace > room


def _workspace(stage: Stage) -> int:
    return max(
        stage.forward_workspace_bytes,
        stage.backward_input_workspace_bytes,
        stage.backward_weight_workspace_bytes,
        stage.backward_workspace_bytes,
    )


def fusing_may_pay(stage: Stage) -> bool:
    """Whether a B can be better than I with its W right behind, in time or in memory."""
    faster = stage.fused_backward_ms < stage.backward_input_ms + stage.backward_weight_ms
    return faster or any(map(_fusing_saves_bytes, stage.menu))


def _fusing_saves_bytes(mode: CellMode) -> bool:
    context, inside = mode.weight_context_bytes, mode.backward_bytes + mode.inside_bytes
    first = max(inside, context) + mode.backward_input_workspace_bytes
    split = max(first, context + mode.backward_weight_workspace_bytes)
    return inside + mode.backward_workspace_bytes < split


def in_order_loses_nothing(problem: Problem) -> bool:
    """Whether first in, first out is free: no mode but keep is worth anything.

    Then all micro-batches are alike in every pass, and the k-th pass may be called micro-batch k.
    """
    return not any(
        memory_binds(problem, stage.device) and len(usable_modes(problem, s)) > 1
        for s, stage in enumerate(problem.stages)
    )


def usable_modes(problem: Problem, s: int) -> list[int]:
    """Return the modes of a stage's menu that its device can carry out; keep is the first."""
    return [mode for mode in range(len(problem.menus[s])) if problem.can_use(s, mode)]


# --- Times and bytes as whole numbers, rounded so that bounds stay bounds.

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
        yield from (stage.fused_backward_ms, stage.grad_sync_ms)
        yield from problem.boundary_ms[s]
        yield from (lane.ms for lane in problem.boundary_lanes[s])
        for number in usable_modes(problem, s):
            mode = problem.menus[s][number]
            yield mode.recompute_ms
            if mode.offload_bytes:
                yield problem.offload_ms(s, mode.offload_bytes)
                yield problem.reload_ms(s, mode.offload_bytes)


def _sizes(problem: Problem, s: int) -> Iterator[int]:
    for mode in problem.menus[s]:
        yield from (mode.activation_bytes, mode.forward_bytes, mode.offload_bytes)
        yield from (mode.inside_bytes, mode.weight_context_bytes)
        yield from (getattr(mode, name) for name in WORKSPACES)


# --- Programs with other numbers for the micro-batches, which are all alike.


def renamed(programs: Programs) -> Programs:
    """Return the programs with micro-batches numbered as stage 0 takes them."""
    firsts = [
        action.microbatch
        for program in programs
        for action in program
        if action.stage == 0 and action.type is ActionType.FORWARD
    ]
    name = {old: new for new, old in enumerate(firsts)}
    return tuple(
        tuple(action._replace(microbatch=name[action.microbatch]) for action in program)
        for program in programs
    )


def in_order(programs: Programs) -> Programs:
    """Return programs that keep everything with every pass numbered as it comes.

    The k-th W belongs to the k-th backward that was split.
    """
    return tuple(_in_order(program) for program in programs)


def _in_order(program: tuple[Action, ...]) -> tuple[Action, ...]:
    count: Counter[tuple[int, str]] = Counter()
    split: dict[int, list[int]] = {}
    numbered = []
    for action in program:
        stage, kind, *_ = action
        key = (stage, "back" if kind.is_backward else kind.value)
        number = count[key]
        count[key] += 1
        if kind is ActionType.BACKWARD_INPUT:
            split.setdefault(stage, []).append(number)
        if kind is ActionType.BACKWARD_WEIGHT:
            number = split[stage][number]
        numbered.append(action._replace(microbatch=number))
    return tuple(numbered)
