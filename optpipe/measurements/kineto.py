"""PyTorch profiler (Kineto) traces of pipeline ranks as measurements."""

from __future__ import annotations

import json
import re
import statistics
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from optpipe.errors import MeasurementError
from optpipe.measurements.to_problem import DeviceFacts, Measurements, Sample, StageFacts, Transfer
from optpipe.measurements.trace_file import read_rank_traces

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from optpipe.measurements.to_problem import MeasuredAction
    from optpipe.measurements.trace_file import (
        Process,
        RankTrace,
        TracedRange,
        TraceEvent,
        TraceSource,
    )

__all__ = ["find_compute_stream", "find_devices", "find_span", "read_kineto"]

_TRANSFERS = ("OFFLOAD", "RELOAD", "SEND_F")
_LEAST_BUSY = 0.9
_SHOWN = 6


def read_kineto(
    paths: Sequence[TraceSource],
    patterns: Sequence[str] = (),
    gpu_time: GpuTime = "span",
    process: str = "",
) -> Measurements:
    """Return the measurements in the traces of the ranks of one run.

    Ranks with the same stages are replicas: they count as one device, with the samples of all.
    Devices are numbered in the order of their first ranks.

    Parameters
    ----------
    paths
        One file per rank, or several of the same rank in order of time; ``.json`` or gzip.
    patterns
        Names of ranges, ``ACTION=REGEX``, or a ``REGEX`` with the groups stage, action and
        microbatch; none = torch's and ours.
    gpu_time
        Time of a range on a GPU: see `GpuTime`.
    process
        Only processes whose name contains it are read: a file may hold a plan in addition to the
        run.

    Raises
    ------
    MeasurementError
        If a file is no trace or has no range of the pipeline, or ranks contradict each other.
    """
    traces = read_rank_traces(paths, patterns, process)
    device_of = find_devices(traces)
    samples, notes = _samples(traces, gpu_time)
    transfers, num_single = _read_messages(traces, device_of)
    sizes, rates = _read_copies(traces, device_of)
    memory, memory_notes = _read_memory(traces, device_of)
    if num_single:
        memory_notes.append(
            f"{num_single} messages have one end only in these traces and are left out: "
            "their times include waiting."
        )
    if not transfers and len(device_of) > 1:
        memory_notes.append("The traces hold no messages with sizes: links are not measured.")
    placement = {one.stage: device_of[trace.rank] for trace in traces for one in trace.ranges}
    # A gap is refused when the problem is built, with the stages by name.
    num_stages = 1 + max(placement)
    return Measurements(
        source=f"{len(paths)} Kineto trace{'s' if len(paths) > 1 else ''}",
        samples=samples,
        placement=tuple(placement.get(stage, 0) for stage in range(num_stages)),
        stages=tuple(
            StageFacts(offload_bytes=sizes.get(stage), **memory.get(stage, {}))
            for stage in range(num_stages)
        ),
        devices=_device_facts(traces, device_of, rates),
        transfers=transfers,
        notes=(*notes, *memory_notes),
    )


def _samples(
    traces: Iterable[RankTrace], gpu_time: GpuTime
) -> tuple[tuple[Sample, ...], list[str]]:
    samples: list[Sample] = []
    busy: dict[tuple[int, str], list[float]] = defaultdict(list)
    idle: Counter[tuple[int, str]] = Counter()
    clocks = set()
    for trace in traces:
        timed = [one for one in trace.ranges if one.action not in _TRANSFERS]
        stream = find_compute_stream(trace.process, [one.event for one in timed])
        clocks.add(stream is not None)
        for one in timed:
            found = _time_ms(trace.process, one.event, stream, gpu_time)
            if found is None and one.action != "W":
                idle[one.stage, one.action] += 1
                continue
            # A W without kernels is one of a module whose whole backward runs in I.
            samples.append(
                Sample(
                    stage=one.stage,
                    action=cast("MeasuredAction", one.action),
                    time_ms=round(found.ms, 6) if found else 0.0,
                    microbatch=one.microbatch,
                    step=one.step,
                    rank=trace.rank,
                    lanes_ms=found.lanes_ms if found else (),
                )
            )
            if found is not None and found.busy is not None:
                busy[one.stage, one.action].append(found.busy)
    return tuple(samples), list(_time_notes(clocks, idle, busy, gpu_time))


