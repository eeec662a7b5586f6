"""Image files: complete, reproducible, and honest about schedules that do not fit."""

import xml.etree.ElementTree as ET

import numpy as np
import pytest
from matplotlib.image import imread
from matplotlib.text import Text

from optpipe import InputError, load_csv
from optpipe.plot.image import draw_figure, draw_svg, save_figure
from optpipe.plot.scene import PALETTES, View
from optpipe_solver.families.classic import build_interleaved
from tests.building import problem, stage
from tests.plot.conftest import make_small_problem
from tests.plot.large import GIB, large_case


def svg_texts(path) -> set[str]:
    root = ET.parse(path).getroot()
    return {text.strip() for node in root.iter() if (text := node.text) and text.strip()}


def views_of(problem, small_programs) -> list[View]:
    """A schedule that fits and one that does not, at 15 bytes."""
    plain = load_csv("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n")
    return [View("before", problem, plain), View("after", problem, small_programs)]


@pytest.fixture
def views(small_problem, small_programs) -> list[View]:
    return views_of(small_problem, small_programs)


def test_an_svg_names_its_panels_actions_and_peaks(tmp_path, small_programs) -> None:
    """Equal input gives equal bytes."""
    views = views_of(make_small_problem(15), small_programs)
    save_figure(views, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_bytes() == draw_svg(views)
    texts = svg_texts(tmp_path / "a.svg")
    assert "before: makespan 13 ms, bubble 23.1%" in texts
    assert "after: makespan 13 ms, bubble 23.1%" in texts
    assert {"F0", "F1", "I0", "W1", "gpu0", "gpu1", "to the host", "memory limit"} <= texts
    assert {"gpu1  13 of 15 B", "gpu0  OVER: 16 of 15 B"} <= texts


def test_labels_of_two_digits_have_their_kind() -> None:
    """Below the letter, where a bar is too narrow for one line."""
    problem, rows = large_case(4, 24)
    figure = draw_figure([View("many", problem, rows)])
    drawn = {text.get_text() for axis in figure.axes for text in axis.texts}
    assert {"F9", "F\n10", "F\n23"} <= drawn
    assert not {text for text in drawn if text.isdecimal()}


def test_a_long_title_is_not_cut() -> None:
    problem, rows = large_case(4, 24)
    figure = draw_figure([View("OptPipe (zb-h2, squeezed, " + "peak" * 16 + ")", problem, rows)])
    figure.canvas.draw()
    (title,) = figure.findobj(lambda one: isinstance(one, Text) and "peakpeak" in one.get_text())
    assert title.get_window_extent().x1 <= figure.bbox.x1


@pytest.mark.parametrize("num_microbatches", [8, 16, 24])
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_no_label_is_wider_than_its_bar(num_microbatches: int, num_chunks: int) -> None:
    """Where a device has several stages, a label names the stage if its bar has room."""
    one, rows = large_case(4, num_microbatches)
    if num_chunks == 2:
        one = problem([stage(at % 4, 3, 3, 2) for at in range(8)], m=num_microbatches)
        rows = build_interleaved(one)
    view = View("narrow", one, rows)
    figure = draw_figure([view])
    gantt, bars = figure.axes[0], view.drawing.bars
    assert gantt.texts
    for text in gantt.texts:
        box = text.get_window_extent()
        middle, device = text.get_position()
        row = np.flatnonzero(
            (bars.device == device) & (bars.start < middle) & (middle < bars.end) & (bars.lane == 0)
        )[0]
        left, right = gantt.transData.transform([(bars.start[row], 0), (bars.end[row], 0)])[:, 0]
        assert left + 0.5 <= box.x0
        assert box.x1 <= right - 0.5
    names = {text.get_text() for text in gantt.texts}
    stages_named = {name[0] for name in names if name[0].isdecimal()}
    assert stages_named == (set("01234567") if (num_chunks, num_microbatches) == (2, 8) else set())


def test_a_file_that_cannot_be_written_is_an_input_error(tmp_path, views) -> None:
    """By its suffix, in place of which those that work are named, or by its folder."""
    with pytest.raises(InputError, match=r"\.png, \.svg, \.pdf"):
        save_figure(views, tmp_path / "a.bmp")
    with pytest.raises(InputError, match="cannot write"):
        save_figure(views, tmp_path / "nowhere" / "a.svg")


def test_a_device_may_be_called_what_matplotlib_would_read_as_a_formula(
    tmp_path, small_programs
) -> None:
    small = make_small_problem(15)
    names = ("$x^^$", "a\x00b")
    devices = [
        device.model_copy(update={"name": name})
        for device, name in zip(small.devices, names, strict=True)
    ]
    odd = small.model_copy(update={"devices": devices})
    save_figure(views_of(odd, small_programs), tmp_path / "a.svg")
    assert {"$x^^$", "a\N{REPLACEMENT CHARACTER}b"} <= svg_texts(tmp_path / "a.svg")


def test_a_bound_is_a_line_and_a_gap_in_the_title(tmp_path, small_problem, small_programs) -> None:
    """A bound of the makespan is a moment; one of a span is told, and no line."""
    save_figure([View("a", small_problem, small_programs, 11.0)], tmp_path / "a.svg")
    texts = svg_texts(tmp_path / "a.svg")
    assert "a: makespan 13 ms, bubble 23.1%, bound 11 ms, gap 15.4%" in texts
    assert "lower bound" in texts
    of_span = small_problem.model_copy(update={"objective": "span"})
    save_figure([View("a", of_span, small_programs, 11.0)], tmp_path / "b.svg")
    texts = svg_texts(tmp_path / "b.svg")
    assert "a: makespan 13 ms, span 13 ms, bubble 23.1%, bound 11 ms, gap 15.4%" in texts
    assert "lower bound" not in texts


@pytest.mark.extended
def test_64_devices_and_512_microbatches_are_a_small_picture(tmp_path) -> None:
    """98,304 actions are shared out to pixels; the axis says so, and devices are named."""
    problem, programs = large_case(64, 512)
    save_figure([View("1F1B", problem, programs)], tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size < 2_000_000
    texts = svg_texts(tmp_path / "a.svg")
    assert {"gpu0", "gpu62", "100% of the limit"} <= texts
    assert any("mixes the colours" in text for text in texts)


def area_of(path, colour: str) -> int:
    wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    pixels = (imread(path)[..., :3] * 255).round().astype(int)
    return int(np.all(pixels == wanted, axis=-1).sum())


@pytest.mark.parametrize("num_devices", [pytest.param(2, marks=pytest.mark.extended), 26])
def test_what_is_over_a_limit_is_red(tmp_path, num_devices: int) -> None:
    """As a curve, and as the range of many devices; a limit that holds is only a line."""
    problem, programs = large_case(num_devices, 4)
    areas = {}
    for limit in (13 * GIB, 80 * GIB):
        devices = [device.model_copy(update={"memory_bytes": limit}) for device in problem.devices]
        limited = problem.model_copy(update={"devices": devices})
        save_figure([View("a", limited, programs)], tmp_path / "a.png")
        areas[limit] = area_of(tmp_path / "a.png", PALETTES["light"].limit)
    assert areas[13 * GIB] > 3 * areas[80 * GIB]
