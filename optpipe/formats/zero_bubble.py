"""A schedule as a Python object list: the ``ScheduledNode`` of the public zero-bubble runtime.

The node is defined in ``megatron/core/pipeline_parallel/zerobubble/scheduler/graph.py`` of the
zero-bubble repository (and of AMD's Primus, which has the offload nodes too); what it makes the
runtime do, in ``zerobubble/runtime.py``. docs/exports.md says which versions were read. The words
differ from ours: their *stage* is our device, their *layer group* our stage; their B is our I,
their BW our B.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

from optpipe.errors import ScheduleFormatError
from optpipe.problem import placement_of
from optpipe.schedule import Action, ActionType, Pass, input_of, pass_of
from optpipe.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe.problem import Problem
    from optpipe.schedule import Program, Programs
    from optpipe.simulate import Simulation, Times

__all__ = ["Event", "Exchange", "Turn", "dump_python_list", "joint_order", "rows_of"]


_NAMES = {
    ActionType.FORWARD: ("F",),
    ActionType.BACKWARD_INPUT: ("B",),
    ActionType.BACKWARD_WEIGHT: ("W",),
    ActionType.FULL_BACKWARD: ("BW",),
    ActionType.OFFLOAD: ("OFFLOAD_SEND_START",),
    ActionType.RELEASE: ("OFFLOAD_SEND_END",),
    ActionType.RELOAD: ("OFFLOAD_RECV_PREP", "OFFLOAD_RECV_START"),
}
_ENDS_USE = (ActionType.BACKWARD_WEIGHT, ActionType.FULL_BACKWARD)


class _Node(NamedTuple):
    """One node; times in ms, ``peer`` a device, ``pair`` the number of an exchange."""

    type: str
    microbatch: int
    chunk: int
    layer_group: int
    start: float
    end: float
    receive_from: int | None = None
    send_to: int | None = None
    peer: int | None = None
    pair: int | None = None
    offloaded: bool = False


def dump_python_list(problem: Problem, programs: Programs) -> str:
    """Return legal programs as a Python module that imports nothing.

    Its ``local_order(graph)`` and ``scheduled_nodes(graph)`` take the runtime's module ``graph``
    and return the nodes of every device: passes alone, for the runtime's own pass to add
    communication, or everything with communication placed here. Raises `ScheduleFormatError` with
    row, column and cell of the first action that the runtime cannot run, or would run with wrong
    gradients.
    """
    _expect_zero_bubble(problem, programs)
    run = simulate(problem, programs)
    rows = _Rows(problem, programs, run).nodes()
    text = "".join(
        f"    (  # device {device}\n" + "".join(map(_row, row)) + "    ),\n"
        for device, row in enumerate(rows)
    )
    return _TEMPLATE.format(
        problem_hash=problem.problem_hash,
        planned=run.makespan_ms,
        devices=len(problem.devices),
        chunks=max(map(len, problem.stages_of)),
        microbatches=problem.num_microbatches,
        flags=_flags(problem),
        offload_note=_OFFLOAD_NOTE if any(node.offloaded for row in rows for node in row) else "",
        rows=text,
    )


class _Rows:
    """The nodes of each device, from a joint order in which tensors leave as soon as they exist."""

    def __init__(self, problem: Problem, programs: Programs, run: Simulation) -> None:
        self._num_devices = len(problem.devices)
        self._placement = problem.placement
        self._line = joint_order(problem, programs, run)
        self._at: dict[Action, Times] = {
            action: at
            for program, row in zip(programs, run.times, strict=True)
            for action, at in zip(program, row, strict=True)
        }
        self._ended: dict[Pass, float] = {
            made: at.end for action, at in self._at.items() if (made := pass_of(action)) is not None
        }
        self._offloaded = {
            (action.stage, action.microbatch)
            for action in self._at
            if action.type is ActionType.OFFLOAD
        }
        self._held: dict[int, list[int]] = {}
        for stage, microbatch in sorted(self._offloaded):
            self._held.setdefault(stage, []).append(microbatch)
        self._used: set[tuple[int, int]] = set()
        # A stage's turn among those of its device.
        self._chunk = {
            stage: chunk for held in problem.stages_of for chunk, stage in enumerate(held)
        }

    def nodes(self) -> list[list[_Node]]:
        pairs = [event for event in self._line if isinstance(event, Exchange)]
        number = {event: index for index, event in enumerate(pairs)}
        rows = rows_of(self._line, self._num_devices)
        return [
            [node for event in row for node in self._nodes(device, event, number)]
            for device, row in enumerate(rows)
        ]

    def _nodes(
        self, device: int, event: Action | Exchange, number: dict[Exchange, int]
    ) -> Iterator[_Node]:
        if isinstance(event, Exchange):
            yield self._communication(device, event, number[event])
            return
        at = self._at[event]
        offloaded = (event.stage, event.microbatch) in self._offloaded
        is_pass = not (event.type.is_transfer or event.type is ActionType.RELEASE)
        for name in _NAMES[event.type]:
            yield _Node(
                name, event.microbatch, self._chunk[event.stage], event.stage,
                at.start if is_pass else at.issue, at.end if is_pass else at.issue,
                receive_from=self._receives_from(event), send_to=self._sends_to(event),
                offloaded=offloaded,
            )  # fmt: skip
        if offloaded and event.type in _ENDS_USE:
            self._used.add((event.stage, event.microbatch))
            yield from self._let_go(event.stage, at.end)

    def _let_go(self, stage: int, moment: float) -> Iterator[_Node]:
        """Yield the ends of reloads in the order of the reloads, which is how the runtime has them.

        A fused backward may overtake the weight gradient of an earlier micro-batch.
        """
        held = self._held.get(stage, [])
        while held and (stage, held[0]) in self._used:
            yield _Node(
                "OFFLOAD_RECV_END", held.pop(0), self._chunk[stage], stage, moment, moment,
                offloaded=True,
            )  # fmt: skip

    def _communication(self, device: int, event: Exchange, number: int) -> _Node:
        sends = device == event.source
        following = event.stage - 1 if event.backward else event.stage + 1
        stage = event.stage if sends else following
        ended = self._ended[Pass(event.backward, event.stage, event.microbatch)]
        return _Node(
            f"{'SEND' if sends else 'RECV'}_{'BACKWARD' if event.backward else 'FORWARD'}",
            event.microbatch, self._chunk[stage], stage, ended, ended,
            peer=event.target if sends else event.source, pair=number,
        )  # fmt: skip

    def _receives_from(self, action: Action) -> int | None:
        needed = input_of(action, len(self._placement))
        if needed is None:
            return None
        return self._other(needed.stage, action.stage)

    def _sends_to(self, action: Action) -> int | None:
        made = pass_of(action)
        following = 0 if made is None else action.stage + (-1 if made.backward else 1)
        if made is None or not 0 <= following < len(self._placement):
            return None
        return self._other(following, action.stage)

    def _other(self, stage: int, own: int) -> int | None:
        """Return the device of a stage; None where it is the own stage's."""
        device = self._placement[stage]
        return None if device == self._placement[own] else device


