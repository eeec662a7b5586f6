"""The HTML file of ``optpipe plot`` in a real browser, from the disk and without a network."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, NamedTuple

import pytest
from PIL import Image, ImageChops

from optpipe.plot.interactive import chart_html, schedule_chart
from optpipe.plot.scene import View
from tests.building import everything_at_once
from tests.plot.conftest import make_small_problem, make_small_programs
from tests.plot.large import large_case

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, BrowserContext, Page

pytestmark = pytest.mark.browser

# Frames settle: two of them after the document is idle, so that what was asked for is painted.
SETTLED = """async () => {
  while (!Bokeh.documents.length || !Bokeh.documents[0].is_idle) {
    await new Promise(requestAnimationFrame)
  }
  for (let i = 0; i < 3; i++) await new Promise(requestAnimationFrame)
}"""
PLACE = """([name, x, y]) => {
  const view = Bokeh.index.find_one(Bokeh.documents[0].get_model_by_name(name))
  const box = view.canvas_view.el.getBoundingClientRect()
  const frame = view.frame
  return [box.x + frame.x_scale.compute(x), box.y + frame.y_scale.compute(y)]
}"""
AXIS = """() => {
  const time = Bokeh.documents[0].get_model_by_name("time")
  return [time.start, time.end]
}"""
PATH = """(name) => {
  const gantt = Bokeh.documents[0].get_model_by_name(name)
  const {data} = gantt.renderers.find((held) => held.name === "path").data_source
  return Array.from(data.left).slice(1)
}"""
LABELS = """(level) => Bokeh.documents.flatMap((doc) => ["gantt-0", "gantt-1"].flatMap((name) => {
  const held = doc.get_model_by_name(name)?.renderers.find((one) => one.name === `labels-${level}`)
  const {text = [], x = []} = held?.data_source.data ?? {}
  return Array.from(text, (told, i) => [told, x[i]])
}))"""
ZOOM = "([start, end]) => Bokeh.documents[0].get_model_by_name('time').setv({start, end})"
BACKS = """() => {
  const found = {}
  const look = (root) => {
    for (const el of root.querySelectorAll("*")) {
      const name = el.classList.contains("bk-Tooltip") ? "tooltip"
        : el.classList.contains("bk-input") ? el.localName : null
      if (name) (found[name] ??= []).push(getComputedStyle(el).backgroundColor)
      if (el.shadowRoot) look(el.shadowRoot)
    }
  }
  look(document)
  return found
}"""
TOOLTIP = """() => {
  const found = []
  const look = (root) => {
    for (const el of root.querySelectorAll("*")) {
      if (el.classList.contains("bk-tooltip-content")) found.push(el.innerText)
      if (el.shadowRoot) look(el.shadowRoot)
    }
  }
  look(document)
  return found.join("\\n")
}"""


class Chart(NamedTuple):
    """A page that shows a chart, and what it asked for and complained of."""

    page: Page
    requested: list[str]
    errors: list[str]

    def settle(self) -> None:
        self.page.evaluate(SETTLED)

    def move_to(self, name: str, ms: float, device: float) -> tuple[float, float]:
        """Point at a moment of a device's row; return where that is on the page."""
        x, y = self.page.evaluate(PLACE, [name, ms, device])
        self.page.mouse.move(x - 2, y)
        self.page.mouse.move(x, y)
        self.settle()
        return x, y

    def point_at(self, name: str, ms: float, device: float, words: str) -> str:
        """Point there until the tooltip says so: a busy machine may lose a move; return it all."""
        for _ in range(100):
            self.move_to(name, ms, device)
            text = str(self.page.evaluate(TOOLTIP))
            if words in text:
                return text
            self.page.wait_for_timeout(100)
        raise AssertionError(f"the tooltip never said {words!r}: {text!r}")

    def picture(self) -> Image.Image:
        return Image.open(io.BytesIO(self.page.screenshot())).convert("RGB")

    def axis(self) -> list[float]:
        return list(self.page.evaluate(AXIS))

    def path(self, name: str = "gantt-0") -> list[float]:
        """Starts of the bars that are lit."""
        return list(self.page.evaluate(PATH, name))


@pytest.fixture(scope="module")
def offline(chromium: Browser) -> Iterator[BrowserContext]:
    """A browser that is cut off the network."""
    context = chromium.new_context(offline=True)
    yield context
    context.close()


