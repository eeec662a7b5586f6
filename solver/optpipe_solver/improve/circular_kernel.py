"""Compiled period and memory of a circular order, and annealing on such orders.

A state is the circle of items of every device, from an arbitrary cut, and a period index per item:
micro-batch k runs item a in turn ``turn[a] + k`` of its device. Its period is the maximum cycle
ratio of the constraint graph; its memory a sum over the circle. No big-M, no clock.
"""

# Compiled code knows numpy's old generator only, and takes no keywords.
# ruff: noqa: NPY002, PLR0917

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numba
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

__all__ = ["Circle", "Rules", "anneal", "charged", "excess", "period"]

_ROUNDING = 1e-10


class Rules(NamedTuple):
    """What a problem asks of circles.

    Arcs ``a -> b`` of one micro-batch: b starts ``lag`` ms after a's start at least. ``delta`` is
    what an item adds to its device's bytes, ``extra`` what it holds above the bytes before it.
    ``limit`` is by device, static bytes aside; ``least`` is a period known to be a lower bound.
    """

    duration: Floats
    delta: Ints
    extra: Ints
    arc_from: Ints
    arc_to: Ints
    lag: Floats
    limit: Ints
    least: float


class Circle(NamedTuple):
    """Circles: ``rows[d, :counts[d]]`` are the items of device d; ``turn`` is the period index."""

    rows: Ints
    counts: Ints
    turn: Ints


@numba.njit(cache=True, nogil=True)
def period(circle: Circle, rules: Rules, start: Floats) -> float:
    """Return the shortest period of circles, in ms, inf where there is none; fill ``start``.

    The maximum of (sum of weights) / (sum of heights) over the cycles of the graph: Bellman and
    Ford's relaxation at a trial period, from below; a positive cycle among the parents says that
    the period is at least its ratio, which is the next trial (or that there is none, where its
    height is not positive). ``start`` then satisfies every arc: start[b] >= start[a] + lag - T h.
    """
    trial = rules.least
    count = start.size
    parent = np.full(count, -1, np.int64)
    weight = np.zeros(count)
    height = np.zeros(count, np.int64)
    mark = np.zeros(count, np.int64)
    start[:] = 0.0
    for _ in range(20 * count + 100):
        if not _relax(circle, rules, trial, start, parent, weight, height):
            return trial
        found, ratio = _cycle(parent, weight, height, mark)
        if found:
            if not ratio > trial:
                return np.inf
            trial = ratio
            parent[:] = -1
    return np.inf


@numba.njit(cache=True, nogil=True)
def _relax(
    circle: Circle,
    rules: Rules,
    trial: float,
    start: Floats,
    parent: Ints,
    weight: Floats,
    height: Ints,
) -> bool:
    """Relax every arc once; return whether anything moved."""
    slack = _ROUNDING * max(1.0, trial)
    moved = False
    for arc in range(rules.lag.size):
        a, b = rules.arc_from[arc], rules.arc_to[arc]
        turns = circle.turn[b] - circle.turn[a]
        reached = start[a] + rules.lag[arc] - trial * turns
        if reached > start[b] + slack:
            start[b], parent[b], weight[b], height[b] = reached, a, rules.lag[arc], turns
            moved = True
    for device in range(circle.counts.size):
        size = circle.counts[device]
        for at in range(size):
            a = circle.rows[device, at]
            last = at == size - 1
            b = circle.rows[device, 0] if last else circle.rows[device, at + 1]
            turns = 1 if last else 0
            reached = start[a] + rules.duration[a] - trial * turns
            if a != b and reached > start[b] + slack:
                start[b], parent[b], weight[b], height[b] = reached, a, rules.duration[a], turns
                moved = True
    return moved


@numba.njit(cache=True, nogil=True)
def _cycle(parent: Ints, weight: Floats, height: Ints, mark: Ints) -> tuple[bool, float]:
    """Return whether the parents hold a cycle, and the largest ratio of those found (inf: none)."""
    mark[:] = -1
    found, best = False, -np.inf
    for root in range(parent.size):
        at = root
        while at >= 0 and mark[at] < 0:
            mark[at] = root
            at = parent[at]
        if at >= 0 and mark[at] == root:
            found = True
            long, turns, walk = 0.0, 0, at
            while True:
                long += weight[walk]
                turns += height[walk]
                walk = parent[walk]
                if walk == at:
                    break
            if turns <= 0:
                return True, -np.inf
            best = max(best, long / turns)
    return found, best


