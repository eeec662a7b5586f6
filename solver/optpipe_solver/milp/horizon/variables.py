"""What the full-horizon model orders, and its decision variables, made on demand and never twice.

An item is an action that takes a place in a device's program: compute actions, and RELOAD, which
takes no time there but must stand at a compute boundary. OFFLOAD and RELEASE need no place of
their own: an OFFLOAD issued right behind its forward never delays anything, and a RELEASE only
has to stand before the first action that needs the freed bytes (see `constraints`).

======================  ======================================================================
``start[item]``         ms, within the item's window
``choice[...]``         1 = (stage, micro-batch) is fused / offloaded / recomputed
``before(a, b)``        1 = both exist and a stands before b in their device's program
``released[x, item]``   1 = the RELEASE of x stands before the item
``d2h[x]``, ``h2d[x]``  ms, start of the transfer itself
``host_after[x, y]``    1 = x's backward stands before y's OFFLOAD
``on_host[x, y]``       1 = x is on the host when y's OFFLOAD is issued
``lane[x, y]``          1 = transfer x goes before transfer y on a lane they share
``length``              ms, the objective
======================  ======================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

from optpipe.memory import action_delta, action_workspace
from optpipe.schedule import Action, ActionType
from optpipe.simulate import duration_ms
from optpipe_solver.feasibility import fusing_may_pay, memory_binds
from optpipe_solver.milp.highs import at_least

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe_solver.milp.highs import Constraint, Linear, MilpModel, Variable
    from optpipe_solver.milp.horizon.orders import HorizonItems

__all__ = [
    "MOST_PAIRS",
    "Cell",
    "HorizonChoice",
    "HorizonItem",
    "HorizonVariables",
    "Opening",
    "Presence",
    "draw_items",
    "num_order_pairs",
    "openings_of",
    "relaxed",
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


class HorizonVariables:
    """All variables of one model, by what they mean."""

    def __init__(self, problem: Problem, items: HorizonItems, model: MilpModel) -> None:
        self.model = model
        self.problem = problem
        self.items = items
        self.start = {
            item: model.continuous(f"start_{item.action}", item.earliest, item.latest)
            for row in items.by_device
            for item in row
        }
        self.choice: dict[tuple[HorizonChoice, int, int], Variable] = {}
        self.order: dict[tuple[HorizonItem, HorizonItem], Variable] = {}
        self.released: dict[tuple[Cell, HorizonItem], Variable] = {}
        self.lane: dict[tuple[Action, Action], Variable] = {}
        self.host_peaks: dict[int, Variable] = {}
        self.host_after: dict[tuple[Cell, Cell], Variable] = {}
        self.on_host: dict[tuple[Cell, Cell], Variable] = {}
        self.checkpointed: dict[tuple[Cell, HorizonItem], Variable] = {}
        self.top = 2 * items.horizon_ms
        self.d2h = self._transfers(ActionType.OFFLOAD)
        self.h2d = self._transfers(ActionType.RELOAD)
        self.length = model.continuous("length", 0.0, self.top)
        self.first_start = [
            model.continuous(f"first_{d}", 0.0, items.horizon_ms)
            for d in range(len(problem.devices))
        ]

    def _transfers(self, kind: ActionType) -> dict[Cell, Variable]:
        return {
            cell: self.model.continuous(f"{kind.value}_{_name(cell)}", 0.0, self.top)
            for device in range(len(self.problem.devices))
            for cell in self.items.open_cells(device, kind)
        }

    def chosen(self, choice: HorizonChoice, stage: int, microbatch: int) -> Linear:
        """Return the binary of a choice (SPLIT is the complement of FUSED), 1 if it is made."""
        if not self.items.is_open(choice, (stage, microbatch)):
            return 1.0
        if choice is HorizonChoice.SPLIT:
            return 1.0 - self.chosen(HorizonChoice.FUSED, stage, microbatch)
        key = (choice, stage, microbatch)
        if key not in self.choice:
            self.choice[key] = self.model.binary(f"{choice.value}_{stage}_{microbatch}")
        return self.choice[key]

    def present(self, item: HorizonItem) -> Linear:
        """Return 1 where the item exists."""
        if item.presence is None:
            return 1.0
        return self.chosen(item.presence.choice, item.presence.stage, item.presence.microbatch)

    def before(self, a: HorizonItem, b: HorizonItem) -> Linear:
        """Return 1 exactly where both items exist and a stands before b."""
        if exclusive(a.presence, b.presence) or self.items.implied(b, a):
            return 0.0
        together = self._together(a, b)
        if together is not None and self.items.implied(a, b):
            return together
        if (b, a) in self.order and (a.presence is None or b.presence is None):
            return self.present(a if b.presence is None else b) - self.order[b, a]
        return self.order.setdefault((a, b), self.model.binary(f"order_{a.action}_{b.action}"))

    def _together(self, a: HorizonItem, b: HorizonItem) -> Linear | None:
        """Return 1 where both items exist; None where that is not linear."""
        if a.presence is None:
            return self.present(b)
        if b.presence is None or a.presence == b.presence:
            return self.present(a)
        return None

    def releases(self, cell: Cell, item: HorizonItem) -> Variable:
        """Return 1 only if the RELEASE of a cell stands before an item."""
        key = (cell, item)
        if key not in self.released:
            self.released[key] = self.model.binary(f"released_{_name(cell)}_{item.action}")
        return self.released[key]

    def goes_first(self, x: Action, y: Action) -> Linear:
        """Return 1 where transfer x goes before y (meaningful where both happen)."""
        if (y, x) in self.lane:
            return 1.0 - self.lane[y, x]
        return self.lane.setdefault((x, y), self.model.binary(f"lane_{x}_{y}"))

    @cached_property
    def host_unit(self) -> float:
        """Bytes of the largest offload: what host memory is counted in.

        In bytes, coefficients would reach from 1 to 1e10; HiGHS takes those below 1e-9 of the
        largest for zero, and proved what is not so.
        """
        return float(max(1, *(stage.offload_bytes for stage in self.problem.stages)))

    def host_peak(self, device: int) -> Variable:
        """Return the most a device ever holds on its host, in `host_unit`."""
        if device not in self.host_peaks:
            cells = self.items.open_cells(device, ActionType.OFFLOAD)
            top = sum(self.problem.stages[s].offload_bytes for s, _ in cells) / self.host_unit
            self.host_peaks[device] = self.model.continuous(f"host_peak_{device}", 0.0, top)
        return self.host_peaks[device]

    def host_pair(self, other: Cell, cell: Cell) -> tuple[Variable, Variable]:
        """Return, for the moment a cell's OFFLOAD is issued, whether another's copy is gone, there.

        Gone: its backward stands before; there: it takes host memory.
        """
        key = (other, cell)
        if key not in self.on_host:
            name = f"{_name(other)}_{_name(cell)}"
            self.host_after[key] = self.model.binary(f"host_gone_{name}")
            self.on_host[key] = self.model.continuous(f"on_host_{name}", 0.0, 1.0)
        return self.host_after[key], self.on_host[key]

    def transfer_start(self, transfer: Action) -> Variable:
        """Return the start of an OFFLOAD or RELOAD on its lane."""
        table = self.d2h if transfer.type is ActionType.OFFLOAD else self.h2d
        return table[transfer.stage, transfer.microbatch]


def _name(cell: Cell) -> str:
    return f"{cell[0]}_{cell[1]}"


def exclusive(a: Presence | None, b: Presence | None) -> bool:
    """Whether two items never exist together."""
    if a is None or b is None or (a.stage, a.microbatch) != (b.stage, b.microbatch):
        return False
    pairs = (
        {HorizonChoice.FUSED, HorizonChoice.SPLIT},
        {HorizonChoice.OFFLOADED, HorizonChoice.RECOMPUTED},
    )
    return {a.choice, b.choice} in pairs


# --- The one way this model writes "if": a big-M row.


def relaxed(gap: Linear, holds: Linear, big: float) -> Constraint:
    """Return gap >= 0 where ``holds`` is 1, and nothing where it is 0 (big-M)."""
    return at_least(gap + max(0.0, big) * (1.0 - holds), 0.0)
