"""A pattern: the programs of a family with places for every mode, as a precedence graph.

If a family ignores durations, its order of F, I, W and B is the same for every cut and every mode.
Its programs get a place for each transfer and recomputation that any mode may need. They then form
one graph. A node lasts as long as its stage determines, or 0 ms if the mode does not need it. The
makespan is the longest path. Memory is a prefix count: the number of cells of each stage in each
state at an action.

With one stage per device the path equals the makespan of `optpipe.simulate`, up to rounding of
sums. On a device with several stages it may be longer: a transfer of 0 bytes still waits for its
turn on the lane. Half duplex, shared PCIe groups and spans are not modelled, and refused.

A pair begins when both of its passes could, and sends both results at its end. It lasts as long as
both passes, less the maximum that either could hide. The graph has two parallel chains for this. F
is shorter by what it hides in one chain, B in the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe.problem import Problem
from optpipe.schedule import Action, ActionType, input_of, pass_of
from optpipe_solver.families import FAMILIES, NotApplicable
from optpipe_solver.jit import jitted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from optpipe.model import Model
    from optpipe.schedule import Pass, Program, Programs
    from optpipe_solver.arrays import Floats, Ints

__all__ = [
    "AWAY",
    "BACK",
    "CONTEXT",
    "HELD",
    "NUM_DURATIONS",
    "PAIRED_BACK",
    "PAIRED_FORWARD",
    "PAIRED_PATTERNS",
    "PATTERNS",
    "RESTORED",
    "STATES",
    "SYNC",
    "LongestPath",
    "MemoryMoment",
    "Pattern",
    "PatternGraph",
    "boundaries",
    "heads_of",
    "kind_number",
    "patterns_of",
    "traced",
]


PATTERNS = ("1f1b", "interleaved", "zb-h1", "zb-h2", "gis", "gis-h", "zb-v", "v-half", "v-min")
"""Families whose order depends on no duration and no limit."""

PAIRED_PATTERNS = ("1f1b-overlap", "dualpipe-v")
"""Families that run pairs which every problem of a model's cuts allows."""

_F, _I, _W, _B = (
    ActionType.FORWARD,
    ActionType.BACKWARD_INPUT,
    ActionType.BACKWARD_WEIGHT,
    ActionType.FULL_BACKWARD,
)
_FORWARD, _BACK = 0, 3
_KINDS = (
    _F,
    _I,
    _W,
    _B,
    ActionType.OFFLOAD,
    ActionType.RELEASE,
    ActionType.RELOAD,
    ActionType.RECOMPUTE,
)
SYNC = len(_KINDS)
NUM_DURATIONS = len(_KINDS) + 1
"""Number of kinds of durations: actions, in this order, and the gradient reduction (`SYNC`)."""
PAIRED_FORWARD, PAIRED_BACK = NUM_DURATIONS, NUM_DURATIONS + 1
"""Two more kinds with pairs: their F or their B, less the maximum that it can hide."""

STATES = HELD, AWAY, BACK, RESTORED, CONTEXT = range(5)
"""States of a cell between its F and its last backward action.

As F left it; offloaded and released; reloaded; recomputed; and between I and W.
"""

_RELEASE_LAG, _RELOAD_LEAD = 2, 2
"""Compute actions between an F and its RELEASE, and between a RELOAD and its backward."""


def kind_number(kind: ActionType) -> int:
    """Return the row of a kind in tables of durations."""
    return _KINDS.index(kind)


Boundary = tuple[tuple[float, float], tuple[float, float]]
"""Forward and back: (ms that a message fills its link, ms until it arrives after that)."""


def boundaries(model: Model, placement: Sequence[int]) -> tuple[Boundary, ...]:
    """Return the delays between the stages of a placement, for the largest output of any layer."""
    largest = max(stage.output_bytes for stage in model.stages_on[0])

    def way(source: int, target: int) -> tuple[float, float]:
        link = model.link(source, target)
        return (0.0, 0.0) if link is None else (link.occupied_ms(largest), link.latency_ms)

    return tuple((way(a, b), way(b, a)) for a, b in pairwise(placement))


