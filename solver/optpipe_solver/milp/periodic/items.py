"""What the periodic model orders: the actions of one period, with their bytes and their chain.

An item is an action that takes a place in its device's program: compute actions, and RELEASE and
RELOAD, which take no compute time. OFFLOAD is issued right behind its F. A *copy* numbers the
micro-batches of a super-period: with q copies, micro-batch j is copy j mod q of period j div q, and
each copy may be treated in its own way (offload for one micro-batch in three, say).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from optpipe.memory import action_delta, action_workspace
from optpipe.schedule import Action, ActionType
from optpipe.simulate import duration_ms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.problem import Problem

__all__ = ["Cell", "Hop", "Modes", "PeriodChoice", "PeriodItem", "PeriodicItems", "load_ms"]

Cell = tuple[int, int]
"""A (stage, copy)."""

_F, _I, _W = ActionType.FORWARD, ActionType.BACKWARD_INPUT, ActionType.BACKWARD_WEIGHT
_RELEASE, _RELOAD, _RECOMPUTE = ActionType.RELEASE, ActionType.RELOAD, ActionType.RECOMPUTE


class PeriodChoice(StrEnum):
    """The binary choices of a (stage, copy)."""

    FUSED = "fused"
    OFFLOADED = "offloaded"
    RECOMPUTED = "recomputed"


@dataclass(frozen=True, slots=True)
class Modes:
    """Which choices the model has at all, and how many micro-batches a period holds (q)."""

    fuse: bool = True
    offload: bool = True
    recompute: bool = True
    copies: int = 1


@dataclass(frozen=True, slots=True)
class PeriodItem:
    """One action of a period: ``delta`` is what it adds to its device's bytes."""

    stage: int
    kind: ActionType
    copy: int
    device: int
    duration_ms: float
    delta: int

    @property
    def cell(self) -> Cell:
        """The (stage, copy)."""
        return self.stage, self.copy

    @property
    def name(self) -> str:
        """For variables."""
        return f"{self.stage}{self.kind.value}{self.copy}"


@dataclass(frozen=True, slots=True)
class Hop:
    """``second`` needs ``first``'s end and then ``delay_ms``, in one and the same micro-batch."""

    first: PeriodItem
    second: PeriodItem
    delay_ms: float


class PeriodicItems:
    """All items of one period of a problem.

    Parameters
    ----------
    problem
        Its number of micro-batches plays no part.
    modes
        What may be chosen; a choice that a stage does not have, or does not need because memory
        cannot bind its device, is left out.
    """

    def __init__(self, problem: Problem, modes: Modes) -> None:
        self.problem = problem
        self.modes = modes
        self.copies = modes.copies
        self.by_device: list[list[PeriodItem]] = [[] for _ in problem.devices]
        for device, held in enumerate(problem.stages_of):
            for cell in ((s, c) for c in range(modes.copies) for s in held):
                self.by_device[device] += self._items_of(cell)
        self.of = {(item.cell, item.kind): item for row in self.by_device for item in row}

    def may(self, choice: PeriodChoice, stage: int) -> bool:
        """Whether a stage has a choice."""
        held = self.problem.stages[stage]
        match choice:
            case PeriodChoice.FUSED:
                return self.modes.fuse and fusing_may_pay(self.problem, stage)
            case PeriodChoice.OFFLOADED:
                return self.modes.offload and self.problem.can_offload(stage)
            case PeriodChoice.RECOMPUTED:
                return self.modes.recompute and held.can_recompute

    def cells(self) -> Iterator[Cell]:
        """Yield every (stage, copy)."""
        for s in range(len(self.problem.stages)):
            for c in range(self.copies):
                yield s, c

    def chain(self) -> Iterator[Hop]:
        """Yield what the way of a micro-batch through forwards and input gradients needs. (3)."""
        last = len(self.problem.stages) - 1
        for s, c in self.cells():
            there, back = self.problem.boundary_ms[s]
            if s < last:
                yield Hop(self.of[(s, c), _F], self.of[(s + 1, c), _F], there)
                yield Hop(self.of[(s + 1, c), _I], self.of[(s, c), _I], back)
            else:
                yield Hop(self.of[(s, c), _F], self.of[(s, c), _I], 0.0)

    def inner(self) -> Iterator[tuple[PeriodItem, PeriodItem]]:
        """Yield the pairs of one cell that its device's program keeps in order."""
        for cell in self.cells():
            here = self.of
            yield here[cell, _F], here[cell, _I]
            yield here[cell, _I], here[cell, _W]
            if (cell, _RELEASE) in here:
                yield here[cell, _F], here[cell, _RELEASE]
                yield here[cell, _RELEASE], here[cell, _RELOAD]
                yield here[cell, _RELOAD], here[cell, _I]
            if (cell, _RECOMPUTE) in here:
                yield here[cell, _F], here[cell, _RECOMPUTE]
                yield here[cell, _RECOMPUTE], here[cell, _I]

    def _items_of(self, cell: Cell) -> list[PeriodItem]:
        stage = cell[0]
        kinds = [_F, _I, _W]
        recompute = self.may(PeriodChoice.RECOMPUTED, stage)
        if self.may(PeriodChoice.OFFLOADED, stage):
            kinds += [_RELEASE, _RELOAD]
        if recompute:
            kinds.append(_RECOMPUTE)
        return [self._item(cell, kind, recompute=recompute) for kind in kinds]

    def _item(self, cell: Cell, kind: ActionType, *, recompute: bool) -> PeriodItem:
        stage = self.problem.stages[cell[0]]
        length = 0.0 if kind is _RELOAD else duration_ms(self.problem, Action(cell[0], kind, 0))
        delta = action_delta(stage, kind, is_recomputed=recompute)
        return PeriodItem(cell[0], kind, cell[1], stage.device, length, delta)


def load_ms(problem: Problem) -> float:
    """Return the least compute time of one micro-batch on the busiest device, in ms.

    No period per micro-batch is shorter: a device runs every stage's F and backward once in it.
    """
    return max(sum(problem.stages[s].busy_ms for s in held) for held in problem.stages_of)


def fusing_may_pay(problem: Problem, s: int) -> bool:
    """Whether a fused B can be better than I with W right behind it, in time or in memory."""
    stage = problem.stages[s]
    context = max(stage.activation_bytes, stage.weight_context_bytes)
    split_peak = max(
        context + action_workspace(stage, _I),
        stage.weight_context_bytes + action_workspace(stage, _W),
    )
    fused_peak = stage.activation_bytes + action_workspace(stage, ActionType.FULL_BACKWARD)
    split_ms = stage.backward_input_ms + stage.backward_weight_ms
    return stage.fused_backward_ms < split_ms or fused_peak < split_peak
