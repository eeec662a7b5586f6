"""Simulate programs: every action as soon as possible, in program order.

This is the reference implementation of docs/specification.md, "Time".

The rules are those of CUDA streams:

* Compute actions of a device run one after another.
* OFFLOAD and RELOAD are enqueued on their lanes when the device reaches them.
* RELEASE, and the backward of a reloaded micro-batch, wait for the transfer.
* Waiting transfers go by issue time, then device index.
* In v2 a message departs when its producer has ended and the previous message has left the link.
  In v1 messages never wait for each other.

`simulate` alone judges solvers, families and the runtime's predictions.

Not modelled: the cost of launching work, and any influence of transfers on compute speed. The given
bandwidths are those sustained with both directions and compute busy.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

from optpipe.check import check
from optpipe.memory import memory_walk, modes_of
from optpipe.schedule import (
    Action,
    ActionType,
    Pass,
    input_of,
    lane_of,
    partner_of,
    pass_of,
    starts_pair,
    transit_ms,
)
from optpipe.units import ShortRepr

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from optpipe.memory import CellModes
    from optpipe.problem import Problem
    from optpipe.schedule import Program, Programs

__all__ = [
    "GradSync",
    "Interval",
    "Lane",
    "LinkLoad",
    "LinkMessage",
    "Simulation",
    "Timeline",
    "Times",
    "awaited_transfer",
    "bubble_rate",
    "duration_ms",
    "idle_shares",
    "link_loads",
    "link_warnings",
    "make_timeline",
    "memory_curve",
    "occupies_lane",
    "side_by_side",
    "simulate",
    "timeline_of",
    "times_of",
]


@dataclass(frozen=True, slots=True)
class Times:
    """The times of one action, in ms.

    ``issue`` is when the device reaches it, its inputs aside; ``start`` and ``end`` are those of
    the compute pass or of the transfer itself. A RELEASE has start = end = when its wait is over.
    Both actions of a pair have the same times.
    """

    issue: float
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class GradSync:
    """The gradient reduction of a stage after its last W or B, in ms."""

    device: int
    stage: int
    start: float
    end: float


@dataclass(frozen=True, slots=True, repr=False)
class Simulation(ShortRepr):
    """The times of all actions: ``times[device][index]`` belongs to ``programs[device][index]``."""

    times: tuple[tuple[Times, ...], ...]
    grad_syncs: tuple[GradSync, ...]
    makespan_ms: float
    span_ms: float
    messages: tuple[LinkMessage, ...] = ()
    """Those over links that queue, each link's in the order in which they leave it."""
    modes: tuple[CellModes, ...] = field(default=(), repr=False, compare=False)
    """The modes of each program's cells, as `optpipe.memory.modes_of` returns them."""

    def objective_ms(self, objective: str) -> float:
        """Return makespan_ms or span_ms."""
        return self.makespan_ms if objective == "makespan" else self.span_ms


class LinkMessage(NamedTuple):
    """The output of a pass on a link that carries one message at a time, in ms.

    ``ready`` is when the pass ended. ``depart`` is the later of that time and the time when the
    previous message had left.
    ``left`` is when this message has left; it arrives the link's latency later. ``link`` is an
    index of the problem's links.
    """

    link: int
    producer: Pass
    ready: float
    depart: float
    left: float


class LinkLoad(NamedTuple):
    """The load of a directed link in one step.

    ``busy_ms`` = ``num_bytes`` over its bandwidth. If the link carries one message at a time, no
    schedule has a makespan below ``least_ms``. It adds to ``busy_ms`` the passes that lead to the
    first message, the latency of the last, and the passes that must follow the last.
    """

    source: int
    target: int
    num_bytes: int
    gb_per_s: float
    busy_ms: float
    least_ms: float

    def __str__(self) -> str:
        return (
            f"link {self.source} -> {self.target} is busy for {self.busy_ms:,.1f} ms "
            f"({self.num_bytes / 1e9:,.3g} GB at {self.gb_per_s:g} GB/s)"
        )


