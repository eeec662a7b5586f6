"""Why each action starts when it does, and how much slower each lane may become before it matters.

The simulator starts everything as soon as possible. So every start is 0 or the end of something
else, plus the time on a link if data crosses one. The floats are equal, not merely close.

Slack is exact. The nodes of a graph are the actions, messages on links and gradient reductions. A
node begins when the last of its predecessors has ended: in its program, and on its lanes in the
order of this run. If everything on one lane takes ``f`` times as long, the length is the longest
path, which is convex and piecewise linear in ``f``. Newton's method from the right finds the ``f``
at which the length begins to grow, for all lanes in one pass over the nodes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import TopologicalSorter
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from optpipe.explain.values import DeviceIdle, IdleCause, LaneSlack, LaneUse, PathRun
from optpipe.schedule import Action, ActionType, Pass, input_of, partner_of, pass_of, transit_ms
from optpipe.simulate import awaited_transfer

if TYPE_CHECKING:
    from collections.abc import Generator, Hashable, Iterator, Sequence

    from numpy.typing import NDArray

    from optpipe.explain.values import LaneKind, PieceKind, RunKind
    from optpipe.problem import Problem
    from optpipe.schedule import Program, Programs
    from optpipe.simulate import LinkMessage, Simulation, Times

__all__ = [
    "Piece",
    "Reasons",
    "Spot",
    "WaitReason",
    "Why",
    "critical_path",
    "idle_times",
    "lane_slacks",
    "lane_use",
    "lane_uses",
    "lanes_of",
    "runs_of",
]


# --- Which lanes there are, and how much of the time each is occupied.
# A lane is what one thing at a time can occupy: the compute lane of a device, each direction of its
# transfers, its gradient reductions; and what is shared: both directions of a half-duplex device,
# one direction of a PCIe group; and a link to another device on which messages queue.

_DIGITS = 9
"""Digits of shares that count: sums of the same durations in another order differ by rounding."""

_DIRECTIONS: dict[ActionType, Literal["d2h", "h2d"]] = {
    ActionType.OFFLOAD: "d2h",
    ActionType.RELOAD: "h2d",
}


class OccupiedLane(NamedTuple):
    """A lane: what it is for, and its device, where a link leads, or the PCIe group."""

    kind: LaneKind
    device: int
    group: str = ""
    target: int = -1


def lanes_of(problem: Problem, device: int, kind: ActionType) -> tuple[OccupiedLane, ...]:
    """Return every lane that an action of this type occupies while it runs; none for RELEASE."""
    if kind is ActionType.RELEASE:
        return ()
    if not kind.is_transfer:
        return (OccupiedLane("compute", device),)
    description = problem.devices[device]
    lanes = [OccupiedLane(_DIRECTIONS[kind], device)]
    if description.half_duplex:
        lanes.append(OccupiedLane("both ways", device))
    if description.pcie_group is not None:
        lanes.append(OccupiedLane(_DIRECTIONS[kind], -1, description.pcie_group))
    return tuple(lanes)


def lane_uses(problem: Problem, programs: Programs, run: Simulation) -> tuple[LaneUse, ...]:
    """Return all compute lanes and every other lane that is used, the most occupied first.

    ``busy_ms`` is the sum of the durations of what runs on the lane, RECOMPUTE included. ``share``
    is busy_ms / length, where length is the problem's objective; it is at most 1. Under span, too:
    a device uses its own lanes between its first start and its last end. Every transfer lies
    between 0F and 0B, or 0I, of its micro-batch, so within those of the device of stage 0. Ties are
    in the order of devices.
    """
    busy: dict[OccupiedLane, float] = defaultdict(float)
    for device, program in enumerate(programs):
        if program:
            busy[OccupiedLane("compute", device)] += 0.0
        known = {kind: lanes_of(problem, device, kind) for kind in ActionType}
        for action, at in zip(program, run.times[device], strict=True):
            for lane in () if action.paired else known[action.type]:
                busy[lane] += at.end - at.start
    for sync in run.grad_syncs:
        busy[OccupiedLane("grad sync", sync.device)] += sync.end - sync.start
    for message in run.messages:
        link = problem.links[message.link]
        busy[OccupiedLane("link", link.source, target=link.target)] += message.left - message.depart
    length = run.objective_ms(problem.objective)
    uses = [lane_use(problem, lane, ms, length) for lane, ms in busy.items()]
    return tuple(sorted(uses, key=lambda use: (-round(use.share, _DIGITS), use.devices)))


def lane_use(problem: Problem, lane: OccupiedLane, busy_ms: float, length_ms: float) -> LaneUse:
    """Return how much of a length a lane is used, with the devices that share the lane."""
    devices: tuple[int, ...] = (lane.device,)
    if lane.target >= 0:
        devices = (lane.device, lane.target)
    if lane.group:
        devices = tuple(
            index
            for index, description in enumerate(problem.devices)
            if description.pcie_group == lane.group
        )
    share = busy_ms / length_ms if length_ms > 0 else 0.0
    return LaneUse(
        lane=lane.kind, devices=devices, group=lane.group or None, busy_ms=busy_ms, share=share
    )


_TRANSFERS = frozenset({ActionType.OFFLOAD, ActionType.RELOAD})


Why = Literal["program", "input", "transfer", "lane", "queue"]
"""The reasons for which an action waits.