def _row(node: _Node) -> str:
    numbers = (round(node.start, 6), round(node.end, 6))
    cells = (node.type, node.microbatch, node.chunk, node.layer_group, *numbers, *node[6:])
    return f"        {cells!r},\n"


def _flags(problem: Problem) -> str:
    """Return what makes the runtime place chunks as the problem does."""
    chunks = len(problem.stages) // len(problem.devices)
    if chunks == 1:
        return "--enable-zero-bubble"
    if problem.placement[-1] == 0:
        return "--zero-bubble-v-schedule"
    return f"{chunks} virtual stages, and without --enable-zero-bubble"


_OFFLOAD_NOTE = """
Some activations are offloaded: run with --cpu-offload, and with --offload-overlap-sr, or copies in
both directions share one stream and take longer than planned.
"""

_TEMPLATE = '''"""A pipeline schedule as ScheduledNodes, written by optpipe export.

Problem {problem_hash}.
{devices} devices, chunks on each: {chunks}, {microbatches} micro-batches.
As planned: {planned:.3f} ms.

For the zero-bubble runtime; put this file beside your training script, and before training:

    from megatron.core.pipeline_parallel.zerobubble import runtime
    from megatron.core.pipeline_parallel.zerobubble.scheduler import graph
    runtime.schedule_cache = scheduled_nodes(graph)
    runtime.is_auto_schedule = True  # keep it: no schedule of its own after profiling

Run with {flags}, and without --enable-optimizer-post-validation.
{offload_note}"""

NUM_DEVICES = {devices}
NUM_CHUNKS = {chunks}
NUM_MICROBATCHES = {microbatches}


def local_order(graph):
    """Return the passes of every device, without communication and offload.

    For the runtime's own run_schedule_passes(config, local_order), which adds communication.
    """
    passes = ("F", "B", "W", "BW")
    return [
        [_node(graph, device, row, False) for row in rows if row[0] in passes]
        for device, rows in enumerate(NODES)
    ]


def scheduled_nodes(graph):
    """Return all nodes of every device, in order, communication and offload included."""
    return [[_node(graph, device, row, True) for row in rows] for device, rows in enumerate(NODES)]


def _node(graph, device, row, with_offload):
    name, microbatch, chunk, group, start, end, receive_from, send_to, peer, pair, offloaded = row
    fields = {{}}
    if peer is not None:
        to_next = (device + 1) % NUM_DEVICES == peer
        if NUM_DEVICES == 2:  # both neighbours are one device: the runtime sends to the next
            to_next = name.startswith("SEND_")
        direction = graph.CommDirection.NEXT if to_next else graph.CommDirection.PREV
        fields = {{"comm_direction": direction, "comm_peer_stage": peer, "comm_pair_id": pair}}
    if offloaded and with_offload:
        fields["should_offload"] = True
    return graph.ScheduledNode(
        type=graph.FuncType[name],
        stage=device,
        microbatch=microbatch,
        chunk=chunk,
        layer_group_idx=group,
        start_time=start,
        completion_time=end,
        recv_peer_stage=receive_from,
        send_peer_stage=send_to,
        **fields,
    )


# Per device its nodes: type, micro-batch, chunk, layer group (stage of the model), start and end in
# ms, device it receives from, device it sends to, peer and number of an exchange, offloaded.
NODES = (
{rows})
'''