@pytest.fixture
def opened(offline: BrowserContext, tmp_path: Path) -> Iterator[object]:
    """Return a function that opens the file of some views."""
    pages = []

    def open_file(views: list[View], theme="light", width=1000) -> Chart:
        file = tmp_path / "chart.html"
        file.write_text(
            chart_html(schedule_chart(views, theme=theme), title="t", theme=theme), "utf-8"
        )
        page = offline.new_page()
        page.set_viewport_size({"width": width, "height": 900})
        pages.append(page)
        chart = Chart(page, [], [])
        page.on("request", lambda request: chart.requested.append(request.url))
        page.on("pageerror", lambda error: chart.errors.append(str(error)))
        page.goto(file.as_uri())
        chart.settle()
        return chart

    yield open_file
    for page in pages:
        page.close()


@pytest.fixture
def two() -> list[View]:
    """The small schedule twice, once with a bound."""
    problem, programs = make_small_problem(), make_small_programs()
    return [View("one", problem, programs, 11.0), View("two", problem, programs)]


def differ(one: Image.Image, other: Image.Image) -> bool:
    return ImageChops.difference(one, other).getbbox() is not None


def test_it_draws_without_a_request_or_an_error(opened, two) -> None:
    chart = opened(two)
    assert [url for url in chart.requested if not url.startswith(("file:", "data:", "blob:"))] == []
    assert chart.errors == []
    assert chart.axis() == [pytest.approx(-0.13), pytest.approx(13.13)]


def test_the_wheel_zooms_the_time_of_all_views_and_dragging_pans_to_the_ends(opened, two) -> None:
    chart = opened(two)
    before, whole = chart.picture(), chart.axis()
    x, y = chart.move_to("gantt-0", 6.0, -0.5)
    chart.page.mouse.wheel(0, -300)
    chart.page.wait_for_function(f"({AXIS})()[1] < {whole[1]}")
    chart.settle()
    zoomed = chart.axis()
    assert whole[0] < zoomed[0] < 6 < zoomed[1] < whole[1]
    assert differ(before, chart.picture())
    rows = "() => Bokeh.documents[0].get_model_by_name('gantt-1').y_range.end"
    assert chart.page.evaluate(rows) == pytest.approx(-0.55)
    chart.page.mouse.down()
    chart.page.mouse.move(x - 100, y, steps=5)
    chart.page.mouse.up()
    chart.settle()
    assert chart.axis()[0] > zoomed[0]
    chart.page.mouse.move(x, y)
    chart.page.mouse.down()
    for _ in range(3):
        chart.page.mouse.move(x + 900, y, steps=3)
    chart.page.mouse.up()
    chart.settle()
    assert chart.axis()[0] >= -0.14


def test_pointing_at_an_action_tells_it_and_lights_its_path_everywhere(opened, two) -> None:
    chart = opened(two)
    text = chart.point_at("gantt-0", 7.0, 0, "micro-batch 0")
    assert "input gradient of micro-batch 0, stage 0" in text
    assert "on gpu0" in text
    assert "6 ms to 8 ms: 2 ms" in text
    assert "memory: 16 B before, 13 B after (\N{MINUS SIGN}3 B)" in text
    starts = sorted([0, 2, 5, 6, 8, 2, 4, 10])
    assert sorted(chart.path("gantt-0")) == pytest.approx(starts)
    assert sorted(chart.path("gantt-1")) == pytest.approx(starts)
    chart.page.mouse.move(5, 5)
    chart.page.wait_for_function(f"({PATH})('gantt-0').length === 0")


def test_a_tap_keeps_the_path_and_shows_the_devices_memory(opened, two) -> None:
    chart = opened(two)
    x, y = chart.move_to("gantt-0", 3.0, 1)
    chart.page.mouse.click(x, y)
    chart.page.mouse.move(5, 5)
    chart.settle()
    assert len(chart.path()) == 8
    title = "(name) => Bokeh.documents[0].get_model_by_name(`${name}-title`).text"
    assert chart.page.evaluate(title, "memory-0").startswith("one, memory of gpu1: peak 13 B")
    assert chart.page.evaluate(title, "memory-1").startswith("two, memory of gpu0: peak 16 B")
    chart.page.mouse.move(x, y)
    chart.page.mouse.wheel(0, -300)
    chart.page.wait_for_function(f"({AXIS})()[1] < 13")
    chart.settle()
    assert min(chart.path()) >= chart.axis()[0], "it stays within its frame"
    chart.page.mouse.click(x, y)
    chart.page.mouse.move(5, 5)
    chart.page.wait_for_function(f"({PATH})('gantt-0').length === 0")


def test_a_micro_batch_can_be_followed_from_the_keyboard(opened, two) -> None:
    chart = opened(two)
    field = chart.page.get_by_label("follow micro-batch")
    field.fill("1")
    field.press("Enter")
    chart.page.wait_for_function(f"({PATH})('gantt-0').length === 6")
    field.fill("")
    field.press("Enter")
    chart.page.wait_for_function(f"({PATH})('gantt-0').length === 0")


