"""What more would buy, asked on the page: a button, and answers as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from optpipe_api import Settings
from optpipe_api.access import Role
from tests.api.live import make_settings, running, two_stages
from tests.browser.visit import DRAWN, PHONE, Visit, visiting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

STARTS = "tests.api.start_solver:solve"
ASK = "#ask-what-if:enabled"
ANSWERED = "#what-if[data-finished=true]"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One server for the tests of this module; its solver lives on its start."""
    folder = tmp_path_factory.mktemp("server")
    with running(make_settings(folder, solve_path=STARTS, lease_s=60.0)) as (address, _):
        yield address


@pytest.fixture
def visit(chromium: Browser, url: str) -> Iterator[Visit]:
    with visiting(chromium, url) as made:
        yield made


def solved(url: str, name: str, **headers: str) -> dict[str, Any]:
    """An ended job."""
    problem = {"problem": two_stages(name)}
    answer = httpx.post(f"{url}/v1/jobs?wait=60", json=problem, headers=headers, timeout=90)
    job: dict[str, Any] = answer.json()
    assert job["state"] == "succeeded"
    return job


def asked(url: str, job: dict[str, Any], wait: int = 60) -> dict[str, Any]:
    """What is answered when all is known."""
    path = f"{url}/v1/jobs/{job['id']}/what-ifs?wait={wait}"
    told: dict[str, Any] = httpx.post(path, json={}, timeout=90).json()
    return told


def sentences(told: dict[str, Any]) -> list[str]:
    return [one["sentence"] for one in (*told["answers"], *told["unasked"])]


def shown(visit: Visit) -> list[str]:
    """The sentence of each row."""
    return visit.page.locator("#what-if .reason p:first-child").all_inner_texts()


def test_a_button_asks_and_a_reload_shows_the_same(visit: Visit, url: str) -> None:
    """The schedule is searched once more before, as it is not proven; and that is said."""
    job = solved(url, "gains")
    page = visit.open(f"?job={job['id']}")
    page.wait_for_selector(ASK)
    page.fill("[aria-label='Seconds for each question']", "3")
    page.click(ASK)
    page.wait_for_selector("#announce:text-matches('First this schedule|Answered')")
    page.wait_for_selector(ANSWERED)
    told = httpx.get(f"{url}/v1/jobs/{job['id']}/what-ifs").json()
    assert shown(visit) == sentences(told)
    assert told["options"]["time_limit_s"] == 3
    again = httpx.get(f"{url}/v1/jobs/{job['id']}").json()
    assert again["options"]["time_limit_s"] == job["options"]["time_limit_s"] + 3
    posted = [address.rpartition("/")[2] for address in visit.requested]
    assert posted.index("resume") < posted.index("what-ifs", posted.index("resume"))
    visit.picture("what-if")
    page.reload()
    page.wait_for_selector(ANSWERED)
    assert shown(visit) == sentences(told)


def test_each_answer_leads_to_its_schedule_beside_the_one_before(visit: Visit, url: str) -> None:
    job = solved(url, "gains")
    told = asked(url, job)
    page = visit.open(f"?job={job['id']}")
    page.wait_for_selector(ANSWERED)
    row = page.locator("#what-if [data-name=one-more-gb]")
    assert "less" in row.locator("h3").inner_text()
    row.locator("a", has_text="Beside this one").click()
    page.wait_for_selector(f"#job[data-id='{told['answers'][0]['job_id']}']")
    page.wait_for_selector(f"{DRAWN}[data-tag*='{job['id']}']")
    visit.picture("what-if-beside")


def test_answers_appear_as_their_searches_end(visit: Visit, url: str) -> None:
    """One is cancelled, the other goes on; after a reload in between, too."""
    job = solved(url, "waits")
    told = asked(url, job, wait=0)
    first, second = (one["job_id"] for one in told["answers"])
    page = visit.open(f"?job={job['id']}")
    page.wait_for_selector("#what-if[data-finished=false]")
    httpx.delete(f"{url}/v1/jobs/{first}", timeout=60)
    page.wait_for_selector("#what-if [data-name=one-more-gb][data-state=cancelled]")
    rest = page.locator("#what-if [data-name=twice-the-microbatches] p >> nth=0")
    assert rest.inner_text() == "twice the micro-batches (8)"
    assert page.is_disabled("#ask-what-if")
    httpx.delete(f"{url}/v1/jobs/{second}", timeout=60)
    page.wait_for_selector(ANSWERED)
    assert "as before" in rest.inner_text()


