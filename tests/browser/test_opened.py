"""Schedules and traces that are dropped on the page, or opened by a button, are drawn."""

from __future__ import annotations

import base64
import gzip
from typing import TYPE_CHECKING

import httpx
import pytest

from examples.measurements.make_samples import BASE
from tests.api.live import make_settings, running
from tests.browser.visit import DRAWN, Visit, uploaded
from tests.cli.test_importing import TRACES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.long]

OPENED = "#opened .chart[data-drawn]"
DROP = """async (files) => {
  const transfer = new DataTransfer();
  for (const [name, text] of Object.entries(files)) {
    const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
    transfer.items.add(new File([bytes], name));
  }
  const event = (type) => new DragEvent(type, { dataTransfer: transfer, bubbles: true, cancelable: true });
  document.body.dispatchEvent(event("dragover"));
  const isShown = !document.getElementById("drop").hidden;
  document.body.dispatchEvent(event("drop"));
  return isShown && document.getElementById("drop").hidden;
}"""  # noqa: E501
TITLES = """() => Bokeh.documents.flatMap((d) => [0, 1, 2].map((n) =>
  d.get_model_by_name(`gantt-${n}-title`)?.text)).filter(Boolean)"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(make_settings(tmp_path_factory.mktemp("server"))) as (address, _):
        yield address


@pytest.fixture(scope="module")
def job(url: str) -> str:
    """An ended job of the example that the traces were made from."""
    body = f'{{"problem": {BASE.read_text("utf-8")}}}'
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{url}/v1/jobs?wait=60", content=body, headers=headers, timeout=90)
    job_id: str = answer.raise_for_status().json()["id"]
    return job_id


def drop(page: Page, files: Mapping[str, bytes]) -> None:
    """Drag files over the page and let them fall."""
    texts = {name: base64.b64encode(content).decode() for name, content in files.items()}
    assert page.evaluate(DROP, texts), "the page did not say where to drop"


def titles(page: Page) -> list[str]:
    found: list[str] = [text.replace("\n", " ") for text in page.evaluate(TITLES)]
    return found


def test_traces_dropped_on_an_answer_are_drawn_next_to_its_plan(visit: Visit, job: str) -> None:
    """Another choice takes them away; a reload shows the answer without them."""
    page = visit.open(f"?job={job}")
    page.wait_for_selector(DRAWN)
    drop(page, {path.name: path.read_bytes() for path in TRACES})
    page.wait_for_function("Bokeh.documents.some((d) => d.get_model_by_name('gantt-1'))")
    planned, measured = titles(page)
    assert planned.startswith("planned: ")
    assert measured.startswith("trace of rank0.json.gz and 3 more, step ")
    assert page.inner_text("#beside option:checked").startswith("rank0.json.gz, ")
    assert page.is_hidden("#fault")
    visit.picture("measured")
    page.select_option("#beside", "")
    page.wait_for_function("!Bokeh.documents.some((d) => d.get_model_by_name('gantt-1'))")
    page.reload()
    page.wait_for_selector(DRAWN)
    assert len(titles(page)) == 1


def test_a_schedule_is_drawn_alone_and_with_its_problem(visit: Visit, url: str, job: str) -> None:
    csv = httpx.get(f"{url}/v1/jobs/{job}/schedule?format=csv").content
    page = visit.open("?list=jobs")
    drop(page, {"mine.csv": csv})
    page.wait_for_selector(OPENED)
    assert titles(page)[0].startswith("mine.csv, without its problem: F, I and W take 1 ms each")
    assert page.inner_text("#opened h1") == "mine.csv"
    drop(page, {"mine.csv": csv, "problem.json": BASE.read_bytes()})
    page.wait_for_function(f"({TITLES})().some((text) => text.startsWith('mine.csv: '))")
    page.reload()
    page.wait_for_selector("#opened .button")
    with page.expect_file_chooser() as choosing:
        page.click("#opened .button")
    choosing.value.set_files([uploaded(gzip.decompress(TRACES[0].read_bytes()).decode(), "a.json")])
    page.wait_for_selector(OPENED)
    assert titles(page)[0].startswith("trace of a.json, step ")


def test_a_problem_dropped_anywhere_is_in_the_form(visit: Visit) -> None:
    page = visit.open("?list=jobs")
    drop(page, {"dropped.json": BASE.read_bytes()})
    page.wait_for_selector("#file-name >> text=dropped.json")
    page.wait_for_selector("#compose:not([data-stale])")
    assert page.is_visible("#compose")


def test_files_that_cannot_be_drawn_are_refused_in_a_sentence(visit: Visit, job: str) -> None:
    for query in ("", f"?job={job}"):
        page = visit.open(query)
        drop(page, {"notes.txt": b"hello"})
        page.wait_for_selector("#fault:visible:has-text('notes.txt')")
    drop(page, {"cut.json.gz": TRACES[0].read_bytes()[:-9]})
    page.wait_for_selector("#fault:visible:has-text('cut.json.gz is no complete gzip file')")
    drop(page, {"large.json": b" " * (8 * 2**20 + 1)})
    page.wait_for_selector("#fault:visible:has-text('more than 8388608 bytes')")
    drop(page, {"bomb.json.gz": gzip.compress(b" " * 2**30, 1)})
    page.wait_for_selector("#fault:visible:has-text('bomb.json.gz: the files have more than 8388')")