def link_loads(problem: Problem) -> tuple[LinkLoad, ...]:
    """Return the load of each link with a bandwidth that carries anything."""
    links = {(link.source, link.target): link for link in problem.links}
    # When a first micro-batch ends its F and I on each stage, the last one's way back included.
    least = problem.least
    there, back = zip(*least.boundary_ms, strict=True)
    inputs = [min(stage.backward_input_ms, stage.fused_backward_ms) for stage in least.stages]
    forward = [f + t for f, t in zip((s.forward_ms for s in least.stages), there, strict=True)]
    down = list(accumulate(forward))
    up = list(accumulate(i + b for i, b in zip(inputs, back, strict=True)))
    sent = defaultdict(list)
    # The very last backward is followed by its W, where it is no B, and a gradient reduction.
    last = least.stages[0]
    whole = min(last.backward_input_ms + last.backward_weight_ms, last.fused_backward_ms)
    ending = whole - inputs[0] + last.grad_sync_ms
    costs = [problem.stages_by_cost[cost] for cost in problem.cost_of]
    for s, (this, that) in enumerate(pairwise(problem.stages)):
        if size := sum(stages[s].output_bytes for stages in costs):
            turn = down[-1] + up[-1]
            head, tail = down[s] - there[s], up[s] - back[s]
            sent[this.device, that.device].append((head, turn - down[s], size))
            sent[that.device, this.device].append((turn - up[s], tail, size))
    loads = []
    for way, messages in sent.items():
        if (link := links.get(way)) is None or link.bandwidth_gb_per_s is None:
            continue
        heads, tails, sizes = zip(*messages, strict=True)
        num_bytes = sum(sizes)
        busy_ms = link.occupied_ms(num_bytes)
        least_ms = min(heads) + busy_ms + link.latency_ms + min(tails) + ending
        loads.append(LinkLoad(*way, num_bytes, link.bandwidth_gb_per_s, busy_ms, least_ms))
    return tuple(loads)


def link_warnings(problem: Problem, makespan_ms: float) -> tuple[str, ...]:
    """Return a sentence per link that could not deliver within a makespan in ms.

    Problems of v1 let messages pass each other; on real links, and in v2, they queue: none.
    """
    return tuple(
        f"{load}: where its messages queue no schedule is shorter than {load.least_ms:,.1f} ms, "
        f"but these {makespan_ms:,.1f} ms count each message as if it were alone; give the link "
        "more bandwidth, send fewer bytes over it, or cut elsewhere"
        for load in link_loads(problem)
        if load.least_ms > makespan_ms * (1 + 1e-9)
    )


def duration_ms(problem: Problem, action: Action, mode: int | None = None) -> float:
    """Return how long an action occupies its lane, in ms (RELEASE: 0).

    ``mode`` is that of its cell; by default it is the mode that the action implies
    (`Stage.implied_mode`).
    """
    stage = problem.stage_of(action.stage, action.microbatch)
    chosen = stage.implied_mode(action.type) if mode is None else mode
    cell = problem.menu_of(action.stage, action.microbatch)[chosen]
    match action.type:
        case ActionType.FORWARD:
            return stage.forward_ms
        case ActionType.BACKWARD_INPUT:
            return stage.backward_input_ms + cell.inside_ms
        case ActionType.BACKWARD_WEIGHT:
            return stage.backward_weight_ms
        case ActionType.FULL_BACKWARD:
            return stage.fused_backward_ms + cell.inside_ms
        case ActionType.RECOMPUTE:
            return cell.recompute_ms
        case ActionType.OFFLOAD:
            return problem.offload_ms(action.stage, cell.offload_bytes)
        case ActionType.RELOAD:
            return problem.reload_ms(action.stage, cell.offload_bytes)
        case ActionType.RELEASE:
            return 0.0


