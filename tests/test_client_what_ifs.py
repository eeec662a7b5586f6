"""What more would buy, asked by both clients: searched first, asked once, waited for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from optpipe import Problem, load_schedule
from optpipe.client import ConflictError, NotFoundError
from tests.api.live import make_settings, running, two_stages
from tests.client_script import JOB, Script, fault, noted_pauses, plain, told, waited

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ENDED = {"state": "succeeded", "has_schedule": True, "objective_ms": 10.0}
ANSWER = {
    "name": "one-more-gb",
    "question": "1 GB more",
    "job_id": "b" * 32,
    "state": "running",
    "before_ms": 10.0,
    "microbatches_before": 4,
    "microbatches_after": 4,
    "is_never_worse": True,
}


def asked(**changes: Any) -> httpx.Response:
    view = {
        "job_id": JOB["id"],
        "batch_id": "c" * 32,
        "is_finished": True,
        "created_at": JOB["created_at"],
        "schedule_number": 2,
        "is_current": True,
        "before_ms": 10.0,
        "microbatches_before": 4,
        "answers": [ANSWER],
        "a_field_of_the_future": 1,
    }
    return httpx.Response(200, json=view | changes)


@pytest.fixture(params=[plain, waited], ids=["sync", "async"])
def client(request) -> Iterator[Callable[..., Any]]:
    """Makes a client of a script or an address; all is said of both."""
    opened: list[Any] = []

    def open_client(*arguments: Any) -> Any:
        opened.append(request.param(*arguments))
        return opened[-1]

    yield open_client
    for one in opened:
        one.close()


@pytest.fixture
def pauses(monkeypatch) -> list[float]:
    """No test waits; the pauses the client would have made are listed."""
    return noted_pauses(monkeypatch)


def test_a_job_that_is_not_proven_is_searched_again_before_it_is_asked_about(client) -> None:
    """For the same seconds, so that a gain is a gain of the change."""
    better = ENDED | {"objective_ms": 9.0}
    script = Script(told(**ENDED), told(**better), told(**better), asked())
    answers = client(script).what_if("a", time_limit_s=7.0, threads=2, priority=3)
    first, path = "jobs/a", "jobs/" + "a" * 32
    assert script.paths == [first, f"{path}/resume", path, f"{path}/what-ifs"]
    assert json.loads(script.requests[1].content) == {"time_limit_s": 7.0}
    body = {"options": {"time_limit_s": 7.0, "threads": 2}, "priority": 3}
    assert json.loads(script.requests[3].content) == body
    assert answers.answers[0].gain is None


@pytest.mark.parametrize(
    ("job", "options"),
    [
        (ENDED | {"gap": 0.0}, {}),
        (ENDED | {"gap": 0.5}, {"searches_first": False}),
        (ENDED | {"has_schedule": False}, {}),
    ],
)
def test_a_proven_job_needs_no_second_search_and_no_other_has_to(client, job, options) -> None:
    script = Script(told(**job), asked())
    client(script).what_if("a", **options)
    assert [path.rpartition("/")[2] for path in script.paths] == ["a", "what-ifs"]


def test_the_answers_are_waited_for(client, pauses) -> None:
    """Looked at less often while there is no news."""
    running = asked(is_finished=False)
    script = Script(told(**ENDED, gap=0.0), running, running, running, asked())
    assert client(script).what_if("a").is_finished
    assert script.paths[2:] == ["jobs/" + "a" * 32 + "/what-ifs"] * 3
    assert pauses[0] < pauses[1] < pauses[2]


def test_a_question_that_may_have_been_lost_is_asked_again_under_its_key(client, pauses) -> None:
    lost = httpx.ReadError("connection reset")
    script = Script(told(**ENDED, gap=0.0), lost, fault(503, "store.unavailable"), asked())
    client(script).what_if("a")
    keys = [request.headers["Idempotency-Key"] for request in script.requests[1:]]
    assert len(set(keys)) == 1


def test_what_nobody_asked_or_cannot_be_asked_says_so(client) -> None:
    with pytest.raises(NotFoundError, match="the reason"):
        client(Script(fault(404, "what_ifs.none"))).what_ifs("a")
    with pytest.raises(ConflictError, match="the reason"):
        client(Script(told(**ENDED, gap=0.0), fault(409, "state.conflict"))).what_if("a")


def test_a_service_answers_with_the_schedules_that_the_answers_came_from(client, tmp_path) -> None:
    """From the submission on: the job's end is waited for, and each answer is a job."""
    settings = make_settings(tmp_path, solve_path="tests.api.start_solver:solve", lease_s=60.0)
    with running(settings) as (url, _):
        connection = client(None, url)
        job = connection.submit(Problem.parse(two_stages("gains")))
        found = connection.what_if(job, time_limit_s=5.0)
        assert connection.what_ifs(job) == found
        more, twice = found.answers
        assert (more.name, twice.name) == ("one-more-gb", "twice-the-microbatches")
        assert (more.state, more.error) == ("succeeded", None)
        assert more.gain > twice.gain == 0
        assert more.sentence.startswith("1 GB more on gpu0")
        schedule = connection.schedule(more.job_id)
        assert schedule == load_schedule(connection.schedule_text(more.job_id, "json"))
        assert schedule.makespan_ms == more.after_ms < more.before_ms
        assert [one.name for one in found.unasked] == ["faster-pcie"]
        assert connection.job(job).options["time_limit_s"] == 65.0
