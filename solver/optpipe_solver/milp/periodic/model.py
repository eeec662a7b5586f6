"""The periodic model, built for a range of periods, and the block a solution stands for.

Modulo scheduling (Rau 1994; Eichenberger, Davidson 1997) of one micro-batch: phase and integer
period index per action, circular non-overlap per device, memory from the indices. It generalises
the building blocks of Qi et al., "Pipeline Parallelism with Controllable Memory" (arXiv
2405.15362).
"""

from __future__ import annotations

import itertools
from math import ceil, floor
from typing import TYPE_CHECKING, NamedTuple

from optpipe.schedule import ActionType
from optpipe_solver.milp.highs import MilpModel, value_of
from optpipe_solver.milp.periodic.block import Entry, PeriodicBlock
from optpipe_solver.milp.periodic.constraints import all_constraints
from optpipe_solver.milp.periodic.items import PeriodChoice, PeriodicItems, load_ms
from optpipe_solver.milp.periodic.variables import PeriodicVariables

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from optpipe.problem import Problem
    from optpipe_solver.milp.highs import Linear, Variable
    from optpipe_solver.milp.periodic.items import Cell, Modes, PeriodItem

__all__ = ["PeriodicModel", "start_of"]


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
        self.model = MilpModel("periodic")
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
        self, row: Sequence[PeriodItem], values: Mapping[Variable, float], period: float
    ) -> tuple[Entry, ...]:
        v = self.variables

        def rank(b: PeriodItem) -> float:
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

    def _exists(self, item: PeriodItem, values: Mapping[Variable, float]) -> bool:
        match item.kind:
            case ActionType.BACKWARD_WEIGHT:
                return not self._chosen(PeriodChoice.FUSED, item, values)
            case ActionType.RELEASE | ActionType.RELOAD:
                return self._chosen(PeriodChoice.OFFLOADED, item, values)
            case ActionType.RECOMPUTE:
                return self._chosen(PeriodChoice.RECOMPUTED, item, values)
            case _:
                return True

    def _kind(self, item: PeriodItem, values: Mapping[Variable, float]) -> ActionType:
        fused = self._chosen(PeriodChoice.FUSED, item, values)
        if fused and item.kind is ActionType.BACKWARD_INPUT:
            return ActionType.FULL_BACKWARD
        return item.kind

    def _chosen(
        self, choice: PeriodChoice, item: PeriodItem, values: Mapping[Variable, float]
    ) -> bool:
        return value_of(self.variables.chosen(choice, item.cell), values) > 0.5


# --- A block as a start of the periodic model: the values that its variables have in it.
# Items that a cell does without stand together, as constraint (7) wants them: RECOMPUTE right
# behind F, RELEASE and RELOAD right before I, W right behind its B. What waits a period or longer
# runs that many periods earlier, which by the argument of (3) loses nothing. HiGHS takes the
# orders, indices and choices and finds the best times that go with them; where a block is none of
# the model's after all, it begins without a start.

_F, _I, _W, _B = (
    ActionType.FORWARD,
    ActionType.BACKWARD_INPUT,
    ActionType.BACKWARD_WEIGHT,
    ActionType.FULL_BACKWARD,
)
_RELEASE, _RELOAD, _RECOMPUTE = ActionType.RELEASE, ActionType.RELOAD, ActionType.RECOMPUTE
_SHOWS = {
    PeriodChoice.FUSED: _B,
    PeriodChoice.OFFLOADED: _RELEASE,
    PeriodChoice.RECOMPUTED: _RECOMPUTE,
}
_SLACK = 1e-9


class _Placed(NamedTuple):
    """Where an item stands: its turn, its place in the row, its start in ms, its length in ms."""

    turn: int
    place: int
    start_ms: float
    ms: float


def start_of(v: PeriodicVariables, block: PeriodicBlock) -> dict[Variable, float] | None:
    """Return the values of a model's variables in a block, None where it has other copies.

    The model's periods may be longer or shorter than the block's: the times are the block's own.
    """
    if block.copies != v.items.copies:
        return None
    shows = {((e.stage, e.copy), e.kind) for row in block.rows for e in row}
    placed = _earlier(v.items, dict(_placed(v.items, block, shows)), block.period_ms)
    unit = v.turn / block.period_ms
    rate = min(1.0, max(v.slowest, v.items.copies * v.load_ms / block.period_ms))
    values: dict[Variable, float] = {v.rate: rate}
    for device, first in enumerate(v.first):
        values[v.shift[device]] = placed[first].start_ms * unit if first is not None else 0.0
    for item, index in v.index.items():
        first = v.first[item.device]
        place = v.place[item]
        if first is None or isinstance(index, float) or isinstance(place, float):
            continue
        turns = _turns(placed[item], placed[first])
        values[index] = float(turns)
        since = placed[item].start_ms - placed[first].start_ms
        values[place] = since * unit - turns * v.turn
    for (a, b), order in v.order.items():
        cut = placed[_first(v, a)]
        values[order] = float(_since(placed[a], cut) < _since(placed[b], cut))
    for (choice, cell), chosen in v.choice.items():
        values[chosen] = float((cell, _SHOWS[choice]) in shows)
        if (choice, cell) in v.slowed:
            values[v.slowed[choice, cell]] = values[chosen] * rate
    values |= _transfers(v, placed, shows, unit)
    return values | _peak(v, block)


