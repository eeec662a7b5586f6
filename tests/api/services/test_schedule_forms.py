"""Fetching schedules: forms, entity tags, waiting for the next improvement."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from xml.etree import ElementTree as ET

import httpx
import pytest

from optpipe import load_csv, load_schedule
from optpipe.errors import MissingExtraError
from optpipe_api.errors import (
    BodyTooHeavyError,
    FormUnavailableError,
    TooLargeToDrawError,
    TooManyBodiesError,
    TooManyFormsError,
)
from optpipe_api.services import render
from optpipe_api.services.parse_pool import ParsePool
from optpipe_api.services.render import Charts, as_text
from tests.api.routes.test_jobs import fault, submit

TRACE = "application/vnd.optpipe.trace+json"


@pytest.fixture(scope="module")
def job(http):
    """An ended job with three schedules behind it."""
    return submit(http, "improve:2:0").json()


@pytest.fixture
def path(job) -> str:
    return f"/v1/jobs/{job['id']}/schedule"


@pytest.fixture(scope="module")
def texts(http, job) -> tuple[str, str]:
    """Schedule and problem, as they are stored."""
    place = f"/v1/jobs/{job['id']}"
    return http.get(f"{place}/schedule").text, http.get(f"{place}/problem").text


def test_a_trace_shows_every_action(http, path) -> None:
    """By name or by media type."""
    named = http.get(path, params={"format": "trace"})
    assert named.headers["content-type"] == TRACE
    events = [event for event in named.json()["traceEvents"] if event["ph"] == "X"]
    programs = load_schedule(http.get(path).text).programs
    assert sorted(event["name"] for event in events) == sorted(
        str(action) for program in programs for action in program
    )
    assert http.get(path, headers={"Accept": TRACE}).content == named.content


def test_a_picture_is_an_svg_without_scripts(http, path) -> None:
    """And the same each time."""
    first, again = (http.get(path, headers={"Accept": "image/svg+xml"}) for _ in range(2))
    assert first.headers["content-type"] == "image/svg+xml"
    assert "sandbox" in first.headers["content-security-policy"]
    root = ET.fromstring(first.text)
    assert root.tag.endswith("svg")
    assert not [item for item in root.iter() if item.tag.endswith("script")]
    assert first.content == again.content


@pytest.mark.parametrize("form", ["json", "csv", "trace"])
def test_each_form_has_a_tag_by_which_it_is_known(http, job, path, form) -> None:
    """304 for it, the schedule for any other."""
    first = http.get(path, params={"format": form})
    tag = first.headers["etag"]
    assert tag.startswith(f'"{job["id"]}.{job["num_schedules"]}')
    same = http.get(path, params={"format": form}, headers={"If-None-Match": tag})
    assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", tag)
    assert same.headers["vary"] == "Accept"
    other = {"json": "csv", "csv": "trace", "trace": "json"}[form]
    assert http.get(path, params={"format": other}, headers={"If-None-Match": tag}).content


def test_an_ended_job_does_not_wait(http, path) -> None:
    """Nothing better will come: 304 at once."""
    tag = http.get(path).headers["etag"]
    began = time.monotonic()
    answer = http.get(path, params={"wait": 60}, headers={"If-None-Match": tag})
    assert answer.status_code == 304
    assert time.monotonic() - began < 30


def test_waiting_gives_every_improvement_as_it_comes(http) -> None:
    """The first schedule too; each is better than the one before."""
    job = submit(http, "improve:3:0.4", wait=0).json()
    path = f"/v1/jobs/{job['id']}/schedule"
    found: list[httpx.Response] = []
    tag = ""
    while True:
        answer = http.get(path, params={"wait": 60}, headers={"If-None-Match": tag})
        if answer.status_code == 304:
            break
        found.append(answer)
        tag = answer.headers["etag"]
    lengths = [load_schedule(answer.text).objective_ms for answer in found]
    assert lengths == sorted(lengths, reverse=True)
    assert len({*lengths}) >= 3
    assert len({answer.headers["etag"] for answer in found}) == len(found)


def test_waiting_for_a_schedule_that_never_comes_says_so(http) -> None:
    """404 with the state when the time is up, and when the job has ended."""
    job = submit(http, "nothing", wait=0).json()
    answer = http.get(f"/v1/jobs/{job['id']}/schedule", params={"wait": 60})
    fault(answer, 404, "schedule.none")
    fault(http.get(f"/v1/jobs/{'0' * 32}/schedule", params={"wait": 60}), 404, "job.not_found")


def test_a_large_schedule_becomes_the_same_text_in_a_process(texts, monkeypatch) -> None:
    """As in a thread."""
    with closing(ParsePool()) as pool:
        monkeypatch.setattr("optpipe_api.services.parse_pool._IN_THREAD_BYTES", 0)
        text = asyncio.run(pool.run(as_text, "csv", texts[0]))
    assert text == as_text("csv", texts[0])
    assert load_csv(text) == load_schedule(texts[0]).programs


def drawn(monkeypatch, error: Exception) -> None:
    """Ask for a picture, where the process that draws raises an error."""

    async def run(*_: object, **__: object) -> None:
        raise error

    with closing(Charts()) as charts:
        monkeypatch.setattr(charts._pool, "run", run)
        asyncio.run(charts.picture("", ""))


def test_a_picture_of_too_many_actions_is_refused_with_the_limit(texts, monkeypatch) -> None:
    """Before anything is drawn."""
    monkeypatch.setattr(render, "MOST_CHARTED", 5)
    with pytest.raises(TooLargeToDrawError, match="may have 5") as caught:
        render.draw(*texts)
    with pytest.raises(TooLargeToDrawError, match=r"20 actions, .* may have 5.*optpipe plot"):
        drawn(monkeypatch, caught.value)


def test_a_server_without_matplotlib_says_what_to_install(texts, monkeypatch) -> None:
    """406, as for a form that does not exist."""
    monkeypatch.setattr("optpipe.plot.scene.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError) as missing:
        render.draw(*texts)
    with pytest.raises(FormUnavailableError, match=r"pip install 'optpipe\[plot\]'"):
        drawn(monkeypatch, missing.value)


def test_a_drawing_that_takes_too_long_or_waits_for_too_many_is_refused(monkeypatch) -> None:
    """413 and 429: what the processes that draw raise is said of drawing."""
    with pytest.raises(TooLargeToDrawError, match="more than 30 s"):
        drawn(monkeypatch, BodyTooHeavyError("30 s"))
    with pytest.raises(TooManyFormsError):
        drawn(monkeypatch, TooManyBodiesError(16))


def test_a_poll_that_nobody_waits_for_does_no_harm(http) -> None:
    """Clients hang up while they wait; the job and the service go on."""
    job = submit(http, "improve:1:3", wait=0).json()
    path = f"/v1/jobs/{job['id']}/schedule"
    known = {"If-None-Match": http.get(path, params={"wait": 60}).headers["etag"]}
    for _ in range(3):
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"{http.base_url}{path}", params={"wait": 60}, headers=known, timeout=0.2)
    better = http.get(path, params={"wait": 60}, headers=known)
    assert (better.status_code, better.headers["etag"]) != (200, known["If-None-Match"])
