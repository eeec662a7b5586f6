"""Schedules as other programs read them: torch, Megatron-Core, the zero-bubble runtime, Perfetto.

*CSV*: programs, one row per device, in the form of torch.distributed.pipelining. Without offload
and recompute actions the text is a torch ``compute_only`` schedule. torch and torchtitan
(``pipeline_parallel_schedule_csv``) read it; ``dump_csv(..., for_torch=True)`` makes sure that they
run it right. The reader skips empty cells, which torch's files use to align time steps.

*Megatron-Core*: the cut of a pipeline as its arguments: the layers of each rank. The format is that
of ``PipelineParallelLayerLayout`` in
``megatron/core/transformer/pipeline_parallel_layer_layout.py`` of NVIDIA/Megatron-LM (commit
00caa53). It has one text per virtual stage in model order, with stage k on rank k mod p. E is the
embedding, t a transformer layer, m a layer of multi-token prediction, L head and loss. The export
refuses the layouts that its ``validate_layer_layout`` refuses.

*Zero bubble*: a Python object list, the ``ScheduledNode`` of the public runtime. The node is
defined in ``megatron/core/pipeline_parallel/zerobubble/scheduler/graph.py`` of the zero-bubble
repository. AMD's Primus has it, too, with the offload nodes. ``zerobubble/runtime.py`` defines
what the runtime does for a node. docs/exports.md lists the versions that were read. Their words
differ from ours: their *stage* is our device, their *layer group* our stage; their B is our I,
their BW our B.

*Chrome trace*: JSON that ui.perfetto.dev and chrome://tracing open. It is the JSON Object Format of
the Trace Event Format: complete events (``X``) for what runs, counters (``C``) for memory, metadata
(``M``) for names. A device is a process, and its lanes are threads. A link on which messages queue
is a process of its own. Times are microseconds, rounded to the nanosecond so that neighbours on a
lane never overlap.
"""

from __future__ import annotations

import csv
import heapq
import io
import json
import re
from itertools import groupby
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from optpipe.errors import ActionSyntaxError, InputError, ScheduleFormatError
from optpipe.formats.json import load_schedule
from optpipe.problem import StageLayers, placement_of
from optpipe.schedule import (
    Action,
    ActionType,
    Pass,
    Programs,
    cells_of,
    input_of,
    parse_action,
    parse_cell,
    pass_of,
)
from optpipe.simulate import make_timeline, memory_curve, simulate, times_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe.problem import Problem
    from optpipe.schedule import Program, Schedule
    from optpipe.simulate import Interval, Lane, Simulation, Timeline, Times

__all__ = [
    "check_num_layers",
    "dump_chrome_trace",
    "dump_csv",
    "dump_planned_beside_measured",
    "dump_python_list",
    "layout_text",
    "load_csv",
    "megatron_layout",
    "parse_programs",
    "read_layout",
]