def _time_notes(
    clocks: set[bool],
    idle: Mapping[tuple[int, str], int],
    busy: Mapping[tuple[int, str], Sequence[float]],
    gpu_time: GpuTime,
) -> Iterator[str]:
    if clocks == {True}:
        yield "Times are those of the GPU kernels launched inside the ranges."
    elif clocks == {False}:
        yield (
            "The traces hold no GPU kernels: times are the CPU's, from the first operator in a "
            "range to the range's end."
        )
    else:
        yield (
            "Some traces hold no GPU kernels: their times are the CPU's, the others are those of "
            "the kernels. Profile all ranks with CUDA activities."
        )
    if idle:
        counts = (f"{n} of {stage}{action}" for (stage, action), n in sorted(idle.items()))
        yield f"Ranges that launched no kernel are left out: {_shortened(counts)}."
    shares = {key: sum(found) / len(found) for key, found in busy.items()}
    low = sorted((share, key) for key, share in shares.items() if share < _LEAST_BUSY)
    if gpu_time == "busy":
        yield "Gaps between the kernels of a range are left out of its time."
    elif low:
        names = (f"{100 * share:.0f}% of {stage}{action}" for share, (stage, action) in low)
        yield (
            f"Kernels ran in {_shortened(names)} only; the rest is waiting, for launches if the "
            "profiler slowed them down (gpu_time busy leaves it out)."
        )


def _shortened(names: Iterable[str]) -> str:
    shown = list(names)
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


def _device_facts(
    traces: Sequence[RankTrace],
    device_of: Mapping[int, int],
    rates: Mapping[tuple[int, str], float],
) -> tuple[DeviceFacts, ...]:
    """Return the memory of each device's GPU, of replicas the minimum, and its copy rates."""
    found: dict[int, list[int]] = defaultdict(list)
    for trace in traces:
        work = (event for events in trace.process.device_work.values() for event in events)
        gpu = next((one.args["device"] for one in work if "device" in one.args), None)
        if gpu in trace.process.gpu_bytes:
            found[device_of[trace.rank]].append(trace.process.gpu_bytes[gpu])
    facts = []
    for device in range(1 + max(device_of.values())):
        both = rates.get((device, "OFFLOAD")), rates.get((device, "RELOAD"))
        there, back = both if None not in both else (None, None)
        memory = min(found[device], default=None)
        facts.append(DeviceFacts(memory_bytes=memory, d2h_gb_per_s=there, h2d_gb_per_s=back))
    return tuple(facts)


def find_devices(traces: Iterable[RankTrace]) -> dict[int, int]:
    """Return the device of each rank; ranks with the same stages share one."""
    stages_of: dict[int, set[int]] = defaultdict(set)
    for trace in traces:
        stages_of[trace.rank] |= {one.stage for one in trace.ranges}
    devices: dict[frozenset[int], int] = {}
    for rank in sorted(stages_of):
        devices.setdefault(frozenset(stages_of[rank]), len(devices))
    owner: dict[int, frozenset[int]] = {}
    for stages in devices:
        for stage in sorted(stages):
            other = owner.setdefault(stage, stages)
            if other != stages:
                raise MeasurementError(
                    f"stage {stage} ran beside stages {sorted(other)} on one rank and beside "
                    f"{sorted(stages)} on another; name the traces of one run"
                )
    return {rank: devices[frozenset(stages)] for rank, stages in sorted(stages_of.items())}


