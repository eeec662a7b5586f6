"""Columns say what the timeline says: the same bars, times and bytes, nothing lost or added.

Hues stay apart on the lane they share, for every kind of colour vision, on both pages.

Colour blindness is simulated by the matrices of Machado, Oliveira and Fernandes (A Physiologically-
based Model for Simulation of Color Vision Deficiency, 2009; severity 1), which act on linear RGB;
the distance is the Euclidean one in CIE L*a*b* (2.3 is just noticeable).
"""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.memory import memory_walk
from optpipe.plot.scene import (
    COLOURS,
    GRAD_SYNC_COLOUR,
    KINDS,
    LANES,
    NO_MICROBATCH,
    NUM_CODES,
    PALETTES,
    TITLES,
    codes_of,
    drawing_of,
    peaks_of,
    pixels_of,
    title_of,
)
from optpipe.schedule import ActionType
from optpipe.simulate import make_timeline
from optpipe_solver import METHODS
from tests.building import everything_at_once
from tests.strategies import cases


@given(cases())
def test_bars_and_curves_are_those_of_the_timeline(case) -> None:
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
        row.action[:3] if row.action else (NO_MICROBATCH, None, NO_MICROBATCH) for row in rows
    ]
    assert (drawing.makespan_ms, drawing.span_ms) == (timeline.makespan_ms, timeline.span_ms)
    for curve, points in zip(drawing.memory, timeline.memory, strict=True):
        assert list(zip(curve.moments, curve.held_bytes, strict=True)) == list(points)
        assert np.all(np.diff(curve.moments) >= 0)


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


def test_a_gradient_reduction_has_the_bytes_of_its_moment() -> None:
    """It takes none and gives none back; what is held by then is held around it."""
    problem, programs = everything_at_once()
    drawing = drawing_of(problem, programs)
    bars = drawing.bars
    (rows,) = np.nonzero(bars.microbatch == NO_MICROBATCH)
    assert len(rows) == 2
    for row in rows:
        curve = drawing.memory[bars.device[row]]
        level = curve.held_bytes[curve.moments <= bars.start[row]][-1]
        assert bars.before[row] == bars.after[row] == level


# Columns of pixels: no time lost, no peak hidden, no colour that does not happen.


GREYS = np.linspace(0.1, 0.9, 3 * NUM_CODES, dtype=np.float32).reshape(NUM_CODES, 3)


@given(cases(), st.integers(1, 60))
def test_pixels_share_out_exactly_the_time_of_each_lane(case, num_columns: int) -> None:
    """The filled shares of a lane's columns add up to the time of its bars."""
    drawing = drawing_of(*case)
    bars, num_devices = drawing.bars, len(case.programs)
    length = max(1.0, drawing.makespan_ms)
    pixels = pixels_of(
        bars, GREYS, num_devices=num_devices, length_ms=length, num_columns=num_columns
    )
    for device in range(num_devices):
        for lane in range(len(LANES)):
            mine = (bars.device == device) & (bars.lane == lane)
            filled = pixels.busy[device, lane].sum() * length / num_columns
            assert filled == pytest.approx((bars.end - bars.start)[mine].sum(), abs=1e-3 * length)


def test_a_column_has_the_colour_of_what_fills_it_or_the_mean_by_time() -> None:
    """With columns shorter than actions, the picture is the schedule; with one, their mean."""
    drawing = drawing_of(*everything_at_once())
    bars = drawing.bars
    pixels = pixels_of(bars, GREYS, num_devices=3, length_ms=drawing.makespan_ms, num_columns=4000)
    width = drawing.makespan_ms / 4000
    for row in np.flatnonzero(bars.end - bars.start > 4 * width):
        column = int((bars.start[row] + bars.end[row]) / 2 / width)
        place = bars.device[row], bars.lane[row], column
        assert pixels.busy[place] == pytest.approx(1.0, abs=1e-3)
        assert pixels.colour[place] == pytest.approx(GREYS[codes_of(bars)[row]], abs=1e-3)
    pixels = pixels_of(bars, GREYS, num_devices=3, length_ms=drawing.makespan_ms, num_columns=1)
    mine = (bars.device == 0) & (bars.lane == 0)
    lengths = (bars.end - bars.start)[mine]
    mean = np.average(GREYS[codes_of(bars)[mine]], axis=0, weights=lengths)
    assert pixels.colour[0, 0, 0] == pytest.approx(mean, rel=1e-4)


