"""Rows that cut off no schedule but much of the linear relaxation; numbers as in `constraints`."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from optpipe.action import ActionType
from optpipe_solver.milp.highs import at_least, total

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_solver.milp.highs import Constraint, Linear
    from optpipe_solver.milp.horizon.items import Item
    from optpipe_solver.milp.horizon.variables import HorizonVariables

__all__ = ["loads", "triangles"]

_MAX_TRIANGLES = 2_000


def loads(v: HorizonVariables) -> Iterator[Constraint]:
    """An item starts after all that stands before it, and the length covers all behind it. (13).

    t_b >= head + sum of d_a y_ab, and L >= t_b + d_b + sum of d_a y_ba + tail, where head is the
    least start of all items of the device and tail the least that follows the end of any; also
    L >= t_b + d_b + tail of b alone. A tail is what the horizon H leaves behind the latest end: a
    schedule of length L < H, shifted by H - L, is one within H and keeps every latest start.
    """
    for row in v.items.by_device:
        compute = [item for item in row if item.duration > 0]
        if not compute:
            continue
        head = min(item.earliest for item in compute)
        for b in compute:
            if b.presence is None:
                before = total([a.duration * v.before(a, b) for a in compute if a is not b])
                yield at_least(v.start[b] - before, head)
        if v.problem.objective == "makespan" or v.items.context.window is not None:
            yield from _behind(v, compute)


def _behind(v: HorizonVariables, row: list[Item]) -> Iterator[Constraint]:
    tail = min(v.items.tail(item) for item in row)
    for b in row:
        if b.presence is None:
            behind = total([a.duration * v.before(b, a) for a in row if a is not b])
            yield at_least(v.length - v.start[b] - behind, b.duration + tail)
            yield at_least(v.length - v.start[b], b.duration + v.items.tail(b))


def triangles(v: HorizonVariables) -> Iterator[Constraint]:
    """y_ab + y_bc + y_ca <= 2, first where one of the three orders is known. (14)."""
    left = _MAX_TRIANGLES
    for row in v.items.by_device:
        sure = [
            item
            for item in row
            if item.presence is None and item.action.type is not ActionType.RELOAD
        ]
        for known in (True, False):
            for a, b, c in combinations(sure, 3):
                if left > 0 and _is_worth(v, a, b, c, known=known):
                    left -= 1
                    yield _no_circle(v, a, b, c)
                    yield _no_circle(v, a, c, b)


def _no_circle(v: HorizonVariables, a: Item, b: Item, c: Item) -> Constraint:
    orders: list[Linear] = [v.before(a, b), v.before(b, c), v.before(c, a)]
    return at_least(2.0 - total(orders), 0.0)


def _is_worth(v: HorizonVariables, a: Item, b: Item, c: Item, *, known: bool) -> bool:
    """Whether one order is known and has nothing between (or none is), and the others are open."""
    fixed = []
    for x, y in ((a, b), (b, c), (a, c)):
        for first, second in ((x, y), (y, x)):
            if v.items.implied(first, second):
                fixed.append((first, second))
    if not known:
        return not fixed
    return len(fixed) == 1 and not v.items.follows_anyway(*fixed[0])