def test_bars_say_what_they_are_where_there_is_room(opened, two) -> None:
    """While they are zoomed nothing, then again, in the middle of what is seen of each."""
    chart = opened(two)
    chart.page.wait_for_function(f"({LABELS})('glyph').length")
    texts = [text for text, _ in chart.page.evaluate(LABELS, "glyph")]
    assert texts.count("I0") == 4  # of two stages, in two views
    assert {"F0", "F1", "I1"} <= set(texts)
    soon = "await new Promise((go) => setTimeout(go, 0))"
    zoomed = f"async (range) => {{ ({ZOOM})(range); {soon}; return ({LABELS})('glyph'); }}"
    assert chart.page.evaluate(zoomed, [6.5, 8.5]) == []
    chart.page.wait_for_function(f"({LABELS})('glyph').length")
    found = dict(chart.page.evaluate(LABELS, "glyph"))
    assert found["I0"] == pytest.approx((6.5 + 8) / 2)


def test_narrow_bars_have_their_letter_above_their_number(opened) -> None:
    chart = opened([View("many", *large_case(4, 24))])
    chart.page.wait_for_function(f"({LABELS})('glyph').length")
    texts = {text for text, _ in chart.page.evaluate(LABELS, "glyph")}
    assert {"F\n0", "F\n5"} <= texts
    assert not {text for text in texts if text.isdecimal()}


def test_a_lit_path_keeps_its_labels(opened, two) -> None:
    chart = opened(two)
    chart.point_at("gantt-0", 7.0, 0, "micro-batch 0")
    chart.page.wait_for_function(f"({LABELS})('overlay').length")
    texts = {text for text, _ in chart.page.evaluate(LABELS, "overlay")}
    assert {"", "F0", "I0"} <= texts
    assert all(text == "" or text.endswith("0") for text in texts)


def test_chunks_are_told_apart_by_their_stage(opened) -> None:
    problem, programs = everything_at_once()
    chart = opened([View("all", problem, programs)])
    chart.page.wait_for_function(f"({LABELS})('glyph').length")
    length = chart.axis()[1]
    chart.page.evaluate(ZOOM, [0, length / 8])
    chart.page.wait_for_function(f"({LABELS})('glyph').some(([text]) => /^[0-9]+F/.test(text))")


def test_titles_are_not_cut_on_a_phone(opened, two) -> None:
    """They break into lines, each as wide as the frame at most, and the figure grows with them."""
    title = "() => Bokeh.documents[0].get_model_by_name('gantt-0-title').text"
    tall = "() => Bokeh.documents[0].get_model_by_name('gantt-0').outer_height"
    wide = opened(two)
    assert "\n" not in wide.page.evaluate(title)
    narrow = opened(two, width=360)
    narrow.page.wait_for_function(f"({title})().includes('\\n')")
    narrow.settle()
    lines = narrow.page.evaluate(title).split("\n")
    assert " ".join(lines) == wide.page.evaluate(title)
    assert narrow.page.evaluate(tall) >= wide.page.evaluate(tall) + 10 * (len(lines) - 1)


def test_nothing_is_white_on_a_dark_page(opened, two) -> None:
    chart = opened(two, "dark")
    chart.point_at("gantt-0", 7.0, 0, "micro-batch 0")
    dark = "rgb(21, 24, 28)"
    backs = chart.page.evaluate(BACKS)
    assert set(backs) == {"select", "input", "tooltip"}
    assert all(set(found) == {dark} for found in backs.values()), backs
    assert chart.picture().getpixel((2, 2)) == (21, 24, 28)


def test_98304_actions_are_drawn_told_and_zoomed(opened) -> None:
    """64 devices and 512 micro-batches; zoomed in, only bars near the frame are kept."""
    problem, programs = large_case(64, 512)
    chart = opened([View("1F1B", problem, programs)])
    before = chart.picture()
    colours = before.getcolors(1_000_000)
    assert colours is not None
    assert len(colours) > 200
    chart.point_at("gantt-0", 500.0, 0, "forward of micro-batch")
    assert len(chart.path()) == 192
    axis = "([a, b]) => Bokeh.documents[0].get_model_by_name('time').setv({start: a, end: b})"
    chart.page.evaluate(axis, [20_000, 20_500])
    kept = """() => Bokeh.documents[0].get_model_by_name("gantt-0").renderers
      .find((held) => held.name === "bars").data_source.data.left.length"""
    chart.page.wait_for_function(f"({kept})() < 10000")
    chart.settle()
    assert chart.page.evaluate(kept) > 64
    assert differ(before, chart.picture())
    chart.page.evaluate(axis, [0, 44_000])
    chart.page.wait_for_function(f"({kept})() === 98304")
    assert chart.errors == []
