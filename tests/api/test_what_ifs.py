"""What-ifs: batches whose items are what a little more of something would buy a job."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given

from optpipe import Problem, check, load_schedule
from optpipe.answers import JobOptions
from optpipe.evaluate import evaluate
from optpipe.explain.what_if import AS_IT_IS, WhatIfQuestion, as_it_is, questions
from optpipe.formats.json import load_problem
from optpipe.schedule import Provenance
from optpipe_api import Settings
from optpipe_api.access import Role
from optpipe_api.errors import BodyTooHeavyError
from optpipe_api.services.batches import make_items
from optpipe_api.services.parse_pool import ParsePool
from tests.api import start_solver
from tests.api.live import connected, keyed, make_settings, two_stages
from tests.api.routes.test_jobs import fault, submit
from tests.strategies import Case, cases

STARTS = start_solver.__name__ + ":solve"
SETTINGS = {"lease_s": 60.0, "solve_path": STARTS, "max_cells": 20}
BUS = {"memory_bytes": 4000, "d2h_gb_per_s": 1.0, "h2d_gb_per_s": 1.0}
NAMES = [AS_IT_IS, "one-more-gb", "twice-the-microbatches"]


def starting(folder: Path, **overrides: Any) -> Settings:
    return make_settings(folder, lease_s=60.0, solve_path=STARTS, **overrides)


def solved(http: httpx.Client, name: str = "", **changes: Any) -> dict[str, Any]:
    job: dict[str, Any] = submit(http, name, **changes).json()
    assert job["state"] == "succeeded"
    return job


def post(http: httpx.Client, job: dict[str, Any] | str, wait: float = 60, **body: Any) -> Any:
    request = {"what_if": job if isinstance(job, str) else job["id"], **body}
    return http.post("/v1/batches", params={"wait": wait}, json=request)


def ask(http: httpx.Client, job: dict[str, Any], wait: float = 60, **options: Any) -> Any:
    answer = post(http, job, wait, options=options)
    assert answer.status_code == (200 if wait else 202), answer.text
    batch = answer.json()
    assert answer.headers["location"] == f"/v1/batches/{batch['id']}"
    return batch


def found(batch: dict[str, Any]) -> dict[str, float]:
    return {item["values"]["question"]: item["objective_ms"] for item in batch["items"]}


def both(http: httpx.Client, job_id: str) -> tuple[Problem, Any]:
    problem = Problem.parse(http.get(f"/v1/jobs/{job_id}/problem").json())
    return problem, load_schedule(http.get(f"/v1/jobs/{job_id}/schedule").text)


def asked_locally(http: httpx.Client, job: dict[str, Any]) -> dict[str, WhatIfQuestion]:
    """The questions of `optpipe explain --what-if` about the same job, by name."""
    problem, schedule = both(http, job["id"])
    both_kinds = [as_it_is(problem, schedule.programs), *questions(problem, schedule.programs)]
    return {one.name: one for one in both_kinds if isinstance(one, WhatIfQuestion)}


def offloading() -> list[dict[str, Any]]:
    return [{**stage, "offload_bytes": 1000} for stage in two_stages()["stages"]]


# Asking


def test_each_item_is_a_question_of_the_command_line(http) -> None:
    """Its problem, its name and its words; and more memory gains what the solver makes of it."""
    job = solved(http, "gains", devices=[BUS] * 2, stages=offloading())
    batch = ask(http, job)
    by_name = asked_locally(http, job)
    assert batch["axes"] == {"question": list(by_name)}
    for item, question in zip(batch["items"], by_name.values(), strict=True):
        assert item["values"] == {
            "question": question.name,
            "num_microbatches": question.problem.num_microbatches,
        }
        assert item["name"] == f"gains: {question.text}"
        changed, schedule = both(http, item["job_id"])
        assert changed == question.problem
        check(changed, schedule.programs)
        assert schedule.objective_ms == item["objective_ms"]
    after = found(batch)
    assert after["one-more-gb"] < job["objective_ms"] == after[AS_IT_IS] == after["faster-pcie"]


def test_each_search_starts_from_the_jobs_best_programs(http) -> None:
    """Twice as many micro-batches from the programs twice; a solver that only keeps its start."""
    job = solved(http, "keeps")
    by_name = asked_locally(http, job)
    for item in ask(http, job)["items"]:
        one = http.get(f"/v1/jobs/{item['job_id']}").json()
        assert both(http, one["id"])[1].programs == by_name[item["values"]["question"]].start
        assert (one["cache"], one["source_id"]) == ("near", job["id"])
        events = http.get(f"/v1/jobs/{one['id']}/events").text
        assert f"started from a schedule of job {job['id']}" in events


def test_what_is_found_is_no_worse_than_its_start_whatever_the_solver_finds(http) -> None:
    """One that knows a better schedule, and items whose solver finds a worse one."""
    for word in ("fused:worse", "worse"):
        job = solved(http, word)
        before = job["objective_ms"]
        assert found(ask(http, job)) == dict(zip(NAMES, (before, before, 2 * before), strict=True))


def test_what_makes_no_sense_is_left_out(http) -> None:
    """The service's own limit counts: it takes no problem of more cells. No bus, no faster one."""
    assert list(found(ask(http, solved(http, "keeps", num_microbatches=6)))) == NAMES[:2]


