"""How long the work inside a range kept the compute lane busy."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from optpipe.measurements.trace_file import Event, Process

__all__ = ["GpuTime", "RangeTime", "RangeTimer", "is_p2p", "work_inside"]

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

    def __init__(self, process: Process, ranges: Iterable[Event], gpu_time: GpuTime) -> None:
        self._process = process
        self._gpu_time = gpu_time
        self._stream = _compute_stream(process, ranges)

    @property
    def on_gpu(self) -> bool:
        """Whether times are those of kernels."""
        return self._stream is not None

    def time(self, event: Event) -> RangeTime | None:
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

    def _cpu_us(self, event: Event) -> float:
        starts = self._process.operator_starts
        first = bisect_left(starts, event.start_us)
        if first == len(starts) or starts[first] > event.end_us:
            return event.duration_us
        return event.end_us - starts[first]


def is_p2p(work: Event) -> bool:
    """Return whether this is a kernel that sends or receives a message."""
    return work.name.startswith(_P2P)


def work_inside(process: Process, event: Event) -> list[Event]:
    """Return the GPU work launched while a range was open."""
    launches: Sequence[tuple[float, int]] = process.launches
    first = bisect_left(launches, (event.start_us, -1))
    last = bisect_right(launches, (event.end_us, 2**63))
    return [
        work
        for _, correlation in launches[first:last]
        for work in process.device_work.get(correlation, ())
    ]


def _compute_stream(process: Process, ranges: Iterable[Event]) -> object | None:
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


def _is_on(work: Event, stream: object) -> bool:
    return work.args.get("stream") == stream and not is_p2p(work)
