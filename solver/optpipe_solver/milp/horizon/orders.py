"""What the model orders: items with time windows, and orders known between them in every schedule.

An item is an action that takes a place in a device's program: compute actions, and RELOAD, which
takes no time there but must stand at a compute boundary. OFFLOAD and RELEASE need no place of
their own: an OFFLOAD issued right behind its forward never delays anything, and a RELEASE only
has to stand before the first action that needs the freed bytes (see `constraints`).

Deduced from time: data arrives, one item of a device at a time, windows hold their load.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe.memory import action_delta, action_workspace
from optpipe.schedule import Action, ActionType
from optpipe.simulate import duration_ms
from optpipe_solver.feasibility import fusing_may_pay, memory_binds
from optpipe_solver.jit import jitted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe.problem import Problem
    from optpipe_solver.arrays import Flags, Floats, Ints

__all__ = [
    "MOST_PAIRS",
    "Cell",
    "Cells",
    "Facts",
    "HorizonChoice",
    "HorizonItem",
    "HorizonItems",
    "Known",
    "Opening",
    "Presence",
    "cells_of",
    "draw_items",
    "facts_of",
    "is_overloaded",
    "num_order_pairs",
    "openings_of",
    "order_by_memory",
    "order_by_time",
    "propagate",
    "put_before",
    "shave",
    "shrink_by_arcs",
    "shrink_by_loads",
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
    s, microbatch = opening.cell
    stage = problem.stages[s]
    action = Action(s, kind, microbatch)
    mode = problem.menus[s][stage.implied_mode(kind)]
    delta = action_delta(mode, kind)
    return HorizonItem(
        index=index,
        action=action,
        device=stage.device,
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
    for stages in problem.stages_of:
        count = m * sum(
            3 + problem.can_offload(s) + problem.stages[s].can_recompute for s in stages
        )
        pairs += count * (count - 1) // (3 if fifo and m > 1 else 2)
    return pairs


# --- What the compiled deductions work on: facts, cells, and what is known so far; orders noted.


class Facts(NamedTuple):
    """What never changes; items of one device stand together, from ``low`` to ``high``.

    ``arcs`` holds two producers and two consumers each (-1 = none, two = alternatives) and
    ``delay`` the ms between; ``pushes`` and ``pulls`` whether the producer, the consumer surely
    exists where the other does. ``room`` is per device, ``extra`` the least bytes an item takes.
    """

    duration: Floats
    certain: Flags
    device: Ints
    low: Ints
    high: Ints
    arcs: Ints
    delay: Floats
    pushes: Flags
    pulls: Flags
    extra: Ints
    room: Ints
    tolerance: float


class Cells(NamedTuple):
    """(stage, micro-batch) pairs by device: chain of F, I, W, the alternative B, bytes by state.

    A cell has done none, F, F and I, or all: states 0 to 3. ``cost`` is the least the cell adds to
    its device in a state. Cells of one ``lot`` go first in, first out (-1: in any order).
    """

    low: Ints
    high: Ints
    chain: Ints
    fused: Ints
    cost: Ints
    lot: Ints


class Known(NamedTuple):
    """What is known so far: windows of starts in ms, and ``before[a, b]``."""

    earliest: Floats
    latest: Floats
    before: Flags


@jitted
def put_before(facts: Facts, known: Known, a: int, b: int) -> int:
    """Note that a stands before b, and what follows by transitivity; -1 = impossible.

    An order passes through an item only if that surely exists.
    """
    before, certain = known.before, facts.certain
    low, high = facts.low[facts.device[a]], facts.high[facts.device[a]]
    for x in range(low, high):
        if x != a and not (before[x, a] and certain[a]):
            continue
        for y in range(low, high):
            if y != b and not (before[b, y] and certain[b]):
                continue
            if certain[x] and certain[y] and (x == y or before[y, x]):
                return -1
            before[x, y] = x != y
    return 1


@jitted
def shrink_by_arcs(facts: Facts, known: Known) -> int:
    """Apply every arc both ways; return how many windows shrank, -1 = a needed pass has none."""
    changed = 0
    for k in range(facts.delay.size):
        if facts.pushes[k]:
            changed += _push(facts, known, k)
        if facts.pulls[k]:
            changed += _pull(facts, known, k)
        if changed and not _is_finite(known, facts, k):
            return -1
    return changed


@jitted
def _push(facts: Facts, known: Known, k: int) -> int:
    """What waits for an arc starts after the earliest of the alternatives that make its input."""
    there, changed = np.inf, 0
    for side in range(2):
        a = facts.arcs[k, side]
        if a >= 0 and known.earliest[a] <= known.latest[a] + facts.tolerance:
            there = min(there, known.earliest[a] + facts.duration[a])
    there += facts.delay[k]
    for side in range(2, 4):
        b = facts.arcs[k, side]
        if b >= 0 and known.earliest[b] < there - facts.tolerance:
            known.earliest[b] = there
            changed += 1
    return changed


@jitted
def _pull(facts: Facts, known: Known, k: int) -> int:
    """What an arc's input is made by ends before the latest of the alternatives that need it."""
    needed, changed = -np.inf, 0
    for side in range(2, 4):
        b = facts.arcs[k, side]
        if b >= 0 and known.earliest[b] <= known.latest[b] + facts.tolerance:
            needed = max(needed, known.latest[b])
    needed -= facts.delay[k]
    for side in range(2):
        a = facts.arcs[k, side]
        if a >= 0 and known.latest[a] + facts.duration[a] > needed + facts.tolerance:
            known.latest[a] = needed - facts.duration[a]
            changed += 1
    return changed


