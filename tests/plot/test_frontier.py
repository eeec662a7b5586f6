"""The frontier's picture: every line named, what is infeasible marked, equal bytes."""

import re
import xml.etree.ElementTree as ET

import pytest

from optpipe.errors import InputError, MissingExtraError, install_command
from optpipe.plot import scene
from optpipe.plot.image import draw_frontier, frontier_svg, save_frontier
from optpipe.plot.scene import require_drawing, unit_of
from optpipe.sweep import FrontierLine, Point


def line(label: str, *found: tuple[int, float | None, float | None, bool]) -> FrontierLine:
    points = (
        Point(
            index=index,
            family=label,
            label=label,
            memory_bytes=(gibibytes * 2**30, 1),
            objective_ms=objective_ms,
            bound_ms=bound_ms,
            is_infeasible=is_infeasible,
        )
        for index, (gibibytes, objective_ms, bound_ms, is_infeasible) in enumerate(found)
    )
    return FrontierLine(label=label, points=tuple(points))


LINES = [
    line("m = 8", (1, None, None, True), (2, 30.0, 20.0, False), (4, 25.0, 20.0, False)),
    line("m = 16", (2, None, 35.0, False), (4, 60.0, 35.0, False)),
]


def drawn(lines: list[FrontierLine]) -> dict[str, tuple[list[float], list[float]]]:
    """What is drawn under each name of the legend: x and y."""
    (axes,) = draw_frontier(lines).axes
    return {
        str(item.get_label()).strip(): (list(item.get_xdata()), list(item.get_ydata()))
        for item in axes.lines
    }


def test_points_stand_at_their_memory_and_their_objective() -> None:
    """What was found is joined; what fits nowhere is a cross on the lower edge."""
    shown = drawn(LINES)
    assert shown["m = 8"] == ([2.0, 4.0], [30.0, 25.0])
    assert shown["m = 16"] == ([4.0], [60.0])
    at, heights = shown["nothing fits (proven)"]
    assert at == [1.0]
    assert heights[0] < 20.0
    # Bounds are dashed lines of their own.
    (axes,) = draw_frontier(LINES).axes
    dashed = [list(item.get_ydata()) for item in axes.lines if item.get_linestyle() == "--"]
    assert dashed == [[20.0, 20.0], [35.0, 35.0]]


def test_lines_step_as_a_schedule_fits_a_larger_limit_and_a_bound_holds_for_a_smaller_one() -> None:
    """The area between them never claims more: its corners are those of both staircases."""
    stairs = line("s", (4, 20.0, 15.0, False), (1, 30.0, 25.0, False), (2, 24.0, 18.0, False))
    (axes,) = draw_frontier([stairs]).axes
    shapes = {item.get_linestyle(): item.get_drawstyle() for item in axes.lines[:2]}
    assert shapes == {"-": "steps-post", "--": "steps-pre"}
    (area,) = axes.collections
    corners = {tuple(map(float, corner)) for corner in area.get_paths()[0].vertices}
    assert {(1.0, 30.0), (2.0, 30.0), (2.0, 24.0), (4.0, 24.0)} <= corners
    assert {(1.0, 18.0), (2.0, 18.0), (2.0, 15.0), (4.0, 15.0)} <= corners
    assert list(axes.lines[0].get_xdata()) == [1.0, 2.0, 4.0]


def test_an_svg_names_lines_axes_and_title() -> None:
    """Texts of the file; what would be markup, a formula or a hidden name stays text."""
    odd = line("_$x^^$\x00", (1, 5.0, 4.0, False))
    root = ET.fromstring(frontier_svg([*LINES, odd], "a <b> & $c$"))
    texts = {text.strip() for node in root.iter() if (text := node.text) and text.strip()}
    assert {"m = 8", "m = 16", "lower bound", "nothing fits (proven)"} <= texts
    assert "_$x^^$\N{REPLACEMENT CHARACTER}" in texts
    assert {"memory per device (GiB)", "objective (ms)", "a <b> & $c$"} <= texts


@pytest.mark.parametrize(
    ("memory_bytes", "unit"),
    [(2**30, "GiB"), (5 * 2**20, "MiB"), (4096, "KiB"), (12, "B"), (None, "GiB")],
)
def test_the_axis_has_a_unit_that_fits(memory_bytes: int | None, unit: str) -> None:
    """GiB, unless all limits are below one; of nothing too."""
    points = [
        Point(index=0, family="a", label="a", memory_bytes=(size,))
        for size in (memory_bytes, 1)
        if memory_bytes is not None and size is not None
    ]
    assert unit_of(points).name == unit


@pytest.mark.parametrize("lines", [[], [line("x")], [line("x", (1, None, None, True))]])
def test_what_has_no_numbers_is_drawn_empty(lines: list[FrontierLine]) -> None:
    assert frontier_svg(lines).startswith(b"<?xml")


def test_equal_input_gives_equal_bytes_in_a_file_and_in_memory(tmp_path) -> None:
    """The picture holds no date and no random names."""
    save_frontier(LINES, tmp_path / "a.svg", "t")
    assert (tmp_path / "a.svg").read_bytes() == frontier_svg(LINES, "t")
    save_frontier(LINES, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_many_lines_leave_the_legend_readable() -> None:
    """The first lines are named; more would cover the picture."""
    many = [line(f"line {index}", (index + 1, 5.0, 4.0, False)) for index in range(40)]
    named = [name for name in drawn(many) if name.startswith("line")]
    assert named == [f"line {index}" for index in range(16)]


def test_an_html_file_can_be_zoomed_into(tmp_path) -> None:
    """The same lines and numbers, by another library."""
    save_frontier(LINES, tmp_path / "a.html", "t")
    assert "25 ms, bound 20 ms, gap 20.0%" in (tmp_path / "a.html").read_text("utf-8")
    with pytest.raises(InputError, match="cannot write"):
        save_frontier(LINES, tmp_path / "nowhere" / "a.html")


@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_what_is_missing_is_told_before_the_work(monkeypatch, suffix: str) -> None:
    """Hours of solving must not end in a missing package."""
    require_drawing(suffix)
    monkeypatch.setattr(scene, "find_spec", lambda package: None)
    with pytest.raises(MissingExtraError, match=re.escape(install_command("plot"))):
        require_drawing(suffix)
