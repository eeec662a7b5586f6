"""What more would buy, asked on the page: a button, and answers as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from optpipe.explain.what_if import WhatIfAnswer
from tests.api.live import make_settings, running, two_stages
from tests.browser.visit import DRAWN, Visit

if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = pytest.mark.browser

STARTS = "tests.api.start_solver:solve"
ASK = "#ask-what-if:enabled"
ANSWERED = "#what-if[data-finished=true]"
KEEP_ANNOUNCED = """() => {
  const place = document.querySelector("#announce");
  window.announced = [];
  new MutationObserver(() => announced.push(place.textContent)).observe(place, {childList: true});
}"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One server for the tests of this module; its solver lives on its start."""
    folder = tmp_path_factory.mktemp("server")
    with running(make_settings(folder, solve_path=STARTS, lease_s=60.0)) as (address, _):
        yield address


def solved(url: str, name: str, **headers: str) -> dict[str, Any]:
    """An ended job."""
    problem = {"problem": two_stages(name)}
    answer = httpx.post(f"{url}/v1/jobs?wait=60", json=problem, headers=headers, timeout=90)
    job: dict[str, Any] = answer.json()
    assert job["state"] == "succeeded"
    return job


def asked(url: str, job: dict[str, Any], wait: int = 60, **headers: str) -> dict[str, Any]:
    """The batch when all of it has ended."""
    path, body = f"{url}/v1/batches?wait={wait}", {"what_if": job["id"]}
    batch: dict[str, Any] = httpx.post(path, json=body, headers=headers, timeout=90).json()
    return batch


def address(job: dict[str, Any], batch: dict[str, Any]) -> str:
    return f"?job={job['id']}&what_if={batch['id']}"


def shown(visit: Visit) -> list[str]:
    """The sentence of each row."""
    sentences: list[str] = visit.page.locator("#what-if .reason p:first-child").all_inner_texts()
    return sentences


def local(batch: dict[str, Any], job: dict[str, Any]) -> list[str]:
    """The sentence that `optpipe explain --what-if` prints of each item."""
    items = batch["items"]
    numbers = [item["values"]["num_microbatches"] for item in items]
    return [
        WhatIfAnswer(
            name=item["values"]["question"],
            text=item["name"].partition(": ")[2],
            before_ms=job["objective_ms"],
            num_before=min(numbers),
            after_ms=item["objective_ms"],
            num_after=number,
            bound_ms=item["bound_ms"],
            is_never_worse=True,
        )
        .sentence()
        .replace("->", "→")
        for item, number in zip(items, numbers, strict=True)
    ]


def newest(url: str) -> dict[str, Any]:
    """The batch that was asked for last."""
    batch_id = httpx.get(f"{url}/v1/batches?limit=1").json()["batches"][0]["id"]
    batch: dict[str, Any] = httpx.get(f"{url}/v1/batches/{batch_id}").json()
    return batch


def test_a_button_asks_and_a_reload_shows_the_same(visit: Visit, url: str) -> None:
    """The rows say what the command line says, the first of them what is gained by searching."""
    job = solved(url, "gains")
    page = visit.open(f"?job={job['id']}")
    page.wait_for_selector(ASK)
    page.fill("[aria-label='Seconds for each question']", "3")
    # What is announced next may be there before anybody looks.
    page.evaluate(KEEP_ANNOUNCED)
    page.click(ASK)
    page.wait_for_selector(ANSWERED)
    page.wait_for_function("() => announced.some((text) => text.startsWith('Answered: '))")
    batch = newest(url)
    assert shown(visit) == local(batch, job)
    assert shown(visit)[0].startswith("no change, searched again: ")
    assert batch["options"]["time_limit_s"] == 3
    visit.picture("what-if")
    page.reload()
    page.wait_for_selector(ANSWERED)
    assert shown(visit) == local(batch, job)
    assert newest(url)["id"] == batch["id"]


def test_each_answer_leads_to_its_schedule_beside_the_one_before(visit: Visit, url: str) -> None:
    job = solved(url, "gains")
    batch = asked(url, job)
    page = visit.open(address(job, batch))
    page.wait_for_selector(ANSWERED)
    row = page.locator("#what-if [data-name=one-more-gb]")
    assert "less" in row.locator("h3").inner_text()
    row.locator("a", has_text="Next to this one").click()
    page.wait_for_selector(f"#job[data-id='{batch['items'][1]['job_id']}']")
    page.wait_for_selector(f"{DRAWN}[data-tag*='{job['id']}']")
    visit.picture("what-if-beside")


def test_answers_appear_as_their_searches_end(visit: Visit, url: str) -> None:
    job = solved(url, "waits")
    batch = asked(url, job, wait=0)
    page = visit.open(address(job, batch))
    page.wait_for_selector("#what-if[data-finished=false]")
    httpx.post(f"{url}/v1/jobs/{batch['items'][1]['job_id']}/cancel", timeout=60)
    page.wait_for_selector("#what-if [data-name=one-more-gb][data-state=cancelled]")
    rest = page.locator("#what-if [data-name=twice-the-microbatches] p >> nth=0")
    assert rest.inner_text() == "twice the micro-batches (8)"
    assert page.is_disabled("#ask-what-if")
    httpx.post(f"{url}/v1/batches/{batch['id']}/cancel", timeout=60)
    page.wait_for_selector(ANSWERED)
    assert "ms per micro-batch as before" in rest.inner_text()


def test_a_job_that_was_searched_again_says_that_its_answers_are_older(
    visit: Visit, url: str
) -> None:
    job = solved(url, "later")
    batch = asked(url, job)
    httpx.post(f"{url}/v1/jobs/{job['id']}/resume?wait=60", json={"time_limit_s": 1}, timeout=90)
    page = visit.open(address(job, batch))
    page.wait_for_selector("#what-if >> text=searched again since it was asked about")
    assert page.inner_text(ASK) == "Ask again"
    page.click(ASK)
    page.wait_for_selector("#what-if >> text=Each is searched for 20 s from this schedule")
    page.wait_for_selector(ANSWERED)
    assert newest(url)["id"] in page.url


def test_what_was_deleted_since_can_be_asked_again(visit: Visit, url: str) -> None:
    job = solved(url, "keeps")
    page = visit.open(address(job, {"id": "0" * 32}))
    page.wait_for_function("!location.search.includes('what_if')")
    assert page.inner_text(ASK) == "Find out"
    assert shown(visit) == []