@jitted
def _is_finite(known: Known, facts: Facts, k: int) -> bool:
    """Whether no item that surely exists lost its window to an arc without partner."""
    for side in range(4):
        item = facts.arcs[k, side]
        lost = item >= 0 and (known.earliest[item] == np.inf or known.latest[item] == -np.inf)
        if lost and facts.certain[item]:
            return False
    return True


@jitted
def order_by_time(facts: Facts, known: Known) -> int:
    """Note orders of which the other way round is impossible in time."""
    earliest, latest, before = known.earliest, known.latest, known.before
    changed = 0
    for device in range(facts.low.size):
        for a in range(facts.low[device], facts.high[device]):
            for b in range(facts.low[device], facts.high[device]):
                if a == b or before[a, b]:
                    continue
                if earliest[b] + facts.duration[b] > latest[a] + facts.tolerance:
                    if put_before(facts, known, a, b) < 0:
                        return -1
                    changed += 1
    return changed


@jitted
def shrink_by_loads(facts: Facts, known: Known) -> int:
    """What surely stands before an item runs first, one after another; and behind it likewise."""
    earliest, latest, duration = known.earliest, known.latest, facts.duration
    changed = 0
    for device in range(facts.low.size):
        low, high = facts.low[device], facts.high[device]
        # Copies: an order by heads that change meanwhile would count idle time that is none.
        heads, ends = earliest[low:high].copy(), latest[low:high] + duration[low:high]
        by_head, by_tail = np.argsort(heads), np.argsort(-ends)
        for b in range(low, high):
            ready, due = -np.inf, np.inf
            for a in by_head:
                if known.before[low + a, b] and facts.certain[low + a]:
                    ready = max(ready, heads[a]) + duration[low + a]
            for a in by_tail:
                if known.before[b, low + a] and facts.certain[low + a]:
                    due = min(due, ends[a]) - duration[low + a]
            if ready > earliest[b] + facts.tolerance:
                earliest[b] = ready
                changed += 1
            if due < latest[b] + duration[b] - facts.tolerance:
                latest[b] = due - duration[b]
                changed += 1
    return changed