def simulate(
    problem: Problem,
    programs: Programs,
    durations: Mapping[Action, float] | None = None,
    message_factors: Mapping[Pass, float] | None = None,
    modes: Sequence[CellModes] | None = None,
) -> Simulation:
    """Return the times of all actions and messages of legal programs.

    Parameters
    ----------
    problem
        Gives the duration of every action, the links and the shared lanes.
    programs
        Legal programs (see `optpipe.check.check`); this function does not check their memory.
    durations
        Durations in ms that replace the problem's, for some or all actions: measured times, noise.
        The hidden time of a pair scales with its forward, and is at most its backward.
    message_factors
        Factor of the time of the message with a pass's output, for some or all passes: of both the
        time that it occupies a link and the time until it arrives.
    modes
        The modes of each program's cells, if the caller has them: `check` returns them.

    Raises
    ------
    IllegalScheduleError
        If the programs get stuck.
    """
    known = tuple(modes or (modes_of(problem, program) for program in programs))
    run = _LaneRun(problem, programs, known, durations or {}, message_factors or {})
    run.to_the_end()
    return run.result()


class _LaneRun:
    """All lanes of all devices.

    Each device advances until it waits for something of unknown end, perhaps far into the future.
    Only transfers must start in the order of time, because they compete for lanes. Whenever no
    device can advance, the transfer with the earliest start is started. No blocked device can issue
    an earlier one, because what blocks it ends no earlier than this one starts.
    """

    def __init__(
        self,
        problem: Problem,
        programs: Programs,
        modes: tuple[CellModes, ...],
        durations: Mapping[Action, float],
        message_factors: Mapping[Pass, float],
    ) -> None:
        self.problem = problem
        self.message_factors = message_factors
        self.programs = programs
        self.durations = {action.bare: ms for action, ms in durations.items()}
        self.modes = modes
        self.clock = [0.0] * len(programs)
        self.times: list[list[Times | None]] = [[None] * len(program) for program in programs]
        self.head = [0] * len(programs)
        self.departs: dict[Pass, float] = {}
        self.messages: list[LinkMessage] = []
        self.link_free = [0.0] * len(problem.links)
        self.waiting_for_pass: dict[Pass, int] = {}
        self.lanes = _TransferLanes(problem)

    def to_the_end(self) -> None:
        runnable = list(range(len(self.programs)))
        while runnable:
            while runnable:
                runnable.extend(self._advance(runnable.pop()))
            started = self.lanes.start_next()
            if started is not None:
                device, index, times = started
                self.times[device][index] = times
                runnable.append(device)
        if any(at < len(program) for at, program in zip(self.head, self.programs, strict=True)):
            check(self.problem, self.programs)
            raise AssertionError("the check passed programs that cannot run")

    def _advance(self, device: int) -> list[int]:
        """Run a device until it waits for something unknown; return the devices it woke."""
        program = self.programs[device]
        woken = []
        while self.head[device] < len(program):
            index = self.head[device]
            action = program[index]
            if action.type.is_transfer:
                item = _Issued(
                    self.clock[device], device, index, action, self._duration(device, action)
                )
                self.times[device][index] = self.lanes.issue(item)
            else:
                together = program[index : index + 1 + starts_pair(program, index)]
                times = self._compute_times(device, together)
                if times is None:
                    break
                self.clock[device] = times.end
                for at, part in enumerate(together, start=index):
                    self.times[device][at] = times
                    completed = pass_of(part)
                    if completed is not None:
                        self.departs[completed] = self._departure(completed, times.end)
                        if completed in self.waiting_for_pass:
                            woken.append(self.waiting_for_pass.pop(completed))
                self.head[device] += len(together) - 1
            self.head[device] += 1
        return woken

    def _compute_times(self, device: int, together: Program) -> Times | None:
        """Return when a compute action, or a pair, runs; None while that is unknown."""
        issue = start = self.clock[device]
        for action in together:
            ready = self._ready(device, action)
            if ready is None:
                return None
            start = max(start, ready)
        return Times(issue, start, start + self._lasts(device, together))

    def _ready(self, device: int, action: Action) -> float | None:
        """Return when what an action waits for is there; None while that is unknown."""
        start = self.clock[device]
        needed = input_of(action, len(self.problem.stages))
        if needed is not None:
            if needed not in self.departs:
                self.waiting_for_pass[needed] = device
                return None
            transit = transit_ms(self.problem, needed, action)
            transit *= self.message_factors.get(needed, 1.0)
            start = max(start, self.departs[needed] + transit)
        transfer = awaited_transfer(action)
        if transfer is not None and transfer in self.lanes.issued:
            end = self.lanes.end.get(transfer)
            if end is None:
                return None
            start = max(start, end)
        return start

    def _lasts(self, device: int, together: Program) -> float:
        """Return how long one action or a pair runs; what hides scales with the forward's time."""
        length = self._duration(device, together[0])
        if len(together) == 1:
            return length
        forward, backward = together
        other = self._duration(device, backward)
        hidden = self.problem.hidden_ms[forward.stage, backward.stage, backward.type.value]
        if hidden > 0:
            hidden *= length / self.problem.stages[forward.stage].forward_ms
        return length + other - min(hidden, other)

    def _departure(self, producer: Pass, ready: float) -> float:
        """Return when the output of a pass leaves its device, which has sent all before it."""
        link, length = lane_of(self.problem, producer)
        if link < 0:
            return ready
        length *= self.message_factors.get(producer, 1.0)
        depart = max(ready, self.link_free[link])
        self.link_free[link] = depart + length
        self.messages.append(LinkMessage(link, producer, ready, depart, depart + length))
        return depart

    def _duration(self, device: int, action: Action) -> float:
        known = self.durations.get(action.bare)
        if known is not None:
            return known
        return duration_ms(self.problem, action, self.modes[device][action.cell])

    def result(self) -> Simulation:
        times = tuple(tuple(t for t in row if t is not None) for row in self.times)
        syncs = tuple(self._grad_syncs(times))
        first = [min((t.start for t in row), default=0.0) for row in times]
        last = [max((t.end for t in row), default=0.0) for row in times]
        for sync in syncs:
            last[sync.device] = max(last[sync.device], sync.end)
        used = [device for device, row in enumerate(times) if row]
        makespan = max(last) - min((first[d] for d in used), default=0.0)
        span = max((last[d] - first[d] for d in used), default=0.0)
        return Simulation(times, syncs, makespan, span, tuple(self.messages), self.modes)

    def _grad_syncs(self, times: tuple[tuple[Times, ...], ...]) -> list[GradSync]:
        syncs = []
        for device, (program, row) in enumerate(zip(self.programs, times, strict=True)):
            ready: dict[int, float] = {}
            for action, at in zip(program, row, strict=True):
                if action.type in (ActionType.BACKWARD_WEIGHT, ActionType.FULL_BACKWARD):
                    ready.pop(action.stage, None)
                    ready[action.stage] = at.end
            free = 0.0
            for stage, end in ready.items():
                length = self.problem.stages[stage].grad_sync_ms
                if length == 0:
                    continue
                start = max(free, end)
                free = start + length
                syncs.append(GradSync(device, stage, start, free))
        return syncs


