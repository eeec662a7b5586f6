"""Bytes of stages and devices in traces recorded with ``profile_memory=True``.

The profiler notes every allocation and release (``[memory]``), at the time of the CPU's call, which
is when torch's caching allocator hands a block out or takes it back. So what a range leaves
allocated, and the most it had allocated, do not depend on how fast the GPU was.
"""

from __future__ import annotations

import json
import re
import statistics
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from optpipe.errors import MeasurementError
from optpipe.measurements.trace_file import Process, TraceEvent, read_trace
from optpipe.measurements.values import Transfer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from optpipe.measurements.trace_file import Allocation

__all__ = [
    "GpuTime",
    "HostCopies",
    "HostCopy",
    "Messages",
    "RangePattern",
    "RangePatterns",
    "RangeTime",
    "RangeTimer",
    "RankTrace",
    "TracedAction",
    "TracedMemory",
    "TracedRange",
    "copy_in_range",
    "is_p2p",
    "parse_pattern",
    "read_memory",
    "read_messages",
    "read_rank_traces",
    "sent_bytes",
    "summarise_copies",
    "work_inside",
]


_NEGLIGIBLE = 0.01
_WORKSPACES = {
    "F": "forward_workspace_bytes",
    "I": "backward_input_workspace_bytes",
    "W": "backward_weight_workspace_bytes",
    "B": "backward_workspace_bytes",
}


class TracedMemory(NamedTuple):
    """Sizes in bytes, by field of a stage, and what to know of them."""

    facts: dict[int, dict[str, int]]
    notes: tuple[str, ...]


@dataclass
class _LargestSeen:
    """The largest values of one stage so far, and the last change of each action."""

    left: dict[str, int] = field(default_factory=dict)
    freed: dict[str, int] = field(default_factory=dict)
    change: dict[str, int] = field(default_factory=dict)
    workspace: dict[str, int] = field(default_factory=dict)
    output_bytes: int = 0

    def note(self, action: str, bytes_over_time: Sequence[int]) -> None:
        """Take in one run: what was allocated beyond what was there before, after each call."""
        after = bytes_over_time[-1] if bytes_over_time else 0
        most = max(bytes_over_time, default=0)
        self.left[action] = max(after, self.left.get(action, 0))
        self.freed[action] = max(-after, self.freed.get(action, 0))
        self.change[action] = after
        self.workspace[action] = max(most - max(0, after), self.workspace.get(action, 0))

    @property
    def kept_bytes(self) -> int:
        """What a micro-batch leaves behind when its backward is done."""
        backward = ("I", "W") if "W" in self.change else ("B",)
        return sum(self.change.get(action, 0) for action in ("F", *backward))


def read_memory(traces: Sequence[RankTrace], device_of: Mapping[int, int]) -> TracedMemory:
    """Return what the ranges of each stage left allocated, freed and needed in between.

    The largest of all steps but the first counts, of the first where there is no other. A stage
    that received its input from another device holds that too. Stages with recomputed micro-batches
    are left out: their forwards keep different amounts.

    Parameters
    ----------
    traces
        The ranks' ranges.
    device_of
        Device of each rank.
    """
    seen: dict[int, _LargestSeen] = defaultdict(_LargestSeen)
    home: dict[int, int] = {}
    is_late = any(one.step for trace in traces for one in trace.ranges)
    for trace in traces:
        counted = [one for one in trace.ranges if one.step or not is_late]
        home |= {one.stage: device_of[trace.rank] for one in counted}
        _note_ranges(trace.process, counted, seen)
    recomputed = {stage for stage, found in seen.items() if "RECOMPUTE" in found.left}
    static = _divide(_resident(traces, device_of), home)
    facts = {
        stage: _facts(stage, seen) | _known("static_bytes", static.get(stage))
        for stage in sorted(seen)
        if stage not in recomputed
    }
    kept = {stage: seen[stage].kept_bytes for stage in facts}
    notes = (*_notes(facts, home, recomputed), *_kept_notes(facts, kept), *_static_notes(static))
    return TracedMemory(facts, notes)