def patterns_of(
    placement: Sequence[int],
    num_microbatches: int,
    links: Sequence[Boundary],
    *,
    transfers: bool,
    recompute: bool,
    names: Collection[str] = PATTERNS,
) -> Iterator[Pattern]:
    """Yield the patterns that a placement allows, in the order of `FAMILIES`.

    Parameters
    ----------
    placement
        Device of each stage.
    num_microbatches
        At least 1.
    links
        Delays between stages, see `boundaries`.
    transfers, recompute
        Whether any mode moves bytes, or recomputes apart.
    names
        The patterns to yield, of `PATTERNS` and `PAIRED_PATTERNS`. The latter have no places for
        transfers and recomputations.
    """
    for family in FAMILIES:
        pairs = family.name in PAIRED_PATTERNS
        if family.name in names and (pairs or family.name in PATTERNS):
            problem = _equal_stages(placement, num_microbatches, pairs=pairs)
            try:
                programs = family.build(problem)
            except NotApplicable:
                continue
            places = transfers and not pairs, recompute and not pairs
            yield Pattern(family.name, problem, programs, tuple(links), *places)


def _equal_stages(placement: Sequence[int], num_microbatches: int, *, pairs: bool) -> Problem:
    stage = {"forward_ms": 1, "backward_input_ms": 1, "backward_weight_ms": 1}
    numbered = list(enumerate(placement))
    licensed = [
        {"forward": a, "backward": b, "hidden_ms": 0.5}
        for a, device in numbered
        for b, other in numbered
        if pairs and device == other
    ]
    return Problem.model_validate(
        {
            **({"format": "optpipe/problem/v2", "pairs": licensed} if pairs else {}),
            "num_microbatches": num_microbatches,
            "devices": [{"memory_bytes": 2**53}] * (max(placement) + 1),
            "stages": [{"device": device, "activation_bytes": 0, **stage} for device in placement],
        }
    )


class LongestPath(NamedTuple):
    """A path: how often each (kind, stage) is on it, its other ms, and its length."""

    counts: Ints
    constant_ms: float
    length_ms: float

    def length_of(self, durations: Floats) -> float:
        """Return the path's length in ms with other durations, by kind and stage."""
        return self.constant_ms + float((self.counts * durations).sum())


class MemoryMoment(NamedTuple):
    """An action of a device: cells of its stages by state, and the action that runs.

    ``counts`` is by stage of the device, in model order, and state. ``stage`` and ``kind`` are
    those of the action. Its workspace and its recomputation inside take memory in addition. For
    the backward of a pair, so does the workspace of the F of stage ``forward``, -1 for none.
    """

    counts: tuple[tuple[int, ...], ...]
    stage: int
    kind: ActionType
    with_inside: bool
    forward: int = -1


