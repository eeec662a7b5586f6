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

from optpipe.memory import action_delta, action_workspace
from optpipe.schedule import Action, ActionType
from optpipe.simulate import duration_ms
from optpipe_solver.feasibility import fusing_may_pay, memory_binds

if TYPE_CHECKING:
    from optpipe.problem import Problem

__all__ = [
    "MOST_PAIRS",
    "Cell",
    "HorizonChoice",
    "HorizonItem",
    "Opening",
    "Presence",
    "draw_items",
    "num_order_pairs",
    "openings_of",
]

Cell = tuple[int, int]
"""A (stage, micro-batch)."""

MOST_PAIRS = 60_000
"""Pairs of items of a device, summed over devices, beyond which no model is worth building."""

_F, _I, _W, _B = (
    ActionType.FORWARD,
    ActionType.BACKWARD_INPUT,
    ActionType.BACKWARD_WEIGHT,
    ActionType.FULL_BACKWARD,
)


class HorizonChoice(StrEnum):
    """Binary choices of a (stage, micro-batch) on which the presence of items depends."""

    FUSED = "fused"
    SPLIT = "split"
    OFFLOADED = "offloaded"
    RECOMPUTED = "recomputed"


@dataclass(frozen=True, slots=True)
class Presence:
    """The item exists only if this choice is made."""

    choice: HorizonChoice
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True, eq=False)
class HorizonItem:
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
    """What may be chosen about a cell, and ``here``: the actions that exist in any case or may."""

    cell: Cell
    here: frozenset[ActionType]
    may_fuse: bool
    may_offload: bool
    may_recompute: bool

    def presence(self, kind: ActionType) -> Presence | None:
        """Return the choice on which an action depends."""
        if kind in (_I, _W) and self.may_fuse:
            return Presence(HorizonChoice.SPLIT, *self.cell)
        if kind is _B and self.may_fuse:
            return Presence(HorizonChoice.FUSED, *self.cell)
        if kind is ActionType.RELOAD and self.may_offload:
            return Presence(HorizonChoice.OFFLOADED, *self.cell)
        if kind is ActionType.RECOMPUTE and self.may_recompute:
            return Presence(HorizonChoice.RECOMPUTED, *self.cell)
        return None


def draw_items(problem: Problem, openings: list[Opening]) -> list[HorizonItem]:
    """Return all items, device by device, with windows still to be found."""
    items: list[HorizonItem] = []
    for device in range(len(problem.devices)):
        for opening in openings:
            if problem.stages[opening.cell[0]].device == device:
                for kind in _ITEM_ORDER:
                    if kind in opening.here:
                        items.append(_item(problem, opening, kind, len(items)))
    return items


_ITEM_ORDER = (_F, _I, _W, _B, ActionType.RELOAD, ActionType.RECOMPUTE)


def _item(problem: Problem, opening: Opening, kind: ActionType, index: int) -> HorizonItem:
    stage, microbatch = opening.cell
    held = problem.stages[stage]
    action = Action(stage, kind, microbatch)
    mode = problem.menus[stage][held.implied_mode(kind)]
    delta = action_delta(mode, kind)
    return HorizonItem(
        index=index,
        action=action,
        device=held.device,
        duration=0.0 if kind.is_transfer else duration_ms(problem, action),
        presence=opening.presence(kind),
        delta=delta,
        extra=max(0, delta) + action_workspace(mode, kind),
        earliest=0.0,
        latest=0.0,
    )


def openings_of(problem: Problem) -> list[Opening]:
    """Return what is open about every cell, by cell."""
    return [
        _opening(problem, (s, j))
        for s in range(len(problem.stages))
        for j in range(problem.num_microbatches)
    ]


def _opening(problem: Problem, cell: Cell) -> Opening:
    """Offload and recompute are no choice where memory does not bind: they buy nothing there."""
    stage = problem.stages[cell[0]]
    binds = memory_binds(problem, stage.device)
    fuse = fusing_may_pay(problem, cell[0])
    offload = binds and problem.can_offload(cell[0])
    recompute = binds and stage.can_recompute
    kinds = {_F, _I, _W}
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


def num_order_pairs(problem: Problem, *, fifo: bool) -> int:
    """Return how many pairs of items would need an order binary: the size of the model."""
    m = problem.num_microbatches
    pairs = 0
    for held in problem.stages_of:
        count = m * sum(3 + problem.can_offload(s) + problem.stages[s].can_recompute for s in held)
        pairs += count * (count - 1) // (3 if fifo and m > 1 else 2)
    return pairs
