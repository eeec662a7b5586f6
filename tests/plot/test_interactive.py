"""The interactive chart's data and files; what it does in a browser: tests/browser."""

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from bokeh.models import ColumnDataSource, Range1d

from optpipe import load_csv
from optpipe.plot.interactive import chart_html, chart_item, frontier_chart, schedule_chart
from optpipe.plot.scene import KINDS, NO_MICROBATCH, View, drawing_of
from optpipe.sweep import FrontierLine
from tests.building import everything_at_once, problem, stage
from tests.plot.conftest import make_small_problem
from tests.plot.large import large_case
from tests.plot.test_frontier import line

FOUND = (1, None, None, True), (2, 30.0, 24.0, False), (4, 25.0, None, False)
LINES = [line("<b>m = 8</b>", *FOUND)]


@pytest.fixture
def views(small_problem, small_programs) -> list[View]:
    """Two problems, one of which the programs do not fit into."""
    return [
        View("before", make_small_problem(15), small_programs),
        View("after", small_problem, small_programs, 11.0),
    ]


class Tags(HTMLParser):
    """Collects what a page would ask others for, and its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs) -> None:
        self.tags.append(tag)
        self.addresses += [
            value for name, value in attrs if name in {"src", "href", "srcset", "action"}
        ]


def named(layout: Any, name: str) -> Any:
    return layout.select_one({"name": name})


def columns_of(layout, place: int) -> Any:
    (bars,) = [
        renderer
        for renderer in named(layout, f"gantt-{place}").renderers
        if renderer.name == "bars"
    ]
    return bars.data_source.data


def test_memory_names_its_device_under_the_pointer(views) -> None:
    """Unless the view has no memory: then its figure and its choice are hidden."""
    alone = replace(views[1], has_memory=False)
    layout = schedule_chart([views[0], alone])
    (hover,) = [tool for tool in named(layout, "memory-0").tools if tool.name == "memory-hover"]
    (edge,) = hover.renderers
    assert set(edge.data_source.data["device"]) == {"gpu0"}
    assert ("", "@device") in hover.tooltips
    assert named(layout, "memory-0").visible
    assert not named(layout, "memory-1").visible
    assert named(layout, "gantt-1").xaxis.visible


def test_a_row_is_a_bar_of_the_drawing() -> None:
    """Narrow types, and the numbers still say what the simulation said."""
    problem, programs = everything_at_once()
    bars = drawing_of(problem, programs).bars
    data = columns_of(schedule_chart([View("all", problem, programs)]), 0)
    assert data["left"] == pytest.approx(bars.start, rel=1e-6)
    assert data["right"] == pytest.approx(bars.end, rel=1e-6)
    assert data["before"] == pytest.approx(bars.before, rel=1e-6)
    assert data["after"] == pytest.approx(bars.after, rel=1e-6)
    assert np.array_equal(data["code"] // 2, bars.kind)
    for name in ("device", "stage", "microbatch"):
        assert np.array_equal(data[name], getattr(bars, name))
    assert np.all((data["top"] < data["bottom"]) & (np.round(data["top"]) == bars.device))
    is_sync = data["microbatch"] == NO_MICROBATCH
    assert {KINDS[code // 2] for code in data["code"][is_sync]} == {None}


def test_short_actions_late_in_a_long_schedule_keep_their_length() -> None:
    """Where float32 would blur them, times stay float64."""
    problem, programs = large_case(2, 3)
    stages = [
        stage.model_copy(update={"forward_ms": 1e-3 if stage.device else 1e6})
        for stage in problem.stages
    ]
    tiny = problem.model_copy(update={"stages": stages})
    data = columns_of(schedule_chart([View("tiny", tiny, programs)]), 0)
    assert data["left"].dtype == np.float64
    assert np.min(data["right"] - data["left"]) == pytest.approx(1e-3, rel=1e-3)


def test_all_figures_share_one_named_time_axis(views) -> None:
    layout = schedule_chart(views)
    time = named(layout, "time")
    assert isinstance(time, Range1d)
    names = ("gantt-0", "memory-0", "gantt-1", "memory-1")
    for name in names:
        assert named(layout, name).x_range is time
    assert time.start < 0
    assert time.end > 13


def test_a_bound_is_a_line_only_where_it_is_a_moment(small_problem, small_programs) -> None:
    """The bound of a span is no moment of the axis; both are told in the title.

    One of 0 is true of every schedule, and stands there only until there is a better one.
    """
    view = View("a", small_problem, small_programs, 11.0)
    layout = schedule_chart([view])
    plot = named(layout, "gantt-0")
    assert [line.location for line in plot.select({"name": "bound"})] == [11.0]
    title = named(layout, "gantt-0-title")
    assert title.text == "a: makespan 13 ms, bubble 23.1%, bound 11 ms, gap 15.4%"
    of_span = small_problem.model_copy(update={"objective": "span"})
    layout = schedule_chart([View("a", of_span, small_programs, 11.0)])
    assert list(named(layout, "gantt-0").select({"name": "bound"})) == []
    assert "span 13 ms, bubble" in named(layout, "gantt-0-title").text
    layout = schedule_chart([View("a", small_problem, small_programs, 0.0)])
    assert named(layout, "gantt-0-title").text == "a: makespan 13 ms, bubble 23.1%"
    assert list(named(layout, "gantt-0").select({"name": "bound"})) == []


def test_idle_shares_stand_at_devices_and_their_mean_in_the_title() -> None:
    """The first device computes for 6 ms of 18, the second for 12; the page reads the objective."""
    given = problem([stage(0, 1, 1, 1), stage(1, 2, 2, 2)], m=2)
    layout = schedule_chart([View("a", given, load_csv("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n"))])
    (axis,) = named(layout, "gantt-0").yaxis
    assert axis.major_label_overrides == {0: "gpu0 67%", 1: "gpu1 33%"}
    assert layout.tags == [18]
    title = "a: makespan 18 ms, bubble 50.0% (busiest device 33.3%)"
    assert named(layout, "gantt-0-title").text == title


def test_equal_charts_are_equal_bytes(views) -> None:
    """In one process, where bokeh goes on counting, and in another, where hashes differ."""
    first, again = (chart_item(schedule_chart(views)) for _ in range(2))
    assert first == again
    assert first != chart_item(schedule_chart(views[:1]))
    code = (
        "from tests.plot.test_interactive import digest_of_everything\n"
        "print(digest_of_everything())"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "1", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert elsewhere.strip() == digest_of_everything()


def digest_of_everything() -> str:
    item = chart_item(schedule_chart([View("a", *everything_at_once())]))
    return hashlib.sha256(item.encode()).hexdigest()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_file_asks_nobody_for_anything(views, theme) -> None:
    title = "</script><img src=x>"
    page = chart_html(schedule_chart(views, theme=theme), title=title, theme=theme)
    tags = Tags()
    tags.feed(page)
    assert tags.addresses == []
    assert "img" not in tags.tags
    assert "iframe" not in tags.tags


@pytest.mark.parametrize("odd", ["</script><script>alert(1)</script>", "<!--<script>"])
def test_names_cannot_end_the_script_they_stand_in(odd, small_problem, small_programs) -> None:
    """A device may be called like its end; or like a comment, in which it never ends."""
    devices = [device.model_copy(update={"name": odd}) for device in small_problem.devices]
    problem = small_problem.model_copy(update={"devices": devices})
    page = chart_html(schedule_chart([View(odd, problem, small_programs)]), title="t")
    assert odd not in page
    begin = page.index('id="item">') + len('id="item">')
    item = page[begin : page.index("</script>", begin)]
    json.loads(item)
    assert "<" not in item


def test_the_memory_chart_begins_with_the_fullest_device() -> None:
    problem, programs = large_case(4, 8)
    layout = schedule_chart([View("1F1B", problem, programs)])
    plot = named(layout, "memory-0")
    title = named(layout, "memory-0-title").text
    assert title == "1F1B, memory of gpu0: peak 76.0 GiB of 80.0 GiB"
    (shown,) = {
        renderer.data_source.id: renderer.data_source for renderer in plot.renderers
    }.values()
    assert isinstance(shown, ColumnDataSource)
    assert max(shown.data["held"]) == 76
    assert set(shown.data["static"]) == {12}
    assert set(shown.data["limit"]) == {80}


def test_a_frontier_shows_points_bounds_and_what_is_infeasible() -> None:
    """The label of a line is text, whatever it holds."""
    page = chart_html(frontier_chart(LINES, "a & b"), title="a & b")
    assert "nothing fits (proven)" in page
    assert "30 ms, bound 24 ms, gap 20.0%" in page
    assert "25 ms, no bound" in page
    assert "<title>a &amp; b</title>" in page


def test_what_has_nothing_to_show_is_drawn_empty() -> None:
    pointless = [FrontierLine(label="", points=())]
    for chart in (schedule_chart([]), frontier_chart([], ""), frontier_chart(pointless, "")):
        assert json.loads(chart_item(chart))["root_id"]