@dataclass(frozen=True)
class Pattern:
    """The programs of a family, with places for transfers and recomputations.

    Parameters
    ----------
    name
        The name of the family.
    problem
        A problem of equal stages; only its placement and number of micro-batches count.
    compute
        The family's programs.
    links
        Delays per boundary between stages, see `boundaries`.
    transfers, recompute
        Whether the programs have places for transfers, and for recomputations.
    """

    name: str
    problem: Problem
    compute: Programs
    links: tuple[Boundary, ...]
    transfers: bool
    recompute: bool

    @cached_property
    def programs(self) -> Programs:
        """The programs with every place."""
        return tuple(self._with_places(program) for program in self.compute)

    def _with_places(self, program: Program) -> Program:
        at = {action._replace(paired=False): index for index, action in enumerate(program)}
        before: dict[int, list[Action]] = {}
        for action, index in at.items():
            if action.type is not _F:
                continue
            stage, _, microbatch, *_ = action
            ends = [at[found] for kind in (_I, _B)
                    if (found := Action(stage, kind, microbatch)) in at]  # fmt: skip
            end = ends[0]
            if self.transfers:
                back = max(index + 1, end - _RELOAD_LEAD)
                gone = min(index + 1 + _RELEASE_LAG, back)
                for kind, place in (
                    (ActionType.OFFLOAD, index + 1),
                    (ActionType.RELEASE, gone),
                    (ActionType.RELOAD, back),
                ):
                    before.setdefault(place, []).append(Action(stage, kind, microbatch))
            if self.recompute:
                again = Action(stage, ActionType.RECOMPUTE, microbatch)
                before.setdefault(end, []).append(again)
        placed: list[Action] = []
        for index, action in enumerate(program):
            # Memory is freed before it is used: a RELEASE comes before a RELOAD.
            placed += sorted(before.get(index, ()), key=lambda one: _KINDS.index(one.type))
            placed.append(action)
        return tuple(placed)

    @property
    def num_durations(self) -> int:
        """Number of kinds of durations."""
        return NUM_DURATIONS + 2 * self.has_pairs

    @property
    def has_pairs(self) -> bool:
        """Whether the family runs pairs."""
        return bool(self.problem.pairs)

    @property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """Stages of each device, in model order."""
        return self.problem.stages_of

    @cached_property
    def moments(self) -> tuple[tuple[MemoryMoment, ...], ...]:
        """Distinct memory moments of each device's program."""
        return tuple(
            tuple(dict.fromkeys(self._moments_of(device))) for device in range(len(self.programs))
        )

    def _moments_of(self, device: int) -> Iterator[MemoryMoment]:
        place = {stage: index for index, stage in enumerate(self.stages_of[device])}
        counts = [[0] * len(STATES) for _ in place]
        state: dict[tuple[int, int], int] = {}

        def shift(action: Action, to: int | None) -> None:
            row = counts[place[action.stage]]
            was = state.pop(action.cell, None)
            if was is not None:
                row[was] -= 1
            if to is not None:
                row[to] += 1
                state[action.cell] = to

        def moment(action: Action, forward: int, *, with_inside: bool = False) -> MemoryMoment:
            counts_now = tuple(tuple(row) for row in counts)
            return MemoryMoment(counts_now, action.stage, action.type, with_inside, forward)

        program = self.programs[device]
        for before, action in zip((*program[:1], *program), program, strict=False):
            kind, forward = action.type, before.stage if action.paired else -1
            if kind in _TAKES:
                shift(action, _TAKES[kind])
                yield moment(action, forward)
            elif kind in (_I, _B):
                yield moment(action, forward, with_inside=True)
                shift(action, CONTEXT if kind is _I else None)
                yield moment(action, forward)
            elif kind is _W:
                yield moment(action, forward)
                shift(action, None)
            elif kind is ActionType.RELEASE:
                shift(action, AWAY)

    @cached_property
    def graph(self) -> PatternGraph:
        """A node for each action, message and reduction, linked to the nodes it waits for."""
        builder = _GraphBuilder(self)
        waiting = [list(_steps(program))[::-1] for program in self.programs]
        while any(waiting):
            before = sum(map(len, waiting))
            for device, program in enumerate(waiting):
                while program and all(map(builder.is_ready, program[-1])):
                    builder.add(device, program.pop())
            if sum(map(len, waiting)) == before:
                raise ValueError(f"the programs of {self.name} wait for each other")
        return builder.finish()

    def length_ms(self, durations: Floats) -> float:
        """Return the makespan; ``durations`` as for `longest_paths`."""
        graph = self.graph
        length = durations[graph.kind, graph.stage] * graph.lasts + graph.fixed_ms
        return float(heads_of(graph.sources, graph.lags, length)[0].max())

    def longest_paths(self, durations: Floats) -> list[LongestPath]:
        """Return the longest path, and the longest through each device, longest first.

        ``durations`` is in ms, by kind (`num_durations`) and stage.
        """
        graph = self.graph
        length = durations[graph.kind, graph.stage] * graph.lasts + graph.fixed_ms
        head, best = heads_of(graph.sources, graph.lags, length)
        tail, onward = _tails(graph.sources, graph.lags, length)
        through = head + tail
        ends = {int(np.argmax(through))}
        for device in range(len(self.programs)):
            own = np.flatnonzero(graph.device == device)
            if own.size:
                ends.add(int(own[np.argmax(through[own])]))
        paths = []
        for node in ends:
            counts = np.zeros((self.num_durations, len(self.problem.stages)), dtype=np.int64)
            constant_ms = traced(node, best, onward, graph, counts)
            paths.append(LongestPath(counts, constant_ms, float(through[node])))
        return sorted(paths, key=lambda path: -path.length_ms)


