"""Compiled period and memory of circular orders, offloaded and recomputed cells included.

A state is the circle of items of every device, from an arbitrary cut, a period index per item -
micro-batch k runs item a in turn ``turn[a] + k`` of its device - and a mode per (stage, copy). Its
period is the maximum cycle ratio of the constraint graph; its memory a sum over the circle. No
big-M, no clock.

Transfers are nodes beside the items: the copy out of a cell is issued behind its F, the copy back
where RELOAD stands, and each lane serves them in the order of their issue, as the simulator does.
*Relaxed:* of a shared PCIe group only the load counts.
"""

# Compiled code takes no keywords.
# ruff: noqa: PLR0917

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numba
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

__all__ = [
    "BACKWARD",
    "FORWARD",
    "KEPT",
    "NUM_ROLES",
    "OFFLOADED",
    "RECOMPUTE",
    "RECOMPUTED",
    "RELEASE",
    "RELOAD",
    "WEIGHT",
    "Circle",
    "Graph",
    "Rules",
    "cells_in_order",
    "excess",
    "host_peak",
    "new_graph",
    "period",
    "way",
]

FORWARD, BACKWARD, WEIGHT, RELEASE, RELOAD, RECOMPUTE = range(6)
NUM_ROLES = 6
KEPT, OFFLOADED, RECOMPUTED = range(3)

_ROUNDING = 1e-10


class Rules(NamedTuple):
    """What a problem asks of circles.

    By item: ``duration`` in ms, ``delta`` (the bytes it adds to its device's), ``extra`` (what it
    holds above the bytes before it while it runs), ``cell`` and ``role``. ``item[cell, role]`` is
    -1 where the cell has no such item. By cell: ``device``, ``may[cell, mode]``, ``dropped`` (the
    bytes its F does not keep where it is recomputed), ``away`` and ``home`` (transfer times in ms),
    ``hosted`` (bytes). Arcs ``a -> b`` of one micro-batch: b starts ``lag`` ms after a's start at
    least. By device: ``limit`` in bytes, static bytes aside, ``one_lane`` (half duplex), ``group``
    and ``host`` (numbers; group -1: none). ``host_limit`` is by host, -1: none. ``least`` is a
    period known to be a lower bound.
    """

    duration: Floats
    delta: Ints
    extra: Ints
    cell: Ints
    role: Ints
    item: Ints
    device: Ints
    may: NDArray[np.bool_]
    dropped: Ints
    away: Floats
    home: Floats
    hosted: Ints
    arc_from: Ints
    arc_to: Ints
    lag: Floats
    limit: Ints
    one_lane: NDArray[np.bool_]
    group: Ints
    host: Ints
    host_limit: Ints
    least: float


class Circle(NamedTuple):
    """Circles: ``rows[d, :counts[d]]`` are the items of device d; ``turn`` is the period index.

    ``mode`` is by cell; only the items that the mode asks for stand in the row.
    """

    rows: Ints
    counts: Ints
    turn: Ints
    mode: Ints


class Graph(NamedTuple):
    """Where the relaxation works, by node: the items, then two transfers per cell."""

    start: Floats
    parent: Ints
    weight: Floats
    height: Ints
    mark: Ints
    lane_first: Ints
    lane_last: Ints
    lane_ms: Floats


def new_graph(rules: Rules) -> Graph:
    """Return the working memory for circles of these rules."""
    count = rules.duration.size + 2 * rules.device.size
    whole = np.zeros(count, np.int64)
    lane = np.zeros(2, np.int64)
    return Graph(
        start=np.zeros(count),
        parent=whole,
        weight=np.zeros(count),
        height=whole.copy(),
        mark=whole.copy(),
        lane_first=lane,
        lane_last=lane.copy(),
        lane_ms=np.zeros(2),
    )


