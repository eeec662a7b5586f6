"""Server-sent events: everything once, in order, whoever reconnects, resumes or restarts."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import closing
from typing import Any

import httpx
import pytest
from httpx_sse import connect_sse

from optpipe.answers import EventKind
from optpipe_api.errors import StoreUnavailableError
from optpipe_api.jobs import HistoryEntry
from optpipe_api.routes import jobs
from tests.api.live import client, make_settings, running, until
from tests.api.routes.test_jobs import fault, submit


def follow(
    http: httpx.Client, job_id: str, after: int | None = None
) -> Generator[dict[str, Any], None, None]:
    """The data of a job's events from one connection; id and kind are checked against it."""
    headers = {} if after is None else {"Last-Event-ID": str(after)}
    with connect_sse(http, "GET", f"/v1/jobs/{job_id}/events", headers=headers) as source:
        for event in source.iter_sse():
            if not event.data:
                continue  # a ping: httpx-sse takes the blank line after it for an event
            data = event.json()
            assert (event.id, event.event) == (str(data["number"]), data["kind"])
            yield data


def followed(http: httpx.Client, job_id: str, after: int | None = None) -> list[dict[str, Any]]:
    return list(follow(http, job_id, after))


def numbers(entries: list[dict[str, Any]]) -> list[int]:
    return [entry["number"] for entry in entries]


def states(entries: list[dict[str, Any]]) -> list[str]:
    return [entry["text"] for entry in entries if entry["kind"] == "state"]


def test_a_job_is_followed_from_its_birth_to_its_end(http) -> None:
    job = submit(http, "improve:2:0.2", wait=0).json()
    live = followed(http, job["id"])
    assert states(live) == ["queued", "running", "succeeded"]
    assert numbers(live) == sorted({*numbers(live)})
    found = [entry for entry in live if entry["kind"] == "incumbent"]
    assert [entry["method"] for entry in found][:3] == ["fake-0", "fake-1", "fake-2"]
    view = http.get(f"/v1/jobs/{job['id']}").json()
    assert (found[-1]["objective_ms"], found[-1]["gap"]) == (view["objective_ms"], view["gap"])
    assert followed(http, job["id"]) == live


def test_a_stream_is_not_stored_and_not_buffered(http) -> None:
    job = submit(http).json()
    answer = http.get(f"/v1/jobs/{job['id']}/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.text.count("retry: 1000\n") == 1


def test_reconnecting_anywhere_misses_and_doubles_nothing(http) -> None:
    job = submit(http, "improve:2:0").json()
    path = f"/v1/jobs/{job['id']}/events"
    whole = followed(http, job["id"])
    for seen, last in enumerate(numbers(whole)[:-1], start=1):
        assert followed(http, job["id"], last) == whole[seen:]
        text = http.get(path, params={"after": last}).text
        assert [line for line in text.split("\n") if line.startswith("id: ")] == [
            f"id: {number}" for number in numbers(whole)[seen:]
        ]
    for last in (whole[-1]["number"], 2**53):
        answer = http.get(path, headers={"Last-Event-ID": str(last)})
        assert (answer.status_code, answer.content) == (204, b"")


@pytest.mark.parametrize("last", ["x", "-1", "1.5", str(2**80)])
def test_an_illegal_event_number_is_refused(http, last: str) -> None:
    job = submit(http).json()
    path = f"/v1/jobs/{job['id']}/events"
    fault(http.get(path, headers={"Last-Event-ID": last}), 422, "request.invalid")
    fault(http.get(path, params={"after": last}), 422, "request.invalid")


def test_a_stopping_server_lets_followers_go_and_another_one_goes_on(tmp_path) -> None:
    """The next server on the same database knows where each was."""
    settings = make_settings(tmp_path)
    seen: list[dict[str, Any]] = []
    with running(settings) as (url, _):
        job = _submitted(url)
        thread = threading.Thread(target=_follow_until_cut, args=(url, job["id"], seen))
        thread.start()
        until(lambda: any(entry["kind"] == "incumbent" for entry in seen))
        began = time.monotonic()
    thread.join()
    assert time.monotonic() - began < 40
    with running(settings) as (url, _), client(url) as http:
        http.post(f"/v1/jobs/{job['id']}/cancel")
        rest = followed(http, job["id"], seen[-1]["number"])
        assert seen + rest == followed(http, job["id"])
    assert states(rest)[-1] == "cancelled"


def _submitted(url: str) -> dict[str, Any]:
    with client(url) as http:
        found: dict[str, Any] = submit(http, "improve:30:0.2", wait=0).json()
    return found


def _follow_until_cut(url: str, job_id: str, seen: list[dict[str, Any]]) -> None:
    with client(url) as http:
        seen.extend(follow(http, job_id))


# Without a server: pauses, a database that is gone, clients that are gone


def entry(number: int) -> HistoryEntry:
    return HistoryEntry(number=number, kind=EventKind.LOG, at=0.0, text="said\nin two lines")


@pytest.mark.anyio
async def test_pauses_are_filled_with_pings() -> None:
    async def entries() -> AsyncGenerator[HistoryEntry, None]:
        yield entry(1)
        await asyncio.sleep(0.5)
        yield entry(2)

    first, *pings, second = [part async for part in jobs._encode_events(entries(), ping_s=0.1)]
    assert first.startswith(b"event: log\ndata: {")
    assert second.endswith(b"id: 2\n\n")
    assert json.loads(second.split(b"\n")[1].removeprefix(b"data: "))["text"] == entry(2).text
    assert set(pings) == {b": ping\n\n"}
    assert len(pings) >= 2


@pytest.mark.anyio
async def test_a_database_that_is_gone_ends_the_stream_for_a_reconnection() -> None:
    """Without a word, as the answer has begun."""

    async def entries() -> AsyncGenerator[HistoryEntry, None]:
        yield entry(1)
        raise StoreUnavailableError("gone")

    assert len([part async for part in jobs._encode_events(entries())]) == 1


def test_a_client_that_is_gone_leaves_nobody_reading(tmp_path) -> None:
    """Neither one that waits nor one that has just been sent something."""
    server = running(make_settings(tmp_path))
    with server as (url, app), client(url) as http:
        job = submit(http, "improve:1:60", wait=0).json()
        followers = app.state.service.jobs._followers
        for count in (1, 3):
            with closing(follow(http, job["id"])) as entries:
                for _ in range(count):
                    next(entries)
            until(lambda: not followers._tails)
        http.post(f"/v1/jobs/{job['id']}/cancel")
