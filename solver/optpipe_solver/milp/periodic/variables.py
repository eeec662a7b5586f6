"""The decision variables of the periodic model; times in units of which a period has ``turn``.

==================  ==========================================================================
``rate``            least load / T, in (0, 1]: all times are multiples of it, so that T is linear
``shift[d]``        start of the device's first item, in units
``place[item]``     start after that, in [0, turn): the first item of a device stands at 0
``index[item]``     whole periods after the first item's period (an integer)
``before(a, b)``    1 = a stands before b in the device's circle, cut before its first item
``choice[...]``     1 = (stage, copy) is fused / offloaded / recomputed
``d2h, h2d[cell]``  start of the transfer on its lane, in units
``apart``           (turns, x, y): whole periods between transfers x and y of one lane
``peak``            in units of bytes: the objective where memory is minimised
==================  ==========================================================================
"""

from __future__ import annotations

from math import ceil, gcd
from typing import TYPE_CHECKING

from optpipe.memory import action_workspace
from optpipe.schedule import ActionType
from optpipe_solver.milp.highs import total
from optpipe_solver.milp.periodic.items import PeriodChoice, load_ms

if TYPE_CHECKING:
    from optpipe_solver.milp.highs import Linear, MilpModel, Variable
    from optpipe_solver.milp.periodic.items import Cell, PeriodicItems, PeriodItem

__all__ = ["PeriodicVariables"]

_MOST_GRAINS = 64
"""Up to so many grains in the largest item the peak is an integer, and its bound rounds up."""

_MOST_UNITS = 64
"""Units of a period: the shortest item is the unit, so that equal times are whole numbers."""