# --- How long the work inside a range kept the compute lane busy.
# On a GPU the time is that of the kernels launched while the range was open, on any thread
# (autograd has its own), on the stream that computes most. Work on other streams, such as copies
# and collectives, counts only while the compute stream waits for it inside the span. A wait for a
# receive comes before the first kernel and does not count. Without kernels the time is the CPU's,
# from the first operator in the range to the range's end: the time before that operator is a wait
# for a receive.

GpuTime = Literal["span", "busy"]
"""span: from the first kernel's start to the last one's end. busy: the kernels alone."""

_P2P = ("ncclDevKernel_SendRecv", "ncclKernel_SendRecv")
_MEMORY = ("Memcpy", "Memset")
_EXCHANGE = re.compile(r"(deep|hybrid)_ep.*(dispatch|combine)")
_Interval = tuple[float, float]


class _RangeTime(NamedTuple):
    """A range's time, the share of its span in which a kernel ran (GPU only), and its lanes."""

    ms: float
    busy: float | None = None
    lanes_ms: tuple[float, ...] = ()


def _time_ms(
    process: Process, event: TraceEvent, stream: object | None, gpu_time: GpuTime
) -> _RangeTime | None:
    """Return how long a range took; None if it launched no kernel where others did.

    ``stream`` None = there are no kernels.
    """
    span = find_span(process, event, stream)
    if span is None:
        return None
    span_us = span[1] - span[0]
    if stream is None:
        return _RangeTime(span_us / 1e3)
    inside = _work_inside(process, event)
    kernels = _kernels_inside(process, event, stream)
    busy_us = sum(work.duration_us for work in kernels)
    share = busy_us / span_us if span_us else 1.0
    if gpu_time == "busy":
        return _RangeTime(busy_us / 1e3, share)
    exchanges = [(work.start_us, work.end_us) for work in inside if _is_exchange(work)]
    computed = [(work.start_us, work.end_us) for work in kernels if not _is_exchange(work)]
    return _RangeTime(span_us / 1e3, share, _lanes_ms(span, exchanges, computed))


def find_span(process: Process, event: TraceEvent, stream: object | None) -> _Interval | None:
    """Return when a range kept its compute lane busy, in microseconds; None if it has no kernel.

    ``stream`` as of `find_compute_stream`. Without kernels in the whole trace it is None, and the
    span is from the first operator in the range to the range's end.
    """
    if stream is None:
        starts = process.operator_starts
        first = bisect_left(starts, event.start_us)
        waits = first == len(starts) or starts[first] > event.end_us
        return event.start_us if waits else starts[first], event.end_us
    kernels = _kernels_inside(process, event, stream)
    if not kernels:
        return None
    return min(work.start_us for work in kernels), max(work.end_us for work in kernels)


def _kernels_inside(process: Process, event: TraceEvent, stream: object) -> list[TraceEvent]:
    """Return the compute kernels launched while a range was open."""
    inside = _work_inside(process, event)
    return [work for work in inside if work.args.get("stream") == stream and not _is_p2p(work)]


def _lanes_ms(
    span: _Interval, exchanges: Iterable[_Interval], computed: Iterable[_Interval]
) -> tuple[float, ...]:
    """Return the alternating times of compute and exchange in a span; empty without exchanges.

    It exchanges while an exchange runs and no other kernel of the compute stream does; all the
    rest of it computes, waits between kernels too.
    """
    edges = [(at, change, 0) for one in exchanges for at, change in zip(one, (1, -1), strict=True)]
    edges += [(at, 0, change) for one in computed for at, change in zip(one, (1, -1), strict=True)]
    lanes, running, since = [0.0], [0, 0], span[0]
    for at, exchange, compute in sorted(edges):
        now = min(max(at, span[0]), span[1])
        if now > since:
            is_exchange = running[0] > 0 and not running[1]
            if is_exchange == len(lanes) % 2:
                lanes.append(0.0)
            lanes[-1] += (now - since) / 1e3
            since = now
        running = [running[0] + exchange, running[1] + compute]
    if len(lanes) % 2 == 0:
        lanes.append(0.0)
    lanes[-1] += (span[1] - since) / 1e3
    return tuple(round(one, 6) for one in lanes) if len(lanes) > 1 else ()