# --- The object list of the zero-bubble runtime.


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

    Its two functions take the runtime's module ``graph`` and return the nodes of every device.
    ``local_order(graph)`` returns passes alone, to which the runtime adds communication.
    ``scheduled_nodes(graph)`` returns passes and communication. Raises `ScheduleFormatError` with
    row, column and cell of the first action that the runtime cannot run, or would run with wrong
    gradients.
    """
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
    for device, program in enumerate(programs):
        _expect_queues(device, program)
    run = simulate(problem, programs)
    rows = _JointOrder(problem, programs, run).rows()
    text = ""
    for device, row in enumerate(rows):
        text += f"    (  # device {device}\n"
        for node in row:
            times = (round(node.start, 6), round(node.end, 6))
            text += f"        {(*node[:4], *times, *node[6:])!r},\n"
        text += "    ),\n"
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


class _JointOrder:
    """A total order of all events; a device's row is its part of that order.

    Each pass comes after its inputs and after its predecessors in its program. Each exchange comes
    between the pass that makes a tensor and the one that needs it. Events that are ready wait in a
    heap, by time; at equal times exchanges go first, then backwards, then forwards.

    No deadlock, whatever the sizes of buffers: let every send and receive wait for its partner, and
    let devices follow their rows. Take the first event of the order that has not happened yet. All
    earlier events have happened, so it is at the head of the row of each of its devices, and it can
    happen. For the same reason both devices of a pair have their exchanges in one order.
    """

    def __init__(self, problem: Problem, programs: Programs, run: Simulation) -> None:
        self._placement = problem.placement
        self._programs = programs
        self._times = run.times
        # A stage's turn among those of its device.
        self._chunk = {
            stage: chunk for stages in problem.stages_of for chunk, stage in enumerate(stages)
        }
        self._offloaded = {
            (stage, microbatch)
            for program in programs
            for stage, kind, microbatch, *_ in program
            if kind is ActionType.OFFLOAD
        }
        self._held: dict[int, list[int]] = {}
        for stage, microbatch in sorted(self._offloaded):
            self._held.setdefault(stage, []).append(microbatch)
        self._used: set[tuple[int, int]] = set()
        self._heads = [0] * len(programs)
        self._ended: dict[Pass, float] = {}
        self._done: set[Pass] = set()
        self._waiting: dict[Pass, int] = {}
        # A moment; 0 for the exchange of a pass's output, else 1 or 2 for a device and its action.
        self._ready: list[tuple[float, int, Any]] = []
        self._num_exchanges = 0
        self._rows: list[list[_Node]] = [[] for _ in programs]

    def rows(self) -> list[list[_Node]]:
        """Return the nodes of each device."""
        for device in range(len(self._programs)):
            self._look_at(device)
        while self._ready:
            moment, turn, event = heapq.heappop(self._ready)
            if turn:
                device, action = event
                at = self._times[device][self._heads[device]]
                self._heads[device] += 1
                self._rows[device] += self._nodes(action, at)
                completed = pass_of(action)
                if completed is not None:
                    self._ended[completed] = at.end
                    if self._peer(completed.reader, completed.stage) is None:
                        self._finish(completed)
                    else:
                        heapq.heappush(self._ready, (max(moment, at.end), 0, completed))
                self._look_at(device)
            else:
                self._exchange(event)
        return self._rows

    def _look_at(self, device: int) -> None:
        """Put the next action of a device into the heap, if what it needs is done.

        The key of an action is the time when it ends, that of a copy when it is enqueued.
        """
        index = self._heads[device]
        if index == len(self._programs[device]):
            return
        action = self._programs[device][index]
        needed = input_of(action, len(self._placement))
        if needed is not None and needed not in self._done:
            self._waiting[needed] = device
            return
        at = self._times[device][index]
        moment = at.issue if action.type.is_transfer else at.end
        turn = 1 if action.type.is_backward else 2
        heapq.heappush(self._ready, (moment, turn, (device, action)))

    def _exchange(self, producer: Pass) -> None:
        stages, moment = (producer.stage, producer.reader), self._ended[producer]
        way = "BACKWARD" if producer.backward else "FORWARD"
        for verb, stage, other in (("SEND", *stages), ("RECV", *stages[::-1])):
            node = _Node(
                f"{verb}_{way}", producer.microbatch, self._chunk[stage], stage, moment, moment,
                peer=self._placement[other], pair=self._num_exchanges,
            )  # fmt: skip
            self._rows[self._placement[stage]].append(node)
        self._num_exchanges += 1
        self._finish(producer)

    def _finish(self, completed: Pass) -> None:
        self._done.add(completed)
        if completed in self._waiting:
            self._look_at(self._waiting.pop(completed))

    def _nodes(self, action: Action, at: Times) -> Iterator[_Node]:
        cell = action.stage, action.microbatch
        is_copy = action.type.is_transfer or action.type is ActionType.RELEASE
        needed, completed = input_of(action, len(self._placement)), pass_of(action)
        for name in _NAMES[action.type]:
            yield _Node(
                name, action.microbatch, self._chunk[action.stage], action.stage,
                at.issue if is_copy else at.start, at.issue if is_copy else at.end,
                receive_from=self._peer(needed.stage, action.stage) if needed else None,
                send_to=self._peer(completed.reader, action.stage) if completed else None,
                offloaded=cell in self._offloaded,
            )  # fmt: skip
        if cell in self._offloaded and action.type in _ENDS_USE:
            self._used.add(cell)
            # A fused backward may overtake the weight gradient of an earlier micro-batch.
            reloaded = self._held.get(action.stage, [])
            while reloaded and (action.stage, reloaded[0]) in self._used:
                yield _Node(
                    "OFFLOAD_RECV_END", reloaded.pop(0), self._chunk[action.stage], action.stage,
                    at.end, at.end, offloaded=True,
                )  # fmt: skip

    def _peer(self, stage: int, own: int) -> int | None:
        """Return the device of a stage; None if that is the own stage's, or there is none."""
        if not 0 <= stage < len(self._placement) or self._placement[stage] == self._placement[own]:
            return None
        return self._placement[stage]


