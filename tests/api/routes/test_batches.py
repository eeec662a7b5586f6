"""Batches over HTTP: sweeps and lists, progress, tables, frontiers, cancel and retry."""

import json
import time
from typing import Any

import httpx
import pytest

from optpipe import Problem, Schedule
from optpipe.evaluate import evaluate
from optpipe.formats.tables import load_sweep_csv
from optpipe_api import Settings
from optpipe_api.access import Role
from optpipe_api.errors import BodyTooLargeError
from optpipe_api.services import submission
from optpipe_api.services.submission import read_batch
from tests.api.live import (
    client,
    connected,
    keyed,
    make_settings,
    running,
    two_stages,
    until,
)

BASE = "/v1/batches"
SCALES = [1, 0.5, 0.2]
SETTINGS = {"cache": True, "max_batch_items": 20, "max_cells": 1000, "max_queued_jobs": 40}


def body(name: str = "a", axes: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "problem": two_stages(name),
        "axes": {"memory_scale": SCALES} if axes is None else axes,
        "options": {"time_limit_s": 5},
        **more,
    }


def refused(http: httpx.Client, request: Any, status: int = 422, **options: Any) -> str:
    before = len(http.get("/v1/jobs?limit=200").json()["jobs"])
    answer = http.post(BASE, json=request, **options)
    assert answer.status_code == status, answer.text
    assert len(http.get("/v1/jobs?limit=200").json()["jobs"]) == before, "jobs were made"
    detail: str = answer.json()["detail"]
    return detail


def made(http: httpx.Client, request: dict[str, Any], **options: Any) -> dict[str, Any]:
    answer = http.post(BASE, json=request, params={"wait": 60}, **options)
    assert answer.status_code == 200, answer.text
    batch: dict[str, Any] = answer.json()
    assert answer.headers["Location"] == f"{BASE}/{batch['id']}"
    return batch


# Submitting


def test_a_sweep_becomes_a_job_of_each_combination(http) -> None:
    batch = made(http, body() | {"tags": ["b", "a"], "priority": 3, "name": "sweep"})
    assert (batch["name"], batch["is_finished"], batch["progress"]) == ("sweep", True, 1.0)
    assert batch["counts"] == {
        "queued": 0, "running": 0, "succeeded": 2, "infeasible": 1, "failed": 0, "cancelled": 0,
    }  # fmt: skip
    assert (batch["num_items"], batch["tags"], batch["priority"]) == (3, ["a", "b"], 3)
    assert batch["axes"] == {"memory_scale": SCALES}
    assert batch["options"]["time_limit_s"] == 5
    assert batch["finished_at"] >= batch["created_at"]
    for index, (item, scale) in enumerate(zip(batch["items"], SCALES, strict=True)):
        job = http.get(f"/v1/jobs/{item['job_id']}").json()
        assert item["index"] == job["batch_index"] == index
        assert item["values"] == {"memory_scale": scale}
        assert item["memory_bytes"] == 4000 * scale
        assert job["name"] == item["name"] == f"a memory_scale = {scale}"
        assert (job["batch_id"], job["tags"], job["priority"]) == (batch["id"], ["a", "b"], 3)
        assert (job["state"], job["objective_ms"]) == (item["state"], item["objective_ms"])
        problem = Problem.parse(http.get(f"/v1/jobs/{item['job_id']}/problem").json())
        assert problem.devices[0].memory_bytes == 4000 * scale
    assert batch["items"][2]["error"]["code"] == "problem.infeasible"
    listed = http.get("/v1/jobs", params={"batch": batch["id"]}).json()["jobs"]
    # Newest first: those of least memory were made first, and are solved first.
    assert [job["batch_index"] for job in listed] == [0, 1, 2]
    assert http.get(f"{BASE}/{batch['id']}").json() == batch


def test_what_was_solved_before_is_answered_at_once(http) -> None:
    axes = {"num_microbatches": [5, 6]}
    made(http, body("first", axes))
    answer = http.post(BASE, json=body("second", axes))
    assert answer.status_code == 200
    assert {item["cache"] for item in answer.json()["items"]} == {"hit"}
    near = made(http, body("near", axes | {"stages[0].forward_ms": [10.5]}))
    assert {item["cache"] for item in near["items"]} == {"near"}