@numba.njit(cache=True, nogil=True)
def period(circle: Circle, rules: Rules, graph: Graph) -> float:
    """Return the shortest period of circles, in ms, inf where there is none; fill the starts.

    The maximum of (sum of weights) / (sum of heights) over the cycles of the graph: Bellman and
    Ford's relaxation at a trial period, from below; a positive cycle among the parents says that
    the period is at least its ratio, which is the next trial (or that there is none, where its
    height is not positive). The starts then satisfy every arc: start[b] >= start[a] + lag - T h,
    each as early as that admits when item 0 starts at 0.
    """
    trial = max(rules.least, _transfer_load(circle, rules))
    graph.parent[:] = -1
    graph.start[:] = -np.inf
    graph.start[0] = 0.0
    for _ in range(20 * graph.start.size + 100):
        if not _relax(circle, rules, trial, graph):
            return trial
        found, ratio = _cycle(graph)
        if found:
            if not ratio > trial:
                return np.inf
            trial = ratio
            graph.parent[:] = -1
            graph.start[:] = -np.inf
            graph.start[0] = 0.0
    return np.inf


@numba.njit(cache=True, nogil=True)
def _transfer_load(circle: Circle, rules: Rules) -> float:
    """Return the time that the transfers of the busiest lane take in one period."""
    lanes = np.zeros((2, circle.counts.size))
    for cell in range(circle.mode.size):
        if circle.mode[cell] == OFFLOADED:
            device = rules.device[cell]
            lanes[0, device] += rules.away[cell]
            lanes[0 if rules.one_lane[device] else 1, device] += rules.home[cell]
    groups = np.zeros((2, circle.counts.size))
    for cell in range(circle.mode.size):
        group = rules.group[rules.device[cell]]
        if circle.mode[cell] == OFFLOADED and group >= 0:
            groups[0, group] += rules.away[cell]
            groups[1, group] += rules.home[cell]
    return max(lanes.max(), groups.max())


@numba.njit(cache=True, nogil=True)
def _pull(graph: Graph, a: int, b: int, lag: float, turns: int, trial: float) -> bool:
    """Let b start no earlier than ``lag`` after a, ``turns`` periods before; say if it moved."""
    reached = graph.start[a] + lag - trial * turns
    if a == b or not reached > graph.start[b] + _ROUNDING * max(1.0, trial):
        return False
    graph.start[b], graph.parent[b] = reached, a
    graph.weight[b], graph.height[b] = lag, turns
    return True


@numba.njit(cache=True, nogil=True)
def _relax(circle: Circle, rules: Rules, trial: float, graph: Graph) -> bool:
    """Relax every arc once; return whether anything moved."""
    moved = False
    for arc in range(rules.lag.size):
        a, b = rules.arc_from[arc], rules.arc_to[arc]
        turns = circle.turn[b] - circle.turn[a]
        moved |= _pull(graph, a, b, rules.lag[arc], turns, trial)
    for device in range(circle.counts.size):
        size = circle.counts[device]
        for at in range(size):
            a = circle.rows[device, at]
            last = at == size - 1
            b = circle.rows[device, 0] if last else circle.rows[device, at + 1]
            moved |= _pull(graph, a, b, rules.duration[a], 1 if last else 0, trial)
        moved |= _relax_lanes(circle, rules, device, trial, graph)
    return moved


@numba.njit(cache=True, nogil=True)
def _relax_lanes(circle: Circle, rules: Rules, device: int, trial: float, graph: Graph) -> bool:
    """Relax the transfers of one device: what issues them, what waits for them, their lanes."""
    moved = False
    items = rules.duration.size
    one = rules.one_lane[device]
    first, before, lasting = graph.lane_first, graph.lane_last, graph.lane_ms
    first[:] = -1
    for at in range(circle.counts[device]):
        a = circle.rows[device, at]
        cell, role = rules.cell[a], rules.role[a]
        if circle.mode[cell] != OFFLOADED or role not in {FORWARD, RELOAD}:
            continue
        out = role == FORWARD
        node = items + 2 * cell + (0 if out else 1)
        waiting = rules.item[cell, RELEASE if out else BACKWARD]
        long = rules.away[cell] if out else rules.home[cell]
        lane = 0 if out or one else 1
        moved |= _pull(graph, a, node, rules.duration[a], 0, trial)
        if first[lane] < 0:
            first[lane] = node
        else:
            moved |= _pull(graph, before[lane], node, lasting[lane], 0, trial)
        moved |= _pull(graph, node, waiting, long, circle.turn[waiting] - circle.turn[a], trial)
        before[lane], lasting[lane] = node, long
    for lane in range(2):
        if first[lane] >= 0:
            moved |= _pull(graph, before[lane], first[lane], lasting[lane], 1, trial)
    return moved


