"""Compiled period and memory of circular orders, offloaded and recomputed cells included.

A state is the circle of items of every device, from an arbitrary cut, a period index per item -
micro-batch k runs item a in turn ``turn[a] + k`` of its device - and a mode per (stage, copy). Its
period is the maximum cycle ratio of the constraint graph; its memory a sum over the circle. No
big-M, no clock.

Transfers are nodes beside the items: the copy out of a cell is issued behind its F, the copy back
where RELOAD stands, and each lane serves them in the order of their issue, as the simulator does.
*Relaxed:* of a shared PCIe group only the load counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe.memory import action_delta, action_workspace
from optpipe.schedule import Action, ActionType
from optpipe.simulate import duration_ms
from optpipe_solver.jit import jitted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from optpipe.problem import Problem

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
    "CircularRules",
    "Graph",
    "Node",
    "Nodes",
    "cells_in_order",
    "excess",
    "host_peak",
    "new_graph",
    "period",
    "rules_of",
    "way",
]


# Compiled code takes no keywords.
# ruff: noqa: PLR0917


FORWARD, BACKWARD, WEIGHT, RELEASE, RELOAD, RECOMPUTE = range(6)
NUM_ROLES = 6
KEPT, OFFLOADED, RECOMPUTED = range(3)

_ROUNDING = 1e-10


class CircularRules(NamedTuple):
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


def new_graph(rules: CircularRules) -> Graph:
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


@jitted
def period(circle: Circle, rules: CircularRules, graph: Graph) -> float:
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


@jitted
def _transfer_load(circle: Circle, rules: CircularRules) -> float:
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


@jitted
def _pull(graph: Graph, a: int, b: int, lag: float, turns: int, trial: float) -> bool:
    """Let b start no earlier than ``lag`` after a, ``turns`` periods before; say if it moved."""
    reached = graph.start[a] + lag - trial * turns
    if a == b or not reached > graph.start[b] + _ROUNDING * max(1.0, trial):
        return False
    graph.start[b], graph.parent[b] = reached, a
    graph.weight[b], graph.height[b] = lag, turns
    return True


@jitted
def _relax(circle: Circle, rules: CircularRules, trial: float, graph: Graph) -> bool:
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


@jitted
def _relax_lanes(
    circle: Circle, rules: CircularRules, device: int, trial: float, graph: Graph
) -> bool:
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


@jitted
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


@jitted
def way(circle: Circle, rules: CircularRules, graph: Graph, trial: float) -> float:
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


@jitted
def _delta(circle: Circle, rules: CircularRules, a: int) -> int:
    """Return what an item adds to its device's bytes, as its cell is treated."""
    cell = rules.cell[a]
    drops = rules.role[a] == FORWARD and circle.mode[cell] == RECOMPUTED
    return rules.delta[a] - (rules.dropped[cell] if drops else 0)


@jitted
def excess(circle: Circle, rules: CircularRules, device: int) -> int:
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


@jitted
def host_peak(circle: Circle, rules: CircularRules, device: int) -> int:
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


@jitted
def cells_in_order(circle: Circle, rules: CircularRules, device: int) -> bool:
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


# --- What a problem asks of circular orders, as the arrays that compiled code reads.

_KINDS = {
    FORWARD: ActionType.FORWARD,
    BACKWARD: ActionType.BACKWARD_INPUT,
    WEIGHT: ActionType.BACKWARD_WEIGHT,
    RELEASE: ActionType.RELEASE,
    RELOAD: ActionType.RELOAD,
    RECOMPUTE: ActionType.RECOMPUTE,
}


class Node(NamedTuple):
    """An item: what (stage, copy) it is of, its part in it, and its action type."""

    stage: int
    copy: int
    role: int
    kind: ActionType


