"""Equal problems at one time, over HTTP: solved by one process, told to everybody."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.api.live import connected, make_settings, two_stages
from tests.api.test_events import followed, states
from tests.api.test_routes import submit

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx


@pytest.fixture(scope="module")
def http(tmp_path_factory) -> Iterator[httpx.Client]:
    """A server that remembers; names are not part of a problem, and are the fake's scripts."""
    folder = tmp_path_factory.mktemp("sharing")
    with connected(make_settings(folder, cache=True, lease_s=60.0)) as client:
        yield client


def ask(http: httpx.Client, script: str, num_microbatches: int, **options: Any) -> dict[str, Any]:
    """Submit a problem that its number of micro-batches tells from those of other tests."""
    answer = submit(http, script, wait=0, options=options, num_microbatches=num_microbatches)
    found: dict[str, Any] = answer.json()
    return found


def look(http: httpx.Client, job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = http.get(f"/v1/jobs/{job['id']}").json()
    return found


def until_it_has_a_schedule(http: httpx.Client, job: dict[str, Any]) -> None:
    while not look(http, job)["has_schedule"]:
        time.sleep(0.02)


def test_a_second_client_hears_what_the_first_ones_solve_finds(http) -> None:
    """As it comes, and the end; it took no attempt of its own."""
    first = ask(http, "improve:3:0.3", 5)
    until_it_has_a_schedule(http, first)
    second = ask(http, "improve:9:9", 5)
    assert (second["state"], second["cache"], second["source_id"]) == ("queued", "hit", first["id"])
    assert second["has_schedule"]
    entries = followed(http, second["id"])
    assert states(entries) == ["queued", "succeeded"]
    ends = [look(http, job) for job in (first, second)]
    assert ends[0]["objective_ms"] == ends[1]["objective_ms"]
    assert [one["attempt"] for one in ends] == [1, 0]
    texts = [http.get(f"/v1/jobs/{one['id']}/schedule").text for one in ends]
    assert texts[0] == texts[1]


def test_a_waiting_request_has_its_answer_with_the_first_ones_end(http) -> None:
    """Not a second later."""
    first = ask(http, "improve:1:0.5", 6)
    second = submit(http, "same", wait=30, num_microbatches=6)
    assert second.status_code == 200
    ended_at = look(http, first)["finished_at"]
    assert (second.json()["state"], second.json()["finished_at"]) == ("succeeded", ended_at)


def test_who_cancels_the_first_takes_nothing_from_the_second(http) -> None:
    """It is solved by itself, from what was found."""
    first = ask(http, "improve:30:0.3", 7)
    until_it_has_a_schedule(http, first)
    second = ask(http, "improve:0:0", 7)
    http.delete(f"/v1/jobs/{first['id']}")
    assert states(followed(http, second["id"])) == ["queued", "running", "succeeded"]
    ended = look(http, second)
    assert (ended["attempt"], ended["cache"], ended["source_id"]) == (1, "near", first["id"])


def test_a_fresh_answer_is_not_shared(http) -> None:
    """``refresh`` depends on nothing but the request."""
    first = ask(http, "improve:1:0.3", 8)
    second = ask(http, "improve:0:0", 8, cache="refresh")
    assert (second["cache"], second["source_id"]) == ("miss", None)
    for job in (first, second):
        followed(http, job["id"])
        assert look(http, job)["attempt"] == 1


def test_equal_items_of_a_batch_are_solved_once(http) -> None:
    """Each is told as if it were alone."""
    problem = two_stages("improve:1:0.2", num_microbatches=9)
    batch = http.post("/v1/batches", params={"wait": 30}, json={"problems": [problem] * 3}).json()
    jobs = http.get("/v1/jobs", params={"batch": batch["id"]}).json()["jobs"]
    assert [job["state"] for job in jobs] == ["succeeded"] * 3
    assert sorted(job["attempt"] for job in jobs) == [0, 0, 1]
    assert len({job["objective_ms"] for job in jobs}) == 1