def test_a_proven_job_is_not_searched_again_without_a_change(http) -> None:
    """And where the bound of a changed problem is the length before, nothing can be gained."""
    job = solved(http, "proves")
    http.post(f"/v1/jobs/{job['id']}/resume", params={"wait": 60}, json={"time_limit_s": 1})
    batch = ask(http, job)
    assert list(found(batch)) == NAMES[1:]
    assert batch["items"][0]["bound_ms"] == job["objective_ms"]


def test_more_searching_alone_is_seen_beside_the_changes(http) -> None:
    """A second search gains without any change; the job itself, solved before, is no answer."""
    job = solved(http, "later", options={"time_limit_s": 20})
    after = found(ask(http, job, time_limit_s=20))
    assert after[AS_IT_IS] == after["one-more-gb"] < job["objective_ms"]


def test_it_is_a_batch_like_any_other(http) -> None:
    job = solved(http, "x" * 200)
    options = {"time_limit_s": 7, "threads": 2, "seed": 5}
    batch = post(http, job, options=options, priority=3, tags=["mine"]).json()
    assert batch["id"] in [one["id"] for one in http.get("/v1/batches").json()["batches"]]
    assert http.get(f"/v1/batches/{batch['id']}").json() == batch
    assert (batch["name"], batch["priority"]) == ("x" * 191 + ": what if", 3)
    assert options.items() <= batch["options"].items()
    item = http.get(f"/v1/jobs/{batch['items'][0]['job_id']}").json()
    assert (item["tags"], item["priority"], len(item["name"])) == (["mine"], 3, 200)
    assert (item["batch_id"], item["batch_index"]) == (batch["id"], 0)
    assert options.items() <= item["options"].items()
    table = http.get(f"/v1/batches/{batch['id']}/table?format=csv").text
    assert {"question", "num_microbatches"} <= set(table.splitlines()[0].split(","))
    lines = http.get(f"/v1/batches/{batch['id']}/frontier?format=json").json()["lines"]
    # More memory stands on the line of what is not changed.
    assert [(line["label"].split(",")[0], len(line["points"])) for line in lines] == [
        (f'question = "{AS_IT_IS}"', 2),
        (f'question = "{NAMES[2]}"', 1),
    ]
    assert post(http, job, name="mine").json()["name"] == "mine"


def test_a_repeated_key_asks_once_also_when_a_better_schedule_was_found(http) -> None:
    """What is asked about it then would be other problems; the request is the same."""
    job = solved(http, "later")
    headers = {"Idempotency-Key": "what"}
    body = {"what_if": job["id"]}
    first = http.post("/v1/batches", json=body, params={"wait": 60}, headers=headers).json()
    http.post(f"/v1/jobs/{job['id']}/resume", params={"wait": 60}, json={"time_limit_s": 1})
    assert http.post("/v1/batches", json=body, headers=headers).json() == first
    other = http.post("/v1/batches", json={**body, "priority": 1}, headers=headers)
    fault(other, 422, "idempotency.reused")
    other = http.post("/v1/batches", json={"what_if": solved(http)["id"]}, headers=headers)
    fault(other, 422, "idempotency.reused")


# What was solved before


def more_memory() -> list[dict[str, int]]:
    return [{"memory_bytes": 1_000_004_000}, {"memory_bytes": 4000}]


@pytest.mark.parametrize(("word", "is_hit"), [("worse", False), ("fused:", True)])
def test_what_was_solved_before_counts_only_if_it_is_no_worse_than_the_start(
    tmp_path, word: str, is_hit: bool
) -> None:
    """The changed problem was solved already, with all the time; names do not count."""
    with connected(starting(tmp_path, cache=True)) as http:
        known = solved(http, word, devices=more_memory(), options={"time_limit_s": 20})
        job = solved(http, "fused:", options={"time_limit_s": 20})
        first = ask(http, job, time_limit_s=20)["items"]
        assert found({"items": first})["one-more-gb"] == job["objective_ms"]
        more = http.get(f"/v1/jobs/{first[1]['job_id']}").json()
        assert more["problem_hash"] == known["problem_hash"]
        assert (more["cache"], more["source_id"]) == (
            ("hit", known["id"]) if is_hit else ("near", job["id"])
        )
        again = ask(http, job, time_limit_s=20)
        # What is searched without a change is searched each time.
        assert [item["cache"] for item in again["items"]] == ["near", "hit", "hit"]