def _is_p2p(work: TraceEvent) -> bool:
    """Return whether this is a kernel that sends or receives a message."""
    return work.name.startswith(_P2P) and not _is_exchange(work)


def _is_exchange(work: TraceEvent) -> bool:
    """Return whether this kernel exchanges tokens with experts: NCCL's all-to-all, or DeepEP's."""
    name = str(work.args.get("Collective name", "")).replace("_", "")
    return name.startswith("alltoall") or _EXCHANGE.search(work.name) is not None


def _work_inside(process: Process, event: TraceEvent) -> list[TraceEvent]:
    """Return the GPU work launched while a range was open."""
    launches: Sequence[tuple[float, int]] = process.launches
    first = bisect_left(launches, (event.start_us, -1))
    last = bisect_right(launches, (event.end_us, 2**63))
    return [
        work
        for _, correlation in launches[first:last]
        for work in process.device_work.get(correlation, ())
    ]


def find_compute_stream(process: Process, ranges: Iterable[TraceEvent]) -> object | None:
    """Return the stream that computes most inside some ranges; None if no kernel is there."""
    busy: dict[str, float] = defaultdict(float)
    streams: dict[str, object] = {}
    for event in ranges:
        for work in _work_inside(process, event):
            if "stream" in work.args and not work.name.startswith((*_P2P, *_MEMORY)):
                key = str(work.args["stream"])
                busy[key] += work.duration_us
                streams[key] = work.args["stream"]
    if not busy:
        return None
    return streams[max(sorted(busy), key=lambda key: busy[key])]


# --- Bytes of stages in traces recorded with ``profile_memory=True``.
# The profiler notes every allocation and release (``[memory]``), at the time of the CPU's call,
# which is when torch's caching allocator hands a block out or takes it back. So what a range leaves
# allocated, and the most it had allocated, do not depend on how fast the GPU was.

_NEGLIGIBLE = 0.01
_WORKSPACES = {
    "F": "forward_workspace_bytes",
    "I": "backward_input_workspace_bytes",
    "W": "backward_weight_workspace_bytes",
    "B": "backward_workspace_bytes",
}


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
        """Bytes of a micro-batch that remain after its backward."""
        backward = ("I", "W") if "W" in self.change else ("B",)
        return sum(self.change.get(action, 0) for action in ("F", *backward))


def _read_memory(
    traces: Sequence[RankTrace], device_of: Mapping[int, int]
) -> tuple[dict[int, dict[str, int]], list[str]]:
    """Return the bytes that the ranges of each stage allocated, freed and needed, and notes.

    The largest of all steps but the first counts, of the first where there is no other. A stage
    that received its input from another device holds that too. Stages with recomputed micro-batches
    are left out: their forwards keep different amounts.
    """
    seen: dict[int, _LargestSeen] = defaultdict(_LargestSeen)
    home: dict[int, int] = {}
    is_late = any(one.step for trace in traces for one in trace.ranges)
    for trace in traces:
        counted = [one for one in trace.ranges if one.step or not is_late]
        home |= {one.stage: device_of[trace.rank] for one in counted}
        _note_ranges(trace.process, counted, seen)
    recomputed = {stage for stage, found in seen.items() if "RECOMPUTE" in found.left}
    resident = _resident(traces, device_of)
    static: dict[int, int] = {}
    for device, num_bytes in resident.items():
        stages = sorted(stage for stage, of in home.items() if of == device)
        for place, stage in enumerate(stages):
            share, rest = divmod(num_bytes, len(stages))
            static[stage] = share + (rest if place == 0 else 0)
    facts = {stage: _sizes(stage, seen) for stage in sorted(set(seen) - recomputed)}
    for stage in set(facts) & set(static):
        facts[stage]["static_bytes"] = static[stage]
    kept = {stage: seen[stage].kept_bytes for stage in facts}
    return facts, list(_memory_notes(facts, home, recomputed, kept, static))