# Refusing


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"axes": {"memory": [1]}}, "axes.memory: is neither an axis"),
        ({"axes": {"memory_scale": []}}, "axes.memory_scale"),
        ({"axes": {"memory_scale": 1}}, "axes.memory_scale"),
        ({"axes": {f"axis {index}": [1] for index in range(9)}}, "axes"),
        ({"axes": {"num_microbatches": [4, -1]}}, "the variation num_microbatches = -1 is no"),
        ({"problem": 1}, "must be an object"),
        ({"problems": [two_stages()]}, "give one of them"),
        ({"problems": None}, "problems: must be a list"),
        ({"options": {"time_limit_s": 1e9}}, "options.time_limit_s"),
        ({"options": {"method": "magic"}}, "options.method"),
        ({"options": {"objective": "span"}}, "options.objective: unknown field"),
        ({"tags": ["a b"]}, "tags"),
        ({"what": 1}, "what: unknown field"),
    ],
)
def test_what_breaks_a_rule_is_refused_and_nothing_is_made(http, change, words: str) -> None:
    assert words in refused(http, body() | change)


def test_listed_problems_are_refused_by_their_place(http) -> None:
    bad = two_stages() | {"num_microbatches": 0}
    assert "problems[1]: num_microbatches = 0" in refused(http, {"problems": [two_stages(), bad]})
    both = {"problems": [two_stages()], "axes": {"memory_scale": [1]}}
    assert "give problem instead" in refused(http, both)
    assert "problems" in refused(http, {"problems": []})
    assert "problem" in refused(http, {})
    assert "must be an object" in refused(http, [])


def test_too_many_items_are_refused_with_both_numbers(http) -> None:
    """Counted before anything is made of them."""
    many = {"num_microbatches": list(range(1, 8)), "memory_scale": SCALES}
    words = "the batch has 21 items, and may have 20 (OPTPIPE_MAX_BATCH_ITEMS)"
    assert words in refused(http, body(axes=many))
    assert words in refused(http, {"problems": [{}] * 21})


def test_an_item_that_is_too_large_is_named(http) -> None:
    detail = refused(http, body("b", {"num_microbatches": [4, 501]}))
    assert "item 1 (b num_microbatches = 501): num_microbatches = 501: stages x" in detail


def test_hostile_sweeps_are_refused_in_no_time(http) -> None:
    """A few bytes that ask for a lot, and a lot of values that ask for little."""
    thousand = list(range(1, 1001))
    for axes in (
        {f"stages[0].{name}": thousand for name in ("forward_ms", "activation_bytes", "device")},
        {"num_microbatches": list(range(1, 80_000))},
        {"num_microbatches": [10**9]},
        {"memory_scale": [10**300]},
        {f"devices[{'9' * 199}].memory_bytes": [1]},
    ):
        began = time.monotonic()
        assert len(refused(http, body(axes=axes))) < 700
        # Mostly of what else this machine does.
        assert time.monotonic() - began < 20


def test_problems_that_are_too_large_together_are_refused(monkeypatch) -> None:
    """A small body may make large problems: their bytes are counted."""
    monkeypatch.setattr(submission, "MAX_BATCH_BYTES", 2000)
    with pytest.raises(BodyTooLargeError, match="the first 2 of 3 problems take more than 2000"):
        read_batch(json.dumps(body()).encode(), Settings(), ["auto"])


# Results


def test_the_table_comes_as_json_csv_and_markdown(http) -> None:
    batch = made(http, body("table"))
    url = f"{BASE}/{batch['id']}/table"
    rows = http.get(url).json()["rows"]
    assert [row["values"] for row in rows] == [{"memory_scale": scale} for scale in SCALES]
    assert [row["objective_ms"] for row in rows] == [i["objective_ms"] for i in batch["items"]]
    assert [row["job_id"] for row in rows] == [item["job_id"] for item in batch["items"]]
    assert rows[2]["state"] == "infeasible"
    assert "no schedule fits" in rows[2]["message"]
    csv = http.get(url, headers={"Accept": "text/csv"})
    assert csv.headers["Content-Type"].startswith("text/csv")
    assert load_sweep_csv(csv.text) == rows
    markdown = http.get(url, params={"format": "markdown"}).text.splitlines()
    assert markdown[0].startswith("| memory_scale | state | memory | objective ms |")
    assert len(markdown) == 5
    assert http.get(url, headers={"Accept": "image/png"}).status_code == 406