# --- What the public zero-bubble runtime cannot run, or would run with wrong gradients.
# It keeps activations, received tensors, weight gradients and offloaded activations of a chunk in
# queues, first in first out (``TrainingIteration.Buffers``, ``WeightGradStore`` and
# ``ActivationStorePool``): what comes in another order gets another micro-batch's tensors.

_QUEUES = {
    ActionType.FORWARD: "forwards",
    ActionType.BACKWARD_INPUT: "backwards",
    ActionType.FULL_BACKWARD: "backwards",
    ActionType.BACKWARD_WEIGHT: "weight gradients",
    ActionType.OFFLOAD: "offloads",
    ActionType.RELEASE: "releases",
    ActionType.RELOAD: "reloads",
}


def _expect_zero_bubble(problem: Problem, programs: Programs) -> None:
    """Accept legal programs that the runtime runs right, refuse all others.

    Raises `ScheduleFormatError` with row, column and cell, and what to do.
    """
    _expect_placement(problem)
    for device, program in enumerate(programs):
        _expect_queues(device, program)


def _expect_placement(problem: Problem) -> None:
    num_devices = len(problem.devices)
    chunks, rest = divmod(len(problem.stages), num_devices)
    known = []
    if rest == 0 and num_devices > 1:
        known.append(placement_of("loop", num_devices, chunks))
        if chunks == 2:
            known.append(placement_of("v", num_devices, chunks))
    if problem.placement not in known:
        raise ScheduleFormatError(
            f"placement {list(problem.placement)} on {num_devices} devices: the zero-bubble "
            "runtime has two devices or more, and one stage on each, chunks in a loop, or two "
            "chunks in a V; use optpipe.runtime, or such a placement"
        )


def _expect_queues(device: int, program: Program) -> None:
    last: dict[tuple[int, str], int] = {}
    for index, action in enumerate(program):
        if action.type is ActionType.RECOMPUTE:
            raise _refused(
                device, index, action, "the zero-bubble runtime's R makes again only what a layer "
                "handed in for it (norms, activation functions), not a whole forward; solve "
                "without recompute_ms",
            )  # fmt: skip
        queue = (action.stage, _QUEUES[action.type])
        before = last.get(queue, -1)
        if action.microbatch < before:
            raise _refused(
                device, index, action, f"comes after micro-batch {before}, but the zero-bubble "
                f"runtime takes the {queue[1]} of a chunk in the order of the micro-batches, and "
                "would make wrong gradients silently; use optpipe.runtime, or a schedule that "
                "keeps the order",
            )  # fmt: skip
        last[queue] = action.microbatch


def _refused(device: int, index: int, action: Action, why: str) -> ScheduleFormatError:
    return ScheduleFormatError(f"row {device + 1}, column {index + 1}: {action}: {why}")


