"""A visit to the page: one browser page that notes what went wrong, and keeps pictures."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, BrowserContext, Page

PATIENCE_MS = 180_000
READY = "body[data-ready]"
DRAWN = "#job .chart[data-drawn]"
DESKTOP, PHONE = (1280, 860), (390, 740)
SCHEDULE = "?view=schedule"


class Visit:
    """One page: ``requested`` addresses, ``errors`` of scripts."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.requested: list[str] = []
        self.errors: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("request", lambda request: self.requested.append(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._note)

    def _note(self, message: Any) -> None:
        # What the Content-Security-Policy refused is told here alone.
        if "Content Security Policy" in message.text:
            self.errors.append(message.text)

    def open(self, query: str = SCHEDULE) -> Page:
        """Go there and wait until the form and the view are complete; without a query: the form."""
        self.page.goto(f"{self.url}/{query}")
        self.page.wait_for_selector(READY)
        return self.page

    def foreign(self) -> list[str]:
        """Requests to anywhere else than the service."""
        own = (self.url, "data:", "blob:")
        return [address for address in self.requested if not address.startswith(own)]

    def picture(self, name: str) -> None:
        """Keep a picture for people, where they named a folder: each takes a second or two."""
        if folder := os.environ.get("OPTPIPE_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=Path(folder, f"{name}.png"), full_page=True)

    def time_axis(self) -> tuple[float, float]:
        """What part of the time axis is seen, in ms."""
        start, end = self.page.evaluate(
            """() => {
              const range = Bokeh.documents.map((d) => d.get_model_by_name("time")).find(Boolean);
              return [range.start, range.end];
            }"""
        )
        return start, end

    def place_of(self, time_ms: float, device: int) -> tuple[float, float]:
        """Where on the screen a moment of a device is, in the first schedule of the chart."""
        x, y = self.page.evaluate(
            """([time, device]) => {
              const doc = Bokeh.documents.find((d) => d.get_model_by_name("gantt-0"));
              const view = Bokeh.index.find_one(doc.get_model_by_name("gantt-0"));
              const box = view.el.getBoundingClientRect();
              const { x_scale, y_scale } = view.frame;
              return [box.x + x_scale.compute(time), box.y + y_scale.compute(device)];
            }""",
            [time_ms, device],
        )
        return x, y


@contextmanager
def visiting(
    browser: Browser, url: str, size: tuple[int, int] = DESKTOP, scheme: Any = "light"
) -> Iterator[Visit]:
    """Open a browser that has seen nothing; in the end no script may have failed."""
    with tabs(browser, size, scheme) as context, visiting_in(context, url) as visit:
        yield visit


@contextmanager
def tabs(
    browser: Browser, size: tuple[int, int] = DESKTOP, scheme: Any = "light"
) -> Iterator[BrowserContext]:
    """Open a browser whose pages share what was loaded once."""
    width, height = size
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, accept_downloads=True
    )
    yield context
    context.close()


@contextmanager
def visiting_in(context: BrowserContext, url: str) -> Iterator[Visit]:
    """Open a page beside others; in the end no script may have failed."""
    visit = Visit(context.new_page(), url)
    try:
        yield visit
    finally:
        visit.page.close()
    assert visit.errors == [], visit.errors
    assert visit.foreign() == [], visit.foreign()


def upload(page: Page, problem: object, name: str = "problem.json") -> None:
    """Hand a problem in as a file; `taken` waits until the form has it."""
    text = problem if isinstance(problem, str) else json.dumps(problem)
    page.check("input[name=source][value=file]", force=True)
    page.set_input_files("#file-input", uploaded(text, name))


def uploaded(text: str, name: str) -> Any:
    """Return a file of JSON as the browser takes it."""
    return {"name": name, "mimeType": "application/json", "buffer": text.encode()}


def taken(page: Page, problem: object, name: str = "problem.json") -> None:
    """Hand a problem in as a file, and wait until the form shows it."""
    upload(page, problem, name)
    page.wait_for_selector(f"#file-name >> text={name}")
    page.wait_for_selector("#compose:not([data-stale])")
