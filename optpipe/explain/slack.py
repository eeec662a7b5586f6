"""How much slower each lane may become before the step does: exact, from the longest paths.

All that runs is a node of a graph: actions, messages on links, gradient reductions; each begins
when the last of those before it has ended, in its program and on its lanes in the order of this
run. If everything on one lane takes ``f`` times as long, the length is the longest path, which is
convex and piecewise linear in ``f``; where it leaves the length of today is found by Newton's
method from the right, for all lanes in one walk over the nodes.
"""

from __future__ import annotations

from collections import defaultdict
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe.explain.reasons import OccupiedLane, lane_use, lanes_of
from optpipe.explain.values import LaneSlack
from optpipe.schedule import ActionType, input_of, pass_of, transit_ms
from optpipe.simulate import awaited_transfer

if TYPE_CHECKING:
    from collections.abc import Hashable

    from numpy.typing import NDArray

    from optpipe.explain.values import LaneUse
    from optpipe.problem import Problem
    from optpipe.schedule import Action, Pass, Programs
    from optpipe.simulate import Simulation

__all__ = ["lane_slacks"]

_EXACT = 1e-9


def lane_slacks(
    problem: Problem, programs: Programs, run: Simulation, *, most: int | None = None
) -> tuple[LaneSlack, ...]:
    """Return what each lane that is used may lose before the objective grows, the least first.

    Orders stay those of ``run``, also of transfers that share a PCIe group or a half-duplex device.
    On a link the bytes slow down, not the latency. ``most``: where nodes x lanes are more, nothing
    is returned; a million take about a second.
    """
    graph = _PathGraph(problem, programs, run)
    if most is not None and graph.size > most:
        return ()
    length = run.objective_ms(problem.objective)
    allowed = length * (1 + _EXACT)
    # Its own load alone is then longer than all is today.
    factors = np.array([2 * max(1.0, length / graph.busy_ms[lane]) for lane in graph.lanes])
    reached, slopes = graph.lengths(factors)
    while (over := (reached > allowed) & (factors > 1.0)).any():
        factors[over] -= (reached[over] - length) / slopes[over]
        factors = np.maximum(1.0, factors)
        reached, slopes = graph.lengths(factors)
    found = [
        LaneSlack(lane=use.lane, devices=use.devices, group=use.group, factor=float(factor))
        for use, factor in zip(map(graph.use_of, graph.lanes), factors, strict=True)
    ]
    return tuple(sorted(found, key=lambda one: (round(one.factor, 9), one.devices, one.lane)))


class _PathNode(NamedTuple):
    """Something that takes time: what it occupies, for how long, and what must have ended before.

    ``before``: nodes, and the ms between their end and its start.
    """

    lanes: tuple[OccupiedLane, ...]
    ms: float
    before: list[tuple[Hashable, float]]


