"""Medians and spread of repeated measurements."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Spread", "quantile", "spread"]

_DIGITS = 6
"""Times are kept to the nanosecond: no clock used here tells more."""


class Spread(NamedTuple):
    """How repeated times of one action are distributed, in ms.

    ``mad_ms`` is the median distance from the median, which a few outliers do not move.
    """

    num_samples: int
    median_ms: float
    p5_ms: float
    p95_ms: float
    mad_ms: float


def spread(times_ms: Sequence[float]) -> Spread:
    """Return the number, median, 5th and 95th percentile and median absolute deviation.

    Raises
    ------
    ValueError
        If there are no times.
    """
    ordered = sorted(times_ms)
    median = statistics.median(ordered)
    deviation = statistics.median(abs(time - median) for time in ordered)
    return Spread(
        num_samples=len(ordered),
        median_ms=round(median, _DIGITS),
        p5_ms=round(quantile(ordered, 0.05), _DIGITS),
        p95_ms=round(quantile(ordered, 0.95), _DIGITS),
        mad_ms=round(deviation, _DIGITS),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which a share (0-1) of sorted values lies, linear in between.

    Raises
    ------
    ValueError
        If there are no values.
    """
    if not ordered:
        raise ValueError("no values, so there is no quantile; give at least one")
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