def test_the_frontier_comes_as_numbers_and_as_a_picture(http) -> None:
    axes = {"num_microbatches": [2, 4], "memory_scale": SCALES}
    batch = made(http, body("frontier", axes))
    url = f"{BASE}/{batch['id']}/frontier"
    lines = http.get(url).json()["lines"]
    assert [line["label"] for line in lines] == ["num_microbatches = 2", "num_microbatches = 4"]
    for line in lines:
        points = line["points"]
        assert [point["memory_bytes"] for point in points] == [800, 2000, 4000]
        assert [point["is_infeasible"] for point in points] == [True, False, False]
        assert points[0]["objective_ms"] is None
        assert points[1]["objective_ms"] == points[2]["objective_ms"] > 0
    picture = http.get(url, params={"format": "svg"})
    assert picture.status_code == 200, picture.text
    assert picture.headers["Content-Type"] == "image/svg+xml"
    assert "sandbox" in picture.headers["Content-Security-Policy"]
    assert "num_microbatches = 4" in picture.text
    assert "frontier" in picture.text


@pytest.mark.parametrize("path", ["", "/table", "/frontier"])
def test_an_unknown_batch_is_not_found(http, path: str) -> None:
    for batch_id in ("0" * 32, "x"):
        answer = http.get(f"{BASE}/{batch_id}{path}")
        assert (answer.status_code, answer.json()["code"]) == (404, "batch.not_found")
    assert http.post(f"{BASE}/{'0' * 32}/cancel").status_code == 404
    assert http.post(f"{BASE}/{'0' * 32}/retry").status_code == 404


@pytest.mark.parametrize(("loose", "state"), [("improve:1:0:a", "succeeded"), ("fails", "failed")])
def test_a_row_shows_the_schedule_of_a_tighter_item_and_no_final_job_changes(
    tmp_path, loose: str, state: str
) -> None:
    """In items, table and frontier; the looser job is the same to the last byte."""
    roomy = two_stages(loose, devices=[{"memory_bytes": 5000}] * 2)
    request = {"problems": [roomy, two_stages("improve:4:0.3:b")]}
    with connected(make_settings(tmp_path, lease_s=60.0)) as http:
        path = f"{BASE}/{http.post(BASE, json=request).json()['id']}"
        own, tighter = (f"/v1/jobs/{item['job_id']}" for item in http.get(path).json()["items"])
        until(lambda: http.get(own).json()["state"] == state)
        paths = [own, f"{own}/events", f"{own}/schedule"]
        before = [http.get(one).content for one in paths]
        batch = until(lambda: http.get(path).json(), lambda now: now["is_finished"])
        assert [http.get(one).content for one in paths] == before
        best_ms = http.get(tighter).json()["objective_ms"]
        assert json.loads(before[0])["objective_ms"] != best_ms
        rows = http.get(f"{path}/table").json()["rows"]
        (line,) = http.get(f"{path}/frontier").json()["lines"]
        for found in (batch["items"], rows, line["points"]):
            assert [one["objective_ms"] for one in found] == [best_ms, best_ms]
        assert [row["state"] for row in rows] == [state, "succeeded"]
        tight_id = tighter.rpartition("/")[2]
        assert [item["schedule_job_id"] for item in batch["items"]] == [tight_id] * 2
        assert f"the schedule of job {tight_id}" in rows[0]["message"]
        assert rows[1]["message"] is None
        # It is legal in the looser problem, and as long as the row says.
        schedule = Schedule.parse(http.get(f"{tighter}/schedule").json())
        again = evaluate(Problem.parse(roomy), schedule.programs, schedule.provenance)
        assert again.objective_ms == best_ms


# Changing


