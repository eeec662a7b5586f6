"""Columns lose no time: blocks tile the lane, bins share it out, levels keep every peak."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe import Action, ActionType
from optpipe.plot.raster import bins_of, blocks_of, levels_of
from optpipe.timeline import Interval


@st.composite
def lanes(draw) -> list[Interval]:
    """Intervals one after the other with gaps, as on a compute lane."""
    intervals, now = [], 0.0
    for index in range(draw(st.integers(1, 20))):
        start = now + draw(st.floats(0, 3))
        now = start + draw(st.floats(0.001, 5))
        kind = draw(st.sampled_from([ActionType.FORWARD, ActionType.BACKWARD_INPUT]))
        intervals.append(Interval(0, "compute", Action(0, kind, index), start, now))
    return intervals


@given(lanes(), st.integers(1, 150))
def test_blocks_cover_every_column_once_and_in_order(lane, width: int) -> None:
    end = lane[-1].end
    blocks = blocks_of(lane, end, end, width)
    assert blocks[0].first == 0
    assert blocks[-1].last == width
    assert all(left.last == right.first for left, right in pairwise(blocks))
    shown = [block.interval for block in blocks if block.interval is not None]
    assert shown == [item for item in lane if item in shown]


@given(lanes(), st.integers(1, 150))
def test_a_block_is_never_more_than_half_a_column_off(lane, width: int) -> None:
    end = lane[-1].end
    half = pytest.approx(0, abs=end / width / 2 * 1.001)
    for block in blocks_of(lane, end, end, width):
        if block.interval is not None:
            assert block.first / width * end - block.interval.start == half
            assert block.last / width * end - block.interval.end == half


@given(lanes(), st.integers(1, 40))
def test_bins_share_out_exactly_the_busy_time(lane, width: int) -> None:
    end = lane[-1].end
    busy = sum(item.end - item.start for item in lane)
    shared = sum(item.busy for item in bins_of(lane, end, width)) * end / width
    assert shared == pytest.approx(busy)


def test_levels_keep_a_peak_that_is_shorter_than_a_column() -> None:
    curve = [(0.0, 1), (50.0, 9), (50.1, 2)]
    levels = levels_of(curve, 100.0, 100.0, 10)
    assert levels == [1, 1, 1, 1, 1, 9, 2, 2, 2, 2]
