"""The client: what it sends, when it tries again, and which errors it raises."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from optpipe import Problem
from optpipe.client import Client
from optpipe.errors import (
    InfeasibleProblemError,
    InputError,
    ProblemError,
    ScheduleFormatError,
    ServiceError,
    ServiceUnreachableError,
)
from tests.building import problem, stage

JOB = {
    "id": "a" * 32,
    "state": "running",
    "has_schedule": False,
    "problem_hash": "sha256:0",
    "objective": "makespan",
    "created_at": "2026-01-31T12:00:00Z",
    "a_field_of_the_future": 1,
}


class Script:
    """Answers requests from a list, and remembers them; an exception in the list is raised."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def client(script: Script, **arguments) -> Client:
    return Client("http://planner:8000/base", transport=httpx.MockTransport(script), **arguments)


def told(**changes) -> httpx.Response:
    return httpx.Response(200, json=JOB | changes)


def fault(status: int, code: str, headers=None, **extra) -> httpx.Response:
    headers = {"Content-Type": "application/problem+json"} | (headers or {})
    body = {"status": status, "code": code, "detail": "the reason", **extra}
    return httpx.Response(status, headers=headers, content=json.dumps(body))


@pytest.fixture(autouse=True)
def pauses(monkeypatch) -> list[float]:
    """No test waits; the pauses the client would have made are listed."""
    made: list[float] = []
    monkeypatch.setattr("optpipe.client.time.sleep", made.append)
    return made


def test_a_submission_is_the_problem_and_the_options_that_were_given() -> None:
    script = Script(told(state="queued"))
    small = problem([stage()])
    job = client(script).submit(small, time_limit_s=2.0, wait_s=3.0)
    (request,) = script.requests
    body = json.loads(request.content)
    assert request.url == "http://planner:8000/base/v1/jobs?wait=3.0"
    assert Problem.parse(body["problem"]) == small
    assert body["options"] == {"time_limit_s": 2.0}
    assert (job.state, job.is_finished, job.trace) == ("queued", False, None)


def test_a_submission_is_repeated_under_one_key_and_the_next_one_has_another() -> None:
    lost = httpx.ReadError("connection reset")
    script = Script(lost, fault(503, "store.unavailable"), told(), told())
    connection = client(script)
    for _ in range(2):
        connection.submit(problem([stage()]))
    keys = [request.headers["Idempotency-Key"] for request in script.requests]
    assert keys[0] == keys[1] == keys[2] != keys[3]


def test_pauses_grow_and_follow_what_the_service_asks_for(pauses) -> None:
    lost = httpx.ConnectError("refused")
    script = Script(lost, lost, lost, fault(429, "queue.full", {"Retry-After": "7"}), told())
    client(script).job("a")
    assert 0.1 <= pauses[0] <= 0.2 <= pauses[1] <= 0.4 <= pauses[2] <= 0.8
    assert pauses[3] == 7


def test_a_service_that_stays_away_is_unreachable_and_one_that_stays_full_refuses() -> None:
    script = Script(*[httpx.ConnectError("refused")] * 3)
    with pytest.raises(ServiceUnreachableError, match=r"http://planner:8000.*optpipe serve"):
        client(script, num_retries=2).job("a")
    script = Script(*[fault(429, "queue.full", {"Retry-After": "1"})] * 3)
    with pytest.raises(ServiceError, match="the reason") as caught:
        client(script, num_retries=2).job("a")
    assert (caught.value.status, caught.value.problem_code) == (429, "queue.full")


@pytest.mark.parametrize("status", [400, 404, 409, 413, 422, 500])
def test_other_refusals_are_not_tried_again(status: int, pauses) -> None:
    with pytest.raises(ServiceError) as caught:
        client(Script(fault(status, "some.code"))).job("a")
    assert (caught.value.status, caught.value.problem_code, pauses) == (status, "some.code", [])


def test_refusals_with_a_meaning_have_a_type() -> None:
    with pytest.raises(ProblemError, match="the reason"):
        client(Script(fault(422, "problem.invalid"))).submit(problem([stage()]))
    with pytest.raises(InfeasibleProblemError) as caught:
        client(Script(fault(409, "problem.infeasible", needs={"x": 5}))).schedule("a")
    assert caught.value.needs == {"x": 5}


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(404, text="<html>nginx</html>"),
        httpx.Response(404, headers={"Content-Type": "application/problem+json"}, text="{"),
        httpx.Response(404, headers={"Content-Type": "application/problem+json"}, text="[]"),
    ],
)
def test_a_refusal_that_is_no_problem_detail_is_still_a_service_error(answer) -> None:
    with pytest.raises(ServiceError, match="answered 404"):
        client(Script(answer)).job("a")