def test_who_cancels_the_first_search_asks_nothing(visit: Visit, url: str) -> None:
    """And may ask again: the button is there."""
    job = solved(url, "waits")
    page = visit.open(f"?job={job['id']}")
    page.click(ASK)
    page.wait_for_selector("#what-if >> text=First this schedule is searched for 20 s more")
    page.wait_for_selector("#job[data-state=running]")
    assert page.is_disabled("#ask-what-if")
    page.click("#cancel")
    page.wait_for_selector(ASK)
    assert page.inner_text(ASK) == "What would more buy?"
    assert "First this schedule" not in page.inner_text("#what-if")


def test_a_proven_schedule_is_asked_about_at_once(visit: Visit, url: str) -> None:
    job = solved(url, "proves")
    # The first schedule of this solver is proven by nobody: its second search does that.
    httpx.post(f"{url}/v1/jobs/{job['id']}/resume?wait=60", json={"time_limit_s": 1}, timeout=90)
    page = visit.open(f"?job={job['id']}")
    page.click(ASK)
    page.wait_for_selector(ANSWERED)
    assert not [address for address in visit.requested if address.endswith("/resume")]
    assert "proven: nothing can be gained" in shown(visit)[0]


def test_a_better_schedule_makes_the_answers_old(visit: Visit, url: str) -> None:
    job = solved(url, "later")
    asked(url, job)
    httpx.post(f"{url}/v1/jobs/{job['id']}/resume?wait=60", json={"time_limit_s": 1}, timeout=90)
    page = visit.open(f"?job={job['id']}")
    page.wait_for_selector("#what-if >> text=about an earlier schedule")
    assert page.inner_text(ASK) == "Ask again"


def test_a_phone_in_the_dark_shows_it_and_the_keyboard_asks(chromium: Browser, url: str) -> None:
    """360 pixels, without scrolling sideways."""
    job = solved(url, "gains")
    with visiting(chromium, url, PHONE, "dark") as visit:
        page = visit.open(f"?job={job['id']}")
        page.wait_for_selector(ASK)
        page.focus(ASK)
        page.keyboard.press("Enter")
        page.wait_for_selector(ANSWERED)
        page.wait_for_selector(DRAWN)
        visit.picture("phone-what-if-dark")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]


def test_who_may_only_read_sees_answers_and_no_button(chromium: Browser, tmp_path) -> None:
    settings = make_settings(tmp_path, solve_path=STARTS, lease_s=60.0, require_keys=True)
    with running(settings) as (url, app):
        keys = app.state.service.keys
        writer = {"X-API-Key": keys.create("team", Role.SUBMIT)[1]}
        job = solved(url, "keeps", **writer)
        path = f"{url}/v1/jobs/{job['id']}/what-ifs?wait=60"
        httpx.post(path, json={}, headers=writer, timeout=90)
        keys.revoke("team")
        reader = keys.create("team", Role.READ)[1]
        with visiting(chromium, url) as visit:
            page = visit.page
            page.add_init_script(f"sessionStorage.setItem('optpipe-key', {reader!r})")
            visit.open(f"?job={job['id']}")
            page.wait_for_selector(ANSWERED)
            page.wait_for_selector("#ask-what-if", state="hidden")


@pytest.mark.timeout(300)
def test_the_solver_itself_answers(chromium: Browser, tmp_path) -> None:
    """Room for one activation at a time; with 1 GB more the pipeline fills."""
    settings = Settings(
        database_url=f"sqlite:///{tmp_path}/jobs.db", solver_processes=1, max_threads=1
    )
    with running(settings) as (url, _), visiting(chromium, url) as visit:
        problem = two_stages("tight", devices=[{"memory_bytes": 1000}, {"memory_bytes": 4000}])
        answer = httpx.post(f"{url}/v1/jobs?wait=60", json={"problem": problem}, timeout=200)
        job = answer.json()
        page = visit.open(f"?job={job['id']}")
        page.fill("[aria-label='Seconds for each question']", "5")
        page.click(ASK)
        page.wait_for_selector(ANSWERED, timeout=250_000)
        told = httpx.get(f"{url}/v1/jobs/{job['id']}/what-ifs").json()
        assert shown(visit) == sentences(told)
        more = told["answers"][0]
        assert more["gain"] > 0.1
        assert more["sentence"].endswith("proven: that is the best")