@given(cases())
def test_every_start_is_the_schedule_that_its_programs_make(case: Case) -> None:
    """Legal for the changed problem, and as long as the core says; never longer where promised."""
    problem, programs = case
    schedule = evaluate(problem, programs, Provenance(method="given"))
    items = make_items(
        problem.model_dump_json(by_alias=True),
        schedule.model_dump_json(by_alias=True),
        9999,
        JobOptions(time_limit_s=1.0),
        is_proven=False,
    )
    promised = {
        question.name: question.is_never_worse
        for question in (as_it_is(problem, programs), *questions(problem, programs))
        if isinstance(question, WhatIfQuestion)
    }
    for item in items:
        assert item.job.start is not None
        changed = load_problem(item.job.documents["problem"])
        start = load_schedule(item.job.start.documents["schedule"])
        assert evaluate(changed, start.programs, Provenance(method="given")) == start.model_copy(
            update={"stopped_by": "work_limit"}
        )
        assert item.job.start.objective_ms == start.objective_ms
        share = start.objective_ms / changed.num_microbatches
        before = schedule.objective_ms / problem.num_microbatches
        is_never_worse = promised[item.plan.values["question"]]
        assert not is_never_worse or share <= before * (1 + 1e-9) + 1e-9


# What is refused


def test_only_an_ended_job_with_a_schedule_can_be_asked_about(tmp_path) -> None:
    with connected(make_settings(tmp_path)) as http:
        job = submit(http, "improve:3:9", wait=0).json()
        said = fault(post(http, job), 409, "state.conflict")["detail"]
        assert "wait for its end" in said
        http.post(f"/v1/jobs/{job['id']}/cancel")
        job = submit(http, "nothing").json()
        said = fault(post(http, job), 409, "state.conflict")["detail"]
        assert "resume it" in said
        job = submit(http, devices=[{"memory_bytes": 10}] * 2).json()
        refused = fault(post(http, job), 409, "problem.infeasible")
        assert refused["needs"]
        fault(post(http, "nothing"), 404, "job.not_found")
        assert http.get("/v1/batches").json()["batches"] == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"time_limit_s": 5}, "time_limit_s"),
        ({"options": {"method": "nothing"}}, "method"),
        ({"options": {"time_limit_s": 0}}, "time_limit_s"),
        ({"options": {"threads": 99}}, "OPTPIPE_MAX_THREADS"),
        ({"priority": 101}, "priority"),
        ({"problem": two_stages()}, "give one of them"),
        ({"problems": [two_stages()]}, "give one of them"),
        ({"axes": {"memory_scale": [1]}}, "axes vary one problem"),
        ({"what_if": ""}, "what_if"),
        ({"what_if": 7}, "what_if"),
    ],
)
def test_a_request_that_breaks_a_rule_is_refused_by_name(http, body: Any, said: str) -> None:
    job = solved(http, "keeps")
    answer = http.post("/v1/batches", json={"what_if": job["id"], **body})
    assert answer.status_code == 422
    assert said in answer.json()["detail"]


def test_they_are_no_more_than_the_items_of_a_batch_may_be(tmp_path) -> None:
    with connected(starting(tmp_path, max_batch_items=2)) as http:
        answer = post(http, solved(http, "keeps"))
        assert answer.status_code == 422
        assert "OPTPIPE_MAX_BATCH_ITEMS" in answer.json()["detail"]


def test_a_schedule_that_is_too_large_says_where_it_can_be_asked(http, monkeypatch) -> None:
    run = ParsePool.run

    async def refused(self: ParsePool, function: Any, *args: Any, **options: Any) -> Any:
        if function is make_items:
            raise BodyTooHeavyError("5 s")
        return await run(self, function, *args, **options)

    job = solved(http, "keeps")
    monkeypatch.setattr(ParsePool, "run", refused)
    answer = fault(post(http, job), 413, "schedule.too_large")
    assert "optpipe explain --what-if" in answer["detail"]


def test_a_what_if_belongs_to_whoever_asks(tmp_path) -> None:
    roles = {"ann": Role.SUBMIT, "bob": Role.SUBMIT, "root": Role.ADMIN}
    with keyed(starting(tmp_path, require_keys=True), **roles) as as_:
        job = solved(as_["ann"], "keeps")
        fault(post(as_["bob"], job), 404, "job.not_found")
        assert ask(as_["root"], job)["owner"] == "root"