def _flags(problem: Problem) -> str:
    """Return the flags that make the runtime place chunks as the problem does."""
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


def _expect_queues(device: int, program: Program) -> None:
    last: dict[tuple[int, str], int] = {}
    for index, action in enumerate(program):
        queue = (action.stage, _QUEUES.get(action.type, ""))
        before = last.get(queue, -1)
        last[queue] = action.microbatch
        if action.mode:
            why = (
                "the zero-bubble runtime has no modes beside keep and offload; use "
                "optpipe.runtime, or solve a problem with that menu alone"
            )
        elif action.paired:
            why = (
                "runs together with the forward before it, and the zero-bubble runtime runs one "
                "pass at a time; use optpipe.runtime or torch's, or solve without pairs"
            )
        elif action.type is ActionType.RECOMPUTE:
            why = (
                "the zero-bubble runtime's R makes again only what a layer handed in for it "
                "(norms, activation functions), not a whole forward; solve without recompute_ms"
            )
        elif action.microbatch < before:
            why = (
                f"comes after micro-batch {before}, but the zero-bubble runtime takes the "
                f"{queue[1]} of a chunk in the order of the micro-batches, and would make wrong "
                "gradients silently; use optpipe.runtime, or a schedule that keeps the order"
            )
        else:
            continue
        raise ScheduleFormatError(f"row {device + 1}, column {index + 1}: {action}: {why}")


# --- CSV, one row per device, as torch reads it.


_UNKNOWN_TO_TORCH = frozenset(
    {ActionType.OFFLOAD, ActionType.RELEASE, ActionType.RELOAD, ActionType.RECOMPUTE}
)


def dump_csv(programs: Programs, *, for_torch: bool = False) -> str:
    """Return programs as CSV text.

    Parameters
    ----------
    for_torch
        Whether to refuse programs that torch's own schedule runtime cannot run, or would run with
        wrong gradients. `optpipe.runtime` runs all of them.

    Raises
    ------
    ScheduleFormatError
        For torch only: with the first cell of an action that torch lacks, or of a forward of the
        last stage that is not in the order of the micro-batches; or with an empty row.
    """
    if for_torch:
        last = max((action.stage for program in programs for action in program), default=0)
        for row, program in enumerate(programs, start=1):
            if not program:
                raise ScheduleFormatError(
                    f"row {row} is empty, but torch's runtime needs an action on every rank; leave "
                    "that device out of the problem, and solve again"
                )
            num_losses = column = 0
            for action in program:
                column += not action.paired
                if action.type in _UNKNOWN_TO_TORCH or action.mode:
                    what = "modes" if action.mode else action.type.value
                    raise ScheduleFormatError(
                        f"row {row}, column {column}: torch's runtime has no {what} ({action}), "
                        "and without it the program needs more memory than was planned; run it "
                        "with optpipe.runtime, or solve a problem without bandwidths, "
                        "recompute_ms and modes"
                    )
                if action.stage == last and action.type is ActionType.FORWARD:
                    if action.microbatch != num_losses:
                        expected = action._replace(microbatch=num_losses)
                        raise ScheduleFormatError(
                            f"row {row}, column {column}: {action} stands where torch's runtime "
                            f"expects {expected}; it takes the losses of the last stage for those "
                            "of the micro-batches in their order, and would make wrong gradients "
                            "silently; run it with optpipe.runtime, or use a schedule that keeps "
                            "the order"
                        )
                    num_losses += 1
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for program in programs:
        writer.writerow(cells_of(program))
    return out.getvalue()


def load_csv(text: str) -> Programs:
    """Return the programs of a CSV text.

    Raises
    ------
    ScheduleFormatError
        If a cell is not exactly one action; with row and column.
    """
    programs = []
    try:
        # Spreadsheets put a byte order mark in front.
        rows = list(csv.reader(io.StringIO(text.removeprefix("\ufeff")), strict=True))
    except csv.Error as error:
        raise ScheduleFormatError(f"not CSV: {error}; write one row per device") from None
    for row_number, row in enumerate(rows, start=1):
        program: list[Action] = []
        for column, cell in enumerate(row, start=1):
            if not cell.strip():
                continue
            try:
                program.extend(parse_cell(cell.strip()))
            except ActionSyntaxError as error:
                place = f"row {row_number}, column {column}"
                hint = "; separate cells by commas" if _are_actions(cell) else ""
                raise ScheduleFormatError(f"{place}: {error}{hint}") from None
        programs.append(tuple(program))
    if not programs:
        raise ScheduleFormatError("the CSV is empty; write one row per device")
    return tuple(programs)