@jitted
def is_overloaded(facts: Facts, known: Known) -> bool:
    """Whether some items of a device need more time than lies between their windows' ends."""
    earliest, latest, duration = known.earliest, known.latest, facts.duration
    for device in range(facts.low.size):
        low, high = facts.low[device], facts.high[device]
        by_head = np.argsort(-earliest[low:high]) + low
        for last in range(low, high):
            if not facts.certain[last]:
                continue
            due = latest[last] + duration[last]
            load = 0.0
            for a in by_head:
                if facts.certain[a] and latest[a] + duration[a] <= due:
                    load += duration[a]
                    if earliest[a] + load > due + facts.tolerance * 10:
                        return True
    return False


# --- Compiled deductions about items: windows shrink, orders follow, until nothing more follows.
# Per sweep: data arrives (longest paths both ways); two items of a device of which one order is
# impossible stand in the other; what surely stands before an item takes its time first (one-machine
# heads and tails, Carlier and Pinson 1989); no set of items may need more time than its windows
# leave; what memory forces (`memory_rules`). `shave` tries each open order and reverses it where
# that ends in a contradiction (Martin and Shmoys 1996). Every deduction holds in every schedule
# whose ends lie within the windows given at first, so nothing as good as the incumbent is lost.

_MAX_SWEEPS = 200


@jitted
def propagate(facts: Facts, cells: Cells, known: Known) -> bool:
    """Deduce until nothing follows any more; False = no schedule is left."""
    for _ in range(_MAX_SWEEPS):
        changed = shrink_by_arcs(facts, known)
        if changed < 0:
            return False
        more = order_by_time(facts, known)
        if more < 0 or is_overloaded(facts, known):
            return False
        changed += more + shrink_by_loads(facts, known)
        more = order_by_memory(facts, cells, known)
        if more < 0:
            return False
        changed += more
        for item in range(facts.duration.size):
            gone = known.earliest[item] > known.latest[item] + facts.tolerance
            if gone and facts.certain[item]:
                return False
        if changed == 0:
            return True
    return True


@jitted
def shave(
    facts: Facts, cells: Cells, known: Known, first: int, num_trials: int
) -> tuple[int, int, int]:
    """Try open orders of pairs that surely exist, the pairs counted item by item from ``first``.

    Returns the pair to go on with, the trials left and the number of orders fixed, -1 where that
    shows that there is no schedule. After the last pair comes number items x items.
    """
    count = facts.duration.size
    fixed = 0
    for pair in range(first, count * count):
        a, b = pair // count, pair % count
        if b <= a or facts.device[a] != facts.device[b] or not _is_open_pair(facts, known, a, b):
            continue
        if num_trials <= 0:
            return pair, 0, fixed
        num_trials -= 2
        more = _try_both(facts, cells, known, a, b)
        if more < 0:
            return pair, num_trials, -1
        fixed += more
    return count * count, num_trials, fixed


@jitted
def _is_open_pair(facts: Facts, known: Known, a: int, b: int) -> bool:
    certain = facts.certain[a] and facts.certain[b]
    return bool(certain and not known.before[a, b] and not known.before[b, a])


@jitted
def _try_both(facts: Facts, cells: Cells, known: Known, a: int, b: int) -> int:
    """Fix the order of two items if the other is impossible: 1; 0 = still open; -1 = neither."""
    for first, second in ((a, b), (b, a)):
        if _contradicts(facts, cells, known, first, second):
            if put_before(facts, known, second, first) < 0:
                return -1
            return 1 if propagate(facts, cells, known) else -1
    return 0


@jitted
def _contradicts(facts: Facts, cells: Cells, known: Known, first: int, second: int) -> bool:
    trial = Known(known.earliest.copy(), known.latest.copy(), known.before.copy())
    return put_before(facts, trial, first, second) < 0 or not propagate(facts, cells, trial)


# --- Deductions from memory: the states that a device's cells can be in where an item begins.

_NO_STATE = 2**55
"""More bytes than any: what a cell without a possible state would hold."""


