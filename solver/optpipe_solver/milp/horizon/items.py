"""What the model orders: items with windows, presence and memory.

An item is an action that takes a place in a device's program: compute actions, and RELOAD, which
takes no time there but must stand at a compute boundary. OFFLOAD and RELEASE need no place of
their own: an OFFLOAD issued right behind its forward never delays anything, and a RELEASE only
has to stand before the first action that needs the freed bytes (see `constraints`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from optpipe.action import Action, ActionType
from optpipe.memory import action_delta, action_workspace
from optpipe.simulate import duration_ms

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe_solver.milp.horizon.context import Cell, Context

__all__ = ["Choice", "Item", "Opening", "Presence", "draw_items", "memory_binds"]

_F, _I, _W, _B = (
    ActionType.FORWARD,
    ActionType.BACKWARD_INPUT,
    ActionType.BACKWARD_WEIGHT,
    ActionType.FULL_BACKWARD,
)


class Choice(StrEnum):
    """Binary choices of a (stage, micro-batch) on which the presence of items depends."""

    FUSED = "fused"
    SPLIT = "split"
    OFFLOADED = "offloaded"
    RECOMPUTED = "recomputed"


@dataclass(frozen=True, slots=True)
class Presence:
    """The item exists only if this choice is made."""

    choice: Choice
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One action that takes a place in its device's program; one object stands for it.

    ``index`` counts all items, those of one device in a row; ``presence`` None = always there;
    ``delta`` is what it adds to the device's bytes, ``extra`` what it holds above the bytes before
    it while it runs. ``earliest`` and ``latest`` bound its start in ms.
    """

    index: int
    action: Action
    device: int
    duration: float
    presence: Presence | None
    delta: int
    extra: int
    earliest: float
    latest: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """What is open about a cell: the actions that may exist, and when.

    ``here`` holds the actions that exist in any case or may, OFFLOAD and RELEASE included;
    a choice not open is made: an action of ``here`` then exists.
    """

    cell: Cell
    here: frozenset[ActionType]
    may_fuse: bool = False
    may_offload: bool = False
    may_recompute: bool = False
    is_recomputed: bool = False

    def presence(self, kind: ActionType) -> Presence | None:
        """Return the choice on which an action depends."""
        if kind in (_I, _W) and self.may_fuse:
            return Presence(Choice.SPLIT, *self.cell)
        if kind is _B and self.may_fuse:
            return Presence(Choice.FUSED, *self.cell)
        if kind is ActionType.RELOAD and self.may_offload:
            return Presence(Choice.OFFLOADED, *self.cell)
        if kind is ActionType.RECOMPUTE and self.may_recompute:
            return Presence(Choice.RECOMPUTED, *self.cell)
        return None


def draw_items(problem: Problem, openings: list[Opening]) -> list[Item]:
    """Return all items, device by device, with windows still to be found."""
    items: list[Item] = []
    for device in range(len(problem.devices)):
        for opening in openings:
            if problem.stages[opening.cell[0]].device == device:
                for kind in _ITEM_ORDER:
                    if kind in opening.here:
                        items.append(_item(problem, opening, kind, len(items)))
    return items


_ITEM_ORDER = (_F, _I, _W, _B, ActionType.RELOAD, ActionType.RECOMPUTE)


def _item(problem: Problem, opening: Opening, kind: ActionType, index: int) -> Item:
    stage, microbatch = opening.cell
    held = problem.stages[stage]
    action = Action(stage, kind, microbatch)
    delta = action_delta(held, kind, is_recomputed=opening.is_recomputed)
    return Item(
        index=index,
        action=action,
        device=held.device,
        duration=0.0 if kind.is_transfer else duration_ms(problem, action),
        presence=opening.presence(kind),
        delta=delta,
        extra=max(0, delta) + action_workspace(held, kind),
        earliest=0.0,
        latest=0.0,
    )


def openings_of(problem: Problem, context: Context, *, alike: bool) -> list[Opening]:
    """Return what is open about every cell that has an action in the window, by cell.

    ``alike``: no offload, no recompute and no fused backward is worth looking at unless the
    window holds one already.
    """
    here: dict[Cell, set[ActionType]] = {}
    if context.window is None:
        cells = range(problem.num_microbatches)
        here = {(s, j): {_F, _I, _W} for s in range(len(problem.stages)) for j in cells}
    else:
        for program in context.window:
            for stage, kind, j in program:
                here.setdefault((stage, j), set()).add(kind)
    tight = [not alike and memory_binds(problem, device) for device in range(len(problem.devices))]
    return [_opening(problem, context, cell, here[cell], tight) for cell in sorted(here)]


def _opening(
    problem: Problem,
    context: Context,
    cell: Cell,
    here: set[ActionType],
    tight: list[bool],
) -> Opening:
    stage = problem.stages[cell[0]]
    again = cell in context.recomputed
    if _F not in here or not here & {_I, _B} or stage.device in context.frozen:
        return Opening(cell=cell, here=frozenset(here), is_recomputed=again)
    whole_backward = bool(here & {_W, _B})
    binds = tight[stage.device]
    fuse = whole_backward and (fusing_may_pay(problem, cell[0]) or _B in here)
    offload = ActionType.OFFLOAD in here or (binds and problem.can_offload(cell[0]))
    recompute = ActionType.RECOMPUTE in here or (binds and stage.can_recompute)
    kinds = {_F, _I}
    if whole_backward:
        kinds.add(_W)
    if fuse:
        kinds.add(_B)
    if offload:
        kinds |= {ActionType.OFFLOAD, ActionType.RELEASE, ActionType.RELOAD}
    if recompute:
        kinds.add(ActionType.RECOMPUTE)
    return Opening(
        cell=cell,
        here=frozenset(kinds),
        may_fuse=fuse,
        may_offload=offload,
        may_recompute=recompute,
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
    limit = problem.devices[device].usable_bytes - problem.static_bytes_of(device)
    return most + workspace > limit


def fusing_may_pay(problem: Problem, s: int) -> bool:
    """Whether a fused B can be better than I with W right behind it, in time or in memory."""
    stage = problem.stages[s]
    split_peak = max(
        max(stage.activation_bytes, stage.weight_context_bytes)
        + stage.backward_input_workspace_bytes,
        stage.weight_context_bytes + stage.backward_weight_workspace_bytes,
    )
    fused_peak = stage.activation_bytes + stage.backward_workspace_bytes
    split_ms = stage.backward_input_ms + stage.backward_weight_ms
    return stage.fused_backward_ms < split_ms or fused_peak < split_peak