def test_cancel_ends_what_waits_and_stops_what_runs(tmp_path) -> None:
    settings = make_settings(tmp_path, solver_processes=1, lease_s=60.0)
    with connected(settings) as http:
        axes = {"stages[0].grad_sync_ms": [3, 2, 1]}
        answer = http.post(BASE, json=body("improve:3:20: ", axes))
        assert answer.status_code == 202
        url = f"{BASE}/{answer.json()['id']}"
        while not http.get(url).json()["items"][0]["objective_ms"]:
            time.sleep(0.02)
        seen = http.get(url).json()
        assert (seen["progress"], seen["counts"]["running"], seen["counts"]["queued"]) == (0, 1, 2)
        assert not seen["is_finished"]
        http.post(f"{url}/cancel")
        ended = http.get(url, params={"wait": 60}).json()
        assert (ended["counts"]["cancelled"], ended["is_finished"]) == (3, True)
        # Only the first item ran; the looser ones show its schedule.
        (first, *_) = items = ended["items"]
        assert {item["schedule_job_id"] for item in items} == {first["job_id"]}
        jobs = [http.get(f"/v1/jobs/{item['job_id']}").json() for item in items]
        assert [job["objective_ms"] is None for job in jobs] == [False, True, True]
        assert http.post(f"{url}/cancel").status_code == 200
        assert http.delete(url).status_code == 204
        assert http.get(url).status_code == 404


def test_a_batch_that_is_deleted_before_it_is_shown_is_shown_as_it_was(
    tmp_path, monkeypatch
) -> None:
    """A batch of known answers has ended when it is added."""
    with running(make_settings(tmp_path, cache=True)) as (url, app), client(url) as http:
        made(http, body())
        store = app.state.service._stores.batches
        plan = store.plan

        def delete_and_plan(batch_id: str) -> Any:
            store.delete(batch_id)
            return plan(batch_id)

        monkeypatch.setattr(store, "plan", delete_and_plan)
        answer = http.post(BASE, json=body())
        batch = answer.json()
        assert (answer.status_code, batch["is_finished"], batch["num_items"]) == (200, True, 3)
        assert http.get(f"{BASE}/{batch['id']}").status_code == 404


def test_retry_queues_failed_items_again_as_the_same_jobs(tmp_path) -> None:
    """Both solver processes die at first; the second time they start from what they had found."""
    settings = make_settings(tmp_path, max_attempts=1, lease_s=60.0)
    names = [f"dies:2:{tmp_path}/{index}" for index in range(2)]
    with connected(settings, processes=True) as http:
        problems = [
            two_stages(name, num_microbatches=2 + at) for at, name in enumerate([*names, "fine"])
        ]
        batch = made(http, {"problems": problems})
        assert [item["state"] for item in batch["items"]] == ["failed", "failed", "succeeded"]
        url = f"{BASE}/{batch['id']}/retry"
        again = http.post(url, params={"wait": 60}).json()
        assert [item["state"] for item in again["items"]] == ["succeeded"] * 3
        ids = [[item["job_id"] for item in seen["items"]] for seen in (batch, again)]
        assert ids[0] == ids[1]
        for index in range(2):
            log = (tmp_path / str(index)).read_text(encoding="utf-8").split("\n")
            assert log == ["from nothing", "with start", ""]
        nothing = http.post(url)
        assert (nothing.status_code, nothing.json()) == (200, again)


def test_batches_of_others_do_not_exist(tmp_path) -> None:
    settings = make_settings(tmp_path, require_keys=True, max_jobs_per_key=3)
    roles = {"ann": Role.SUBMIT, "bob": Role.SUBMIT, "root": Role.ADMIN}
    with keyed(settings, **roles) as as_:
        mine = made(as_["ann"], body())
        path = f"{BASE}/{mine['id']}"
        assert mine["owner"] is None
        for what in ("GET", "GET /table", "GET /frontier", "POST /retry", "DELETE"):
            method, _, suffix = what.partition(" ")
            assert as_["bob"].request(method, path + suffix).status_code == 404
        assert as_["bob"].get(BASE).json()["batches"] == []
        assert as_["root"].get(path).json()["owner"] == "ann"
        assert len(as_["root"].get(BASE).json()["batches"]) == 1
        answer = as_["ann"].post(BASE, json=body(axes={"memory_scale": [1, 0.9, 0.8, 0.7]}))
        assert (answer.status_code, answer.json()["code"]) == (429, "key.too_many_jobs")
        assert as_["ann"].post(BASE, json=body()).status_code in (200, 202)