@jitted
def order_by_memory(facts: Facts, cells: Cells, known: Known) -> int:
    """Note orders without which an item would find less room than it needs.

    Where item b begins, every cell of its device is in some state. If a cell in state k, all
    others in their cheapest possible ones, leaves b no room, the cell is not in state k.
    """
    changed = 0
    for b in range(facts.duration.size):
        if facts.extra[b] <= 0:
            continue
        device = facts.device[b]
        possible = _possible_states(cells, known.before, b, device)
        if not _exclude_states(cells, possible, device, facts.room[device] - facts.extra[b]):
            if facts.certain[b]:
                return -1
            continue
        for cell in range(cells.low[device], cells.high[device]):
            states = possible[cell - cells.low[device]]
            more = _order_by_states(facts, cells, known, (b, cell), states)
            if more < 0:
                return -1
            changed += more
    return changed


@jitted
def _possible_states(cells: Cells, before: Flags, b: int, device: int) -> Flags:
    """Return, by cell of a device and state, whether the cell may be in it where b begins."""
    low, high = cells.low[device], cells.high[device]
    possible = np.zeros((high - low, 4), dtype=np.bool_)
    for cell in range(low, high):
        fused = cells.fused[cell]
        for state in range(4):
            reached, left = True, True
            if state > 0:
                entry = cells.chain[cell, state - 1]
                reached = entry != b and not before[b, entry]
                if state == 3 and fused >= 0 and not reached:
                    reached = fused != b and not before[b, fused]
            if state < 3:
                left = not before[cells.chain[cell, state], b]
                if state == 1 and fused >= 0 and not left:
                    left = not before[fused, b]
            possible[cell - low, state] = reached and left
    return possible


@jitted
def _exclude_states(cells: Cells, possible: Flags, device: int, room: int) -> bool:
    """Strike out states that leave no room; False = some cell has none left."""
    for cell in range(cells.low[device], cells.high[device]):
        row = possible[cell - cells.low[device]]
        some = False
        for state in range(4):
            if row[state]:
                row[state] = _least_held(cells, possible, device, (cell, state)) <= room
                some = some or row[state]
        if not some:
            return False
    return True


@jitted
def _least_held(cells: Cells, possible: Flags, device: int, fixed: tuple[int, int]) -> int:
    """Return the least bytes with one cell in a state, all others in possible ones.

    Under first in, first out no later cell of a lot is further than an earlier one.
    """
    chosen, state = fixed
    held_bytes = 0
    for cell in range(cells.low[device], cells.high[device]):
        same_lot = cells.lot[cell] >= 0 and cells.lot[cell] == cells.lot[chosen]
        least = _NO_STATE
        for k in range(4):
            too_far = same_lot and cell >= chosen and k > state
            too_near = same_lot and cell <= chosen and k < state
            other = cell == chosen and k != state
            if possible[cell - cells.low[device], k] and not (too_far or too_near or other):
                least = min(least, cells.cost[cell, k])
        held_bytes += least
    return int(held_bytes)


@jitted
def _order_by_states(
    facts: Facts, cells: Cells, known: Known, at: tuple[int, int], possible: Flags
) -> int:
    """Note orders between an item and those of a cell that the cell's possible states force."""
    b, cell = at
    lowest, highest = 3, 0
    for state in range(4):
        if possible[state]:
            lowest, highest = min(lowest, state), max(highest, state)
    changed = 0
    for k in range(3):
        if k > 0 and cells.fused[cell] >= 0:
            continue
        item = cells.chain[cell, k]
        if item == b:
            continue
        if k < lowest and not known.before[item, b]:
            if put_before(facts, known, item, b) < 0:
                return -1
            changed += 1
        elif k >= highest and not known.before[b, item]:
            if put_before(facts, known, b, item) < 0:
                return -1
            changed += 1
    return changed


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


# --- Items as arrays, for what is deduced from time.

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
    s, kind, j, *_ = item.action
    if kind is _F and owner.is_open(HorizonChoice.RECOMPUTED, (s, j)):
        stage = owner.problem.stages[s]
        return item.extra - (stage.activation_bytes - (stage.checkpoint_bytes or 0))
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
