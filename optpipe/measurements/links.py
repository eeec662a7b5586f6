"""Latency and bandwidth of links, fitted to timed messages."""

from __future__ import annotations

import statistics
from collections import defaultdict
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optpipe.measurements.values import Transfer

__all__ = ["LinkFit", "fit_links"]


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

    def as_link(self) -> dict[str, Any]:
        """Return the fields of a problem's link."""
        return {
            "from": self.source,
            "to": self.target,
            "latency_ms": self.latency_ms,
            "bandwidth_gb_per_s": self.bandwidth_gb_per_s,
        }


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