def _known(name: str, value: int | None) -> dict[str, int]:
    return {} if value is None else {name: value}


def _resident(traces: Iterable[RankTrace], device_of: Mapping[int, int]) -> dict[int, int]:
    """Return what lay on each device's GPU before the first action of a rank's last step."""
    found: dict[int, int] = {}
    for trace in traces:
        last = max((one.step or 0 for one in trace.ranges), default=0)
        begins = [one.event.start_us for one in trace.ranges if (one.step or 0) == last]
        before = [
            one for one in trace.process.allocations if one.on_gpu and one.at_us < min(begins)
        ]
        if before:
            device = device_of[trace.rank]
            found[device] = max(before[-1].total_bytes, found.get(device, 0))
    return found


def _divide(resident: Mapping[int, int], home: Mapping[int, int]) -> dict[int, int]:
    """Return each stage's share of its device's bytes: equal ones, the rest to the first."""
    static: dict[int, int] = {}
    for device, num_bytes in resident.items():
        stages = sorted(stage for stage, of in home.items() if of == device)
        for place, stage in enumerate(stages):
            share, rest = divmod(num_bytes, len(stages))
            static[stage] = share + (rest if place == 0 else 0)
    return static


def _note_ranges(
    process: Process, counted: Iterable[TracedRange], seen: dict[int, _LargestSeen]
) -> None:
    allocations = _of_the_device(process.allocations)
    for one in counted:
        if one.action == "SEND_F":
            found = sent_bytes(process, one.event)
            seen[one.stage].output_bytes = max(found, seen[one.stage].output_bytes)
        elif allocations and one.action not in ("OFFLOAD", "RELOAD"):
            first = bisect_left(allocations, one.event.start_us, key=_at)
            last = bisect_right(allocations, one.event.end_us, key=_at)
            changes = (allocation.num_bytes for allocation in allocations[first:last])
            seen[one.stage].note(one.action, list(accumulate(changes)))


def _of_the_device(allocations: Sequence[Allocation]) -> list[Allocation]:
    on_gpu = [one for one in allocations if one.on_gpu]
    return on_gpu or list(allocations)


def _at(allocation: Allocation) -> float:
    return allocation.at_us


def _facts(stage: int, seen: Mapping[int, _LargestSeen]) -> dict[str, int]:
    own = seen[stage]
    facts = {
        _WORKSPACES[action]: size for action, size in own.workspace.items() if action in _WORKSPACES
    }
    if own.output_bytes:
        facts["output_bytes"] = own.output_bytes
    if "F" in own.left:
        facts["activation_bytes"] = own.left["F"] + _received(stage, seen)
    if "W" in own.freed:
        facts["weight_context_bytes"] = own.freed["W"]
    return facts


def _received(stage: int, seen: Mapping[int, _LargestSeen]) -> int:
    """Return what the stage before sent; within a device nothing is."""
    before = seen.get(stage - 1)
    return 0 if before is None else before.output_bytes


def _notes(
    facts: Mapping[int, Mapping[str, int]], home: Mapping[int, int], recomputed: set[int]
) -> Iterable[str]:
    if any("activation_bytes" in found for found in facts.values()):
        yield "Bytes are what the ranges left allocated, by the allocator's own count."
    unknown = [
        str(stage)
        for stage, found in facts.items()
        if "activation_bytes" in found
        and home.get(stage - 1, home[stage]) != home[stage]
        and "output_bytes" not in facts.get(stage - 1, {})
    ]
    if unknown:
        yield (
            f"activation_bytes of stage {', '.join(unknown)} lacks the received input, whose size "
            "the traces do not hold."
        )
    if recomputed:
        yield (
            f"Bytes of stage {', '.join(map(str, sorted(recomputed)))} are not read: some of its "
            "micro-batches were recomputed."
        )


