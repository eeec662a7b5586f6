"""What the models of the peers know about a problem before they choose anything."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeAlias

from optpipe import Action, ActionType

if TYPE_CHECKING:
    from optpipe import Problem, Programs, Stage

__all__ = [
    "Cell",
    "fusing_may_pay",
    "in_order",
    "in_order_loses_nothing",
    "memory_binds",
    "renamed",
]

Cell: TypeAlias = tuple[int, int]
"""A (stage, micro-batch)."""


def memory_binds(problem: Problem, device: int) -> bool:
    """Whether keeping everything of every micro-batch could exceed a device's memory."""
    stages = [problem.stages[s] for s in problem.stages_of[device]]
    held = sum(max(stage.activation_bytes, stage.weight_context_bytes) for stage in stages)
    room = problem.devices[device].usable_bytes - problem.static_bytes_of(device)
    workspace = max((_workspace(stage) for stage in stages), default=0)
    return problem.num_microbatches * held + workspace > room


def _workspace(stage: Stage) -> int:
    return max(
        stage.forward_workspace_bytes,
        stage.backward_input_workspace_bytes,
        stage.backward_weight_workspace_bytes,
        stage.backward_workspace_bytes,
    )


def fusing_may_pay(stage: Stage) -> bool:
    """Whether a B can be better than I with its W right behind, in time or in memory."""
    context, full = stage.weight_context_bytes, stage.activation_bytes
    first = max(full, context) + stage.backward_input_workspace_bytes
    split = max(first, context + stage.backward_weight_workspace_bytes)
    faster = stage.fused_backward_ms < stage.backward_input_ms + stage.backward_weight_ms
    return faster or full + stage.backward_workspace_bytes < split


def in_order_loses_nothing(problem: Problem) -> bool:
    """Whether first in, first out is free: nothing is worth offloading or recomputing.

    Then all micro-batches are alike in every pass, and the k-th pass may be called micro-batch k.
    """
    return not any(
        memory_binds(problem, stage.device) and (problem.can_offload(s) or stage.can_recompute)
        for s, stage in enumerate(problem.stages)
    )


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
    """Return programs without offload or recompute with every pass numbered as it comes.

    The k-th W belongs to the k-th backward that was split.
    """
    return tuple(_in_order(program) for program in programs)


def _in_order(program: tuple[Action, ...]) -> tuple[Action, ...]:
    count: Counter[tuple[int, str]] = Counter()
    split: dict[int, list[int]] = {}
    numbered = []
    for action in program:
        stage, kind, _ = action
        key = (stage, "back" if kind.is_backward else kind.value)
        number = count[key]
        count[key] += 1
        if kind is ActionType.BACKWARD_INPUT:
            split.setdefault(stage, []).append(number)
        if kind is ActionType.BACKWARD_WEIGHT:
            number = split[stage][number]
        numbered.append(action._replace(microbatch=number))
    return tuple(numbered)
