"""Medians and spread: of few samples, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.measurements import Transfer, fit_links
from optpipe.measurements.to_problem import TimeSpread, spread


def test_the_spread_of_eleven_times() -> None:
    """0, 10, ..., 100 in disorder: the 5th percentile lies half-way between the first two."""
    times = [50, 0, 100, 10, 90, 20, 80, 30, 70, 40, 60]
    assert spread(times) == TimeSpread(
        num_samples=11, median_ms=50, p5_ms=5.0, p95_ms=95.0, mad_ms=30
    )


def test_an_outlier_moves_neither_median_nor_deviation() -> None:
    """The mean of these is 202.8 ms."""
    found = spread([1, 2, 3, 1000, 8])
    assert (found.median_ms, found.mad_ms) == (3, 2)


def test_one_time_is_all_its_quantiles() -> None:
    assert spread([7.5]) == TimeSpread(
        num_samples=1, median_ms=7.5, p5_ms=7.5, p95_ms=7.5, mad_ms=0
    )


# Latency and bandwidth fitted to messages.


def messages(*points: tuple[int, float]) -> list[Transfer]:
    """Messages from device 0 to device 1: (bytes, ms) each."""
    return [Transfer(source=0, target=1, num_bytes=size, time_ms=ms) for size, ms in points]


@given(
    latency_ms=st.floats(0, 10),
    gb_per_s=st.floats(0.1, 1000),
    sizes=st.sets(st.integers(1, 1000), min_size=2, max_size=8),
)
def test_exact_messages_give_the_link_back(latency_ms, gb_per_s, sizes) -> None:
    points = [(size * 10**6, latency_ms + size / gb_per_s) for size in sizes]
    (fit,) = fit_links(messages(*points))
    assert fit.latency_ms == pytest.approx(latency_ms, abs=1e-5)
    assert fit.bandwidth_gb_per_s == pytest.approx(gb_per_s, rel=1e-6)
    assert fit.num_sizes == len(sizes)


@pytest.mark.parametrize(
    ("points", "latency_ms", "gb_per_s"),
    [
        # Of each size, the median of its times counts: one late message moves nothing.
        ([*[(10**6 * size, 1.0 + size) for size in (1, 2, 4)] * 3, (10**6, 500.0)], 1, 1),
        # Latency cannot be told from one size.
        ([(2 * 10**6, 1.0), (2 * 10**6, 3.0)], 0, 1),
        # A line below zero: latency is not negative.
        ([(10**6, 1.0), (2 * 10**6, 4.0)], 0, 1 / 1.5),
        # Longer messages that took no longer: no bandwidth is known.
        ([(10**6, 2.0), (2 * 10**6, 1.0)], 1.5, None),
    ],
)
def test_odd_messages_give_a_link_that_can_be(points, latency_ms, gb_per_s) -> None:
    (fit,) = fit_links(messages(*points))
    assert fit.latency_ms == latency_ms
    assert fit.bandwidth_gb_per_s == (gb_per_s and pytest.approx(gb_per_s))


def test_directions_are_links_of_their_own() -> None:
    there, back = messages((10**6, 1.0))[0], Transfer(source=1, target=0, num_bytes=5, time_ms=1)
    assert [(fit.source, fit.target) for fit in fit_links([back, there])] == [(0, 1), (1, 0)]
    assert fit_links([]) == ()