def _kept_notes(facts: Mapping[int, Mapping[str, int]], kept: Mapping[int, int]) -> Iterable[str]:
    leaky = {
        stage: size
        for stage, size in kept.items()
        if size > _NEGLIGIBLE * facts[stage].get("activation_bytes", size)
    }
    if leaky:
        sizes = ", ".join(f"{size} of stage {stage}" for stage, size in leaky.items())
        yield (
            f"Bytes that each micro-batch leaves allocated after its backward: {sizes}. A problem "
            "cannot say so; count them in reserved_bytes."
        )


def _static_notes(static: Mapping[int, int]) -> Iterable[str]:
    if static:
        yield (
            "static_bytes is all that lay on the GPU before a step's first action, divided among "
            "the stages of a device; reserved_bytes is to hold the CUDA context and NCCL."
        )


# --- Which named ranges of a trace are pipeline actions.
# torch's schedule runtime, and with it ours, marks each action as ``PP:`` and the action's text
# (`torch.distributed.pipelining.schedules`, 2.13: ``PP:1F0``, ``PP:0SEND_F0``, ``PP:0UNSHARD``),
# and our own traces as the text alone; torch's GPipe marks ``Forward 3`` and ``Backward 3``.

_TORCH = re.compile(
    r"(?:PP:)?(?P<stage>\d{1,9})(?P<action>F|I|W|B|RECOMPUTE|OFFLOAD|RELOAD|SEND_F)(?P<microbatch>\d{1,9})"
)
_GPIPE = re.compile(r"(?P<action>Forward|Backward) (?P<microbatch>\d{1,9})")
_OVERLAPPED = re.compile(r"PP:.*OVERLAP_F_B.*")
_WORDS = {
    "forward": "F",
    "fwd": "F",
    "backward": "B",
    "bwd": "B",
    "backward_input": "I",
    "backward_weight": "W",
    "recompute": "RECOMPUTE",
}
_LETTERS = ("F", "I", "W", "B", "RECOMPUTE", "OFFLOAD", "RELOAD", "SEND_F")


class TracedAction(NamedTuple):
    """What a range's name says; ``stage`` None = the only stage of its rank."""

    action: str
    stage: int | None
    microbatch: int | None


class RangePattern(NamedTuple):
    """A regular expression for whole names, with the groups stage, action and microbatch.

    ``action`` stands for the group where the expression has none.
    """

    expression: re.Pattern[str]
    action: str | None = None

    def match(self, name: str) -> TracedAction | None:
        """Return what a name says, or None if it is another range."""
        found = self.expression.fullmatch(name)
        if found is None:
            return None
        groups = found.groupdict()
        word = self.action or groups.get("action") or ""
        action = word.upper() if word.upper() in _LETTERS else _WORDS.get(word.lower())
        if action is None:
            raise MeasurementError(
                f"range {name!r}: {word!r} is no action; an action is one of "
                f"{', '.join(_LETTERS)}, or {', '.join(_WORDS)}: change the pattern"
            )
        return TracedAction(action, _number(groups, "stage"), _number(groups, "microbatch"))


class RangePatterns(NamedTuple):
    """The patterns of one reading; the first that matches a name counts."""

    patterns: tuple[RangePattern, ...]

    @classmethod
    def of(cls, texts: Sequence[str]) -> RangePatterns:
        """Return the patterns people wrote, or those of torch where they wrote none."""
        if not texts:
            return cls((RangePattern(_TORCH), RangePattern(_GPIPE)))
        return cls(tuple(parse_pattern(text) for text in texts))

    def match(self, name: str) -> TracedAction | None:
        """Return what a name says, or None.

        Raises
        ------
        MeasurementError
            If it is an overlapped pair: two actions whose times cannot be told apart.
        """
        if _OVERLAPPED.fullmatch(name):
            raise MeasurementError(
                f"range {name!r} is an overlapped forward-backward pair, whose two times cannot "
                "be told apart; profile a schedule without overlapped pairs"
            )
        for pattern in self.patterns:
            found = pattern.match(name)
            if found is not None:
                return found
        return None