def awaited_transfer(action: Action) -> Action | None:
    """Return the transfer whose end an action of the compute lane waits for, if it exists."""
    stage, kind, microbatch, *_ = action
    if kind is ActionType.RELEASE:
        return Action(stage, ActionType.OFFLOAD, microbatch)
    if kind.consumes_reload:
        return Action(stage, ActionType.RELOAD, microbatch)
    return None


class _Issued(NamedTuple):
    """A transfer in its queue; sorts as waiting transfers go."""

    issue: float
    device: int
    position: int
    action: Action
    duration: float


class _TransferLanes:
    """Both transfer lanes of every device, half-duplex devices and shared PCIe groups included."""

    def __init__(self, problem: Problem) -> None:
        self.issued: set[Action] = set()
        self.end: dict[Action, float] = {}
        self._keys = {
            (device, kind): _lane_keys(problem, device, kind)
            for device in range(len(problem.devices))
            for kind in (ActionType.OFFLOAD, ActionType.RELOAD)
        }
        self._free = {key: 0.0 for keys in self._keys.values() for key in keys}
        self._queues: dict[tuple[int, ActionType], deque[_Issued]] = {
            lane: deque() for lane in self._keys
        }
        # The head of every queue with a start it cannot beat: lanes are only ever taken for longer.
        self._heads: list[tuple[float, _Issued]] = []

    def issue(self, item: _Issued) -> Times | None:
        """Enqueue a transfer; return its times if no other transfer competes for its lane."""
        self.issued.add(item.action)
        if len(self._keys_of(item)) == 1:
            return self._start(item)
        queue = self._queues[item.device, item.action.type]
        queue.append(item)
        if len(queue) == 1:
            self._wait(item)
        return None

    def start_next(self) -> tuple[int, int, Times] | None:
        """Start the waiting transfer that can start first; ties by issue time, then device."""
        while self._heads:
            promised, item = heapq.heappop(self._heads)
            if self._earliest(item) > promised:
                self._wait(item)
                continue
            queue = self._queues[item.device, item.action.type]
            queue.popleft()
            times = self._start(item)
            if queue:
                self._wait(queue[0])
            return item.device, item.position, times
        return None

    def _start(self, item: _Issued) -> Times:
        start = self._earliest(item)
        end = start + item.duration
        for key in self._keys_of(item):
            self._free[key] = end
        self.end[item.action] = end
        return Times(item.issue, start, end)

    def _wait(self, item: _Issued) -> None:
        heapq.heappush(self._heads, (self._earliest(item), item))

    def _earliest(self, item: _Issued) -> float:
        return max(item.issue, *(self._free[key] for key in self._keys_of(item)))

    def _keys_of(self, item: _Issued) -> tuple[str, ...]:
        return self._keys[item.device, item.action.type]