@numba.njit(cache=True, nogil=True)
def _cycle(graph: Graph) -> tuple[bool, float]:
    """Return whether the parents hold a cycle, and the largest ratio of those found (inf: none)."""
    parent, mark = graph.parent, graph.mark
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
                long += graph.weight[walk]
                turns += graph.height[walk]
                walk = parent[walk]
                if walk == at:
                    break
            if turns <= 0:
                return True, -np.inf
            best = max(best, long / turns)
    return found, best


@numba.njit(cache=True, nogil=True)
def way(circle: Circle, rules: Rules, graph: Graph, trial: float) -> float:
    """Return the time from the first start to the last end of one period's micro-batches, in ms.

    Of the starts that `period` filled in, at the period it returned.
    """
    first, last = np.inf, -np.inf
    for device in range(circle.counts.size):
        for at in range(circle.counts[device]):
            a = circle.rows[device, at]
            begin = graph.start[a] + trial * circle.turn[a]
            first = min(first, begin)
            last = max(last, begin + rules.duration[a])
    return last - first


@numba.njit(cache=True, nogil=True)
def _delta(circle: Circle, rules: Rules, a: int) -> int:
    """Return what an item adds to its device's bytes, as its cell is treated."""
    cell = rules.cell[a]
    drops = rules.role[a] == FORWARD and circle.mode[cell] == RECOMPUTED
    return rules.delta[a] - (rules.dropped[cell] if drops else 0)


@numba.njit(cache=True, nogil=True)
def excess(circle: Circle, rules: Rules, device: int) -> int:
    """Return by how many bytes a device's peak exceeds its limit (negative: room left)."""
    held = 0
    for at in range(circle.counts[device]):
        a = circle.rows[device, at]
        held -= _delta(circle, rules, a) * circle.turn[a]
    peak = 0
    for at in range(circle.counts[device]):
        a = circle.rows[device, at]
        delta = _delta(circle, rules, a)
        # The workspace and what is added count while it runs: a recomputed F adds less.
        peak = max(peak, held + rules.extra[a] - (rules.delta[a] - delta))
        held += delta
    return peak - rules.limit[device]


@numba.njit(cache=True, nogil=True)
def host_peak(circle: Circle, rules: Rules, device: int) -> int:
    """Return the most bytes of a device that its host holds at once: from F to the backward."""
    held = 0
    peak = 0
    for walk in range(2):
        for at in range(circle.counts[device]):
            a = circle.rows[device, at]
            cell, role = rules.cell[a], rules.role[a]
            if circle.mode[cell] != OFFLOADED or role not in {FORWARD, BACKWARD}:
                continue
            delta = rules.hosted[cell] if role == FORWARD else -rules.hosted[cell]
            if walk == 0:
                held -= delta * circle.turn[a]
            else:
                held += delta
                peak = max(peak, held)
    return peak


@numba.njit(cache=True, nogil=True)
def cells_in_order(circle: Circle, rules: Rules, device: int) -> bool:
    """Whether F, what is between, I (or B) and W of every cell stand in this order.

    Micro-batch 0 runs an item in turn ``turn``; within a turn by place. Zero times would hide a
    wrong order from `period`.
    """
    size = circle.counts[device]
    row = circle.rows[device]
    place = np.zeros(rules.duration.size, np.int64)
    for at in range(size):
        place[row[at]] = circle.turn[row[at]] * size + at
    for at in range(size):
        a = row[at]
        cell, role = rules.cell[a], rules.role[a]
        if role == FORWARD:
            continue
        needs = BACKWARD if role == WEIGHT else RELEASE if role == RELOAD else FORWARD
        if place[a] <= place[rules.item[cell, needs]]:
            return False
        holds = role in {RELOAD, RECOMPUTE}
        if holds and place[a] >= place[rules.item[cell, BACKWARD]]:
            return False
    return True
