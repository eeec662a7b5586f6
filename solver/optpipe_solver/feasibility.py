"""The smallest memory that admits any schedule, in closed form (DESIGN section 6).

Argument. Take one micro-batch and a device with stages s_1 < s_2 < ... in model order. While the
micro-batch is being worked on in s_k (its F, a RECOMPUTE, its first backward action), every
earlier stage s_i of the device has run its F and not yet its backward, so it holds at least what
its mode leaves: all of the activation if kept, activation - offload if offloaded, the checkpoint if
recomputed. s_k itself needs what its mode needs at that moment. Running one micro-batch after the
other, each stage's W right behind its I (or a fused B), attains exactly this: it is the `serial`
family. A fused B never holds the weight context, so it is what counts where that is larger.

Host memory adds one number per device: the offloaded bytes of one micro-batch are all on the host
when its last stage runs. The least of them that the device's memory allows is a small exact
dynamic program over the device's stages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from optpipe.errors import InputError
from optpipe.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optpipe.problem import Problem, Stage

__all__ = [
    "Feasibility",
    "SerialPlan",
    "Treatment",
    "feasibility",
    "fifo_loses_nothing",
    "fusing_may_pay",
    "least_bytes",
    "memory_binds",
    "needs_text",
    "smallest_memory",
]


class Treatment(StrEnum):
    """What happens to the activation of a (stage, micro-batch) between F and backward."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


class _Option(NamedTuple):
    """One mode of one stage: bytes held afterwards, bytes needed while it runs, host bytes."""

    mode: Treatment
    split: bool
    held: int
    needed: int
    host: int


@dataclass(frozen=True, slots=True)
class SerialPlan:
    """How serial execution fits: per stage its mode and whether its backward is split (I, W)."""

    mode: tuple[Treatment, ...]
    split: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Feasibility:
    """Whether any schedule exists; exactly one of ``plan`` and ``needs`` is filled.

    ``needs`` maps what is too small (``devices[2].memory_bytes``, ``hosts[0].memory_bytes``) to
    the smallest value that works.
    """

    plan: SerialPlan | None
    needs: dict[str, int]

    @property
    def message(self) -> str:
        """One sentence for people; empty where feasible."""
        if self.plan is not None:
            return ""
        return f"no schedule fits the memory limits (proven): {needs_text(self.needs)}"


def needs_text(needs: Mapping[str, int]) -> str:
    """Return the smallest values that work, in words; sizes for people are rounded up."""
    return ", ".join(
        f"{path} must be at least {value}" + (f" ({_rounded_up(value)})" if value >= 1024 else "")
        for path, value in needs.items()
    )