# --- Sends and receives put into programs, in one order that no executor can get stuck in.
# A schedule's programs hold no communication: torch's runtime places its own. Others want it
# written out. Here everything that happens is put into one line, *the joint order*: each pass after
# what it needs and after what stands before it in its program, each exchange between the pass that
# makes the tensor and the one that needs it. A device's row is its part of that line.
#
# No deadlock, whatever the sizes of buffers: let every send and receive wait for its partner, and
# let devices follow their rows. The first event of the joint order that has not happened yet stands
# at the head of the row of everyone who takes part in it, since all earlier ones have happened; so
# it can happen. By the same line, both ends of every pair of devices have its exchanges in one
# order.


class Turn(NamedTuple):
    """An action on its device."""

    device: int
    action: Action


class Exchange(NamedTuple):
    """A tensor on its way: the output of a forward, or with ``backward`` an input gradient.

    ``stage`` is that of the pass that made it; it goes from device ``source`` to ``target``.
    """

    backward: bool
    stage: int
    microbatch: int
    source: int
    target: int


Event = Turn | Exchange


def joint_order(problem: Problem, programs: Programs, run: Simulation) -> list[Event]:
    """Return all events of legal programs in one line, by the simulated times of ``run``.

    Actions stand by when they end, copies by when they are enqueued; an exchange stands where its
    tensor is made, before all that is later than that moment.
    """
    return _Line(problem, programs, run).events()


def rows_of(line: Sequence[Event], num_devices: int) -> list[list[Action | Exchange]]:
    """Return each device's part of the line; an exchange stands in both rows."""
    rows: list[list[Action | Exchange]] = [[] for _ in range(num_devices)]
    for event in line:
        if isinstance(event, Turn):
            rows[event.device].append(event.action)
        else:
            rows[event.source].append(event)
            rows[event.target].append(event)
    return rows


class _Line:
    """The line as it grows: what is ready waits in a heap, by time.

    At equal times exchanges go first, then backwards, then forwards.
    """

    def __init__(self, problem: Problem, programs: Programs, run: Simulation) -> None:
        self._placement = problem.placement
        self._programs = programs
        self._times = run.times
        self._heads = [0] * len(programs)
        self._done: set[Pass] = set()
        self._waiting: dict[Pass, int] = {}
        self._ready: list[tuple[float, int, Event]] = []
        self._line: list[Event] = []

    def events(self) -> list[Event]:
        for device in range(len(self._programs)):
            self._look_at(device)
        while self._ready:
            moment, _, event = heapq.heappop(self._ready)
            self._line.append(event)
            if isinstance(event, Turn):
                self._take(event, moment)
            else:
                self._finish(Pass(event.backward, event.stage, event.microbatch))
        return self._line

    def _look_at(self, device: int) -> None:
        """Put the next action of a device into the heap, if what it needs is done."""
        index = self._heads[device]
        if index == len(self._programs[device]):
            return
        action = self._programs[device][index]
        needed = input_of(action, len(self._placement))
        if needed is not None and needed not in self._done:
            self._waiting[needed] = device
            return
        at = self._times[device][index]
        if action.type.is_transfer:
            moment = at.issue
        else:
            moment = at.start if action.type is ActionType.RELEASE else at.end
        heapq.heappush(
            self._ready, (moment, 1 + (not action.type.is_backward), Turn(device, action))
        )

    def _take(self, turn: Turn, moment: float) -> None:
        device, action = turn
        at = self._times[device][self._heads[device]]
        self._heads[device] += 1
        made = pass_of(action)
        if made is not None:
            leaving = _exchange(self._placement, made)
            if leaving is None:
                self._finish(made)
            else:
                heapq.heappush(self._ready, (max(moment, at.end), 0, leaving))
        self._look_at(device)

    def _finish(self, made: Pass) -> None:
        self._done.add(made)
        if made in self._waiting:
            self._look_at(self._waiting.pop(made))


def _exchange(placement: Sequence[int], made: Pass) -> Exchange | None:
    """Return the exchange of a pass's output; None if no other device needs it."""
    following = made.stage - 1 if made.backward else made.stage + 1
    if not 0 <= following < len(placement):
        return None
    source, target = placement[made.stage], placement[following]
    if source == target:
        return None
    return Exchange(made.backward, made.stage, made.microbatch, source, target)
