"""The periodic model, built for a range of periods, and the block a solution stands for.

Modulo scheduling (Rau 1994; Eichenberger, Davidson 1997) of one micro-batch: phase and integer
period index per action, circular non-overlap per device, memory from the indices. It generalises
the building blocks of Qi et al., "Pipeline Parallelism with Controllable Memory" (arXiv
2405.15362).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.action import ActionType
from optpipe_solver.milp.highs import Model, value_of
from optpipe_solver.milp.periodic.block import Entry, PeriodicBlock
from optpipe_solver.milp.periodic.constraints import all_constraints
from optpipe_solver.milp.periodic.items import Choice, PeriodicItems, load_ms
from optpipe_solver.milp.periodic.variables import PeriodicVariables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optpipe.problem import Problem
    from optpipe_solver.milp.highs import Linear, Variable
    from optpipe_solver.milp.periodic.items import Item, Modes

__all__ = ["PeriodicModel"]

_SMALL = 0.01
"""Factor of every objective.

HiGHS 1.15.1 with a feasibility tolerance of 1e-9 cuts off optima of this model now and then (8 runs
of 128 with objectives near 1, none of 192 with objectives a hundredth of that).
"""


class PeriodicModel:
    """Variables and constraints of one problem.

    Parameters
    ----------
    problem
        Its number of micro-batches plays no part.
    modes
        What may be chosen.
    shortest_ms, longest_ms
        Between which the period per micro-batch must be; the shortest is at least the load bound.

    Raises
    ------
    ValueError
        If no device has anything to compute.
    """

    def __init__(
        self, problem: Problem, modes: Modes, *, shortest_ms: float, longest_ms: float
    ) -> None:
        if not load_ms(problem) > 0:
            raise ValueError(
                "the load bound is 0 ms: a period needs a compute time > 0; give F, I or W a time"
            )
        self.items = PeriodicItems(problem, modes)
        self.model = Model("periodic")
        self.variables = PeriodicVariables(
            self.items, self.model, shortest_ms=shortest_ms, longest_ms=longest_ms
        )
        for constraint in all_constraints(self.variables):
            self.model.add(constraint)

    def minimise(self, objective: Linear) -> None:
        """Set the objective."""
        self.model.minimise(_SMALL * objective)

    def bound(self, outcome_bound: float) -> float:
        """Return the bound of the objective that HiGHS's bound of the scaled one is."""
        return outcome_bound / _SMALL

    def block(self, values: Mapping[Variable, float]) -> PeriodicBlock:
        """Return the block a solution stands for."""
        v = self.variables
        period = v.period_ms(value_of(v.rate, values))
        rows = [self._row(row, values, period) for row in self.items.by_device]
        return PeriodicBlock(period, self.items.copies, tuple(rows))

    def _row(
        self, row: Sequence[Item], values: Mapping[Variable, float], period: float
    ) -> tuple[Entry, ...]:
        v = self.variables

        def rank(b: Item) -> float:
            return sum(value_of(v.before(a, b), values) for a in row if a is not b)

        ordered = sorted((item for item in row if self._exists(item, values)), key=rank)
        turns = {item: round(value_of(v.index[item], values)) for item in ordered}
        least = min(turns.values(), default=0)
        return tuple(
            Entry(
                item.stage,
                self._kind(item, values),
                item.copy,
                turns[item] - least,
                value_of(v.start(item), values) * period / v.turn,
            )
            for item in ordered
        )

    def _exists(self, item: Item, values: Mapping[Variable, float]) -> bool:
        match item.kind:
            case ActionType.BACKWARD_WEIGHT:
                return not self._chosen(Choice.FUSED, item, values)
            case ActionType.RELEASE | ActionType.RELOAD:
                return self._chosen(Choice.OFFLOADED, item, values)
            case ActionType.RECOMPUTE:
                return self._chosen(Choice.RECOMPUTED, item, values)
            case _:
                return True

    def _kind(self, item: Item, values: Mapping[Variable, float]) -> ActionType:
        fused = self._chosen(Choice.FUSED, item, values)
        if fused and item.kind is ActionType.BACKWARD_INPUT:
            return ActionType.FULL_BACKWARD
        return item.kind

    def _chosen(self, choice: Choice, item: Item, values: Mapping[Variable, float]) -> bool:
        return value_of(self.variables.chosen(choice, item.cell), values) > 0.5