class PeriodicVariables:
    """All variables of one model, by what they mean.

    Parameters
    ----------
    items
        What is ordered.
    model
        Where the variables live.
    shortest_ms, longest_ms
        Bounds of the period per micro-batch: ``rate`` lies between load / longest and
        load / shortest.
    """

    def __init__(
        self, items: PeriodicItems, model: MilpModel, *, shortest_ms: float, longest_ms: float
    ) -> None:
        self.items = items
        self.model = model
        self.load_ms = load_ms(items.problem)
        slowest, fastest = self.load_ms / longest_ms, min(1.0, self.load_ms / shortest_ms)
        shortest_ms_of_all = min(
            item.duration_ms for row in items.by_device for item in row if item.duration_ms > 0
        )
        self.unit_ms = max(shortest_ms_of_all, items.copies * self.load_ms / _MOST_UNITS)
        self.turn = items.copies * self.load_ms / self.unit_ms
        self.unit_bytes = max(1, *(abs(item.delta) for row in items.by_device for item in row))
        self.slowest = slowest
        self.rate = model.continuous("rate", slowest, fastest)
        self.grains = self._grains()
        self.peak: Linear = self.grains[0] * (self.grains[1] or 1.0)
        self.longest = self._longest()
        self.first = [row[0] if row else None for row in items.by_device]
        self.shift = [
            model.continuous(f"shift_{d}", 0.0, self.longest * self.turn)
            for d in range(len(items.by_device))
        ]
        self.place: dict[PeriodItem, Linear] = {}
        self.index: dict[PeriodItem, Linear] = {}
        self.order: dict[tuple[PeriodItem, PeriodItem], Variable] = {}
        self.choice: dict[tuple[PeriodChoice, Cell], Variable] = {}
        self.slowed: dict[tuple[PeriodChoice, Cell], Variable] = {}
        self.d2h: dict[Cell, Variable] = {}
        self.h2d: dict[Cell, Variable] = {}
        self.apart: list[tuple[Variable, Variable, Variable]] = []
        self._make()

    def period_ms(self, rate: float) -> float:
        """Return the period of all copies at a rate, in ms."""
        return self.items.copies * self.load_ms / rate

    def before(self, a: PeriodItem, b: PeriodItem) -> Linear:
        """Return 1 where a stands before b in their device's circle."""
        first = self.first[a.device]
        if first in (a, b):
            return 1.0 if a is first else 0.0
        if (b, a) in self.order:
            return 1.0 - self.order[b, a]
        if (a, b) not in self.order:
            self.order[a, b] = self.model.binary(f"order_{a.name}_{b.name}")
        return self.order[a, b]

    def start(self, item: PeriodItem) -> Linear:
        """Return when micro-batch 0 (of its copy) runs the item, in units."""
        return self.shift[item.device] + self.place[item] + self.turn * self.index[item]

    def length(self, item: PeriodItem) -> Linear:
        """Return how long the item runs, in periods; choices included."""
        stage = self.items.problem.stages[item.stage]
        fused = self._slowed(PeriodChoice.FUSED, item.cell)
        match item.kind:
            case ActionType.RECOMPUTE:
                return self.units(item.duration_ms) * self._slowed(
                    PeriodChoice.RECOMPUTED, item.cell
                )
            case ActionType.BACKWARD_INPUT:
                longer = stage.fused_backward_ms - stage.backward_input_ms
                return self.lasting(item.duration_ms) + self.units(longer) * fused
            case ActionType.BACKWARD_WEIGHT:
                return self.lasting(item.duration_ms) - self.units(item.duration_ms) * fused
            case _:
                return self.lasting(item.duration_ms)

    def least_length(self, item: PeriodItem) -> float:
        """Return the least it can be: at the slowest rate, whatever is chosen."""
        stage = self.items.problem.stages[item.stage]
        least = item.duration_ms
        if item.kind is ActionType.RECOMPUTE:
            least = 0.0
        elif self.items.may(PeriodChoice.FUSED, item.stage):
            if item.kind is ActionType.BACKWARD_INPUT:
                least = min(least, stage.fused_backward_ms)
            elif item.kind is ActionType.BACKWARD_WEIGHT:
                least = 0.0
        return self.units(least) * self.slowest

    def total_before(self, item: PeriodItem) -> Linear:
        """Return the least time that stands before an item in its circle."""
        row = self.items.by_device[item.device]
        return total([self.least_length(a) * self.before(a, item) for a in row if a is not item])

    def lasting(self, ms: float) -> Linear:
        """Return a time in units."""
        return self.units(ms) * self.rate

    def units(self, ms: float) -> float:
        """Return a time in units where the rate is 1."""
        return ms / self.unit_ms

    def transfer(self, cell: Cell, ms: float) -> Linear:
        """Return how long a transfer of a cell takes, in units: 0 where it is not offloaded."""
        return self.units(ms) * self._slowed(PeriodChoice.OFFLOADED, cell)

    def chosen(self, choice: PeriodChoice, cell: Cell) -> Linear:
        """Return the binary of a choice, 0 where the stage does not have it."""
        if not self.items.may(choice, cell[0]):
            return 0.0
        key = (choice, cell)
        if key not in self.choice:
            self.choice[key] = self.model.binary(f"{choice.value}_{cell[0]}_{cell[1]}")
        return self.choice[key]

    def _slowed(self, choice: PeriodChoice, cell: Cell) -> Linear:
        """Return choice * rate; `constraints.choices_take_time` gives it its meaning."""
        if not self.items.may(choice, cell[0]):
            return 0.0
        key = (choice, cell)
        if key not in self.slowed:
            self.slowed[key] = self.model.continuous(
                f"slowed_{choice.value}_{cell[0]}_{cell[1]}", 0.0, 1.0
            )
        return self.slowed[key]

    def _make(self) -> None:
        for row in self.items.by_device:
            for item in row:
                is_first = item is self.first[item.device]
                self.place[item] = (
                    0.0 if is_first else self.model.continuous(f"place_{item.name}", 0.0, self.turn)
                )
                self.index[item] = 0.0 if is_first else self._integer(f"index_{item.name}")
                if item.kind is ActionType.RELEASE:
                    name = f"{item.stage}_{item.copy}"
                    top = (self.longest + 1) * self.turn
                    self.d2h[item.cell] = self.model.continuous(f"d2h_{name}", 0.0, top)
                    self.h2d[item.cell] = self.model.continuous(f"h2d_{name}", 0.0, top)

    def _grains(self) -> tuple[Variable, float | None]:
        """Return the variable of the peak: whole grains, and how many units of bytes a grain is.

        None where bytes are too many grains: then it is in units of bytes.
        """
        grain = gcd(*self._all_bytes())
        if grain == 0 or self.unit_bytes > _MOST_GRAINS * grain:
            return self.model.continuous("peak", 0.0, 1e6), None
        grains = self.model.problem.add_variable("peak", 0, 1_000_000, cat="Integer")
        return grains, grain / self.unit_bytes

    def _all_bytes(self) -> list[int]:
        """Return every number of bytes that the peak is made of."""
        kinds = [ActionType.FORWARD, ActionType.BACKWARD_INPUT, ActionType.BACKWARD_WEIGHT]
        kinds += [ActionType.FULL_BACKWARD, ActionType.RECOMPUTE]
        found = [item.delta for row in self.items.by_device for item in row]
        for stage in self.items.problem.stages:
            found += [stage.activation_bytes, stage.static_bytes]
            found += [action_workspace(stage, kind) for kind in kinds]
        return found

    def _integer(self, name: str) -> Variable:
        return self.model.problem.add_variable(name, -self.longest, self.longest, cat="Integer")

    def _longest(self) -> int:
        """Return how many periods the way of a micro-batch can take: no wait is longer than one."""
        hops = list(self.items.chain())
        way = (
            sum(
                max(
                    self.items.problem.stages[h.second.stage].fused_backward_ms,
                    h.second.duration_ms,
                )
                + h.delay_ms
                for h in hops
            )
            / self.items.copies
        )
        rest = max(
            stage.busy_ms + (stage.recompute_ms or 0.0) for stage in self.items.problem.stages
        )
        return ceil(self.units(way + 2 * rest) / self.turn) + len(hops) // self.items.copies + 6