class _PathGraph:
    """All nodes of a run in an order in which each stands behind those before it."""

    def __init__(self, problem: Problem, programs: Programs, run: Simulation) -> None:
        self._problem = problem
        self._nodes: dict[Hashable, _PathNode] = {}
        self._made = {
            made: action
            for program in programs
            for action in program
            if (made := pass_of(action)) is not None
        }
        self._firsts: dict[int, Hashable] = {}
        self._lasts: dict[int, list[Hashable]] = defaultdict(list)
        self._add_actions(programs, run)
        self._take_turns(programs, run)
        self._add_syncs(programs, run)
        self.busy_ms: dict[OccupiedLane, float] = defaultdict(float)
        for node in self._nodes.values():
            for lane in node.lanes:
                self.busy_ms[lane] += node.ms
        self.lanes = sorted(lane for lane, ms in self.busy_ms.items() if ms > 0)
        self.size = len(self._nodes) * len(self.lanes)
        before = {key: [one for one, _ in node.before] for key, node in self._nodes.items()}
        self._order = tuple(TopologicalSorter(before).static_order())

    def _add_actions(self, programs: Programs, run: Simulation) -> None:
        for device, program in enumerate(programs):
            mine = {action.bare for action in program if action.type.is_transfer}
            last: Hashable = None
            for action, at in zip(program, run.times[device], strict=True):
                before = [] if last is None else [(last, 0.0)]
                lanes = lanes_of(self._problem, device, action.type)
                key = action.bare
                length = 0.0 if action.paired else at.end - at.start
                self._nodes[key] = _PathNode(lanes, length, before)
                if action.paired and last is not None:
                    # A pair is the node of its forward: it starts when both could.
                    before = self._nodes[last].before
                if action.type.is_transfer:
                    continue
                self._firsts.setdefault(device, key)
                last, self._lasts[device] = key, [key]
                if (needed := input_of(action, len(self._problem.stages))) is not None:
                    before.append(self._input(needed, action))
                if (transfer := awaited_transfer(action)) in mine:
                    before.append((transfer, 0.0))

    def _input(self, made: Pass, taker: Action) -> tuple[Hashable, float]:
        """Return what brings the output of a pass, and the ms until it is there."""
        problem, source = self._problem, self._made[made].bare
        transit = transit_ms(problem, made, taker)
        ends = problem.stages[made.stage].device, problem.stages[taker.stage].device
        link = next((one for one in problem.links if (one.source, one.target) == ends), None)
        if link is None or link.bandwidth_gb_per_s is None:
            return source, transit
        stage = problem.stage_of(min(made.stage, taker.stage), made.microbatch)
        num_bytes = stage.output_bytes
        lane = OccupiedLane("link", ends[0], target=ends[1])
        self._nodes[made] = _PathNode((lane,), link.occupied_ms(num_bytes), [(source, 0.0)])
        return made, link.latency_ms

    def _take_turns(self, programs: Programs, run: Simulation) -> None:
        """On each lane, and on links that queue, one thing at a time, as it was."""
        queues: dict[object, list[tuple[float, float, int, int, Action]]] = defaultdict(list)
        for device, (program, row) in enumerate(zip(programs, run.times, strict=True)):
            for position, (action, at) in enumerate(zip(program, row, strict=True)):
                if action.type.is_transfer:
                    for lane in lanes_of(self._problem, device, action.type):
                        place = at.start, at.end, device, position, action.bare
                        queues[lane].append(place)
        turns: list[list[Hashable]] = [[key for *_, key in sorted(q)] for q in queues.values()]
        messages: dict[int, list[Hashable]] = defaultdict(list)
        for message in run.messages:
            messages[message.link].append(message.made)
        for turn in (*turns, *messages.values()):
            for ahead, key in pairwise(turn):
                self._nodes[key].before.append((ahead, 0.0))

    def _add_syncs(self, programs: Programs, run: Simulation) -> None:
        last = {
            action.stage: action.bare
            for program in programs
            for action in program
            if action.type in (ActionType.BACKWARD_WEIGHT, ActionType.FULL_BACKWARD)
        }
        for sync in run.grad_syncs:
            ahead = [last[sync.stage], *self._lasts[sync.device][1:]]
            lane = OccupiedLane("grad sync", sync.device)
            key = ("reduction", sync.stage)
            before = [(one, 0.0) for one in ahead]
            self._nodes[key] = _PathNode((lane,), sync.end - sync.start, before)
            # The device's last action, and its last reduction.
            self._lasts[sync.device][1:] = [key]

    def use_of(self, lane: OccupiedLane) -> LaneUse:
        """Return a lane as it is told to people."""
        return lane_use(self._problem, lane, self.busy_ms[lane], 0.0)

    def lengths(self, factors: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
        """Return the objective if one lane alone is slower, by lane, and how it grows with that."""
        ends: dict[Hashable, NDArray[np.float64]] = {}
        nothing = np.zeros((2, len(factors)))
        column = {lane: number for number, lane in enumerate(self.lanes)}
        everything = np.arange(len(factors))
        for key in self._order:
            before = self._nodes[key].before
            end = nothing
            if before:
                starts = np.array([ends[one] for one, _ in before])
                starts[:, 0] += np.array([delay for _, delay in before])[:, None]
                end = starts[starts[:, 0].argmax(axis=0), :, everything].T
            ends[key] = end + self._own(key, factors, column)
        paths = []
        for device, keys in self._lasts.items():
            begin = ends[self._firsts[device]] - self._own(self._firsts[device], factors, column)
            if self._problem.objective == "makespan":
                begin = nothing
            paths += [ends[key] - begin for key in keys]
        found = np.array(paths)
        return tuple(found[found[:, 0].argmax(axis=0), :, everything].T)

    def _own(
        self, key: Hashable, factors: NDArray[np.float64], column: dict[OccupiedLane, int]
    ) -> NDArray[np.float64]:
        """Return what a node adds to its start, and how it grows."""
        lanes, ms, _ = self._nodes[key]
        own = np.array([np.full(len(factors), ms), np.zeros(len(factors))])
        for lane in lanes if ms > 0 else ():
            own[:, column[lane]] += ms * (factors[column[lane]] - 1.0), ms
        return own