@pytest.mark.parametrize("text", ["<html></html>", '{"id": 1}'])
def test_an_answer_that_is_not_of_this_service_is_a_service_error(text: str) -> None:
    with pytest.raises(ServiceError, match="is it an OptPipe service"):
        client(Script(httpx.Response(200, text=text))).job("a")


def test_a_schedule_that_is_none_is_refused() -> None:
    with pytest.raises(ScheduleFormatError):
        client(Script(httpx.Response(200, text="{}"))).schedule("a")


def test_following_yields_the_news_and_ends_with_the_job(pauses) -> None:
    news = [told(), told(), told(objective_ms=3.0), told(state="succeeded", objective_ms=2.0)]
    jobs = list(client(Script(*news)).follow("a"))
    assert [(job.state, job.objective_ms) for job in jobs] == [
        ("running", None),
        ("running", 3.0),
        ("succeeded", 2.0),
    ]
    assert pauses[1] > pauses[0] == pauses[2]


def test_all_pages_of_jobs_are_read() -> None:
    pages = [{"jobs": [JOB, JOB], "next": 7}, {"jobs": [JOB], "next": None}]
    script = Script(*(httpx.Response(200, json=page) for page in pages))
    assert len(list(client(script).jobs())) == 3
    assert script.requests[1].url.params["cursor"] == "7"


def test_a_comparison_is_the_rows_that_the_service_answers() -> None:
    """Options left out are left to the service; the optimiser's time is waited for."""
    rows = [{"method": "1f1b", "makespan_ms": 2.0, "a_field_of_the_future": 1}]
    script = Script(fault(429, "compare.busy"), httpx.Response(200, json={"rows": rows}))
    small = problem([stage()])
    workload = {"tokens_per_microbatch": 4096.0}
    assert client(script).compare(small, time_limit_s=50.0, workload=workload) == rows
    request = script.requests[1]
    body = json.loads(request.content)
    assert request.url == "http://planner:8000/base/v1/compare"
    assert request.headers["Accept"] == "application/json"
    assert Problem.parse(body["problem"]) == small
    assert body["options"] == {"time_limit_s": 50.0, "workload": workload}
    assert request.extensions["timeout"]["read"] > 50 + 30
    assert request.extensions["timeout"]["connect"] == 30


def test_a_comparison_that_took_too_long_is_not_made_again() -> None:
    """A lost connection is repeated, as ever; a time that ran out would run out again."""
    lost, slow = httpx.ConnectError("refused"), httpx.ReadTimeout("timed out")
    script = Script(lost, slow)
    with pytest.raises(ServiceUnreachableError, match="timed out"):
        client(script).compare(problem([stage()]))
    assert script.answers == []
    assert client(Script(slow, told())).job("a").state == "running"


def test_methods_are_names_with_a_line_each() -> None:
    listed = [{"name": "auto", "description": "all"}, {"name": "1f1b", "description": "one"}]
    script = Script(httpx.Response(200, json={"methods": listed}))
    assert client(script).methods() == {"auto": "all", "1f1b": "one"}
    assert script.requests[0].url == "http://planner:8000/base/v1/methods"


@pytest.mark.parametrize("url", ["", "planner:8000", "ftp://planner", "http://", None])
def test_an_address_that_is_none_is_refused(url) -> None:
    with pytest.raises(InputError, match="not the address of a service"):
        Client(url)


@pytest.mark.parametrize("job_id", ["", "../jobs", "a/b", "a?b"])
def test_an_id_that_is_none_never_leaves_the_client(job_id: str) -> None:
    with pytest.raises(InputError, match="not the id of a job"):
        client(Script()).job(job_id)


def test_health_never_raises() -> None:
    answers: list[Any] = [httpx.Response(200), httpx.Response(503), httpx.ConnectError("refused")]
    assert [client(Script(answer)).health() for answer in answers] == [True, False, False]
