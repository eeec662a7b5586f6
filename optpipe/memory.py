"""Memory is a property of the program, not of the clock (DESIGN section 3).

Walking a program from top to bottom and adding what each action takes and gives back yields the
peak under *every* timing. `memory_walk` is that walk; nothing else in the house counts bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from optpipe.schedule import ActionType

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from optpipe.problem import Problem, Stage
    from optpipe.schedule import Program, Programs

__all__ = [
    "EFFECTS",
    "Effect",
    "MemoryStep",
    "action_delta",
    "action_workspace",
    "device_peak_bytes",
    "host_peak_bytes",
    "host_walk",
    "memory_walk",
    "recomputed",
]


class Effect(NamedTuple):
    """What an action of one kind does to its device, and what stands before it in the program.

    * ``delta``: stage -> bytes it adds (negative: gives back), where the cell is not recomputed.
    * ``workspace``: stage -> bytes that exist only while it runs.
    * ``taken_at_start``: whether the bytes change when it starts, or when it ends.
    * ``comes_after``: kinds that stand before it in the same program, where the cell has them.
    """

    delta: Callable[[Stage], int]
    workspace: Callable[[Stage], int] = lambda _: 0
    taken_at_start: bool = False
    comes_after: tuple[ActionType, ...] = ()


_CONSUMED = (ActionType.FORWARD, ActionType.RELOAD, ActionType.RECOMPUTE)

EFFECTS: Mapping[ActionType, Effect] = {
    ActionType.FORWARD: Effect(
        lambda stage: stage.activation_bytes,
        lambda stage: stage.forward_workspace_bytes,
        taken_at_start=True,
    ),
    ActionType.BACKWARD_INPUT: Effect(
        lambda stage: stage.weight_context_bytes - stage.activation_bytes,
        lambda stage: stage.backward_input_workspace_bytes,
        comes_after=_CONSUMED,
    ),
    ActionType.BACKWARD_WEIGHT: Effect(
        lambda stage: -stage.weight_context_bytes,
        lambda stage: stage.backward_weight_workspace_bytes,
        comes_after=(ActionType.BACKWARD_INPUT,),
    ),
    ActionType.FULL_BACKWARD: Effect(
        lambda stage: -stage.activation_bytes,
        lambda stage: stage.backward_workspace_bytes,
        comes_after=_CONSUMED,
    ),
    ActionType.OFFLOAD: Effect(lambda _: 0, comes_after=(ActionType.FORWARD,)),
    ActionType.RELEASE: Effect(
        lambda stage: -stage.offload_bytes, comes_after=(ActionType.OFFLOAD,)
    ),
    ActionType.RELOAD: Effect(
        lambda stage: stage.offload_bytes,
        taken_at_start=True,
        comes_after=(ActionType.RELEASE,),
    ),
    ActionType.RECOMPUTE: Effect(
        lambda stage: stage.activation_bytes - (stage.checkpoint_bytes or 0),
        lambda stage: stage.recompute_workspace_bytes,
        taken_at_start=True,
        comes_after=(ActionType.FORWARD,),
    ),
}
"""The table of DESIGN section 3: legality and memory here and in compiled code follow it."""


@dataclass(frozen=True, slots=True)
class MemoryStep:
    """Bytes held by the pipeline around one action, static bytes included.

    ``taken_at_start`` tells whether ``after`` is reached when the action starts (F, RELOAD,
    RECOMPUTE) or when it ends (I, W, B, RELEASE).
    """

    before: int
    after: int
    peak: int
    taken_at_start: bool


def recomputed(program: Program) -> frozenset[tuple[int, int]]:
    """Return the (stage, micro-batch) pairs for which the program holds a RECOMPUTE."""
    return frozenset(
        (action.stage, action.microbatch)
        for action in program
        if action.type is ActionType.RECOMPUTE
    )


def action_delta(stage: Stage, kind: ActionType, is_recomputed: bool) -> int:
    """Return the bytes an action adds to its device (negative: gives back).

    The F of a cell that is recomputed leaves its checkpoint only.
    """
    if is_recomputed and kind is ActionType.FORWARD:
        return stage.checkpoint_bytes or 0
    return EFFECTS[kind].delta(stage)


def action_workspace(stage: Stage, kind: ActionType) -> int:
    """Return the bytes that exist only while the action runs."""
    return EFFECTS[kind].workspace(stage)


def memory_walk(problem: Problem, device: int, program: Program) -> list[MemoryStep]:
    """Return the bytes held around every action of a device's program, in order."""
    again = recomputed(program)
    held = problem.static_bytes_of(device)
    steps = []
    for action in program:
        stage = problem.stages[action.stage]
        delta = action_delta(stage, action.type, (action.stage, action.microbatch) in again)
        after = held + delta
        peak = max(held, after) + EFFECTS[action.type].workspace(stage)
        steps.append(MemoryStep(held, after, peak, EFFECTS[action.type].taken_at_start))
        held = after
    return steps


def device_peak_bytes(problem: Problem, device: int, program: Program) -> int:
    """Return the peak of a device: static bytes plus the largest prefix sum."""
    steps = memory_walk(problem, device, program)
    return max((step.peak for step in steps), default=problem.static_bytes_of(device))


def host_walk(problem: Problem, program: Program) -> list[int]:
    """Return the host bytes a device holds at each of its actions.

    They count from OFFLOAD to just before the I or B, which therefore no longer counts them.
    """
    held = 0
    waiting: set[tuple[int, int]] = set()
    levels = []
    for stage, kind, microbatch in program:
        if kind is ActionType.OFFLOAD:
            waiting.add((stage, microbatch))
            held += problem.stages[stage].offload_bytes
        elif kind.is_backward and (stage, microbatch) in waiting:
            waiting.remove((stage, microbatch))
            held -= problem.stages[stage].offload_bytes
        levels.append(held)
    return levels


def host_peak_bytes(problem: Problem, programs: Programs) -> dict[str, int]:
    """Return the peak of each host: the sum of its devices' peaks."""
    peaks = {host.name: 0 for host in problem.hosts}
    for device, program in zip(problem.devices, programs, strict=True):
        peaks[device.host] += max(host_walk(problem, program), default=0)
    return peaks