@numba.njit(cache=True, nogil=True)
def excess(circle: Circle, rules: Rules, device: int) -> int:
    """Return by how many bytes a device's peak exceeds its limit (negative: room left)."""
    held = 0
    for at in range(circle.counts[device]):
        a = circle.rows[device, at]
        held -= rules.delta[a] * circle.turn[a]
    peak = 0
    for at in range(circle.counts[device]):
        a = circle.rows[device, at]
        peak = max(peak, held + rules.extra[a])
        held += rules.delta[a]
    return peak - rules.limit[device]


@numba.njit(cache=True, nogil=True)
def _judged(circle: Circle, rules: Rules, over: Floats, start: Floats) -> float:
    """Return the period, longer where memory is exceeded: by its share of the limit."""
    found = period(circle, rules, start)
    return found + rules.least * over.sum()


@numba.njit(cache=True, nogil=True)
def _share_over(circle: Circle, rules: Rules, device: int) -> float:
    over = excess(circle, rules, device)
    return 0.0 if over <= 0 else 0.02 + over / max(1.0, float(rules.limit[device]))


@numba.njit(cache=True, nogil=True)
def charged(circle: Circle, rules: Rules) -> float:
    """Return the period in ms and, where memory is exceeded, a charge."""
    over = np.zeros(circle.counts.size)
    for device in range(over.size):
        over[device] = _share_over(circle, rules, device)
    return _judged(circle, rules, over, np.zeros(rules.duration.size))


@numba.njit(cache=True, nogil=True)
def anneal(
    circle: Circle,
    best: Circle,
    rules: Rules,
    hot: float,
    cold: float,
    num_moves: int,
    seed: int,
) -> float:
    """Move items round their circles, cooling from ``hot`` to ``cold`` (ms); fill ``best``.

    Returns what the best is judged: its period where it keeps the memory limits, more elsewhere.
    """
    np.random.seed(seed)
    start = np.zeros(rules.duration.size)
    over = np.zeros(circle.counts.size)
    for device in range(over.size):
        over[device] = _share_over(circle, rules, device)
    current = _judged(circle, rules, over, start)
    top = current
    best.rows[:], best.turn[:] = circle.rows, circle.turn
    ratio = (cold / hot) ** (1.0 / max(1, num_moves))
    temperature = hot
    kept_row = np.empty(circle.rows.shape[1], np.int64)
    kept_index = np.empty(circle.turn.size, np.int64)
    for _ in range(num_moves):
        temperature *= ratio
        if top <= rules.least:
            break
        device = np.random.randint(over.size)
        size = circle.counts[device]
        if size < 2:
            continue
        kept_row[:], kept_index[:] = circle.rows[device], circle.turn
        kept_over = over[device]
        _move(circle, device)
        over[device] = _share_over(circle, rules, device)
        judged = _judged(circle, rules, over, start) if over[device] <= kept_over + 0.5 else np.inf
        if judged <= current or np.random.random() < np.exp((current - judged) / temperature):
            current = judged
            if current < top * (1.0 - 1e-12):
                top = current
                best.rows[:], best.turn[:] = circle.rows, circle.turn
            continue
        circle.rows[device], circle.turn[:] = kept_row, kept_index
        over[device] = kept_over
    return top


@numba.njit(cache=True, nogil=True)
def _move(circle: Circle, device: int) -> None:
    """Move one item some places up or down its circle; over the cut it changes its index."""
    size = circle.counts[device]
    at = np.random.randint(size)
    places = np.random.randint(1, 1 + (1 << np.random.randint(0, 3)))
    step = 1 if np.random.random() < 0.5 else -1
    row = circle.rows[device]
    for _ in range(places):
        other = at + step
        if other in {-1, size}:
            # Round the cut: everything else keeps its place relative to the others.
            item = row[at]
            other = 0 if step > 0 else size - 1
            while at != other:
                row[at] = row[at - step]
                at -= step
            row[other] = item
            circle.turn[item] += step
        else:
            row[at], row[other] = row[other], row[at]
        at = other
