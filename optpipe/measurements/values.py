"""What was measured, before it is a problem: samples of times, transfers, sizes (frozen values).

Whoever measures - a trace, a log, a table, or the runtime itself - fills a `Measurements`;
`optpipe.measurements.to_problem` alone makes a `Problem` of it. Times are ms, sizes bytes,
bandwidths GB/s (1e9), as in a problem. What was not measured is None, never 0.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field

from optpipe.errors import MeasurementError
from optpipe.problem import (
    Bandwidth,
    Bytes,
    Count,
    Flag,
    FrozenValue,
    Index,
    Milliseconds,
    Mode,
    Name,
    Objective,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "DeviceFacts",
    "Given",
    "LinkFit",
    "MeasuredAction",
    "MeasurementError",
    "Sample",
    "StageFacts",
    "TimeSpread",
    "Transfer",
    "fit_links",
    "spread",
]


MeasuredAction = Literal["F", "I", "W", "B", "RECOMPUTE"]
"""The actions that have a duration of their own."""


class Sample(FrozenValue):
    """One run of one action.

    Parameters
    ----------
    stage, action
        What ran; stages are numbered in model order from 0.
    time_ms
        How long it kept the device's compute lane busy.
    microbatch, step, rank
        Which of the runs it was, where that is known. Steps are numbered from 0.
    lanes_ms
        What it computed and exchanged with experts in turn, in ms, beginning with computing: two
        entries more for each exchange. Empty where it exchanged nothing, or that is not known.
    """

    stage: Index
    action: MeasuredAction
    time_ms: Milliseconds
    microbatch: Index | None = None
    step: Index | None = None
    rank: Index | None = None
    lanes_ms: tuple[Milliseconds, ...] = ()


class Transfer(FrozenValue):
    """One message from one device to another, alone on the link; ``time_ms`` without waiting."""

    source: Index
    target: Index
    num_bytes: Annotated[Bytes, Field(gt=0)]
    time_ms: Milliseconds


class _PartlyKnown(FrozenValue):
    """Fields of which each may be unknown (None)."""

    def or_else(self, general: Self) -> Self:
        """Return these facts, and where one is unknown the general one."""
        return type(self)(**(general.known() | self.known()))

    def known(self) -> dict[str, Any]:
        """Return the facts that are known, by field."""
        return {name: value for name, value in self if value is not None}


class StageFacts(_PartlyKnown):
    """What is known of a stage besides its times; fields as in `optpipe.problem.Stage`.

    Where its ``modes`` are, they say what is offloaded and recomputed, their times included.
    """

    device: Index | None = None
    activation_bytes: Bytes | None = None
    weight_context_bytes: Bytes | None = None
    offload_bytes: Bytes | None = None
    checkpoint_bytes: Bytes | None = None
    static_bytes: Bytes | None = None
    output_bytes: Bytes | None = None
    grad_sync_ms: Milliseconds | None = None
    forward_workspace_bytes: Bytes | None = None
    backward_input_workspace_bytes: Bytes | None = None
    backward_weight_workspace_bytes: Bytes | None = None
    backward_workspace_bytes: Bytes | None = None
    recompute_workspace_bytes: Bytes | None = None
    modes: tuple[Mode, ...] | None = None


class DeviceFacts(_PartlyKnown):
    """What is known of a device; fields as in `optpipe.problem.Device`."""

    name: Name | None = None
    memory_bytes: Bytes | None = None
    reserved_bytes: Bytes | None = None
    d2h_gb_per_s: Bandwidth | None = None
    h2d_gb_per_s: Bandwidth | None = None
    pcie_group: Name | None = None
    half_duplex: Flag | None = None
    host: Name | None = None


# --- What people say of a run: it counts before what was measured.


class Given(FrozenValue):
    """Facts of stages and devices that count before measured ones, and of links that do not.

    Parameters
    ----------
    name, num_microbatches, objective
        Of the problem. Left out, the name says where the times come from, and the number of
        micro-batches is the measured one.
    stages
        Facts of single stages, from stage 0 on; they count before ``stage``.
    stage, device
        Facts of every stage or device.
    link_latency_ms, link_gb_per_s
        Of every link between neighbouring stages that was not measured.
    weight_share
        Share (0-1) of a fused backward that W takes, where I and W were not measured apart.
    """

    name: Name | None = None
    num_microbatches: Count | None = None
    objective: Objective | None = None
    stages: tuple[StageFacts, ...] = ()
    stage: StageFacts = StageFacts()
    device: DeviceFacts = DeviceFacts()
    link_latency_ms: Milliseconds | None = None
    link_gb_per_s: Bandwidth | None = None
    weight_share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None

    def sizes(self) -> tuple[str, ...]:
        """Return the fields that a base problem would contradict."""
        links = {"link_latency_ms": self.link_latency_ms, "link_gb_per_s": self.link_gb_per_s}
        named = [name for name, value in links.items() if value is not None]
        of_stages = [name for facts in (*self.stages, self.stage) for name in facts.known()]
        return tuple(dict.fromkeys((*of_stages, *self.device.known(), *named)))


# --- Medians and spread of repeated measurements.

_DIGITS = 6
"""Times are kept to the nanosecond: no clock used here tells more."""


class TimeSpread(NamedTuple):
    """How repeated times of one action are distributed, in ms.

    ``mad_ms`` is the median distance from the median, which a few outliers do not move.
    """

    num_samples: int
    median_ms: float
    p5_ms: float
    p95_ms: float
    mad_ms: float


def spread(times_ms: Sequence[float]) -> TimeSpread:
    """Return the number, median, 5th and 95th percentile and median absolute deviation."""
    ordered = sorted(times_ms)
    median = statistics.median(ordered)
    # Linear between neighbours; a single time is all its quantiles.
    several = ordered if len(ordered) > 1 else 2 * ordered
    cuts = statistics.quantiles(several, n=20, method="inclusive")
    deviation = statistics.median(abs(time - median) for time in ordered)
    return TimeSpread(
        num_samples=len(ordered),
        median_ms=round(median, _DIGITS),
        p5_ms=round(cuts[0], _DIGITS),
        p95_ms=round(cuts[-1], _DIGITS),
        mad_ms=round(deviation, _DIGITS),
    )


# --- Latency and bandwidth of links, fitted to timed messages.


class LinkFit(NamedTuple):
    """A directed link: time = latency + bytes / bandwidth, and what it was fitted to.

    ``bandwidth_gb_per_s`` is None where longer messages took no longer.
    """

    source: int
    target: int
    latency_ms: float
    bandwidth_gb_per_s: float | None
    num_transfers: int
    num_sizes: int


def fit_links(transfers: Iterable[Transfer]) -> tuple[LinkFit, ...]:
    """Return one fit per directed pair of devices, in order of the pairs.

    Each message size counts once, with the median of its times; slope and intercept are the
    medians over all pairs of sizes (Theil 1950, Sen 1968), so that one odd size moves neither.
    With a single size the whole time counts as bandwidth: latency cannot be told from it.
    """
    times: dict[tuple[int, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in transfers:
        times[one.source, one.target][one.num_bytes].append(one.time_ms)
    return tuple(_fit(pair, times[pair]) for pair in sorted(times))


def _fit(pair: tuple[int, int], times: dict[int, list[float]]) -> LinkFit:
    points = [(size, statistics.median(times[size])) for size in sorted(times)]
    latency_ms, ms_per_byte = _line(points)
    return LinkFit(
        source=pair[0],
        target=pair[1],
        latency_ms=latency_ms,
        bandwidth_gb_per_s=1e-6 / ms_per_byte if ms_per_byte > 0 else None,
        num_transfers=sum(map(len, times.values())),
        num_sizes=len(points),
    )


def _line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Return (latency in ms, ms per byte), neither negative."""
    if len(points) == 1:
        (size, time_ms) = points[0]
        return 0.0, time_ms / size
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2)]
    slope = max(0.0, statistics.median(slopes))
    latency = statistics.median(time_ms - slope * size for size, time_ms in points)
    if latency >= 0:
        return round(latency, 6), slope
    return 0.0, statistics.median(time_ms / size for size, time_ms in points)