def _resident(traces: Iterable[RankTrace], device_of: Mapping[int, int]) -> dict[int, int]:
    """Return the bytes on each device's GPU before the first action of a rank's last step."""
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


def _note_ranges(
    process: Process, counted: Iterable[TracedRange], seen: dict[int, _LargestSeen]
) -> None:
    on_gpu = [one for one in process.allocations if one.on_gpu]
    allocations = on_gpu or process.allocations
    for one in counted:
        if one.action == "SEND_F":
            found = _sent_bytes(process, one.event)
            seen[one.stage].output_bytes = max(found, seen[one.stage].output_bytes)
        elif allocations and one.action not in ("OFFLOAD", "RELOAD"):
            first = bisect_left(allocations, one.event.start_us, key=attrgetter("at_us"))
            last = bisect_right(allocations, one.event.end_us, key=attrgetter("at_us"))
            changes = (allocation.num_bytes for allocation in allocations[first:last])
            seen[one.stage].note(one.action, list(accumulate(changes)))


def _sizes(stage: int, seen: Mapping[int, _LargestSeen]) -> dict[str, int]:
    own = seen[stage]
    facts = {
        _WORKSPACES[action]: size for action, size in own.workspace.items() if action in _WORKSPACES
    }
    if own.output_bytes:
        facts["output_bytes"] = own.output_bytes
    if "F" in own.left:
        # The output of the previous stage; within a device nothing is sent.
        received = seen[stage - 1].output_bytes if stage - 1 in seen else 0
        facts["activation_bytes"] = own.left["F"] + received
    if "W" in own.freed:
        facts["weight_context_bytes"] = own.freed["W"]
    return facts


def _memory_notes(
    facts: Mapping[int, Mapping[str, int]],
    home: Mapping[int, int],
    recomputed: set[int],
    kept: Mapping[int, int],
    static: Mapping[int, int],
) -> Iterator[str]:
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
    if static:
        yield (
            "static_bytes is all that lay on the GPU before a step's first action, divided among "
            "the stages of a device; reserved_bytes is to hold the CUDA context and NCCL."
        )


# --- Messages between ranks in traces, from the kernels that NCCL sends and receives with.
# torch records a message's size, type and peer next to the call that sends or receives it
# (``record_param_comms``). For a call that is not part of a batch, the kernel has them, too. The
# kernel of a batch carries the messages recorded since the previous kernel. The kernel that starts
# first waits for the other side, so a message took as long as the shorter of its two kernels.