def parse_programs(name: str, text: str) -> tuple[Programs, Schedule | None]:
    """Return the programs of a schedule, legal or not, and the record of a JSON file.

    The end of the name tells JSON from CSV; without one, text that begins with ``{`` is JSON.

    Raises `ScheduleFormatError` if the text is no schedule.
    """
    suffix = PurePath(name).suffix.lower()
    if suffix == ".csv" or (suffix != ".json" and not text.lstrip().startswith("{")):
        return load_csv(text), None
    schedule = load_schedule(text)
    return schedule.programs, schedule


def _are_actions(cell: str) -> bool:
    """Whether a cell is a row of a table that separates cells otherwise."""
    first, *others = re.split(r"[;\t]", cell.strip())
    try:
        parse_action(first.strip())
    except ActionSyntaxError:
        return False
    return bool(others)


# --- The layers of every virtual stage, for Megatron-Core.


_FIELDS = {"E": "embedding", "t": "transformer", "m": "mtp", "L": "head"}


def megatron_layout(problem: Problem) -> str:
    """Return ``--num-layers 80 ... --pipeline-model-parallel-layout 'Et*10|t*11|(t*10|)*5t*9L'``.

    Raises
    ------
    InputError
        If a stage has no ``layers``, or Megatron-Core cannot place them so.
    """
    p, count = len(problem.devices), len(problem.stages)
    if problem.placement != tuple(stage % p for stage in range(count)) or count % p:
        raise InputError(
            f"placement {list(problem.placement[:16])}: Megatron-Core has stage k on rank k mod "
            f"{p}, equally many on each; choose a line or a loop over all devices"
        )
    m = problem.num_microbatches
    if count > p and (p == 1 or m % p):
        raise InputError(
            f"{count // p} chunks on {p} ranks with {m} micro-batches: Megatron-Core interleaves "
            f"over two ranks or more, and whole groups of {p} micro-batches; the nearest that "
            f"starts: one chunk, or {m + -m % p} micro-batches"
        )
    stage_layers = _layers(problem)
    layout = layout_text(stage_layers, p)
    mtp = sum(layers.mtp for layers in stage_layers)
    return (
        f"--num-layers {sum(layers.transformer for layers in stage_layers)} "
        + (f"--mtp-num-layers {mtp} " if mtp else "")
        + f"--pipeline-model-parallel-size {p} "
        + f"--pipeline-model-parallel-layout '{layout}'"
    )


def layout_text(stage_layers: Sequence[StageLayers], num_devices: int) -> str:
    """Return ``Et*10|t*11|(t*10|)*5t*9L`` of what the stages hold, in model order.

    Raises
    ------
    InputError
        If Megatron-Core cannot place them so on that many pipeline ranks.
    """
    for name, place, index in (("embedding", "first", 0), ("head", "last", len(stage_layers) - 1)):
        counts = [getattr(layers, name) for layers in stage_layers]
        if sum(counts) != 1 or counts[index] != 1:
            raise InputError(
                f"layers.{name} of the stages = {counts}: Megatron-Core has one, in the {place} "
                "stage; correct them"
            )
    where = [stage for stage, layers in enumerate(stage_layers) if layers.mtp]
    after = where and any(layers.transformer for layers in stage_layers[where[0] + 1 :])
    if len(where) > 1 or after or (where and where[0] < len(stage_layers) - num_devices):
        raise InputError(
            f"layers.mtp in stages {where}: Megatron-Core has all of them in one of the last "
            f"{num_devices} stages, behind every transformer layer; move them"
        )
    letters = [
        "".join(
            letter if (n := getattr(layers, name)) == 1 else f"{letter}*{n}"
            for letter, name in _FIELDS.items()
            if getattr(layers, name)
        )
        for layers in stage_layers
    ]
    runs = [(stage, len(list(run))) for stage, run in groupby(letters)]
    # The last run is one stage, with the head: no group's closing bar ends the text.
    return "".join(f"{stage}|" if n == 1 else f"({stage}|)*{n}" for stage, n in runs)[:-1]


_MOST_LETTERS = 100_000