def parse_pattern(text: str) -> RangePattern:
    """Return the pattern of ``REGEX`` or ``ACTION=REGEX``.

    Raises
    ------
    MeasurementError
        If the expression is broken, has other groups, or nothing names the action.
    """
    action, expression = None, text
    head, mark, tail = text.partition("=")
    if mark and (head.upper() in _LETTERS or head.lower() in _WORDS):
        action, expression = head, tail
    try:
        compiled = re.compile(expression)
    except re.error as error:
        raise MeasurementError(
            f"range pattern {text!r}: {error}; write a regular expression"
        ) from None
    strange = sorted(set(compiled.groupindex) - {"stage", "action", "microbatch"})
    if strange:
        raise MeasurementError(
            f"range pattern {text!r}: group {strange[0]!r} is unknown; "
            "the groups are stage, action and microbatch"
        )
    if action is None and "action" not in compiled.groupindex:
        raise MeasurementError(
            f"range pattern {text!r} names no action; begin it with one, as in "
            "F=forward_step, or add a group (?P<action>...)"
        )
    return RangePattern(compiled, action)


def _number(groups: dict[str, str | None], name: str) -> int | None:
    text = groups.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise MeasurementError(
            f"range pattern: group {name} matched {text!r}, which is no number; change the pattern"
        )
    return int(text)


# --- How long the work inside a range kept the compute lane busy.

GpuTime = Literal["span", "busy"]
"""span: from the first kernel's start to the last one's end. busy: the kernels alone."""

_P2P = ("ncclDevKernel_SendRecv", "ncclKernel_SendRecv")
_COPIES = ("Memcpy", "Memset")


class RangeTime(NamedTuple):
    """A range's time in ms, and the share of its span in which a kernel ran (GPU only)."""

    time_ms: float
    busy_share: float | None


class RangeTimer:
    """Times the ranges of one process.

    On a GPU the time is that of the kernels launched while the range was open, by whichever thread
    (autograd has its own), on the stream that computes most: what runs beside it on other streams,
    such as copies and collectives, counts only where the compute stream waits for it inside the
    span. Waiting for a receive comes before the first kernel and does not count.

    Without kernels the time is the CPU's, from the first operator in the range to the range's end:
    what comes before that operator is a wait for a receive.

    Parameters
    ----------
    process
        Whose events.
    ranges
        The ranges that will be asked for.
    gpu_time
        Which of the two GPU times.
    """

    def __init__(self, process: Process, ranges: Iterable[TraceEvent], gpu_time: GpuTime) -> None:
        self._process = process
        self._gpu_time = gpu_time
        self._stream = _compute_stream(process, ranges)

    @property
    def on_gpu(self) -> bool:
        """Whether times are those of kernels."""
        return self._stream is not None

    def time(self, event: TraceEvent) -> RangeTime | None:
        """Return a range's time, or None if it launched no kernel where others did."""
        if self._stream is None:
            return RangeTime(self._cpu_us(event) / 1e3, None)
        kernels = [work for work in work_inside(self._process, event) if _is_on(work, self._stream)]
        if not kernels:
            return None
        span_us = max(work.end_us for work in kernels) - min(work.start_us for work in kernels)
        busy_us = sum(work.duration_us for work in kernels)
        time_us = span_us if self._gpu_time == "span" else busy_us
        return RangeTime(time_us / 1e3, busy_us / span_us if span_us else 1.0)

    def _cpu_us(self, event: TraceEvent) -> float:
        starts = self._process.operator_starts
        first = bisect_left(starts, event.start_us)
        if first == len(starts) or starts[first] > event.end_us:
            return event.duration_us
        return event.end_us - starts[first]


def is_p2p(work: TraceEvent) -> bool:
    """Return whether this is a kernel that sends or receives a message."""
    return work.name.startswith(_P2P)