_TAKES = {_F: HELD, ActionType.RELOAD: BACK, ActionType.RECOMPUTE: RESTORED}


class PatternGraph(NamedTuple):
    """Nodes in topological order.

    ``sources[i]`` are the nodes that node i waits for, -1 for none, each with its ``lags`` in ms.
    A node lasts ``fixed_ms``, plus the duration of its (kind, stage) if ``lasts`` is 1.
    """

    kind: Ints
    stage: Ints
    device: Ints
    lasts: Ints
    fixed_ms: Floats
    sources: Ints
    lags: Floats


def _steps(program: Program) -> Iterator[Program]:
    """Yield actions that begin together: the two passes of a pair, F first, or a single action."""
    for action, following in zip(program, (*program[1:], None), strict=True):
        if following is not None and following.paired:
            yield (action, following) if action.type is _F else (following, action)
        elif not action.paired:
            yield (action,)


class _GraphBuilder:
    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.placement = pattern.problem.placement
        self.rows: list[tuple[int, int, int, int, float]] = []
        self.causes: list[list[tuple[int, float]]] = []
        num_devices = len(pattern.programs)
        self.compute: list[int] = [-1] * num_devices
        self.lanes: dict[tuple[int, ActionType], int] = {}
        self.links: dict[tuple[int, int], int] = {}
        self.left: dict[Pass, tuple[int, float]] = {}
        self.copies: dict[tuple[ActionType, int, int], int] = {}
        self.last: dict[int, int] = {}

    def node(
        self,
        device: int,
        kind: int,
        stage: int,
        causes: Sequence[tuple[int, float]],
        fixed_ms: float = 0.0,
        *,
        lasts: bool = True,
    ) -> int:
        self.rows.append((kind, stage, device, int(lasts), fixed_ms))
        self.causes.append([cause for cause in causes if cause[0] >= 0])
        return len(self.rows) - 1

    def is_ready(self, action: Action) -> bool:
        """Whether the input of an action from another stage has a node."""
        needed = input_of(action, len(self.placement))
        return needed is None or needed in self.left

    def add(self, device: int, step: Program) -> None:
        """Add an action, or a pair, whose inputs have nodes."""
        if len(step) > 1:
            self._add_pair(device, step)
            return
        (action,) = step
        stage, kind, microbatch, *_ = action
        number = _KINDS.index(kind)
        if kind.is_transfer:
            lane = (device, kind)
            causes = [(self.compute[device], 0.0), (self.lanes.get(lane, -1), 0.0)]
            self.lanes[lane] = self.copies[kind, stage, microbatch] = self.node(
                device, number, stage, causes
            )
            return
        causes = self._causes(device, step)
        if kind is ActionType.RELEASE:
            causes.append((self.copies[ActionType.OFFLOAD, stage, microbatch], 0.0))
        elif kind.consumes_reload:
            causes.append((self.copies.get((ActionType.RELOAD, stage, microbatch), -1), 0.0))
        self.compute[device] = self.node(
            device, number, stage, causes, lasts=kind is not ActionType.RELEASE
        )
        self._hand_on(device, action)

    def _add_pair(self, device: int, step: Program) -> None:
        forward, back = (action.stage for action in step)
        causes, ends = self._causes(device, step), []
        for first, then in ((PAIRED_FORWARD, _BACK), (_FORWARD, PAIRED_BACK)):
            begun = self.node(device, first, forward, causes)
            ends.append((self.node(device, then, back, [(begun, 0.0)]), 0.0))
        self.compute[device] = self.node(device, _FORWARD, forward, ends, lasts=False)
        for action in step:
            self._hand_on(device, action)

    def _causes(self, device: int, step: Program) -> list[tuple[int, float]]:
        """Return the compute node before, and the nodes of inputs from other stages, with lags."""
        needed = (input_of(action, len(self.placement)) for action in step)
        return [(self.compute[device], 0.0), *(self.left[one] for one in needed if one is not None)]

    def _hand_on(self, device: int, action: Action) -> None:
        """Record that an action ends with the last compute node, and send its output."""
        compute_node = self.compute[device]
        if action.type in (_W, _B):
            self.last[action.stage] = compute_node
        sent = pass_of(action)
        if sent is not None:
            self.left[sent] = self._message(device, sent, compute_node)

    def _message(self, device: int, sent: Pass, compute_node: int) -> tuple[int, float]:
        """Return the node after which the output has left, and the ms until it arrives."""
        boundary = sent.stage - 1 if sent.backward else sent.stage
        target = sent.stage - 1 if sent.backward else sent.stage + 1
        placement = self.placement
        if not 0 <= target < len(placement) or placement[target] == device:
            return compute_node, 0.0
        fill_ms, arrives_ms = self.pattern.links[boundary][sent.backward]
        if fill_ms == 0.0:
            return compute_node, arrives_ms
        way = (device, placement[target])
        causes = [(compute_node, 0.0), (self.links.get(way, -1), 0.0)]
        node = self.node(device, 0, sent.stage, causes, fill_ms, lasts=False)
        self.links[way] = node
        return node, arrives_ms

    def finish(self) -> PatternGraph:
        """Add the gradient reductions, one after the other on each device, as they become ready."""
        free = [-1] * len(self.pattern.programs)
        for stage, node in sorted(self.last.items(), key=lambda item: item[1]):
            device = self.placement[stage]
            causes = [(node, 0.0), (free[device], 0.0)]
            free[device] = self.node(device, SYNC, stage, causes)
        width = max(map(len, self.causes))
        sources = np.full((len(self.rows), width), -1, dtype=np.int64)
        lags = np.zeros((len(self.rows), width))
        for node, causes in enumerate(self.causes):
            for which, (source, lag_ms) in enumerate(causes):
                sources[node, which], lags[node, which] = source, lag_ms
        kind, stage_of, device_of, lasts, fixed = zip(*self.rows, strict=True)
        return PatternGraph(
            kind=np.array(kind, dtype=np.int64),
            stage=np.array(stage_of, dtype=np.int64),
            device=np.array(device_of, dtype=np.int64),
            lasts=np.array(lasts, dtype=np.int64),
            fixed_ms=np.array(fixed),
            sources=sources,
            lags=lags,
        )