@given(cases(), st.integers(1, 40))
def test_a_peak_is_in_the_columns_it_touches_and_nowhere_else(case, num_columns: int) -> None:
    """Against a search through all points of the curve."""
    drawing = drawing_of(*case)
    end = drawing.makespan_ms
    edges = np.linspace(0.0, max(end, 1.0), num_columns + 1)
    for curve in drawing.memory:
        until = np.append(curve.moments[1:], np.inf)
        peaks = peaks_of(curve, end, edges)
        for column in range(num_columns):
            left, right = edges[column], min(edges[column + 1], end)
            level = curve.held_bytes[(curve.moments < right) & (until > left)]
            if left < right:
                assert peaks[column] == level.max()


# Names of methods, as the field writes them.


def test_every_method_has_a_name_of_its_own() -> None:
    """A new family is not forgotten, and none is shown under another's name."""
    assert set(METHODS) <= set(TITLES)
    assert len(set(TITLES.values())) == len(TITLES)


@pytest.mark.parametrize(
    ("method", "title"),
    [
        ("1f1b", "1F1B"),
        ("zb-h1+offload", "ZB-H1 + offload"),
        ("plan+v-half", "plan + V-Half"),
        ("given schedule", "given schedule"),
        ("", ""),
    ],
)
def test_a_method_is_shown_as_the_field_writes_it(method: str, title: str) -> None:
    """What is put together of several keeps its parts."""
    assert title_of(method) == title


SEEN_AS = {
    "everyone": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
TO_XYZ = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
WHITE = np.array([0.9505, 1.0, 1.0890])
SIDE = (ActionType.OFFLOAD, ActionType.RELOAD)
COMPUTE = tuple(kind for kind in COLOURS if kind not in SIDE)


def linear(colour: str) -> np.ndarray:
    """Linear red, green and blue of #rrggbb."""
    values = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(colour: str, vision: str) -> np.ndarray:
    """CIE L*a*b* of a colour as somebody sees it."""
    seen = np.clip(np.array(SEEN_AS[vision]) @ linear(colour), 0, 1)
    part = np.array(TO_XYZ) @ seen / WHITE
    root = np.where(part > 0.008856, np.cbrt(part), 7.787 * part + 16 / 116)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


def distance(one: str, other: str, vision: str) -> float:
    return float(np.linalg.norm(lab(one, vision) - lab(other, vision)))


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2.2."""
    light, dark = sorted(float(np.array(TO_XYZ[1]) @ linear(c)) for c in (one, other))[::-1]
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("vision", SEEN_AS)
@pytest.mark.parametrize("kinds", [COMPUTE, SIDE], ids=["compute", "transfers"])
def test_no_two_kinds_of_one_lane_look_alike(vision: str, kinds) -> None:
    """In either shade, and beside what is no action: a bubble, a gradient reduction."""
    beside = [PALETTES["light"].bubble, PALETTES["dark"].bubble]
    if kinds is SIDE:
        beside = [GRAD_SYNC_COLOUR]
    groups = [*(COLOURS[kind] for kind in kinds), *((colour,) for colour in beside)]
    for left, right in combinations(groups, 2):
        for one in left:
            for other in right:
                assert distance(one, other, vision) >= 15, (one, other)


def test_compute_bears_black_text() -> None:
    """Labels are black on every bar that has one."""
    for kind in COMPUTE:
        assert min(contrast(shade, "#000000") for shade in COLOURS[kind]) >= 4.5


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_lines_show_on_their_page(theme) -> None:
    """4.5 for text, 3 for lines (WCAG 2.2, 1.4.3 and 1.4.11)."""
    look = PALETTES[theme]
    assert contrast(look.text, look.page) >= 4.5
    assert contrast(look.quiet, look.page) >= 4.5
    for line in (look.limit, look.bound):
        assert contrast(line, look.page) >= 3