def _lane_keys(problem: Problem, device: int, kind: ActionType) -> tuple[str, ...]:
    """Return the lanes that a transfer occupies: its direction, and those shared with others."""
    description = problem.devices[device]
    other = ActionType.RELOAD if kind is ActionType.OFFLOAD else ActionType.OFFLOAD
    keys = [f"device {device} {kind}"]
    if description.half_duplex:
        keys.append(f"device {device} {other}")
    if description.pcie_group is not None:
        keys.append(f"group {description.pcie_group} {kind}")
    return tuple(keys)


# --- A schedule over time: lanes, bubbles and memory curves, for text and pictures.

Lane = Literal["compute", "d2h", "h2d", "grad_sync"]
_LANES: dict[ActionType, Lane] = {ActionType.OFFLOAD: "d2h", ActionType.RELOAD: "h2d"}


@dataclass(frozen=True, slots=True)
class Interval:
    """One action on one lane, in ms; ``action`` is None for a gradient reduction.

    ``partner`` is what runs together with it, in an interval of its own with the same times.
    """

    device: int
    lane: Lane
    action: Action | None
    start: float
    end: float
    partner: Action | None = None


def side_by_side(intervals: Sequence[Interval]) -> tuple[Interval, ...]:
    """Return intervals as pictures show them: of a pair the forward left, the backward right.

    The two run together, for as long as both bars; each has half of it.
    """
    return tuple(
        item
        if item.partner is None
        else replace(item, start=(item.start + item.end) / 2)
        if item.action is not None and item.action.paired
        else replace(item, end=(item.start + item.end) / 2)
        for item in intervals
    )