def read_layout(text: str) -> tuple[StageLayers, ...]:
    """Return the layers of the stages of such a text; commas mean nothing.

    Raises
    ------
    InputError
        If a letter is none of E, t, m and L, if a stage has them in another order, or if
        repetitions make more than 100,000 of them.
    """
    flat = text.replace(",", "")
    size = 0

    def repeated(found: re.Match[str]) -> str:
        nonlocal size
        times = int(found[2][:6])
        size += len(found[1]) * times
        if size > _MOST_LETTERS:
            raise InputError(
                f"layout: with {found[0][-20:]} it has more than {_MOST_LETTERS:,} letters; "
                "correct the number"
            )
        return found[1] * times

    for pattern in (r"\(([^()]+)\)\*(\d+)", r"([A-Za-z|])\*(\d+)"):
        flat = re.sub(pattern, repeated, flat)
    wrong = sorted(set(flat) - {*_FIELDS, "|"})
    if wrong or not flat:
        raise InputError(
            f"layout {text!r}: {''.join(wrong) or 'it'} is none of E, t, m, L, | and (...)*n; "
            "correct it"
        )
    stages = flat.split("|")
    if mixed := [stage for stage in stages if not re.fullmatch("E*t*m*L*", stage)]:
        raise InputError(
            f"layout {text!r}: stage {mixed[0][:40]!r} must have E, t, m and L in this order, as "
            "Megatron-Core builds them; correct it"
        )
    return tuple(
        StageLayers(**{name: stage.count(letter) for letter, name in _FIELDS.items()})
        for stage in stages
    )


def check_num_layers(problem: Problem, num_layers: int) -> None:
    """Raise `InputError` unless the stages hold so many transformer layers, the model's."""
    total = sum(layers.transformer for layers in _layers(problem))
    if total != num_layers:
        raise InputError(
            f"the stages hold {total} transformer layers, but the model has {num_layers} "
            "(embedding and head are counted apart); correct stages[].layers or the number"
        )


def _layers(problem: Problem) -> list[StageLayers]:
    stage_layers = []
    for index, stage in enumerate(problem.stages):
        if stage.layers is None:
            raise InputError(
                f"stages[{index}] does not say its layers, so nothing can be checked; write them "
                '(optpipe estimate does), e.g. "layers": {"transformer": 10}'
            )
        stage_layers.append(stage.layers)
    return stage_layers


# --- Chrome traces.


_THREADS: dict[Lane, tuple[int, str]] = {
    "compute": (1, "compute"),
    "d2h": (2, "offload (D2H)"),
    "h2d": (3, "reload (H2D)"),
    "grad_sync": (4, "gradient reduction"),
}


def dump_chrome_trace(problem: Problem, programs: Programs) -> str:
    """Return legal programs, simulated, as the text of a trace file."""
    timeline = make_timeline(problem, programs)
    events = [*_planned_events(problem, timeline), *_sent(problem, timeline)]
    return _dump(problem, events, timeline)


def dump_planned_beside_measured(
    problem: Problem, programs: Programs, measured: Sequence[Sequence[Interval]], label: str
) -> str:
    """Return the text of a trace with two rows per device: simulated, and below it as it ran.

    Both have a counter of memory: the bytes of the plan, which depend on no times.

    * ``measured``: what each device did, all of its program, in ms from the first start of all.
    * ``label``: what the measured rows are called, e.g. "measured, step 50".
    """
    timeline = make_timeline(problem, programs)
    events = list(_planned_events(problem, timeline, step=2, label=" planned"))
    for device, (own, row) in enumerate(zip(problem.devices, measured, strict=True)):
        memory = memory_curve(problem, device, programs[device], times_of(programs[device], row))
        events += _trace_row(2 * device + 1, f"{device}: {own.name} {label}", row, memory)
    odd = range(1, 2 * len(programs), 2)
    events += _arrows(problem, odd, measured, first=len(events))
    end = max((item.end for row in measured for item in row), default=0.0)
    return _dump(problem, events, timeline, measured_ms=end)


def _dump(
    problem: Problem, events: list[dict[str, Any]], timeline: Timeline, **lengths: float
) -> str:
    about = {
        "problem": problem.name,
        "problem_hash": problem.problem_hash,
        "makespan_ms": timeline.makespan_ms,
        "span_ms": timeline.span_ms,
        **lengths,
    }
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
    return json.dumps(trace, allow_nan=False) + "\n"


