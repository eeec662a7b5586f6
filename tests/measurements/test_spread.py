"""Medians and spread: of few samples, by hand."""

from __future__ import annotations

import pytest

from optpipe.measurements.spread import Spread, quantile, spread


def test_the_spread_of_eleven_times() -> None:
    """0, 10, ..., 100 in disorder: the 5th percentile lies half-way between the first two."""
    times = [50, 0, 100, 10, 90, 20, 80, 30, 70, 40, 60]
    assert spread(times) == Spread(num_samples=11, median_ms=50, p5_ms=5.0, p95_ms=95.0, mad_ms=30)


def test_an_outlier_moves_neither_median_nor_deviation() -> None:
    """The mean of these is 202.8 ms."""
    found = spread([1, 2, 3, 1000, 8])
    assert (found.median_ms, found.mad_ms) == (3, 2)


def test_one_time_is_all_its_quantiles() -> None:
    assert spread([7.5]) == Spread(num_samples=1, median_ms=7.5, p5_ms=7.5, p95_ms=7.5, mad_ms=0)


@pytest.mark.parametrize(("share", "value"), [(0, 1), (0.5, 2), (0.75, 3), (1, 4)])
def test_a_quantile_is_linear_between_neighbours(share: float, value: float) -> None:
    """Of 1, 2 and 4; the ends are the least and the largest."""
    assert quantile([1, 2, 4], share) == value


def test_of_nothing_there_is_no_quantile() -> None:
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)
