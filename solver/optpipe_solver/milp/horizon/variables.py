"""The decision variables of the full-horizon model, made on demand and never twice.

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

from functools import cached_property
from typing import TYPE_CHECKING

from optpipe.schedule import Action, ActionType
from optpipe_solver.milp.highs import at_least
from optpipe_solver.milp.horizon.orders import HorizonChoice, HorizonItem, Presence

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe_solver.milp.highs import Constraint, Linear, MilpModel, Variable
    from optpipe_solver.milp.horizon.orders import Cell, HorizonItems

__all__ = ["HorizonVariables", "relaxed"]


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
