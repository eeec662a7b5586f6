"""Columns say what the timeline says: the same bars, times and bytes, nothing lost or added."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from optpipe.action import ActionType
from optpipe.memory import memory_walk
from optpipe.plot.bars import KINDS, LANES, NO_MICROBATCH, drawing_of
from optpipe.timeline import make_timeline
from tests.building import everything_at_once
from tests.strategies import cases


@given(cases())
def test_a_bar_is_an_interval_of_the_timeline(case) -> None:
    """Row by row: device, lane, action, start and end."""
    drawing = drawing_of(*case)
    timeline = make_timeline(*case)
    rows = [row for device in timeline.intervals for row in device]
    bars = drawing.bars
    assert len(bars) == len(rows)
    assert [LANES[lane] for lane in bars.lane] == [row.lane for row in rows]
    assert bars.device.tolist() == [row.device for row in rows]
    assert bars.start.tolist() == [row.start for row in rows]
    assert bars.end.tolist() == [row.end for row in rows]
    kinds = [KINDS[kind] for kind in bars.kind]
    assert list(zip(bars.stage.tolist(), kinds, bars.microbatch.tolist(), strict=True)) == [
        tuple(row.action) if row.action else (NO_MICROBATCH, None, NO_MICROBATCH) for row in rows
    ]
    assert (drawing.makespan_ms, drawing.span_ms) == (timeline.makespan_ms, timeline.span_ms)


@given(cases())
def test_bytes_around_a_bar_are_those_of_the_memory_walk(case) -> None:
    """RELEASE has no bar; every other action has its step's bytes."""
    problem, programs = case
    bars = drawing_of(problem, programs).bars
    for device, program in enumerate(programs):
        steps = [
            (step.before, step.after)
            for action, step in zip(program, memory_walk(problem, device, program), strict=True)
            if action.type is not ActionType.RELEASE
        ]
        mine = (bars.device == device) & (bars.microbatch != NO_MICROBATCH)
        assert list(zip(bars.before[mine], bars.after[mine], strict=True)) == steps


@given(cases())
def test_curves_are_those_of_the_timeline(case) -> None:
    """Moments never go back, and begin at 0 with the static bytes."""
    curves = drawing_of(*case).memory
    expected = make_timeline(*case).memory
    for curve, points in zip(curves, expected, strict=True):
        assert list(zip(curve.moments, curve.held, strict=True)) == list(points)
        assert np.all(np.diff(curve.moments) >= 0)
        assert curve.moments[0] == 0


def test_a_gradient_reduction_has_the_bytes_of_its_moment() -> None:
    """It takes none and gives none back; what is held by then is held around it."""
    problem, programs = everything_at_once()
    drawing = drawing_of(problem, programs)
    bars = drawing.bars
    (rows,) = np.nonzero(bars.microbatch == NO_MICROBATCH)
    assert len(rows) == 2
    for row in rows:
        curve = drawing.memory[bars.device[row]]
        held = curve.held[curve.moments <= bars.start[row]][-1]
        assert bars.before[row] == bars.after[row] == held


def test_every_action_type_but_release_has_a_code() -> None:
    """None stands for gradient reductions."""
    assert set(KINDS) == {*ActionType, None} - {ActionType.RELEASE}


@pytest.mark.parametrize("column", ["device", "lane", "kind", "stage", "microbatch", "start"])
def test_columns_are_equally_long(column: str) -> None:
    """A row is a bar."""
    bars = drawing_of(*everything_at_once()).bars
    assert len(getattr(bars, column)) == len(bars)