_ITEM_BYTES = {
    "Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2,
    "Char": 1, "Byte": 1, "Bool": 1, "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip
_FIELDS = {"send": ("Dst Rank", "In msg nelems"), "recv": ("Src Rank", "Out msg nelems")}


_Route = tuple[int, int, int]
"""The sending rank, the receiving rank, and bytes."""


def _read_messages(
    traces: Iterable[RankTrace], device_of: Mapping[int, int]
) -> tuple[tuple[Transfer, ...], int]:
    """Return the messages between devices, and how many have one end only.

    The k-th sent on a route is the k-th received.
    """
    ends: dict[_Route, dict[str, list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for trace in traces:
        for verb, route, *times in _ends(trace.rank, trace.process):
            ends[route][verb].append((times[0], times[1]))
    transfers: list[Transfer] = []
    num_single = 0
    for route in sorted(ends):
        sent, received = (sorted(ends[route][verb]) for verb in ("send", "recv"))
        if len(sent) != len(received):
            num_single += max(len(sent), len(received))
            continue
        source, target = device_of[route[0]], device_of[route[1]]
        if source != target:
            transfers += [
                Transfer(source=source, target=target, num_bytes=route[2], time_ms=min(a, b))
                for (_, a), (_, b) in zip(sent, received, strict=True)
            ]
    return tuple(transfers), num_single


def _sent_bytes(process: Process, event: TraceEvent) -> int:
    """Return the bytes that were sent while a range was open, 0 if the trace lacks them."""
    first = bisect_left(process.messages, event.start_us, key=attrgetter("start_us"))
    last = bisect_right(process.messages, event.end_us, key=attrgetter("start_us"))
    noted = process.messages[first:last]
    calls = noted or [one for one in _work_inside(process, event) if "Collective name" in one.args]
    return sum(_num_bytes(call.args) for call in calls if call.args["Collective name"] == "send")


def _ends(rank: int, process: Process) -> Iterator[tuple[str, _Route, float, float]]:
    """Yield (send or recv, route, start in us, ms) of this rank's ends of messages.

    A batch with several peers or directions has no time of its own.
    """
    noted = process.messages
    taken = 0
    for launched_us, correlation in process.launches:
        for kernel in filter(_is_p2p, process.device_work.get(correlation, ())):
            before = taken
            while taken < len(noted) and noted[taken].start_us <= launched_us:
                taken += 1
            calls = [kernel] if "Collective name" in kernel.args else noted[before:taken]
            found = {(call.args["Collective name"], _peer(rank, call.args)) for call in calls}
            num_bytes = sum(_num_bytes(call.args) for call in calls)
            if len(found) == 1 and num_bytes:
                ((verb, peer),) = found
                if peer is not None:
                    route = (rank, peer, num_bytes) if verb == "send" else (peer, rank, num_bytes)
                    yield verb, route, kernel.start_us, kernel.duration_us / 1e3


def _peer(rank: int, args: Mapping[str, Any]) -> int | None:
    """Return the other rank: named by torch from 2.6 on, before that the other of a pair."""
    field, _ = _FIELDS.get(args["Collective name"], ("", ""))
    named = args.get(field)
    if isinstance(named, int):
        return named
    ranks = args.get("Process Group Ranks")
    if isinstance(ranks, str):
        try:
            ranks = json.loads(ranks)
        except ValueError:
            return None  # long lists are cut off with dots
    others = [one for one in ranks if one != rank] if isinstance(ranks, list) else []
    return others[0] if len(others) == 1 else None


def _num_bytes(args: Mapping[str, Any]) -> int:
    _, field = _FIELDS.get(args["Collective name"], ("", ""))
    count = args.get(field)
    if not isinstance(count, int) or count <= 0:
        return 0
    name = str(args.get("dtype", ""))
    return count * (1 if name.startswith("Float8") else _ITEM_BYTES.get(name, 0))


# --- What offloading and reloading moved, and how fast: while everything else ran too.

_DIRECTIONS = {"OFFLOAD": "Memcpy DtoH", "RELOAD": "Memcpy HtoD"}


def _read_copies(
    traces: Iterable[RankTrace], device_of: Mapping[int, int]
) -> tuple[dict[int, int], dict[tuple[int, str], float]]:
    """Return median bytes per stage, and rates in GB/s per (device, OFFLOAD or RELOAD)."""
    sizes: dict[int, list[int]] = defaultdict(list)
    rates: dict[tuple[int, str], list[float]] = defaultdict(list)
    for trace in traces:
        for one in trace.ranges:
            if one.action not in _DIRECTIONS:
                continue
            copies = [
                work
                for work in _work_inside(trace.process, one.event)
                if work.name.startswith(_DIRECTIONS[one.action])
                and isinstance(work.args.get("bytes"), int)
            ]
            num_bytes = sum(work.args["bytes"] for work in copies)
            busy_us = sum(work.duration_us for work in copies)
            if num_bytes and busy_us:
                rates[device_of[trace.rank], one.action].append(num_bytes / busy_us / 1e3)
                if one.action == "OFFLOAD":
                    sizes[one.stage].append(num_bytes)
    return (
        {stage: statistics.median_low(found) for stage, found in sizes.items()},
        {key: round(statistics.median(found), 3) for key, found in rates.items()},
    )