def _planned_events(
    problem: Problem, timeline: Timeline, step: int = 1, label: str = ""
) -> Iterator[dict[str, Any]]:
    """Yield the events of the simulated rows, whose processes are numbered 0, step, 2 step, ..."""
    rows = zip(problem.devices, timeline.intervals, timeline.memory, strict=True)
    for device, (own, intervals, memory) in enumerate(rows):
        yield from _trace_row(step * device, f"{device}: {own.name}{label}", intervals, memory)
    pids = range(0, step * len(problem.devices), step)
    yield from _arrows(problem, pids, timeline.intervals)


def _arrows(
    problem: Problem,
    processes: Sequence[int],
    intervals: Sequence[Sequence[Interval]],
    first: int = 0,
) -> Iterator[dict[str, Any]]:
    """Yield the flow events from each pass to the pass of another device that needs its output.

    An arrow begins in its pass's last nanosecond: the next slice may begin when that ends.
    """
    passes = [
        (process, item, item.action)
        for process, row in zip(processes, intervals, strict=True)
        for item in row
        if item.lane == "compute" and item.action is not None
    ]
    ends = {pass_of(action): (process, item) for process, item, action in passes}
    for number, (process, item, action) in enumerate(passes, start=first):
        source = input_of(action, len(problem.stages))
        if source is None or source not in ends or ends[source][0] == process:
            continue
        sender, sent = ends[source]
        left = max(_microseconds(sent.start), round(_microseconds(sent.end) - 0.001, 3))
        common = {"name": "output", "cat": "flow", "id": number, "tid": _THREADS["compute"][0]}
        yield common | {"ph": "s", "pid": sender, "ts": left}
        yield common | {"ph": "f", "bp": "e", "pid": process, "ts": _microseconds(item.start)}


def _sent(problem: Problem, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield the queues of links: their names, and each message while it occupies one."""
    first = len(problem.devices)
    for index in sorted({message.link for message in timeline.messages}):
        link = problem.links[index]
        name = {"name": f"link {link.source} -> {link.target}"}
        yield _metadata("process_name", first + index, 0, name)
        yield _metadata("process_sort_index", first + index, 0, {"sort_index": first + index})
        yield _metadata("thread_name", first + index, 1, {"name": "messages"})
    for message in timeline.messages:
        producer, start = message.producer, _microseconds(message.depart)
        yield {
            "name": f"{'gradient' if producer.backward else 'output'} of {producer.stage}, "
            f"micro-batch {producer.microbatch}",
            "cat": "message",
            "ph": "X",
            "ts": start,
            "dur": round(_microseconds(message.left) - start, 3),
            "pid": first + message.link,
            "tid": 1,
            "args": {**producer._asdict(), "waited_ms": message.depart - message.ready},
        }


def _trace_row(
    pid: int, name: str, intervals: Sequence[Interval], memory: Sequence[tuple[float, int]]
) -> Iterator[dict[str, Any]]:
    """Yield the names of a row and its lanes, what ran on them, and the counter of memory."""
    yield _metadata("process_name", pid, 0, {"name": name})
    yield _metadata("process_sort_index", pid, 0, {"sort_index": pid})
    used = {item.lane for item in intervals}
    for lane, (thread, label) in _THREADS.items():
        if lane in used:
            yield _metadata("thread_name", pid, thread, {"name": label})
            yield _metadata("thread_sort_index", pid, thread, {"sort_index": thread})
    for item in intervals:
        if item.partner is None or item.action is None or not item.action.paired:
            yield _complete(pid, item)
    for moment, held_bytes in memory:
        at, args = _microseconds(moment), {"bytes": held_bytes}
        yield {"name": "memory", "ph": "C", "ts": at, "pid": pid, "tid": 0, "args": args}


def _metadata(name: str, process: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "ts": 0, "pid": process, "tid": thread, "args": args}


def _complete(process: int, item: Interval) -> dict[str, Any]:
    start, end = _microseconds(item.start), _microseconds(item.end)
    action, partner = item.action, item.partner
    args: dict[str, Any] = {}
    name, category = "gradient reduction", str(item.lane)
    if action is not None:
        args = {"stage": action.stage, "microbatch": action.microbatch}
        (name,) = cells_of((action,) if partner is None else (action, partner))
        category = action.type.name.lower()
    if partner is not None:
        args |= {"backward_stage": partner.stage, "backward_microbatch": partner.microbatch}
        category = "pair"
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": start,
        "dur": round(end - start, 3),
        "pid": process,
        "tid": _THREADS[item.lane][0],
        "args": args,
    }


def _microseconds(milliseconds: float) -> float:
    return round(milliseconds * 1e3, 3)