def _rounded_up(num_bytes: int) -> str:
    unit = 1024 ** min(4, (num_bytes.bit_length() - 1) // 10)
    return format_bytes(math.ceil(math.ceil(10 * num_bytes / unit) / 10 * unit))


def smallest_memory(problem: Problem) -> list[int]:
    """Return, per device, the smallest memory_bytes with which any schedule exists.

    Host limits are not looked at here; `feasibility` does.
    """
    totals = []
    for device, held in enumerate(problem.devices):
        above = 0
        for stage in reversed(problem.stages_of[device]):
            above = min(
                max(option.needed, option.held + above)
                for option in _options(problem.stages[stage], problem.can_offload(stage))
            )
        totals.append(held.reserved_bytes + problem.static_bytes_of(device) + above)
    return totals


def feasibility(problem: Problem) -> Feasibility:
    """Decide whether any schedule exists, and how to get one or what is missing."""
    if problem.has_modes:
        raise InputError(
            "the problem has menus of modes or uniform_modes, which are checked and simulated, but "
            "not solved yet; give stages the menu keep, offload, recompute"
        )
    needs = {
        f"devices[{device}].memory_bytes": smallest
        for device, smallest in enumerate(smallest_memory(problem))
        if smallest > problem.devices[device].memory_bytes
    }
    if needs:
        return Feasibility(None, needs)
    chosen = [_least_host(problem, device) for device in range(len(problem.devices))]
    for index, host in enumerate(problem.hosts):
        used = sum(
            option.host
            for device, options in enumerate(chosen)
            if problem.devices[device].host == host.name
            for option in options
        )
        if host.memory_bytes is not None and used > host.memory_bytes:
            needs[f"hosts[{index}].memory_bytes"] = used
    if needs:
        return Feasibility(None, needs)
    by_stage = {
        stage: option
        for device, options in enumerate(chosen)
        for stage, option in zip(problem.stages_of[device], options, strict=True)
    }
    options = [by_stage[stage] for stage in range(len(problem.stages))]
    plan = SerialPlan(
        mode=tuple(option.mode for option in options),
        split=tuple(option.split for option in options),
    )
    return Feasibility(plan, {})


def least_bytes(stage: Stage, *, can_offload: bool) -> tuple[int, int]:
    """Return the least bytes a stage holds between its passes, and needs during them.

    On a device with one stage the second number decides whether a schedule exists.
    """
    options = _options(stage, can_offload)
    return min(option.held for option in options), min(option.needed for option in options)


def _options(stage: Stage, can_offload: bool) -> list[_Option]:
    full = stage.activation_bytes
    forward = full + stage.forward_workspace_bytes
    found = []
    for split, backward in zip((True, False), _backward_bytes(stage), strict=True):
        found.append(_Option(Treatment.KEEP, split, full, max(forward, backward), 0))
        if can_offload:
            moved = stage.offload_bytes
            found.append(
                _Option(Treatment.OFFLOAD, split, full - moved, max(forward, backward), moved)
            )
        if stage.checkpoint_bytes is not None:
            first = stage.checkpoint_bytes + stage.forward_workspace_bytes
            again = full + stage.recompute_workspace_bytes
            needed = max(first, again, backward)
            found.append(_Option(Treatment.RECOMPUTE, split, stage.checkpoint_bytes, needed, 0))
    return found


def _backward_bytes(stage: Stage) -> tuple[int, int]:
    """Return what I with W behind it needs of one micro-batch alone, and what B does."""
    full, context = stage.activation_bytes, stage.weight_context_bytes
    split = max(
        max(full, context) + stage.backward_input_workspace_bytes,
        context + stage.backward_weight_workspace_bytes,
    )
    return split, full + stage.backward_workspace_bytes


def _least_host(problem: Problem, device: int) -> tuple[_Option, ...]:
    """Return options of the device's stages that fit it with the fewest host bytes.

    The device must be feasible. States are (bytes held, host bytes) prefixes; dominated ones go.
    Among equals the earlier option wins: keep before offload before recompute, split before fused.
    """
    limit = problem.room_bytes(device)
    states: list[tuple[int, int, tuple[_Option, ...]]] = [(0, 0, ())]
    for stage in problem.stages_of[device]:
        grown = [
            (held + option.held, host + option.host, (*taken, option))
            for held, host, taken in states
            for option in _options(problem.stages[stage], problem.can_offload(stage))
            if held + option.needed <= limit
        ]
        states = _undominated(grown)
    return min(states, key=lambda state: state[1])[2]


def _undominated(
    states: list[tuple[int, int, tuple[_Option, ...]]],
) -> list[tuple[int, int, tuple[_Option, ...]]]:
    kept: list[tuple[int, int, tuple[_Option, ...]]] = []
    for state in sorted(states, key=lambda state: state[:2]):
        if not kept or state[1] < kept[-1][1]:
            kept.append(state)
    return kept


# --- What a problem leaves to choose.


def fifo_loses_nothing(problem: Problem) -> bool:
    """Identical micro-batches may be relabelled pass by pass where each is treated alike.

    That is so where no device can profit from offload or recompute (DESIGN section 6).
    """
    return not any(
        memory_binds(problem, stage.device) and (problem.can_offload(s) or stage.can_recompute)
        for s, stage in enumerate(problem.stages)
    )


def memory_binds(problem: Problem, device: int) -> bool:
    """Whether keeping everything of every micro-batch could exceed the device's memory."""
    most = workspace = 0
    for s in problem.stages_of[device]:
        stage = problem.stages[s]
        held = max(stage.activation_bytes, stage.weight_context_bytes)
        most += held * problem.num_microbatches
        workspace = max(
            workspace,
            stage.forward_workspace_bytes,
            stage.backward_input_workspace_bytes,
            stage.backward_weight_workspace_bytes,
            stage.backward_workspace_bytes,
        )
    limit = problem.room_bytes(device)
    return most + workspace > limit


def fusing_may_pay(problem: Problem, s: int) -> bool:
    """Whether a fused B can be better than I with W right behind it, in time or in memory."""
    stage = problem.stages[s]
    split_peak, fused_peak = _backward_bytes(stage)
    split_ms = stage.backward_input_ms + stage.backward_weight_ms
    return stage.fused_backward_ms < split_ms or fused_peak < split_peak