def work_inside(process: Process, event: TraceEvent) -> list[TraceEvent]:
    """Return the GPU work launched while a range was open."""
    launches: Sequence[tuple[float, int]] = process.launches
    first = bisect_left(launches, (event.start_us, -1))
    last = bisect_right(launches, (event.end_us, 2**63))
    return [
        work
        for _, correlation in launches[first:last]
        for work in process.device_work.get(correlation, ())
    ]


def _compute_stream(process: Process, ranges: Iterable[TraceEvent]) -> object | None:
    busy: dict[str, float] = defaultdict(float)
    streams: dict[str, object] = {}
    for event in ranges:
        for work in work_inside(process, event):
            if "stream" in work.args and not work.name.startswith((*_P2P, *_COPIES)):
                key = str(work.args["stream"])
                busy[key] += work.duration_us
                streams[key] = work.args["stream"]
    if not busy:
        return None
    return streams[max(sorted(busy), key=lambda key: busy[key])]


def _is_on(work: TraceEvent, stream: object) -> bool:
    return work.args.get("stream") == stream and not is_p2p(work)


# --- Messages between ranks in traces, from the kernels that NCCL sends and receives with.
# torch notes a message's size, type and peer beside the call that sends or receives it
# (``record_param_comms``), and, for a call that is not part of a batch, on the kernel too. The
# kernel of a batch carries the messages noted since the kernel before it. A kernel that starts
# first waits for the other side, so a message took as long as the shorter of its two kernels.