@jitted
def heads_of(sources: Ints, lags: Floats, length: Floats) -> tuple[Floats, Ints]:
    """Return each node's earliest end, and the index of its critical source, -1 for none."""
    head = np.empty(length.size)
    best = np.full(length.size, -1)
    for node in range(length.size):
        start = 0.0
        for which in range(sources.shape[1]):
            source = sources[node, which]
            if source >= 0 and (best[node] < 0 or head[source] + lags[node, which] > start):
                start = head[source] + lags[node, which]
                best[node] = which
        head[node] = start + length[node]
    return head, best


@jitted
def traced(node: int, best: Ints, onward: Ints, graph: PatternGraph, counts: Ints) -> float:
    """Count each (kind, stage) on the longest path through a node; return its other ms."""
    constant = 0.0
    at = node
    while True:
        counts[graph.kind[at], graph.stage[at]] += graph.lasts[at]
        constant += graph.fixed_ms[at]
        which = best[at]
        if which < 0:
            break
        constant += graph.lags[at, which]
        at = graph.sources[at, which]
    at = node
    while onward[at] >= 0:
        following = onward[at]
        lag = -1.0
        for which in range(graph.sources.shape[1]):
            if graph.sources[following, which] == at:
                lag = max(lag, graph.lags[following, which])
        constant += lag + graph.fixed_ms[following]
        counts[graph.kind[following], graph.stage[following]] += graph.lasts[following]
        at = following
    return float(constant)


@jitted
def _tails(sources: Ints, lags: Floats, length: Floats) -> tuple[Floats, Ints]:
    """Return the longest path from each node's end to the end of the graph, and its next node."""
    tail = np.zeros(length.size)
    onward = np.full(length.size, -1)
    for node in range(length.size - 1, -1, -1):
        for which in range(sources.shape[1]):
            source = sources[node, which]
            if source >= 0:
                whole = tail[node] + length[node] + lags[node, which]
                if onward[source] < 0 or whole > tail[source]:
                    tail[source] = whole
                    onward[source] = node
    return tail, onward