@dataclass(frozen=True, slots=True, repr=False)
class Timeline(ShortRepr):
    """The intervals, memory curves and messages of a run.

    Attributes
    ----------
    intervals
        Per device, in program order; RELEASE, which occupies nothing, is left out.
    memory
        Per device, (time in ms, bytes held from then on), in program order at equal times; static
        bytes included, workspaces not. The first point is (0, static bytes).
    messages
        As in `Simulation`.
    """

    intervals: tuple[tuple[Interval, ...], ...]
    memory: tuple[tuple[tuple[float, int], ...], ...]
    makespan_ms: float
    span_ms: float
    messages: tuple[LinkMessage, ...] = ()


def bubble_rate(problem: Problem, length_ms: float) -> float:
    """Return the share of all device time that is idle: the mean of `idle_shares`."""
    shares = idle_shares(problem, length_ms)
    return sum(shares) / len(shares)


def idle_shares(problem: Problem, length_ms: float) -> tuple[float, ...]:
    """Return 1 - busy / length of each device, busy = its compute time; 0 for length 0."""
    if length_ms <= 0:
        return (0.0,) * len(problem.devices)
    return tuple(1.0 - busy_ms / length_ms for busy_ms in problem.device_busy_ms)


def make_timeline(
    problem: Problem, programs: Programs, durations: Mapping[Action, float] | None = None
) -> Timeline:
    """Simulate legal programs and return their timeline (arguments as `simulate`)."""
    return timeline_of(problem, programs, simulate(problem, programs, durations))


def timeline_of(problem: Problem, programs: Programs, run: Simulation) -> Timeline:
    """Return the timeline of a simulation of these very programs."""
    intervals: list[tuple[Interval, ...]] = []
    for device, (program, row) in enumerate(zip(programs, run.times, strict=True)):
        rows = [
            Interval(
                device,
                _LANES.get(action.type, "compute"),
                action,
                at.start,
                at.end,
                partner_of(program, index),
            )
            for index, (action, at) in enumerate(zip(program, row, strict=True))
            if occupies_lane(action)
        ]
        rows += [
            Interval(device, "grad_sync", None, sync.start, sync.end)
            for sync in run.grad_syncs
            if sync.device == device
        ]
        intervals.append(tuple(rows))
    return Timeline(
        intervals=tuple(intervals),
        memory=tuple(
            memory_curve(problem, device, program, times, modes)
            for device, (program, times, modes) in enumerate(
                zip(programs, run.times, run.modes, strict=True)
            )
        ),
        makespan_ms=run.makespan_ms,
        span_ms=run.span_ms,
        messages=run.messages,
    )


def occupies_lane(action: Action) -> bool:
    """Whether an action takes time on a lane; RELEASE does not."""
    return action.type is not ActionType.RELEASE


def times_of(program: Program, row: Sequence[Interval]) -> Iterator[Times]:
    """Yield the measured times of a program's actions.

    ``row`` has an interval of each action. An action is issued when the compute before it has
    ended. A RELEASE without an interval takes place when its OFFLOAD has ended.
    """
    ran = {item.action.bare: item for item in row if item.action is not None}
    issued = 0.0
    for action in program:
        item = ran.get(action.bare)
        if item is None:
            awaited = awaited_transfer(action)
            moment = issued if awaited is None else max(issued, ran[awaited.bare].end)
            yield Times(issued, moment, moment)
            continue
        yield Times(issued, item.start, item.end)
        if item.lane == "compute":
            issued = item.end


def memory_curve(
    problem: Problem,
    device: int,
    program: Program,
    times: Iterable[Times],
    modes: CellModes | None = None,
) -> tuple[tuple[float, int], ...]:
    """Return the bytes that a device holds over time, in the form of `Timeline.memory`.

    The bytes are the program's under all times; ``times`` of its actions may be measured ones.
    """
    curve = [(0.0, problem.static_bytes_of(device))]
    steps = memory_walk(problem, device, program, modes)
    for action, step, at in zip(program, steps, times, strict=True):
        if step.after == step.before:
            continue
        if action.type is ActionType.RELOAD:
            moment = at.issue
        else:
            moment = at.start if step.taken_at_start else at.end
        curve.append((moment, step.after))
    return tuple(curve)