def _placed(
    items: PeriodicItems, block: PeriodicBlock, shows: set[tuple[Cell, ActionType]]
) -> Iterator[tuple[PeriodItem, _Placed]]:
    """Yield every item of the model with its place in the block."""
    for row in block.rows:
        place = 0
        for entry in row:
            cell = entry.stage, entry.copy
            kind = _I if entry.kind is _B else entry.kind
            stage = items.problem.stages[entry.stage]
            ms = stage.fused_backward_ms if entry.kind is _B else items.of[cell, kind].duration_ms
            for each, start_ms in _with_idle(entry, ms):
                shown = (_RELEASE if each is _RELOAD else each) if each is not _W else _I
                idle = each is not kind
                if not idle or ((cell, each) in items.of and (cell, shown) not in shows):
                    placed = _Placed(entry.index, place, start_ms, 0.0 if idle else ms)
                    yield items.of[cell, each], placed
                    place += 1


def _with_idle(entry: Entry, ms: float) -> Iterator[tuple[ActionType, float]]:
    """Yield what an entry is, and what stands beside it where its cell does without, by start."""
    end_ms = entry.start_ms + ms
    if entry.kind in {_I, _B}:
        yield _RELEASE, entry.start_ms
        yield _RELOAD, entry.start_ms
    yield (_I if entry.kind is _B else entry.kind), entry.start_ms
    if entry.kind is _F:
        yield _RECOMPUTE, end_ms
    if entry.kind is _B:
        yield _W, end_ms


def _earlier(
    items: PeriodicItems, placed: dict[PeriodItem, _Placed], period_ms: float
) -> dict[PeriodItem, _Placed]:
    """Return the places with no wait of a period or longer along the way of a micro-batch."""
    found = dict(placed)
    stages = range(len(items.problem.stages))
    hops = items.problem.boundary_ms
    for copy in range(items.copies):
        way = [((s, copy), _F) for s in stages] + [((s, copy), _I) for s in reversed(stages)]
        delays = [hops[s][0] for s in stages[:-1]] + [0.0]
        delays += [hops[s][1] for s in reversed(stages[:-1])]
        turns = 0
        for (before, after), delay in zip(itertools.pairwise(way), delays, strict=True):
            a, b = items.of[before], items.of[after]
            turns += _too_long(placed[a], placed[b], delay, period_ms)
            cell, kind = after
            for moved in (kind, *((_RECOMPUTE, _RELOAD) if kind is _I else (_RELEASE,))):
                if (cell, moved) in items.of:
                    item = items.of[cell, moved]
                    found[item] = _moved(placed[item], turns, period_ms)
            if kind is _I:
                w = items.of[cell, _W]
                late = turns + _too_long(placed[b], placed[w], 0.0, period_ms)
                found[w] = _moved(placed[w], late, period_ms)
    return found


def _too_long(a: _Placed, b: _Placed, delay_ms: float, period_ms: float) -> int:
    """Return how many whole periods b could run earlier."""
    wait = b.start_ms - a.start_ms - a.ms - delay_ms
    return max(0, ceil(wait / period_ms - _SLACK) - 1)


def _moved(placed: _Placed, turns: int, period_ms: float) -> _Placed:
    return placed._replace(turn=placed.turn - turns, start_ms=placed.start_ms - turns * period_ms)


def _first(v: PeriodicVariables, item: PeriodItem) -> PeriodItem:
    first = v.first[item.device]
    return item if first is None else first


def _turns(item: _Placed, first: _Placed) -> int:
    """Return an item's index where turns are cut before the first item."""
    return item.turn - first.turn - (1 if item.place < first.place else 0)


def _since(item: _Placed, first: _Placed) -> tuple[bool, int]:
    """Return the order within such a turn."""
    return item.place < first.place, item.place


def _transfers(
    v: PeriodicVariables,
    placed: dict[PeriodItem, _Placed],
    shows: set[tuple[Cell, ActionType]],
    unit: float,
) -> dict[Variable, float]:
    """Return the starts of transfers, as soon and as late as can be, and the turns between them."""
    values: dict[Variable, float] = {}
    for cell, out in v.d2h.items():
        forward, back = placed[v.items.of[cell, _F]], placed[v.items.of[cell, _I]]
        away = (cell, _RELEASE) in shows
        home_ms = v.items.problem.reload_ms(cell[0]) if away else 0.0
        values[out] = (forward.start_ms + forward.ms) * unit
        values[v.h2d[cell]] = (back.start_ms - home_ms) * unit
    for turns, x, y in v.apart:
        values[turns] = -float(floor((values[y] - values[x]) / v.turn + _SLACK))
    return values


def _peak(v: PeriodicVariables, block: PeriodicBlock) -> dict[Variable, float]:
    """Return the value of the peak, in whole grains where the model counts in them."""
    variable, grain = v.grains
    peak = max(block.peaks(v.items.problem)) / v.unit_bytes
    return {variable: peak if grain is None else float(ceil(peak / grain - _SLACK))}
