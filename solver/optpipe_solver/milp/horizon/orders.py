"""Items with their time windows and the orders known between them, in every schedule looked for."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from optpipe.schedule import Action, ActionType
from optpipe_solver.feasibility import memory_binds
from optpipe_solver.milp.horizon.presolve import (
    Cells,
    Facts,
    Known,
    propagate,
    put_before,
    shave,
)
from optpipe_solver.milp.horizon.variables import HorizonChoice, draw_items, openings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe.problem import Problem
    from optpipe_solver.milp.horizon.variables import Cell, HorizonItem, Opening

__all__ = ["HorizonItems", "cells_of", "facts_of"]


_ROUNDING = 1e-8
"""Share of the horizon given away where what was deduced with tolerances becomes a row."""

_MAX_TRIALS = 40_000
_TRIAL_WORK, _SLICE_WORK = 12_000_000, 400_000
"""Most orders tried by shaving, and those between two looks: fewer where there are many items."""


class HorizonItems:
    """All items of a problem.

    Parameters
    ----------
    problem
        What is to be scheduled.
    horizon_ms
        Every schedule worth finding has an objective within this time (an incumbent's).
    fifo
        Whether micro-batches go first in, first out through every pass of every stage. It loses
        nothing where nothing can be offloaded or recomputed; elsewhere it is a restriction.
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
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.problem = problem
        self.horizon_ms = horizon_ms
        self.fifo = fifo
        self.tight = [memory_binds(problem, device) for device in range(len(problem.devices))]
        openings = openings_of(problem)
        self.openings = {opening.cell: opening for opening in openings}
        items = draw_items(problem, openings)
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
        """Whether a cell has, or may have, an action of a kind."""
        return kind in self.openings[cell].here

    def is_open(self, choice: HorizonChoice, cell: Cell) -> bool:
        """Whether a choice is still to be made."""
        opening = self.openings[cell]
        return {
            HorizonChoice.FUSED: opening.may_fuse,
            HorizonChoice.SPLIT: opening.may_fuse,
            HorizonChoice.OFFLOADED: opening.may_offload,
            HorizonChoice.RECOMPUTED: opening.may_recompute,
        }[choice]

    def implied(self, first: HorizonItem, second: HorizonItem) -> bool:
        """Whether ``first`` stands before ``second`` in every schedule in which both exist.

        Both on one device, and in every schedule within the horizon.
        """
        return bool(self._known.before[first.index, second.index])

    def tail(self, item: HorizonItem) -> float:
        """Return the ms of the horizon left behind an item's latest end, rounding aside."""
        return self.horizon_ms * (1 - _ROUNDING) - item.latest - item.duration

    def _first_known(self, items: list[HorizonItem]) -> Known:
        """Return windows of the whole horizon and the orders that hold by definition.

        A stage's gradient reduction follows its last W or B. Under span the clock of a device
        starts with its first action: only that of stage 0's device is known.
        """
        count, problem = len(items), self.problem
        latest = np.full(count, 2.0 * self.horizon_ms)
        for item in items:
            stage = problem.stages[item.action.stage]
            if item.action.type in _LAST:
                bound = problem.objective == "makespan" or item.device == problem.stages[0].device
                ends = self.horizon_ms * (1 if bound else 2)
                latest[item.index] = ends - stage.grad_sync_ms - item.duration
        return Known(np.zeros(count), latest, np.zeros((count, count), dtype=np.bool_))

    def _deduce(self, items: list[HorizonItem]) -> bool:
        """Tighten windows and orders; return False where no schedule is left."""
        facts = facts_of(self, items)
        cells = cells_of(self, items)
        rows = [items[low:high] for low, high in zip(facts.low, facts.high, strict=True)]
        for row in rows:
            for a, b in combinations(row, 2):
                for first, second in ((a, b), (b, a)):
                    if self._by_definition(first.action, second.action):
                        put_before(facts, self._known, first.index, second.index)
        return bool(propagate(facts, cells, self._known)) and self._shave(facts, cells)

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

    def _by_definition(self, a: Action, b: Action) -> bool:
        if a.microbatch == b.microbatch:
            return _chained(a, b)
        return self._fifo_implied(a, b)

    def _fifo_implied(self, a: Action, b: Action) -> bool:
        if a.stage != b.stage or a.microbatch > b.microbatch:
            return False
        if a.type is b.type is ActionType.FORWARD:
            return self.fifo or a.stage == 0
        if not self.fifo:
            return False
        forward_or_back = a.type is ActionType.FORWARD or a.type.is_backward
        if forward_or_back and b.type.is_backward:
            return True
        return _CHAIN[a.type] != 1 and b.type is ActionType.BACKWARD_WEIGHT

    def _finish(self, items: list[HorizonItem]) -> None:
        """Give the items their windows."""
        finished = [self._with_window(item) for item in items]
        self.by_device: list[list[HorizonItem]] = [[] for _ in self.problem.devices]
        for item in finished:
            self.by_device[item.device].append(item)
        self.of_action = {item.action: item for item in finished}

    def _with_window(self, item: HorizonItem) -> HorizonItem:
        # An optional item that cannot exist still needs bounds for its start.
        low = min(float(self._known.earliest[item.index]), 2.0 * self.horizon_ms)
        return replace(item, earliest=low, latest=max(low, float(self._known.latest[item.index])))


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
    if first == 0:
        return second >= 2 or a.stage < b.stage
    return first <= 2 and second >= 2 and a.stage > b.stage


# --- Items as the arrays that `presolve` works on.

_F, _I, _W, _B = (
    ActionType.FORWARD,
    ActionType.BACKWARD_INPUT,
    ActionType.BACKWARD_WEIGHT,
    ActionType.FULL_BACKWARD,
)
_LAST = (_W, _B)
_FACT_ROUNDING = 1e-9
"""Deductions need more than this share of the horizon: path sums are rounded."""

Group = list["HorizonItem"]


def facts_of(owner: HorizonItems, items: list[HorizonItem]) -> Facts:
    """Return the arrays of all items of a model."""
    problem = owner.problem
    device = np.array([item.device for item in items], dtype=np.int64)
    numbers = np.arange(len(problem.devices))
    low = np.searchsorted(device, numbers, side="left").astype(np.int64)
    high = np.searchsorted(device, numbers, side="right").astype(np.int64)
    arcs = list(_arcs(owner, {item.action: item for item in items}))
    ends = [[*_pair(sources), *_pair(targets)] for sources, targets, _ in arcs]
    return Facts(
        duration=np.array([item.duration for item in items], dtype=np.float64),
        certain=np.array([item.presence is None for item in items], dtype=np.bool_),
        device=device,
        low=low,
        high=high,
        arcs=np.array(ends, dtype=np.int64).reshape(-1, 4),
        delay=np.array([delay for _, _, delay in arcs], dtype=np.float64),
        pushes=np.array([_sure(a, b) for a, b, _ in arcs], dtype=np.bool_),
        pulls=np.array([_sure(b, a) for a, b, _ in arcs], dtype=np.bool_),
        extra=np.array([_least_extra(owner, item) for item in items], dtype=np.int64),
        room=np.array([problem.room_bytes(d) for d in range(len(problem.devices))], dtype=np.int64),
        tolerance=_FACT_ROUNDING * max(1e-3, owner.horizon_ms),
    )


def _pair(group: Group) -> list[int]:
    return [*(item.index for item in group), -1][:2]


def _sure(group: Group, other: Group) -> bool:
    """Whether one of a group surely exists where the other group does."""
    if len(group) > 1 or group[0].presence is None:
        return True
    return len(other) == 1 and group[0].presence == other[0].presence


def _least_extra(owner: HorizonItems, item: HorizonItem) -> int:
    """Return the least bytes an item takes above those before it."""
    stage, kind, j, *_ = item.action
    if kind is _F and owner.is_open(HorizonChoice.RECOMPUTED, (stage, j)):
        held = owner.problem.stages[stage]
        return item.extra - (held.activation_bytes - (held.checkpoint_bytes or 0))
    return item.extra


def _arcs(
    owner: HorizonItems, item_of: dict[Action, HorizonItem]
) -> Iterator[tuple[Group, Group, float]]:
    """Yield what waits for what: (alternatives before, alternatives behind, ms between)."""

    def group(stage: int, j: int, *kinds: ActionType) -> Group:
        found = (item_of.get(Action(stage, kind, j)) for kind in kinds)
        return [item for item in found if item is not None]

    problem = owner.problem
    last = len(problem.stages) - 1
    for s, j in owner.openings:
        forward, back = group(s, j, _F), group(s, j, _I, _B)
        reload, again = group(s, j, ActionType.RELOAD), group(s, j, ActionType.RECOMPUTE)
        away = problem.offload_ms(s) if owner.has((s, j), ActionType.OFFLOAD) else 0.0
        links: list[tuple[Group, Group, float]] = [
            (forward, back, 0.0),
            (group(s, j, _I), group(s, j, _W), 0.0),
            (forward, reload, away),
            (forward, again, 0.0),
            (reload, back, problem.reload_ms(s) if reload else 0.0),
            (again, back, 0.0),
        ]
        if s < last:
            there, home = problem.boundary_ms[s]
            links.append((forward, group(s + 1, j, _F), there))
            links.append((group(s + 1, j, _I, _B), back, home))
        yield from (link for link in links if link[0] and link[1])


def cells_of(owner: HorizonItems, items: list[HorizonItem]) -> Cells:
    """Return the (stage, micro-batch) pairs, by device, as arrays."""
    index_of = {item.action: item.index for item in items}
    openings = sorted(
        owner.openings.values(), key=lambda o: (owner.problem.stages[o.cell[0]].device, o.cell)
    )
    device = [owner.problem.stages[o.cell[0]].device for o in openings]
    numbers = np.arange(len(owner.problem.devices))
    rows = [_cell(owner, opening, index_of) for opening in openings]
    kept = np.array(rows, dtype=np.int64).reshape(-1, 9)
    return Cells(
        low=np.searchsorted(device, numbers, side="left").astype(np.int64),
        high=np.searchsorted(device, numbers, side="right").astype(np.int64),
        chain=np.ascontiguousarray(kept[:, 0:3]),
        fused=np.ascontiguousarray(kept[:, 3]),
        cost=np.ascontiguousarray(kept[:, 4:8]),
        lot=np.ascontiguousarray(kept[:, 8]),
    )


def _cell(owner: HorizonItems, opening: Opening, index_of: dict[Action, int]) -> list[int]:
    """Return chain (3), fused, the least bytes it adds in each state (4) and lot of one cell."""
    s, j = opening.cell
    stage = owner.problem.stages[s]
    chain = [index_of[Action(s, kind, j)] for kind in (_F, _I, _W)]
    gone = stage.offload_bytes if opening.may_offload else 0
    if opening.may_recompute:
        gone = max(gone, stage.activation_bytes - (stage.checkpoint_bytes or 0))
    costs = [0, stage.activation_bytes - gone, stage.weight_context_bytes, 0]
    lot = s if owner.fifo and not opening.may_fuse else -1
    return [*chain, index_of.get(Action(s, _B, j), -1), *costs, lot]