* ``program``: the action before it in its program.
* ``input``: the output of another stage.
* ``transfer``: its transfer.
* ``lane``: a transfer before it on its lane.
* ``queue``: its lane.
"""


class Spot(NamedTuple):
    """The position of an action: ``programs[device][cell]``."""

    device: int
    cell: int


class WaitReason(NamedTuple):
    """The thing that an action waited for, and its position."""

    why: Why
    spot: Spot


class Reasons:
    """The reasons of all starts of one simulation of legal programs.

    ``passes``: the position of the action that completes each pass.
    """

    def __init__(self, problem: Problem, programs: Programs, run: Simulation) -> None:
        self._problem = problem
        self._programs = programs
        self._run = run
        self.passes: dict[Pass, Spot] = {}
        self._transfers: dict[Action, Spot] = {}
        self._ahead: dict[Pass, LinkMessage] = {}
        self._messages: dict[Pass, LinkMessage] = {}
        last: dict[int, LinkMessage] = {}
        for message in run.messages:
            self._messages[message.producer] = message
            if message.depart > message.ready:
                self._ahead[message.producer] = last[message.link]
            last[message.link] = message
        self._before: list[list[int]] = []  # each cell's predecessor on the compute lane
        for device, program in enumerate(programs):
            before: list[int] = []
            latest = -1
            for cell, action in enumerate(program):
                before.append(before[-1] if action.paired and before else latest)
                if action.type in _TRANSFERS:
                    self._transfers[action] = Spot(device, cell)
                    continue
                latest = cell
                completed = pass_of(action)
                if completed is not None:
                    self.passes[completed] = Spot(device, cell)
            self._before.append(before)

    def action(self, spot: Spot) -> Action:
        """Return the action at a position."""
        return self._programs[spot.device][spot.cell]

    def times(self, spot: Spot) -> Times:
        """Return the times of the action at a position."""
        return self._run.times[spot.device][spot.cell]

    def waiter(self, spot: Spot) -> Action:
        """Return the action that waited longest, of those that start together at a position.

        Of a pair that waits, it is the action whose input arrived at its start, else the one whose
        transfer ended then.
        """
        first, at = self.action(spot), self.times(spot)
        other = partner_of(self._programs[spot.device], spot.cell)
        if other is None or at.start == at.issue:
            return first
        for action in (first, other):
            source = self.input_spot(action)
            if source is not None and self._arrival(source, action) == at.start:
                return action
        return first if first.type.is_backward else other

    def of(self, spot: Spot) -> WaitReason | None:
        """Return why the action at a position starts no earlier; None if it starts at time 0.

        Of several reasons, it is the first of these: its own program, the output of another stage,
        its transfer. A transfer in a queue waited for the last transfer that left its lane. If
        rounding hides which one that was, the reason is QUEUE, with the action that issued it.
        """
        at = self.times(spot)
        before = self._before[spot.device][spot.cell]
        if at.start == at.issue:
            return WaitReason("program", Spot(spot.device, before)) if before >= 0 else None
        action = self.waiter(spot)
        if action.type.is_transfer:
            ahead = self._ahead_of(spot, action)
            if ahead is not None:
                return WaitReason("lane", ahead)
            return WaitReason("queue", Spot(spot.device, before))
        source = self.input_spot(action)
        if source is not None and self._arrival(source, action) == at.start:
            return WaitReason("input", source)
        kind = ActionType.OFFLOAD if action.type is ActionType.RELEASE else ActionType.RELOAD
        return WaitReason("transfer", self._transfers[action.bare._replace(type=kind)])

    def input_spot(self, action: Action) -> Spot | None:
        """Return the position of the pass whose output an action needs."""
        needed = input_of(action, len(self._problem.stages))
        return None if needed is None else self.passes[needed]

    def _arrival(self, source: Spot, action: Action) -> float:
        producer = pass_of(self.action(source))
        if producer is None:
            raise AssertionError(f"{self.action(source)} has no output")
        message = self._messages.get(producer)
        departs = self.times(source).end if message is None else message.depart
        return departs + transit_ms(self._problem, producer, action)

    def queue_of(self, source: Spot) -> list[LinkMessage]:
        """Return the messages of one link that the output of a pass waited for, its own first.

        Each departs when the next of the list has left; the last of the list waited for none. Empty
        where the output needs no lane.
        """
        producer = pass_of(self.action(source))
        message = None if producer is None else self._messages.get(producer)
        found = []
        while message is not None:
            found.append(message)
            message = self._ahead.get(message.producer)
        return found

    def taker_of(self, producer: Pass) -> Action:
        """Return the action on another stage that needs the output of a pass."""
        step = -1 if producer.backward else 1
        return self.action(self.passes[producer._replace(stage=producer.stage + step)])

    @cached_property
    def _ended(self) -> dict[tuple[OccupiedLane, float], list[Spot]]:
        """The transfers that left a lane, by lane and time.

        Needed only if a transfer on the critical path waited.
        """
        ended: dict[tuple[OccupiedLane, float], list[Spot]] = defaultdict(list)
        for spot in sorted(self._transfers.values()):
            for lane in lanes_of(self._problem, spot.device, self.action(spot).type):
                ended[lane, self.times(spot).end].append(spot)
        return ended

    def _ahead_of(self, spot: Spot, action: Action) -> Spot | None:
        """Return the transfer that left a lane of this transfer at the moment it started.

        Only a transfer that began earlier counts: otherwise one that takes no time in floats could
        be its own reason.
        """
        start = self.times(spot).start
        for lane in lanes_of(self._problem, spot.device, action.type):
            for other in self._ended.get((lane, start), ()):
                if self.times(other).start < start:
                    return other
        return None


# --- Idle time of compute lanes, by cause.

_NOISE = 1e-12


def idle_times(
    problem: Problem, programs: Programs, run: Simulation, reasons: Reasons | None = None
) -> tuple[DeviceIdle, ...]:
    """Return, for each device with a program, what its compute lane waited for.

    The clock of a device is the whole makespan; where the objective is the span, one span from its
    own first start on. Idle is what of it no compute action fills: length - busy. All of a wait
    between two actions is put down to what ended it, the reason of the later one's start:

    * FORWARD, BACKWARD: the other stage's pass had not ended; LINK: it had, and its output was on
      the way, or waited for the link. One wait can have both parts.
    * RELOAD, RELEASE: the transfer had not ended (its own wait for a lane included).
    * WARM_UP: before the first action; under span there is none.
    * GRAD_SYNC: after the last action, until the device's own gradient reductions end.
    * COOL_DOWN: after that.

    ``reasons`` are those of this very simulation, from a caller who has them.
    """
    known = reasons or Reasons(problem, programs, run)
    return tuple(
        _idle(problem, program, run, known, device)
        for device, program in enumerate(programs)
        if program
    )


def _idle(
    problem: Problem, program: Program, run: Simulation, reasons: Reasons, device: int
) -> DeviceIdle:
    # The cells at which the compute lane begins something: RELEASE included, pairs once.
    cells = [
        cell
        for cell, action in enumerate(program)
        if action.type not in _TRANSFERS and not action.paired
    ]
    times = [run.times[device][cell] for cell in cells]
    first, last = times[0].start, times[-1].end
    begin = 0.0 if problem.objective == "makespan" else first
    length = run.objective_ms(problem.objective)
    synced = max([last, *(sync.end for sync in run.grad_syncs if sync.device == device)])
    causes: dict[IdleCause, float] = defaultdict(float)
    causes[IdleCause.WARM_UP] = first - begin
    for cell, at in zip(cells[1:], times[1:], strict=True):
        if at.start > at.issue:
            for cause, ms in _waits(reasons, Spot(device, cell)).items():
                causes[cause] += ms
    causes[IdleCause.GRAD_SYNC] = synced - last
    causes[IdleCause.COOL_DOWN] = begin + length - synced
    busy = sum(at.end - at.start for at in times)
    return DeviceIdle(
        device=device,
        busy_ms=busy,
        idle_ms=max(0.0, length - busy),
        causes={cause: causes[cause] for cause in IdleCause if causes[cause] > _NOISE * length},
    )


def _waits(reasons: Reasons, spot: Spot) -> dict[IdleCause, float]:
    """Return the parts of the wait before an action, in ms."""
    at, action, reason = reasons.times(spot), reasons.waiter(spot), reasons.of(spot)
    if reason is None:
        raise AssertionError(f"{action} waits for nothing")
    if reason.why == "transfer":
        is_release = action.type is ActionType.RELEASE
        return {IdleCause.RELEASE if is_release else IdleCause.RELOAD: at.start - at.issue}
    output_at = max(at.issue, reasons.times(reason.spot).end)
    is_forward = action.type is ActionType.FORWARD
    return {
        IdleCause.FORWARD if is_forward else IdleCause.BACKWARD: output_at - at.issue,
        IdleCause.LINK: at.start - output_at,
    }


# --- The critical path: the chain of actions, transfers and links that makes the length.


@dataclass(frozen=True, slots=True)
class Piece:
    """One link of the chain, in ms.

    ``action`` is what runs; on a ``link``, what its output was carried to; None for a gradient
    reduction. ``device`` is where it happens; on a link, where it leads to.
    """

    kind: PieceKind
    device: int
    action: Action | None
    start: float
    end: float


def critical_path(
    problem: Problem, programs: Programs, run: Simulation, reasons: Reasons | None = None
) -> tuple[Piece, ...]:
    """Return the pieces of the chain that makes the length, in the order of time.

    Under makespan the chain leads from 0 to the last end of all (of several devices that end
    together, the first). Under span it leads from the first start to the last end of the device
    with the longest time between the two (of equal devices, the first). The part of a piece before
    that start is cut off, because it costs nothing.

    Each piece begins exactly when the previous one ends, so their lengths sum to the length. Each
    waited for the previous one, and for nothing later. `Reasons.of` also defines which of several
    such chains this is. A shorter piece shortens the schedule only if it is on all of them.
    ``reasons`` are those of ``run``, if the caller has them.
    """
    last: dict[int, float] = defaultdict(float)
    for device, row in enumerate(run.times):
        last[device] = max((at.end for at in row), default=0.0)
    for sync in run.grad_syncs:
        last[sync.device] = max(last[sync.device], sync.end)
    first = {d: min(at.start for at in row) for d, row in enumerate(run.times) if row}
    is_span = problem.objective == "span"
    device = max(sorted(first), key=lambda d: last[d] - (first[d] if is_span else 0.0))
    begin = first[device] if is_span else min(first.values())
    pieces: list[Piece] = []
    for piece in _backwards(reasons or Reasons(problem, programs, run), programs, run, device):
        pieces.append(replace(piece, start=max(piece.start, begin)))
        if piece.start <= begin:
            break
    return tuple(reversed(pieces))


def _backwards(
    reasons: Reasons, programs: Programs, run: Simulation, device: int
) -> Iterator[Piece]:
    """Walk from the last end of a device back to where the clock starts."""
    index = max(i for i, action in enumerate(programs[device]) if not action.type.is_transfer)
    spot: Spot | None = Spot(device, index)
    syncs = [sync for sync in run.grad_syncs if sync.device == device]
    if syncs and syncs[-1].end > run.times[device][index].end:
        for sync in reversed(syncs):
            yield Piece("grad sync", device, None, sync.start, sync.end)
            program = programs[device]
            kinds = (ActionType.BACKWARD_WEIGHT, ActionType.FULL_BACKWARD)
            ready = max(
                i for i, a in enumerate(program) if a.stage == sync.stage and a.type in kinds
            )
            if run.times[device][ready].end == sync.start:
                spot = Spot(device, ready)
                break
    while spot is not None:
        spot = yield from _step(reasons, spot)


def _step(reasons: Reasons, spot: Spot) -> Generator[Piece, None, Spot | None]:
    """Yield the piece of one action, and the wait before it; return where the chain goes on."""
    action, at = reasons.action(spot), reasons.times(spot)
    if action.type is not ActionType.RELEASE:
        kind: PieceKind = _DIRECTIONS.get(action.type, "compute")
        yield Piece(kind, spot.device, action, at.start, at.end)
    reason = reasons.of(spot)
    if reason is None:
        return None
    came_from = reasons.times(reason.spot)
    if reason.why == "input" and (queue := reasons.queue_of(reason.spot)):
        end = at.start
        for message in queue:
            if message.depart < end:
                taker = reasons.taker_of(message.producer)
                yield Piece("link", spot.device, taker, message.depart, end)
            end = message.depart
        return reasons.passes[queue[-1].producer]
    if reason.why == "input" and came_from.end < at.start:
        yield Piece("link", spot.device, reasons.waiter(spot), came_from.end, at.start)
    elif reason.why == "queue":
        yield Piece("queue", spot.device, action, came_from.end, at.start)
    return reason.spot


# --- Pieces of the critical path, gathered into runs that a person can read.


def runs_of(pieces: Sequence[Piece]) -> tuple[PathRun, ...]:
    """Return the runs of a critical path, in order; every piece is in exactly one of them.

    From each point on, the run is the longer of two, counted in actions; of equals, the first:

    * the actions that one device computes without a wait;
    * the path of one micro-batch through neighbouring stages, links included.

    A link belongs to the action that it leads to.
    """
    runs = []
    at = 0
    while at < len(pieces):
        first = at + 1 if pieces[at].kind == "link" and at + 1 < len(pieces) else at
        kind = pieces[first].kind
        if kind != "compute":
            end = _same(pieces, first)
            runs.append(_path_run(kind, pieces[at:end]))
        else:
            device, wave = _same(pieces, first), _wave(pieces, first)
            num_computed = sum(piece.kind == "compute" for piece in pieces[first:wave])
            is_wave = num_computed > device - first
            end = wave if is_wave else device
            runs.append(_path_run("wave" if is_wave else "device", pieces[at:end]))
        at = end
    return tuple(runs)


def _same(pieces: Sequence[Piece], at: int) -> int:
    """Return where pieces of this kind on this device end."""
    end = at + 1
    first = pieces[at]
    while (
        end < len(pieces) and pieces[end].kind == first.kind and pieces[end].device == first.device
    ):
        end += 1
    return end


def _wave(pieces: Sequence[Piece], at: int) -> int:
    """Return where the way of one micro-batch through neighbouring stages ends."""
    end = at + 1
    while True:
        ahead = end + 1 if end < len(pieces) and pieces[end].kind == "link" else end
        if ahead >= len(pieces) or not _follows(pieces[end - 1].action, pieces[ahead]):
            return end
        end = ahead + 1


def _follows(before: Action | None, piece: Piece) -> bool:
    after = piece.action
    if before is None or after is None or piece.kind != "compute" or before.type != after.type:
        return False
    step = after.stage - before.stage
    return before.microbatch == after.microbatch and step == (-1 if after.type.is_backward else 1)


def _path_run(kind: RunKind, pieces: Sequence[Piece]) -> PathRun:
    done = [piece for piece in pieces if piece.kind != "link"] or pieces
    return PathRun(
        kind=kind,
        devices=tuple(device for device, _ in groupby(piece.device for piece in done)),
        actions=tuple(piece.action for piece in done if piece.action is not None),
        start_ms=pieces[0].start,
        end_ms=pieces[-1].end,
        link_ms=sum(piece.end - piece.start for piece in pieces if piece.kind == "link"),
    )


_EXACT = 1e-9


def lane_slacks(
    problem: Problem, programs: Programs, run: Simulation, *, most: int | None = None
) -> tuple[LaneSlack, ...]:
    """Return how much slower each used lane may become before the objective grows, in rising order.

    Orders stay those of ``run``, also of transfers that share a PCIe group or a half-duplex device.
    On a link the bytes slow down, not the latency. If nodes x lanes exceed ``most``, the result is
    empty; a million take about a second.
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
    uses = [lane_use(problem, lane, graph.busy_ms[lane], 0.0) for lane in graph.lanes]
    found = [
        LaneSlack(lane=use.lane, devices=use.devices, group=use.group, factor=float(factor))
        for use, factor in zip(uses, factors, strict=True)
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
    """All nodes of a run, in an order in which each node comes after its predecessors."""

    def __init__(self, problem: Problem, programs: Programs, run: Simulation) -> None:
        self._problem = problem
        self._nodes: dict[Hashable, _PathNode] = {}
        self._producers = {
            completed: action
            for program in programs
            for action in program
            if (completed := pass_of(action)) is not None
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

    def _input(self, producer: Pass, taker: Action) -> tuple[Hashable, float]:
        """Return what brings the output of a pass, and the ms until it is there."""
        problem, source = self._problem, self._producers[producer].bare
        transit = transit_ms(problem, producer, taker)
        ends = problem.stages[producer.stage].device, problem.stages[taker.stage].device
        link = next((one for one in problem.links if (one.source, one.target) == ends), None)
        if link is None or link.bandwidth_gb_per_s is None:
            return source, transit
        stage = problem.stage_of(min(producer.stage, taker.stage), producer.microbatch)
        num_bytes = stage.output_bytes
        lane = OccupiedLane("link", ends[0], target=ends[1])
        self._nodes[producer] = _PathNode((lane,), link.occupied_ms(num_bytes), [(source, 0.0)])
        return producer, link.latency_ms

    def _take_turns(self, programs: Programs, run: Simulation) -> None:
        """Add the order of this run on each lane, and on links that queue."""
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
            messages[message.link].append(message.producer)
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
        """Return the time that a node adds to its start, and how it grows."""
        lanes, ms, _ = self._nodes[key]
        own = np.array([np.full(len(factors), ms), np.zeros(len(factors))])
        for lane in lanes if ms > 0 else ():
            own[:, column[lane]] += ms * (factors[column[lane]] - 1.0), ms
        return own
