"""Memory is a property of the program, not of the clock (DESIGN section 3).

Walking a program from top to bottom and adding what each action takes and gives back yields the
peak under *every* timing. `memory_walk` is that walk; nothing else in the house counts bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from optpipe.action import ActionType

if TYPE_CHECKING:
    from optpipe.action import Program, Programs
    from optpipe.problem import Problem, Stage

__all__ = [
    "MemoryStep",
    "action_delta",
    "action_workspace",
    "device_peak_bytes",
    "host_peak_bytes",
    "host_walk",
    "memory_walk",
    "recomputed",
]


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


_AT_START = frozenset({ActionType.FORWARD, ActionType.RELOAD, ActionType.RECOMPUTE})


def recomputed(program: Program) -> frozenset[tuple[int, int]]:
    """Return the (stage, micro-batch) pairs for which the program holds a RECOMPUTE."""
    return frozenset(
        (action.stage, action.microbatch)
        for action in program
        if action.type is ActionType.RECOMPUTE
    )


def action_delta(stage: Stage, kind: ActionType, is_recomputed: bool) -> int:
    """Return the bytes an action adds to its device (negative: gives back)."""
    checkpoint = stage.checkpoint_bytes or 0
    match kind:
        case ActionType.FORWARD:
            return checkpoint if is_recomputed else stage.activation_bytes
        case ActionType.BACKWARD_INPUT:
            return stage.weight_context_bytes - stage.activation_bytes
        case ActionType.BACKWARD_WEIGHT:
            return -stage.weight_context_bytes
        case ActionType.FULL_BACKWARD:
            return -stage.activation_bytes
        case ActionType.RELEASE:
            return -stage.offload_bytes
        case ActionType.RELOAD:
            return stage.offload_bytes
        case ActionType.RECOMPUTE:
            return stage.activation_bytes - checkpoint
        case ActionType.OFFLOAD:
            return 0


def action_workspace(stage: Stage, kind: ActionType) -> int:
    """Return the bytes that exist only while the action runs."""
    match kind:
        case ActionType.FORWARD:
            return stage.forward_workspace_bytes
        case ActionType.BACKWARD_INPUT:
            return stage.backward_input_workspace_bytes
        case ActionType.BACKWARD_WEIGHT:
            return stage.backward_weight_workspace_bytes
        case ActionType.FULL_BACKWARD:
            return stage.backward_workspace_bytes
        case ActionType.RECOMPUTE:
            return stage.recompute_workspace_bytes
        case _:
            return 0


def memory_walk(problem: Problem, device: int, program: Program) -> list[MemoryStep]:
    """Return the bytes held around every action of a device's program, in order."""
    again = recomputed(program)
    held = problem.static_bytes_of(device)
    steps = []
    for action in program:
        stage = problem.stages[action.stage]
        delta = action_delta(stage, action.type, (action.stage, action.microbatch) in again)
        after = held + delta
        peak = max(held, after) + action_workspace(stage, action.type)
        steps.append(MemoryStep(held, after, peak, action.type in _AT_START))
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
