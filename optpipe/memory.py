"""Memory is a property of the program, not of the clock (docs/specification.md, "Memory").

`memory_walk` adds the bytes that each action of a program takes and gives back, in order. The
result is the peak under *every* timing. No other code of the core counts bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from optpipe.schedule import ActionType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from optpipe.problem import CellMode, Problem
    from optpipe.schedule import Action, Program, Programs

__all__ = [
    "EFFECTS",
    "OF_MODES",
    "CellModes",
    "Effect",
    "MemoryStep",
    "action_delta",
    "action_workspace",
    "device_peak_bytes",
    "host_peak_bytes",
    "host_walk",
    "memory_walk",
    "modes_of",
]


class Effect(NamedTuple):
    """The effect of one kind of action on its device's memory, and the kinds that precede it.

    * ``delta``: mode of its cell -> bytes it adds (negative: gives back).
    * ``workspace``: mode -> bytes that exist only while it runs.
    * ``inside``: mode -> bytes that it adds at its start and gives back by its end.
    * ``taken_at_start``: whether the bytes change when it starts, or when it ends.
    * ``comes_after``: kinds that precede it in the same program, if the cell has them.
    """

    delta: Callable[[CellMode], int]
    workspace: Callable[[CellMode], int] = lambda _: 0
    inside: Callable[[CellMode], int] = lambda _: 0
    taken_at_start: bool = False
    comes_after: tuple[ActionType, ...] = ()


_CONSUMED = (ActionType.FORWARD, ActionType.RELOAD, ActionType.RECOMPUTE)

EFFECTS: Mapping[ActionType, Effect] = {
    ActionType.FORWARD: Effect(
        lambda mode: mode.forward_bytes,
        lambda mode: mode.forward_workspace_bytes,
        taken_at_start=True,
    ),
    ActionType.BACKWARD_INPUT: Effect(
        lambda mode: mode.weight_context_bytes - mode.backward_bytes,
        lambda mode: mode.backward_input_workspace_bytes,
        lambda mode: mode.inside_bytes,
        comes_after=_CONSUMED,
    ),
    ActionType.BACKWARD_WEIGHT: Effect(
        lambda mode: -mode.weight_context_bytes,
        lambda mode: mode.backward_weight_workspace_bytes,
        comes_after=(ActionType.BACKWARD_INPUT,),
    ),
    ActionType.FULL_BACKWARD: Effect(
        lambda mode: -mode.backward_bytes,
        lambda mode: mode.backward_workspace_bytes,
        lambda mode: mode.inside_bytes,
        comes_after=_CONSUMED,
    ),
    ActionType.OFFLOAD: Effect(lambda _: 0, comes_after=(ActionType.FORWARD,)),
    ActionType.RELEASE: Effect(lambda mode: -mode.offload_bytes, comes_after=(ActionType.OFFLOAD,)),
    ActionType.RELOAD: Effect(
        lambda mode: mode.offload_bytes,
        taken_at_start=True,
        comes_after=(ActionType.RELEASE,),
    ),
    ActionType.RECOMPUTE: Effect(
        lambda mode: mode.activation_bytes - mode.forward_bytes,
        lambda mode: mode.recompute_workspace_bytes,
        taken_at_start=True,
        comes_after=(ActionType.FORWARD, ActionType.RELOAD),
    ),
}
"""The table in docs/specification.md, "Actions".

Legality and memory follow it, here and in compiled code.
"""


@dataclass(frozen=True, slots=True)
class MemoryStep:
    """Bytes held by the pipeline around one action, static bytes included.

    ``taken_at_start``: whether ``after`` is reached when the action starts (F, RELOAD, RECOMPUTE)
    or when it ends (I, W, B, RELEASE).
    """

    before: int
    after: int
    peak: int
    taken_at_start: bool


OF_MODES = frozenset(
    {ActionType.OFFLOAD, ActionType.RELEASE, ActionType.RELOAD, ActionType.RECOMPUTE}
)
"""The kinds that may imply a mode other than keep (`Stage.implied_mode`)."""

CellModes: TypeAlias = "Mapping[tuple[int, int], int]"
"""The mode of each (stage, micro-batch) of a program: its index in the stage's menu."""


