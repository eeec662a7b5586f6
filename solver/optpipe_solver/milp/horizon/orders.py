"""Items with their time windows and the orders known between them, in every schedule looked for."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from typing import TYPE_CHECKING

import numpy as np

from optpipe.action import Action, ActionType
from optpipe_solver.milp.horizon.context import Context
from optpipe_solver.milp.horizon.facts import cells_of, facts_of
from optpipe_solver.milp.horizon.items import (
    Choice,
    draw_items,
    memory_binds,
    openings_of,
)
from optpipe_solver.milp.horizon.knowledge import Known, put_before
from optpipe_solver.milp.horizon.propagation import propagate, shave
from optpipe_solver.milp.horizon.tricks import Tricks

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.problem import Problem
    from optpipe_solver.milp.horizon.context import Cell
    from optpipe_solver.milp.horizon.items import Item
    from optpipe_solver.milp.horizon.knowledge import Cells, Facts

__all__ = ["HorizonItems"]

_ROUNDING = 1e-8
"""Share of the horizon given away where what was deduced with tolerances becomes a row."""

_MAX_TRIALS = 40_000
_TRIAL_WORK, _SLICE_WORK = 12_000_000, 400_000
"""Most orders tried by shaving, and those between two looks: fewer where there are many items."""


class HorizonItems:
    """All items of a problem, or of a window of it.

    Parameters
    ----------
    problem
        What is to be scheduled.
    horizon_ms
        Every schedule worth finding has an objective within this time (an incumbent's).
    fifo
        Whether micro-batches go first in, first out through every pass of every stage. It loses
        nothing where nothing can be offloaded or recomputed; elsewhere it is a restriction.
    tricks, context
        Which deductions are made, and what is fixed around the items.
    alike
        Offload and recompute are left out where the window has none.
    should_stop
        Asked between tries of orders; True ends them.

    Attributes
    ----------
    by_device
        The items of each device.
    is_empty
        Whether it is proven that no schedule lies within the horizon.
    """

    def __init__(
        self,
        problem: Problem,
        horizon_ms: float,
        *,
        fifo: bool,
        tricks: Tricks | None = None,
        context: Context | None = None,
        alike: bool = False,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.problem = problem
        self.horizon_ms = horizon_ms
        self.fifo = fifo
        self.tricks = tricks or Tricks()
        self.context = context or Context.whole(problem)
        self.tight = [memory_binds(problem, device) for device in range(len(problem.devices))]
        openings = openings_of(problem, self.context, alike=alike)
        self.openings = {opening.cell: opening for opening in openings}
        items = draw_items(problem, openings)
        self._certain = np.array([item.presence is None for item in items], dtype=np.bool_)
        self._should_stop = should_stop
        self._known = self._first_known(items)
        self.is_empty = not self._deduce(items)
        self._finish(items)

    def open_cells(self, device: int, kind: ActionType) -> list[Cell]:
        """Return the cells of a device that have, or may have, an OFFLOAD, RELEASE or RELOAD."""
        return [
            cell
            for cell, opening in self.openings.items()
            if kind in opening.here and self.problem.stages[cell[0]].device == device
        ]

    def has(self, cell: Cell, kind: ActionType) -> bool:
        """Whether an action of a cell is, or may be, among what is decided here."""
        return cell in self.openings and kind in self.openings[cell].here

    def is_open(self, choice: Choice, cell: Cell) -> bool:
        """Whether a choice is still to be made."""
        opening = self.openings.get(cell)
        if opening is None:
            return False
        return {
            Choice.FUSED: opening.may_fuse,
            Choice.SPLIT: opening.may_fuse,
            Choice.OFFLOADED: opening.may_offload,
            Choice.RECOMPUTED: opening.may_recompute,
        }[choice]

    def implied(self, first: Item, second: Item) -> bool:
        """Whether ``first`` stands before ``second`` in every schedule in which both exist.

        Both on one device, and in every schedule within the horizon.
        """
        return bool(self._known.before[first.index, second.index])

    def follows_anyway(self, first: Item, second: Item) -> bool:
        """Whether some item that surely exists stands between two of which the order is implied."""
        before, certain = self._known.before, self._certain
        return bool(np.any(before[first.index] & before[:, second.index] & certain))

    def tail(self, item: Item) -> float:
        """Return the ms of the horizon left behind an item's latest end, rounding aside."""
        return self.horizon_ms * (1 - _ROUNDING) - item.latest - item.duration

    def _first_known(self, items: list[Item]) -> Known:
        """Return windows of the whole horizon and the orders that hold by definition."""
        count = len(items)
        context = self.context
        earliest = np.array([self._head(item) for item in items])
        latest = np.full(count, 2.0 * self.horizon_ms)
        for item in items:
            tail = context.tails.get(item.action)
            bound = context.ends_bound[item.device]
            if tail is not None:
                ends = self.horizon_ms * (1 if bound else 2)
                latest[item.index] = ends - tail - item.duration
            latest[item.index] -= self._copy_back(item)
        return Known(earliest, latest, np.zeros((count, count), dtype=np.bool_))

    def _head(self, item: Item) -> float:
        ready = self.context.ready[item.device]
        return max(ready, self.context.heads.get(item.action, 0.0))

    def _copy_back(self, item: Item) -> float:
        """Return the ms of a RELOAD's copy where its tail counts from the copy's end."""
        if item.action.type is ActionType.RELOAD and item.action in self.context.tails:
            return self.problem.reload_ms(item.action.stage)
        return 0.0

    def _deduce(self, items: list[Item]) -> bool:
        """Tighten windows and orders; return False where no schedule is left."""
        facts = facts_of(self, items)
        cells = cells_of(self, items)
        rows = [items[low:high] for low, high in zip(facts.low, facts.high, strict=True)]
        for row in rows:
            for a, b in combinations(row, 2):
                for first, second in ((a, b), (b, a)):
                    if self._by_definition(first.action, second.action):
                        put_before(facts, self._known, first.index, second.index)
        self._keep_frozen(facts, items)
        if not self.tricks.windows:
            return True
        fits = bool(propagate(facts, cells, self._known))
        if fits and self.tricks.shaving and self.tricks.implied_orders:
            fits = self._shave(facts, cells)
        return fits

    def _shave(self, facts: Facts, cells: Cells) -> bool:
        """Try open orders pass by pass, a slice at a time; return False for a contradiction."""
        count = facts.duration.size
        work = 1 + int(np.sum((facts.high - facts.low) ** 2))
        left, slice_ = min(_MAX_TRIALS, _TRIAL_WORK // work), max(2, _SLICE_WORK // work)
        pair, found = 0, 0
        while left > 0 and not self._should_stop():
            given = min(left, slice_)
            pair, rest, fixed = shave(facts, cells, self._known, pair, given)
            if fixed < 0:
                return False
            left -= given - max(0, rest)
            found += fixed
            if pair == count * count:
                if found == 0:
                    break
                pair, found = 0, 0
        return True

    def _keep_frozen(self, facts: Facts, items: list[Item]) -> None:
        index_of = {item.action: item.index for item in items}
        for device in sorted(self.context.frozen):
            program = self.context.window[device] if self.context.window is not None else ()
            row = [index_of[action] for action in program if action in index_of]
            for a, b in pairwise(row):
                put_before(facts, self._known, a, b)

    def _by_definition(self, a: Action, b: Action) -> bool:
        if a.microbatch == b.microbatch:
            return _chained(a, b)
        return self._fifo_implied(a, b)

    def _fifo_implied(self, a: Action, b: Action) -> bool:
        if a.stage != b.stage or a.microbatch > b.microbatch:
            return False
        if a.type is b.type is ActionType.FORWARD:
            return self.fifo or (a.stage == 0 and self.tricks.symmetry)
        if not self.fifo:
            return False
        forward_or_back = a.type is ActionType.FORWARD or a.type.is_backward
        if forward_or_back and b.type.is_backward:
            return True
        return _CHAIN[a.type] != 1 and b.type is ActionType.BACKWARD_WEIGHT

    def _finish(self, items: list[Item]) -> None:
        """Give the items their windows."""
        earliest, latest = self._known.earliest, self._known.latest
        finished = [self._with_window(item, earliest, latest) for item in items]
        self.by_device: list[list[Item]] = [[] for _ in self.problem.devices]
        for item in finished:
            self.by_device[item.device].append(item)
        self.of_action = {item.action: item for item in finished}

    def _with_window(self, item: Item, earliest: object, latest: object) -> Item:
        low, high = float(earliest[item.index]), float(latest[item.index])  # type: ignore[index]
        # An optional item that cannot exist still needs bounds for its start.
        low = min(low, 2.0 * self.horizon_ms)
        return replace(item, earliest=low, latest=max(low, high))


_CHAIN = {
    ActionType.FORWARD: 0,
    ActionType.RELOAD: 1,
    ActionType.RECOMPUTE: 1,
    ActionType.BACKWARD_INPUT: 2,
    ActionType.FULL_BACKWARD: 2,
    ActionType.BACKWARD_WEIGHT: 3,
}


def _chained(a: Action, b: Action) -> bool:
    """Whether a precedes b for one micro-batch: forwards in model order, backwards in reverse."""
    first, second = _CHAIN[a.type], _CHAIN[b.type]
    if a.stage == b.stage:
        return first < second
    if first == 0 and second == 0:
        return a.stage < b.stage
    if first == 0 and second >= 2:
        return True
    if first == 0:
        return a.stage < b.stage
    if first == 1 and second >= 2:
        return a.stage > b.stage
    if first == 2 and second >= 2:
        return a.stage > b.stage
    return False