_ITEM_BYTES = {
    "Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2,
    "Char": 1, "Byte": 1, "Bool": 1, "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip
_FIELDS = {"send": ("Dst Rank", "In msg nelems"), "recv": ("Src Rank", "Out msg nelems")}


class Messages(NamedTuple):
    """Messages whose two ends are known, and the number of those with one end only."""

    transfers: tuple[Transfer, ...]
    num_single: int


class _Route(NamedTuple):
    """From which rank to which, and how much."""

    source: int
    target: int
    num_bytes: int


class _End(NamedTuple):
    """One end of a message."""

    verb: str
    route: _Route
    start_us: float
    time_ms: float


def read_messages(
    processes: Iterable[tuple[int, Process]], device_of: Mapping[int, int]
) -> Messages:
    """Return the messages between devices; the k-th sent on a route is the k-th received.

    Parameters
    ----------
    processes
        (rank, events) of every trace.
    device_of
        Device of each rank.
    """
    ends: dict[_Route, dict[str, list[_End]]] = defaultdict(lambda: defaultdict(list))
    for rank, process in processes:
        for end in _ends(rank, process):
            ends[end.route][end.verb].append(end)
    transfers: list[Transfer] = []
    num_single = 0
    for route in sorted(ends):
        sent, received = (sorted(ends[route][verb], key=_start) for verb in ("send", "recv"))
        if len(sent) != len(received):
            num_single += max(len(sent), len(received))
        elif device_of[route.source] != device_of[route.target]:
            transfers += [
                Transfer(
                    source=device_of[route.source],
                    target=device_of[route.target],
                    num_bytes=route.num_bytes,
                    time_ms=min(there.time_ms, here.time_ms),
                )
                for there, here in zip(sent, received, strict=True)
            ]
    return Messages(tuple(transfers), num_single)


def sent_bytes(process: Process, event: TraceEvent) -> int:
    """Return the bytes that were sent while a range was open, 0 where the trace does not say."""
    first = bisect_left(process.messages, event.start_us, key=_began)
    last = bisect_right(process.messages, event.end_us, key=_began)
    noted = process.messages[first:last]
    calls = noted or [one for one in work_inside(process, event) if "Collective name" in one.args]
    return sum(_num_bytes(call.args) for call in calls if call.args["Collective name"] == "send")


def _began(event: TraceEvent) -> float:
    return event.start_us


def _start(end: _End) -> float:
    return end.start_us


def _ends(rank: int, process: Process) -> Iterator[_End]:
    """Return this rank's ends; a batch with several peers or directions has no time of its own."""
    noted = process.messages
    taken = 0
    for launched_us, correlation in process.launches:
        for kernel in filter(is_p2p, process.device_work.get(correlation, ())):
            before = taken
            while taken < len(noted) and noted[taken].start_us <= launched_us:
                taken += 1
            calls = [kernel] if "Collective name" in kernel.args else noted[before:taken]
            end = _end(rank, kernel, calls)
            if end is not None:
                yield end


def _end(rank: int, kernel: TraceEvent, calls: Sequence[TraceEvent]) -> _End | None:
    found = {(call.args["Collective name"], _peer(rank, call.args)) for call in calls}
    if len(found) != 1:
        return None
    verb, peer = found.pop()
    num_bytes = sum(_num_bytes(call.args) for call in calls)
    if verb not in _FIELDS or peer is None or not num_bytes:
        return None
    route = _Route(rank, peer, num_bytes) if verb == "send" else _Route(peer, rank, num_bytes)
    return _End(verb, route, kernel.start_us, kernel.duration_us / 1e3)


def _peer(rank: int, args: Mapping[str, Any]) -> int | None:
    """Return the other rank: named by torch from 2.6 on, before that the other of a pair."""
    field, _ = _FIELDS.get(args["Collective name"], ("", ""))
    named = args.get(field)
    if isinstance(named, int):
        return named
    others = [one for one in _group(args.get("Process Group Ranks")) if one != rank]
    return others[0] if len(others) == 1 else None


def _group(ranks: Any) -> list[Any]:
    if isinstance(ranks, str):
        try:
            ranks = json.loads(ranks)
        except ValueError:
            return []  # long lists are cut off with dots
    return ranks if isinstance(ranks, list) else []


def _num_bytes(args: Mapping[str, Any]) -> int:
    _, field = _FIELDS.get(args["Collective name"], ("", ""))
    count = args.get(field)
    if not isinstance(count, int) or count <= 0:
        return 0
    name = str(args.get("dtype", ""))
    return count * (1 if name.startswith("Float8") else _ITEM_BYTES.get(name, 0))


# --- What offloading and reloading moved in a trace, and how fast: while everything else ran too.

_DIRECTIONS = {"OFFLOAD": "Memcpy DtoH", "RELOAD": "Memcpy HtoD"}


class HostCopy(NamedTuple):
    """All copies of one OFFLOAD or RELOAD."""

    device: int
    stage: int
    action: str
    num_bytes: int
    gb_per_s: float


class HostCopies(NamedTuple):
    """Medians: bytes per stage, and rates in GB/s per (device, OFFLOAD or RELOAD)."""

    offload_bytes: dict[int, int]
    gb_per_s: dict[tuple[int, str], float]


def copy_in_range(
    process: Process, event: TraceEvent, action: str, stage: int, device: int
) -> HostCopy | None:
    """Return what the range of an OFFLOAD or RELOAD copied, or None if nothing is known of it."""
    copies = [
        (work.args["bytes"], work.duration_us)
        for work in work_inside(process, event)
        if work.name.startswith(_DIRECTIONS[action]) and isinstance(work.args.get("bytes"), int)
    ]
    num_bytes = sum(size for size, _ in copies)
    busy_us = sum(time_us for _, time_us in copies)
    if not num_bytes or not busy_us:
        return None
    return HostCopy(device, stage, action, num_bytes, num_bytes / busy_us / 1e3)


def summarise_copies(copies: Iterable[HostCopy]) -> HostCopies:
    """Return the medians of copies."""
    sizes: dict[int, list[int]] = defaultdict(list)
    rates: dict[tuple[int, str], list[float]] = defaultdict(list)
    for copy in copies:
        rates[copy.device, copy.action].append(copy.gb_per_s)
        if copy.action == "OFFLOAD":
            sizes[copy.stage].append(copy.num_bytes)
    return HostCopies(
        {stage: statistics.median_low(sizes[stage]) for stage in sorted(sizes)},
        {key: round(statistics.median(rates[key]), 3) for key in sorted(rates)},
    )


# --- The pipeline's ranges of every rank, out of the files of one run.

_STEP = "ProfilerStep#"
_SHOWN_NAMES = 8


class TracedRange(NamedTuple):
    """One run of an action; ``step`` counts from 0 within its rank."""

    event: TraceEvent
    stage: int
    action: str
    microbatch: int | None
    step: int | None


class RankTrace(NamedTuple):
    """What one file holds of one rank."""

    rank: int
    process: Process
    ranges: tuple[TracedRange, ...]


class _FoundTraces(NamedTuple):
    rank: int
    process: Process
    ranges: list[tuple[TraceEvent, TracedAction]]


def read_rank_traces(
    paths: Sequence[Path], patterns: Sequence[str], process: str = ""
) -> list[RankTrace]:
    """Return the pipeline's ranges, file by file, of the processes whose name contains ``process``.

    The rank is the trace's own (``distributedInfo``), else the file name's (``rank3``), else the
    file's place. Where names do not say the stage, each rank has one, in the order of the ranks.
    A step's number is how often its rank ran the same (stage, action, micro-batch) before; where
    names do not say the micro-batch, it is the profiler's step.

    Raises
    ------
    MeasurementError
        If a file is no trace, or has no range of the pipeline.
    """
    known = RangePatterns.of(patterns)
    found: list[_FoundTraces] = []
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise MeasurementError(f"{path}: named twice; name each trace once")
        found += _find(path, len(found), known, process)
    place_of = {rank: place for place, rank in enumerate(sorted({one.rank for one in found}))}
    runs: Counter[tuple[int, int, str, int]] = Counter()
    steps: Counter[int] = Counter()
    traces = []
    for one in found:
        ranges = tuple(_numbered(one, place_of[one.rank], runs, steps[one.rank]))
        steps[one.rank] += len(_step_starts(one.process))
        traces.append(RankTrace(one.rank, one.process, ranges))
    return traces


def _find(path: Path, place: int, patterns: RangePatterns, name: str) -> list[_FoundTraces]:
    written = read_trace(path)
    processes = [process for process in written if name in process.name]
    if written and not processes:
        raise MeasurementError(
            f"{path}: no process has {name!r} in its name (there: "
            f"{', '.join(repr(process.name) for process in written[:_SHOWN_NAMES])}); "
            "choose one of them"
        )
    found = []
    for process in processes:
        pairs = ((event, patterns.match(event.name)) for event in process.ranges)
        ranges = [(event, action) for event, action in pairs if action is not None]
        if ranges:
            found.append((process, ranges))
    if not found:
        raise MeasurementError(_nothing_found(path, processes))
    return [
        _FoundTraces(_rank(process, place + index, len(found)), process, ranges)
        for index, (process, ranges) in enumerate(found)
    ]


def _rank(process: Process, place: int, num_processes: int) -> int:
    return place if process.rank is None or num_processes > 1 else process.rank


def _nothing_found(path: Path, processes: Sequence[Process]) -> str:
    seen = Counter(event.name for process in processes for event in process.ranges)
    names = ", ".join(repr(name[:60]) for name, _ in seen.most_common(_SHOWN_NAMES))
    return (
        f"{path}: no range is a pipeline action (most frequent: {names or 'no range at all'}); "
        "record steps of torch's schedule runtime, or give a pattern for the names of your ranges"
    )


def _numbered(
    found: _FoundTraces, place: int, runs: Counter[tuple[int, int, str, int]], first_step: int
) -> Iterator[TracedRange]:
    starts = _step_starts(found.process)
    for event, action in found.ranges:
        stage = place if action.stage is None else action.stage
        if action.microbatch is None:
            before = bisect_right(starts, event.start_us)
            step = first_step + before - 1 if before else None
        else:
            key = found.rank, stage, action.action, action.microbatch
            step = runs[key]
            runs[key] += 1
        yield TracedRange(event, stage, action.action, action.microbatch, step)


def _step_starts(process: Process) -> list[float]:
    return [event.start_us for event in process.ranges if event.name.startswith(_STEP)]
