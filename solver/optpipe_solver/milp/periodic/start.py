"""A block as a start of the periodic model: the values that its variables have in it.

Items that a cell does without stand together, as constraint (7) wants them: RECOMPUTE right behind
F, RELEASE and RELOAD right before I, W right behind its B. What
waits a period or longer runs that many periods earlier, which by the argument of (3) loses nothing.
HiGHS takes the orders, indices and choices and finds the best times that go with them; where a
block is none of the model's after all, it begins without a start.
"""

from __future__ import annotations

import itertools
from math import ceil, floor
from typing import TYPE_CHECKING, NamedTuple

from optpipe.action import ActionType
from optpipe_solver.milp.periodic.items import Choice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_solver.milp.highs import Variable
    from optpipe_solver.milp.periodic.block import Entry, PeriodicBlock
    from optpipe_solver.milp.periodic.items import Cell, Item, PeriodicItems
    from optpipe_solver.milp.periodic.variables import PeriodicVariables

__all__ = ["start_of"]

_F, _I, _W, _B = (
    ActionType.FORWARD,
    ActionType.BACKWARD_INPUT,
    ActionType.BACKWARD_WEIGHT,
    ActionType.FULL_BACKWARD,
)
_RELEASE, _RELOAD, _RECOMPUTE = ActionType.RELEASE, ActionType.RELOAD, ActionType.RECOMPUTE
_SHOWS = {Choice.FUSED: _B, Choice.OFFLOADED: _RELEASE, Choice.RECOMPUTED: _RECOMPUTE}
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
) -> Iterator[tuple[Item, _Placed]]:
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
    items: PeriodicItems, placed: dict[Item, _Placed], period_ms: float
) -> dict[Item, _Placed]:
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


def _first(v: PeriodicVariables, item: Item) -> Item:
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
    placed: dict[Item, _Placed],
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
