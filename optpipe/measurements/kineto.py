"""PyTorch profiler (Kineto) traces of pipeline ranks as measurements."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, cast

from optpipe.errors import MeasurementError
from optpipe.measurements.kineto_events import (
    GpuTime,
    HostCopies,
    Messages,
    RangeTimer,
    RankTrace,
    TracedMemory,
    copy_in_range,
    read_memory,
    read_messages,
    read_rank_traces,
    summarise_copies,
)
from optpipe.measurements.to_problem import Measurements
from optpipe.measurements.values import DeviceFacts, Sample, StageFacts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from optpipe.measurements.values import MeasuredAction

__all__ = ["read_kineto"]

_COPIES = ("OFFLOAD", "RELOAD")
_TRANSFERS = (*_COPIES, "SEND_F")
_LEAST_BUSY = 0.9
_SHOWN = 6


def read_kineto(
    paths: Sequence[Path],
    patterns: Sequence[str] = (),
    gpu_time: GpuTime = "span",
    process: str = "",
) -> Measurements:
    """Return what the traces of the ranks of one run say.

    Ranks with the same stages are replicas: they count as one device, with the samples of all.
    Devices are numbered in the order of their first ranks.

    Parameters
    ----------
    paths
        One file per rank, or several of the same rank in order of time; ``.json`` or gzip.
    patterns
        Names of ranges, as `ranges.parse_pattern` reads them; none = torch's and ours.
    gpu_time
        Time of a range on a GPU: see `range_times.GpuTime`.
    process
        Only processes whose name contains it are read: a file may hold a plan beside the run.

    Raises
    ------
    MeasurementError
        If a file is no trace or has no range of the pipeline, or ranks contradict each other.
    """
    traces = read_rank_traces(paths, patterns, process)
    stages_of: dict[int, set[int]] = defaultdict(set)
    for trace in traces:
        stages_of[trace.rank] |= {one.stage for one in trace.ranges}
    device_of = _device_of(stages_of)
    samples, notes = _samples(traces, gpu_time)
    messages = read_messages([(trace.rank, trace.process) for trace in traces], device_of)
    copies = _copies(traces, device_of)
    memory = read_memory(traces, device_of)
    return Measurements(
        source=f"{len(paths)} Kineto trace{'s' if len(paths) > 1 else ''}",
        samples=samples,
        placement=_placement(stages_of, device_of),
        stages=_stage_facts(stages_of, copies, memory),
        devices=_device_facts(traces, device_of, copies),
        transfers=messages.transfers,
        notes=(*notes, *memory.notes, *_message_notes(messages, len(device_of))),
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
        timer = RangeTimer(trace.process, [one.event for one in timed], gpu_time)
        clocks.add(timer.on_gpu)
        for one in timed:
            found = timer.time(one.event)
            if found is None and one.action != "W":
                idle[one.stage, one.action] += 1
                continue
            # A W without kernels is one of a module whose whole backward runs in I.
            samples.append(
                Sample(
                    stage=one.stage,
                    action=cast("MeasuredAction", one.action),
                    time_ms=round(found.time_ms, 6) if found else 0.0,
                    microbatch=one.microbatch,
                    step=one.step,
                    rank=trace.rank,
                )
            )
            if found is not None and found.busy_share is not None:
                busy[one.stage, one.action].append(found.busy_share)
    return tuple(samples), [*_clock_notes(clocks), *_idle_notes(idle), *_busy_notes(busy, gpu_time)]


def _clock_notes(clocks: set[bool]) -> list[str]:
    if clocks == {True}:
        return ["Times are those of the GPU kernels launched inside the ranges."]
    if clocks == {False}:
        return [
            "The traces hold no GPU kernels: times are the CPU's, from the first operator in a "
            "range to the range's end."
        ]
    return [
        "Some traces hold no GPU kernels: their times are the CPU's, the others are those of the "
        "kernels. Profile all ranks with CUDA activities."
    ]


def _idle_notes(idle: Mapping[tuple[int, str], int]) -> list[str]:
    if not idle:
        return []
    names = _shortened(
        f"{count} of {stage}{action}" for (stage, action), count in sorted(idle.items())
    )
    return [f"Ranges that launched no kernel are left out: {names}."]


def _busy_notes(busy: Mapping[tuple[int, str], Sequence[float]], gpu_time: GpuTime) -> list[str]:
    if gpu_time == "busy":
        return ["Gaps between the kernels of a range are left out of its time."]
    shares = {key: sum(found) / len(found) for key, found in busy.items()}
    low = sorted((share, key) for key, share in shares.items() if share < _LEAST_BUSY)
    if not low:
        return []
    names = _shortened(f"{100 * share:.0f} % of {stage}{action}" for share, (stage, action) in low)
    return [
        f"Kernels ran in {names} only; the rest is waiting, for launches if the profiler slowed "
        "them down (gpu_time busy leaves it out)."
    ]


def _shortened(names: Iterable[str]) -> str:
    shown = list(names)
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


def _message_notes(messages: Messages, num_ranks: int) -> list[str]:
    notes = []
    if messages.num_single:
        notes.append(
            f"{messages.num_single} messages have one end only in these traces and are left out: "
            "their times include waiting."
        )
    if not messages.transfers and num_ranks > 1:
        notes.append("The traces hold no messages with sizes: links are not measured.")
    return notes


def _copies(traces: Iterable[RankTrace], device_of: Mapping[int, int]) -> HostCopies:
    found = (
        copy_in_range(trace.process, one.event, one.action, one.stage, device_of[trace.rank])
        for trace in traces
        for one in trace.ranges
        if one.action in _COPIES
    )
    return summarise_copies(copy for copy in found if copy is not None)


def _stage_facts(
    stages_of: Mapping[int, set[int]], copies: HostCopies, memory: TracedMemory
) -> tuple[StageFacts, ...]:
    num_stages = 1 + max(stage for stages in stages_of.values() for stage in stages)
    return tuple(
        StageFacts(offload_bytes=copies.offload_bytes.get(stage), **memory.facts.get(stage, {}))
        for stage in range(num_stages)
    )


def _device_facts(
    traces: Sequence[RankTrace], device_of: Mapping[int, int], copies: HostCopies
) -> tuple[DeviceFacts, ...]:
    rates = copies.gb_per_s
    facts = []
    for device in range(1 + max(device_of.values())):
        own = [trace for trace in traces if device_of[trace.rank] == device]
        both = rates.get((device, "OFFLOAD")), rates.get((device, "RELOAD"))
        there, back = both if None not in both else (None, None)
        facts.append(
            DeviceFacts(
                memory_bytes=_gpu_bytes(own),
                d2h_gb_per_s=there,
                h2d_gb_per_s=back,
            )
        )
    return tuple(facts)


def _gpu_bytes(traces: Iterable[RankTrace]) -> int | None:
    """Return the memory of the GPU that the kernels ran on; of replicas, the least."""
    found = []
    for trace in traces:
        work = (event for events in trace.process.device_work.values() for event in events)
        device = next((one.args["device"] for one in work if "device" in one.args), None)
        if device in trace.process.gpu_bytes:
            found.append(trace.process.gpu_bytes[device])
    return min(found, default=None)


def _device_of(stages_of: Mapping[int, set[int]]) -> dict[int, int]:
    """Return the device of each rank; ranks with the same stages share one."""
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


def _placement(stages_of: Mapping[int, set[int]], device_of: Mapping[int, int]) -> tuple[int, ...]:
    placed = {stage: device_of[rank] for rank in stages_of for stage in stages_of[rank]}
    # A gap is refused when the problem is built, with the stages by name.
    return tuple(placed.get(stage, 0) for stage in range(1 + max(placed)))
