"""``GET /v1/jobs/{id}/explanation``: sentences and numbers of the best schedule so far."""

import pytest

from optpipe import Problem, load_schedule, simulate
from optpipe.explain import Explanation, explain
from optpipe_api.errors import BodyTooHeavyError
from optpipe_api.services.parse_pool import ParsePool
from tests.api.routes.test_jobs import fault, submit


@pytest.fixture
def path(ended) -> str:
    return f"/v1/jobs/{ended['id']}/explanation"


def test_it_is_what_the_core_says_of_the_best_schedule(http, ended, path) -> None:
    answer = http.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    schedule = load_schedule(http.get(f"/v1/jobs/{ended['id']}/schedule").text)
    problem = Problem.parse(http.get(f"/v1/jobs/{ended['id']}/problem").json())
    told = Explanation.model_validate_json(answer.text)
    assert told == explain(problem, schedule.programs, bound_ms=schedule.bound_ms)
    assert told.length_ms == simulate(problem, schedule.programs).makespan_ms
    assert {sentence["topic"] for sentence in answer.json()["sentences"]} >= {"length", "idle"}


def test_its_tag_is_that_of_the_schedule_in_this_form(http, ended, path) -> None:
    first = http.get(path)
    tag = first.headers["etag"]
    assert tag == f'"{ended["id"]}.{ended["num_schedules"]}.explanation"'
    same = http.get(path, headers={"If-None-Match": tag})
    assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", tag)
    other = http.get(f"/v1/jobs/{ended['id']}/schedule").headers["etag"]
    assert http.get(path, headers={"If-None-Match": other}).content == first.content


def test_without_a_job_or_a_schedule_there_is_none(http) -> None:
    fault(http.get("/v1/jobs/nothing/explanation"), 404, "job.not_found")
    job = submit(http, "nothing").json()
    fault(http.get(f"/v1/jobs/{job['id']}/explanation"), 404, "schedule.none")


def test_one_that_is_too_large_says_where_it_can_be_explained(http, path, monkeypatch) -> None:
    """In place of the message about request bodies that the reading process's limit stands for."""

    async def read(*_: object, **__: object) -> None:
        raise BodyTooHeavyError("5 s")

    monkeypatch.setattr(ParsePool, "run", read)
    answer = http.get(path)
    assert "run optpipe explain" in fault(answer, 413, "schedule.too_large")["detail"]


def test_it_is_documented_field_by_field(http) -> None:
    document = http.get("/openapi.json").json()
    answer = document["paths"]["/v1/jobs/{job_id}/explanation"]["get"]["responses"]["200"]
    schema = answer["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    fields = document["components"]["schemas"][schema]["properties"]
    assert set(fields) == set(Explanation.model_fields)