class Nodes:
    """The items of circles, numbered.

    Parameters
    ----------
    problem
        Its number of micro-batches plays no part.
    fused
        Whether B stands for I and W.
    copies
        Micro-batches per period.
    shrinks
        Whether there is offload and recompute, where the problem has them.
    """

    def __init__(self, problem: Problem, *, fused: bool, copies: int, shrinks: bool) -> None:
        self.problem = problem
        self.fused = fused
        self.copies = copies
        self.shrinks = shrinks
        stages = range(len(problem.stages))
        self.cells = [(s, c) for c in range(copies) for s in stages]
        self.all = [node for s, c in self.cells for node in self._of(s, c)]
        self.number = {(n.stage, n.copy, n.kind): at for at, n in enumerate(self.all)}
        self.item = np.full((len(self.cells), NUM_ROLES), -1, dtype=np.int64)
        for at, node in enumerate(self.all):
            self.item[self.cell(node), node.role] = at

    def cell(self, node: Node) -> int:
        """Return the number of an item's (stage, copy)."""
        return node.copy * len(self.problem.stages) + node.stage

    def may_offload(self, s: int) -> bool:
        """Whether a stage can go to the host."""
        return self.shrinks and self.problem.can_offload(s)

    def may_recompute(self, s: int) -> bool:
        """Whether a stage can be recomputed."""
        return self.shrinks and self.problem.stages[s].can_recompute

    def arcs(self) -> Iterator[tuple[int, int, float]]:
        """Yield (a, b, ms) in the order of the chain: one sweep then reaches its end."""
        last = len(self.problem.stages) - 1
        for c in range(self.copies):
            of = self.item[c * (last + 1) : (c + 1) * (last + 1)]
            for s in range(last):
                yield self._arc(of[s, FORWARD], of[s + 1, FORWARD], self.problem.boundary_ms[s][0])
            yield self._arc(of[last, FORWARD], of[last, BACKWARD], 0.0)
            for s in range(last, 0, -1):
                back_ms = self.problem.boundary_ms[s - 1][1]
                yield self._arc(of[s, BACKWARD], of[s - 1, BACKWARD], back_ms)
            if not self.fused:
                for s in range(last + 1):
                    yield self._arc(of[s, BACKWARD], of[s, WEIGHT], 0.0)

    def duration_ms(self, at: int) -> float:
        """Return how long an item runs."""
        node = self.all[at]
        if node.kind is ActionType.RELOAD:
            return 0.0
        return duration_ms(self.problem, Action(node.stage, node.kind, 0))

    def _arc(self, a: int, b: int, delay_ms: float) -> tuple[int, int, float]:
        return int(a), int(b), self.duration_ms(a) + delay_ms

    def _of(self, s: int, c: int) -> Iterator[Node]:
        yield Node(s, c, FORWARD, ActionType.FORWARD)
        if self.fused:
            yield Node(s, c, BACKWARD, ActionType.FULL_BACKWARD)
        else:
            yield Node(s, c, BACKWARD, ActionType.BACKWARD_INPUT)
            yield Node(s, c, WEIGHT, ActionType.BACKWARD_WEIGHT)
        roles = [RELEASE, RELOAD] if self.may_offload(s) else []
        if self.may_recompute(s):
            roles.append(RECOMPUTE)
        for role in roles:
            yield Node(s, c, role, _KINDS[role])


def rules_of(nodes: Nodes) -> CircularRules:
    """Return what the compiled search knows of a problem."""
    problem = nodes.problem
    stages = [problem.stages[s] for s, _ in nodes.cells]
    arcs = list(nodes.arcs())
    delta = [action_delta(problem.stages[n.stage], n.kind, is_recomputed=False) for n in nodes.all]
    space = [action_workspace(problem.stages[n.stage], n.kind) for n in nodes.all]
    ms = [nodes.duration_ms(at) for at in range(len(nodes.all))]
    may = [(True, nodes.may_offload(s), nodes.may_recompute(s)) for s, _ in nodes.cells]
    dropped = [
        stage.activation_bytes - (stage.checkpoint_bytes or 0) if may_recompute else 0
        for stage, (_, _, may_recompute) in zip(stages, may, strict=True)
    ]
    away = [problem.offload_ms(s) if nodes.may_offload(s) else 0.0 for s, _ in nodes.cells]
    home = [problem.reload_ms(s) if nodes.may_offload(s) else 0.0 for s, _ in nodes.cells]
    return CircularRules(
        duration=np.array(ms, dtype=np.float64),
        delta=_whole(delta),
        extra=_whole([max(0, d) + w for d, w in zip(delta, space, strict=True)]),
        cell=_whole([nodes.cell(node) for node in nodes.all]),
        role=_whole([node.role for node in nodes.all]),
        item=nodes.item,
        device=_whole([stage.device for stage in stages]),
        may=np.array(may, dtype=np.bool_),
        dropped=_whole(dropped),
        away=np.array(away, dtype=np.float64),
        home=np.array(home, dtype=np.float64),
        hosted=_whole([stage.offload_bytes for stage in stages]),
        arc_from=_whole([a for a, _, _ in arcs]),
        arc_to=_whole([b for _, b, _ in arcs]),
        lag=np.array([lag for _, _, lag in arcs], dtype=np.float64),
        limit=_whole(
            [d.usable_bytes - problem.static_bytes_of(at) for at, d in enumerate(problem.devices)]
        ),
        one_lane=np.array([device.half_duplex for device in problem.devices], dtype=np.bool_),
        group=_whole(_groups(problem)),
        host=_whole(_hosts(problem)),
        host_limit=_whole(
            [-1 if host.memory_bytes is None else host.memory_bytes for host in problem.hosts]
        ),
        least=max(_load(nodes, ms), 1e-9),
    )


def _load(nodes: Nodes, ms: list[float]) -> float:
    """Return the compute time of one period on the busiest device, in ms."""
    load = [0.0] * len(nodes.problem.devices)
    for node, lasting in zip(nodes.all, ms, strict=True):
        if node.role != RECOMPUTE:
            load[nodes.problem.stages[node.stage].device] += lasting
    return max(load)


def _groups(problem: Problem) -> list[int]:
    """Return by device the first device of its PCIe group, -1 where it has none."""
    names = [device.pcie_group for device in problem.devices]
    return [-1 if name is None else names.index(name) for name in names]


def _hosts(problem: Problem) -> list[int]:
    names = [host.name for host in problem.hosts]
    return [names.index(device.host) for device in problem.devices]


def _whole(values: list[int]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)