def modes_of(problem: Problem, program: Iterable[Action]) -> CellModes:
    """Return the mode of each (stage, micro-batch) of a program: its index in the stage's menu.

    Its F names it (``2F0@3``). If no F does, and v1 can express the menu, OFFLOAD and RECOMPUTE
    imply it. The program's stages must exist.
    """
    modes: dict[tuple[int, int], int] = {}
    for stage, kind, microbatch, named, _ in program:
        mode = named
        if not named and kind in OF_MODES:
            mode = problem.stage_of(stage, microbatch).implied_mode(kind)
        if mode:
            modes[stage, microbatch] = mode
        else:
            modes.setdefault((stage, microbatch), 0)
    return modes


def action_delta(mode: CellMode, kind: ActionType) -> int:
    """Return the bytes an action adds to its device (negative: gives back)."""
    return EFFECTS[kind].delta(mode)


def action_workspace(mode: CellMode, kind: ActionType) -> int:
    """Return the bytes that exist only while the action runs."""
    return EFFECTS[kind].workspace(mode)


def memory_walk(
    problem: Problem, device: int, program: Program, modes: CellModes | None = None
) -> list[MemoryStep]:
    """Return the bytes held around every action of a device's program, in order.

    Both workspaces of a pair exist at the same time; both of its actions have its peak. ``modes``
    are those of `modes_of`; this and the functions below compute them if the caller has none.
    """
    modes = modes_of(problem, program) if modes is None else modes
    held_bytes = problem.static_bytes_of(device)
    steps: list[MemoryStep] = []
    workspace = 0
    for action in program:
        mode = problem.menu_of(action.stage, action.microbatch)[modes[action.cell]]
        effect = EFFECTS[action.type]
        after = held_bytes + effect.delta(mode)
        workspace = effect.workspace(mode) + (workspace if action.paired else 0)
        peak = max(held_bytes + effect.inside(mode), after) + workspace
        if action.paired and steps:
            steps[-1] = replace(steps[-1], peak=peak)
        steps.append(MemoryStep(held_bytes, after, peak, effect.taken_at_start))
        held_bytes = after
    return steps


def device_peak_bytes(
    problem: Problem, device: int, program: Program, modes: CellModes | None = None
) -> int:
    """Return the peak of a device: static bytes plus the largest prefix sum."""
    steps = memory_walk(problem, device, program, modes)
    return max((step.peak for step in steps), default=problem.static_bytes_of(device))


def host_walk(problem: Problem, program: Program, modes: CellModes | None = None) -> list[int]:
    """Return the host bytes a device holds at each of its actions.

    They count from OFFLOAD to just before what consumes the RELOAD (I, B or RECOMPUTE), which
    therefore no longer counts them.
    """
    modes = modes_of(problem, program) if modes is None else modes
    held_bytes = 0
    waiting: dict[tuple[int, int], int] = {}
    levels = []
    for action in program:
        if action.type is ActionType.OFFLOAD:
            menu = problem.menu_of(action.stage, action.microbatch)
            moved = menu[modes[action.cell]].offload_bytes
            waiting[action.cell] = moved
            held_bytes += moved
        elif waiting and action.type.consumes_reload:
            held_bytes -= waiting.pop(action.cell, 0)
        levels.append(held_bytes)
    return levels


def host_peak_bytes(
    problem: Problem, programs: Programs, modes: Sequence[CellModes] | None = None
) -> dict[str, int]:
    """Return the peak of each host: the sum of its devices' peaks. ``modes`` are by device."""
    peaks = {host.name: 0 for host in problem.hosts}
    known: Sequence[CellModes | None] = modes or [None] * len(programs)
    for device, program, own in zip(problem.devices, programs, known, strict=True):
        peaks[device.host] += max(host_walk(problem, program, own), default=0)
    return peaks
