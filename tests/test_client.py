"""The client: what it sends, when it tries again, and which errors it raises."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from optpipe import Problem, load_schedule
from optpipe.client import (
    Client,
    MethodRow,
    NotFoundError,
    SolveFailedError,
)
from optpipe.client.transport import Address, read_error
from optpipe.errors import (
    InfeasibleProblemError,
    InputError,
    ScheduleFormatError,
    ServiceError,
    ServiceUnreachableError,
)
from optpipe.formats.json import load_model
from tests.building import problem, stage
from tests.client_script import JOB, Script, event, fault, noted_pauses, plain, stream, told, waited

Open = Callable[..., Any]
ROOT = Path(__file__).parent.parent
MODEL = ROOT / "examples" / "models" / "llama3-8b-2h100-2a100.json"
ROW = MethodRow.model_json_schema()["examples"][0]
SCHEDULE = (ROOT / "docs" / "images" / "before-after.schedule.json").read_text("utf-8")


@pytest.fixture(params=[plain, waited], ids=["sync", "async"])
def client(request) -> Iterator[Open]:
    """Makes a client of a script; all is said of both."""
    opened: list[Any] = []

    def open_client(script: Callable[..., httpx.Response], **arguments: Any) -> Any:
        opened.append(request.param(script, **arguments))
        return opened[-1]

    yield open_client
    for one in opened:
        one.close()


@pytest.fixture(autouse=True)
def pauses(monkeypatch) -> list[float]:
    """No test waits; the pauses the client would have made are listed."""
    return noted_pauses(monkeypatch)


def test_a_submission_is_repeated_under_one_key_and_the_next_one_has_another(client) -> None:
    lost = httpx.ReadError("connection reset")
    script = Script(lost, fault(503, "store.unavailable"), told(), told())
    connection = client(script)
    for _ in range(2):
        connection.submit(problem([stage()]))
    keys = [request.headers["Idempotency-Key"] for request in script.requests]
    assert keys[0] == keys[1] == keys[2] != keys[3]


def test_pauses_grow_and_follow_what_the_service_asks_for(client, pauses) -> None:
    lost = httpx.ConnectError("refused")
    script = Script(lost, lost, lost, fault(429, "queue.full", {"Retry-After": "7"}), told())
    client(script).job("a")
    assert 0.1 <= pauses[0] <= 0.2 <= pauses[1] <= 0.4 <= pauses[2] <= 0.8
    assert pauses[3] == 7


def test_a_service_that_stays_away_is_unreachable_and_one_that_stays_full_refuses(client) -> None:
    script = Script(*[httpx.ConnectError("refused")] * 3)
    with pytest.raises(ServiceUnreachableError, match=r"http://planner:8000.*optpipe serve"):
        client(script, num_retries=2).job("a")
    script = Script(*[fault(429, "queue.full", {"Retry-After": "1"})] * 3)
    with pytest.raises(ServiceError, match="the reason") as caught:
        client(script, num_retries=2).job("a")
    assert (caught.value.status, caught.value.problem_code) == (429, "queue.full")


@pytest.mark.parametrize("status", [400, 404, 409, 413, 422, 500])
def test_other_refusals_are_not_tried_again(client, status: int, pauses) -> None:
    with pytest.raises(ServiceError) as caught:
        client(Script(fault(status, "some.code"))).job("a")
    assert (caught.value.status, caught.value.problem_code, pauses) == (status, "some.code", [])


PROBLEM = {"Content-Type": "application/problem+json"}
WRONG_ADDRESS = r"http://.+/v1/jobs/a answered 404.+address"


@pytest.mark.parametrize(
    ("status", "answer", "words"),
    [
        (404, {"text": "<html>nginx</html>"}, WRONG_ADDRESS),
        (404, {"headers": PROBLEM, "text": "{"}, WRONG_ADDRESS),
        (404, {"headers": PROBLEM, "text": "[]"}, WRONG_ADDRESS),
        # A gateway's, and so no wrong address.
        (500, {"text": "<html>nginx</html>"}, r"answered 500 without a reason((?!address).)*$"),
        (200, {"text": "<html></html>"}, "is it an OptPipe service"),
        (200, {"text": '{"id": 1}'}, "is it an OptPipe service"),
    ],
)
def test_an_answer_that_is_not_of_this_service_is_a_service_error(
    client, status: int, answer: dict[str, Any], words: str
) -> None:
    with pytest.raises(ServiceError, match=words):
        client(Script(httpx.Response(status, **answer))).job("a")


@pytest.mark.parametrize("status", [404, 500])
def test_messages_leave_out_a_password_in_the_address(status: int) -> None:
    request = httpx.Request("GET", "http://ann:s3cret@proxy.example/v1/jobs/a")
    error = read_error(httpx.Response(status, request=request))
    assert str(error).startswith(f"http://proxy.example/v1/jobs/a answered {status}")
    address = Address.parse("http://ann:s3cret@proxy.example", None, 1.0, 0)
    assert str(address) == "http://proxy.example"


def test_a_schedule_that_is_none_is_refused(client) -> None:
    with pytest.raises(ScheduleFormatError):
        client(Script(httpx.Response(200, text="{}"))).schedule("a")


def test_all_that_a_submission_can_say(client) -> None:
    """The problem and the options that were given, and no others."""
    script = Script(told(state="queued"))
    small = problem([stage()])
    job = client(script).submit(
        small,
        objective="span",
        cache="refresh",
        tags=("nightly",),
        priority=3,
        idempotency_key="mine",
        wait_s=3.0,
    )
    (request,) = script.requests
    body = json.loads(request.content)
    assert request.url == "http://planner:8000/base/v1/jobs?wait=3.0"
    assert Problem.parse(body["problem"]) == small
    assert body["options"] == {"objective": "span", "cache": "refresh"}
    assert (body["tags"], body["priority"]) == (["nightly"], 3)
    assert request.headers["Idempotency-Key"] == "mine"
    assert (job.state, job.is_finished, job.trace) == ("queued", False, None)


def test_a_model_is_submitted_as_one(client) -> None:
    script = Script(told(kind="plan"))
    model = load_model(MODEL.read_text("utf-8"))
    assert client(script).submit(model, chunks=[1, 2], placements=["loop"]).kind == "plan"
    body = json.loads(script.requests[0].content)
    assert load_model(json.dumps(body["model"])) == model
    assert "problem" not in body
    assert body["options"] == {"chunks": [1, 2], "placements": ["loop"]}


def test_a_key_goes_with_every_request(client) -> None:
    script = Script(told(), told())
    connection = client(script, api_key="opk_a_b")
    connection.job("a")
    connection.cancel("a")
    assert [one.headers["Authorization"] for one in script.requests] == ["Bearer opk_a_b"] * 2
    with pytest.raises(InputError, match="API key") as caught:
        client(Script(), api_key="opk_ä\n")
    assert "opk" not in str(caught.value)


@pytest.mark.parametrize(
    "loss",
    [
        lambda: httpx.ReadError("reset"),
        lambda: httpx.ReadTimeout("slow"),
        lambda: httpx.Response(502, text="<html>a gateway</html>"),
    ],
    ids=["reset", "slow", "gateway"],
)
def test_more_time_is_not_given_twice(client, loss, pauses) -> None:
    """Where nobody knows whether it was given, the error is told; what was refused is repeated."""
    script = Script(loss())
    with pytest.raises((ServiceError, ServiceUnreachableError)):
        client(script).resume("a", 5.0)
    assert (len(script.requests), pauses) == (1, [])
    unsent = httpx.ConnectError("refused")
    script = Script(unsent, fault(429, "queue.full"), told(state="queued"))
    assert client(script).resume("a", 5.0, wait_s=2.0).state == "queued"
    assert json.loads(script.requests[2].content) == {"time_limit_s": 5.0}
    assert script.requests[2].url.params["wait"] == "2.0"


def test_a_schedule_is_fetched_only_if_it_is_newer(client) -> None:
    """The number that is known goes as If-None-Match; 304 means that it is still the best."""
    tagged = {"ETag": f'W/"{JOB["id"]}.7"'}
    known = httpx.Response(200, headers=tagged, text=SCHEDULE)
    script = Script(httpx.Response(304), known, httpx.Response(200, text=SCHEDULE))
    connection = client(script)
    assert connection.schedule_if_newer(JOB["id"], 6, wait_s=40.0) is None
    assert connection.schedule_if_newer(JOB["id"]) == (7, load_schedule(SCHEDULE))
    first, second = script.requests
    assert first.headers["If-None-Match"] == f'"{JOB["id"]}.6"'
    assert (first.url.params["wait"], first.extensions["timeout"]["read"]) == ("40.0", 70.0)
    assert "If-None-Match" not in second.headers
    with pytest.raises(ServiceError, match="ETag"):
        connection.schedule_if_newer(JOB["id"])


def test_all_pages_of_jobs_are_read(client) -> None:
    pages = [{"jobs": [JOB, JOB], "next": JOB["id"]}, {"jobs": [JOB], "next": None}]
    script = Script(*(httpx.Response(200, json=page) for page in pages))
    assert len(list(client(script).jobs())) == 3
    assert script.requests[1].url.params["cursor"] == JOB["id"]


def test_a_comparison_is_a_job_whose_rows_are_fetched_at_its_end(client) -> None:
    """Options left out are left to the service; why it failed is raised."""
    sent = ROW | {"a_field_of_the_future": 1}
    done = told(state="succeeded", kind="compare", has_schedule=False)
    script = Script(
        fault(429, "queue.full"), done, done, httpx.Response(200, json={"rows": [sent]})
    )
    small = problem([stage()])
    workload = {"tokens_per_microbatch": 4096.0}
    (row,) = client(script).compare(small, time_limit_s=50.0, workload=workload)
    assert row.model_dump(mode="json") == ROW
    request = script.requests[1]
    body = json.loads(request.content)
    assert request.url == "http://planner:8000/base/v1/compare"
    assert request.headers["Idempotency-Key"]
    assert Problem.parse(body["problem"]) == small
    assert body["options"] == {"time_limit_s": 50.0, "workload": workload}
    assert str(script.requests[3].url).endswith(f"/v1/jobs/{JOB['id']}/comparison")
    error = {"code": "solver.memory", "message": "too much"}
    failed = told(state="failed", kind="compare", has_schedule=False, error=error)
    with pytest.raises(SolveFailedError, match="too much"):
        client(Script(failed, failed)).compare(small)


def test_methods_are_names_with_a_line_each(client) -> None:
    listed = [{"name": "auto", "description": "all"}, {"name": "1f1b", "description": "one"}]
    script = Script(httpx.Response(200, json={"methods": listed}))
    assert client(script).methods() == {"auto": "all", "1f1b": "one"}
    assert script.requests[0].url == "http://planner:8000/base/v1/methods"


@pytest.mark.parametrize("url", ["", "planner:8000", "ftp://planner", "http://", None])
def test_an_address_that_is_none_is_refused(url) -> None:
    with pytest.raises(InputError, match="not the address of a service"):
        Client(url)


@pytest.mark.parametrize("thing", ["problem.json", ["problem.json"], None])
def test_what_is_no_problem_never_leaves_the_client(client, thing) -> None:
    with pytest.raises(InputError, match=r"^problem = .*must be a Problem or a Model; read it"):
        client(Script()).submit(thing)


@pytest.mark.parametrize("job_id", ["", "../jobs", "a/b", "a?b"])
def test_an_id_that_is_none_never_leaves_the_client(client, job_id: str) -> None:
    with pytest.raises(InputError, match="not the id of a job"):
        client(Script()).job(job_id)


def test_health_never_raises(client) -> None:
    answers: list[Any] = [httpx.Response(200), httpx.Response(503), httpx.ConnectError("refused")]
    assert [client(Script(answer)).health() for answer in answers] == [True, False, False]


def test_a_what_if_is_a_batch_about_a_job(client) -> None:
    """Only what was said of it is sent, under a key of its own."""
    view = {
        "id": "b" * 32,
        "is_finished": False,
        "progress": 0.0,
        "num_items": 3,
        "created_at": JOB["created_at"],
    }
    lost = httpx.ReadError("connection reset")
    script = Script(lost, httpx.Response(202, json=view), httpx.Response(202, json=view))
    connection = client(script)
    assert connection.what_if("a").id == "b" * 32
    connection.what_if("a", priority=3, time_limit_s=7.0, threads=None)
    assert script.paths == ["batches"] * 3
    assert json.loads(script.requests[1].content) == {"what_if": "a"}
    body = {"what_if": "a", "options": {"time_limit_s": 7.0}, "priority": 3}
    assert json.loads(script.requests[2].content) == body
    keys = [request.headers["Idempotency-Key"] for request in script.requests]
    assert keys[0] == keys[1] != keys[2]


# Following a job: by its events over connections that break, else by looking at it.

STEP = {"seconds": 0.1, "method": "fake", "objective_ms": 3.0}
BROKEN = httpx.ReadError("reset")
SILENT = httpx.ReadTimeout("nothing came")
PING = b": ping\n\n"


def states(jobs: list[Any]) -> list[tuple[str, float | None]]:
    return [(job.state, job.objective_ms) for job in jobs]


def test_a_job_is_looked_at_when_something_happened_and_only_then(client, pauses) -> None:
    """What the first look showed already is no news, log lines neither; each news costs a look."""
    script = Script(
        told(trace=[STEP]),
        stream(
            event(1, "state", text="queued"),
            event(2, "state", text="running"),
            event(4, "incumbent", objective_ms=3.0),
            event(5, "log", text="a sentence"),
            PING,
            event(6, "bound", bound_ms=1.0),
            event(9, "state", text="succeeded"),
        ),
        told(trace=[STEP]),
        told(trace=[STEP, STEP], bound_ms=1.0),
        told(state="succeeded", objective_ms=2.0),
    )
    jobs = list(client(script).follow("a"))
    assert states(jobs) == [("running", None), ("running", None), ("succeeded", 2.0)]
    assert jobs[1].bound_ms == 1.0
    job = "jobs/" + "a" * 32
    assert script.paths == ["jobs/a", f"{job}/events", job, job, job]
    assert pauses == []


def test_what_is_known_already_costs_no_look(client) -> None:
    now = {"state": "running", "trace": [STEP]}
    looks: list[str] = []

    def end() -> bytes:
        now["state"] = "succeeded"
        return event(6, "state", text="succeeded")

    def service(request: httpx.Request) -> httpx.Response:
        looks.append(request.url.path)
        if not request.url.path.endswith("/events"):
            return told(**now)
        known = (event(1, "state", text="queued"), event(2, "state", text="running"))
        return stream(
            *known, event(3, "incumbent"), event(4, "log"), event(5, "state", text="running"), end
        )

    assert [job.state for job in client(service).follow("a")] == ["running", "succeeded"]
    assert len(looks) == 1 + 1 + 2


def test_a_broken_stream_goes_on_behind_the_last_event_seen(client) -> None:
    """Each event once, in order: what a second stream repeats is passed over."""
    script = Script(
        stream(event(1, "state", text="queued"), event(2, "state", text="running")[:-1], BROKEN),
        stream(event(1, "state", text="queued"), event(3, "bound", bound_ms=1.0), PING, BROKEN),
        stream(event(7, "state", text="succeeded")),
        httpx.Response(204),
    )
    heard = list(client(script).events("a"))
    assert [one.number for one in heard] == [1, 3, 7]
    resumed_behind = [request.headers.get("Last-Event-ID") for request in script.requests]
    assert resumed_behind == [None, "1", "3", "7"]


def test_who_stops_listening_hangs_up(client) -> None:
    script = Script(stream(event(1, "state", text="queued"), event(2, "state", text="running")))
    heard = client(script).events("a")
    assert next(heard).number == 1
    heard.close()
    assert len(script.requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        lambda: httpx.Response(404, text="<html>nginx</html>"),
        lambda: fault(404, "http.404"),
        lambda: httpx.Response(200, text="<html></html>"),
        lambda: stream(SILENT),
    ],
    ids=["a proxy's 404", "our own", "no stream", "a stream held back"],
)
def test_without_a_stream_the_job_is_looked_at(client, pauses, answer) -> None:
    """Often while there is news, less often while there is none."""
    news = [told(objective_ms=3.0), told(state="succeeded", objective_ms=2.0)]
    script = Script(told(), answer(), told(), told(), *news)
    jobs = list(client(script).follow("a"))
    assert states(jobs) == [("running", None), ("running", 3.0), ("succeeded", 2.0)]
    assert pauses[2] > pauses[1] > pauses[0] == pauses[3]


def test_streams_that_break_before_anything_is_heard_are_given_up(client, pauses) -> None:
    """Between them the job is looked at, so its end is not missed."""
    script = Script(
        told(),
        *[answer for _ in range(3) for answer in (stream(BROKEN), told())],
        stream(BROKEN),
        told(state="succeeded"),
    )
    assert states(list(client(script).follow("a"))) == [("running", None), ("succeeded", None)]
    assert pauses[0] < pauses[1]
    deaf = [stream(BROKEN), stream(BROKEN), told(), stream(BROKEN), told(), stream(BROKEN)]
    with pytest.raises(ServiceError, match="use follow"):
        list(client(Script(*deaf)).events("a"))


def test_streams_that_last_may_break_as_often_as_they_like(client, monkeypatch) -> None:
    """A proxy cuts the stream of a quiet job every minute: nothing is lost, nothing given up."""
    minutes = iter(range(0, 6000, 60))
    monkeypatch.setattr("optpipe.client.transport.time.monotonic", lambda: next(minutes))
    script = Script(*[stream(PING, BROKEN) for _ in range(9)], stream(event(1, "log")))
    script.answers.append(httpx.Response(204))
    assert [one.number for one in client(script).events("a")] == [1]


def test_a_service_that_goes_away_is_waited_for_then_unreachable(client) -> None:
    gone = httpx.ConnectError("refused")
    back = Script(told(), gone, gone, told(), stream(event(1, "state", text="failed")), FAILED())
    assert [job.state for job in client(back).follow("a")] == ["running", "failed"]
    with pytest.raises(ServiceUnreachableError):
        list(client(Script(told(), *[gone] * 3), num_retries=1).follow("a"))
    with pytest.raises(ServiceUnreachableError):
        list(client(Script(*[gone] * 4), num_retries=1).events("a"))


def FAILED() -> httpx.Response:  # noqa: N802 - an answer, made anew for each client
    return told(state="failed", error={"code": "solver.failed", "message": "it died"})


def test_a_busy_service_is_listened_to_later(client, pauses) -> None:
    script = Script(
        told(),
        fault(503, "store.unavailable", {"Retry-After": "2"}),
        told(),
        stream(event(1, "state", text="succeeded")),
        told(state="succeeded"),
    )
    assert [job.state for job in client(script).follow("a")] == ["running", "succeeded"]
    assert pauses == [2.0]


def test_a_job_that_is_none_is_said_so(client) -> None:
    with pytest.raises(NotFoundError):
        list(client(Script(fault(404, "job.not_found"))).follow("a"))
    with pytest.raises(NotFoundError):
        list(client(Script(fault(404, "job.not_found"))).events("a"))


def test_a_job_that_has_ended_is_not_listened_to(client) -> None:
    script = Script(told(state="cancelled"))
    assert [job.state for job in client(script).follow("a")] == ["cancelled"]
    assert script.paths == ["jobs/a"]


def test_a_result_is_waited_for(client) -> None:
    """The best schedule, also of a job that was cancelled or failed later."""
    script = Script(
        told(),
        stream(event(1, "state", text="cancelled")),
        told(state="cancelled", has_schedule=True),
        httpx.Response(200, text=SCHEDULE),
    )
    assert client(script).result("a").programs
    assert script.answers == []


def test_a_result_that_there_is_not_is_an_error_with_its_type(client) -> None:
    needs = {"devices[0].memory_bytes": 5}
    error = {"code": "problem.infeasible", "message": "too small", "needs": needs}
    with pytest.raises(InfeasibleProblemError, match="too small") as caught:
        client(Script(told(state="infeasible", error=error))).result("a")
    assert caught.value.needs == needs
    with pytest.raises(ServiceError, match="it died") as failed:
        client(Script(FAILED())).result("a")
    assert failed.value.problem_code == "solver.failed"


@pytest.mark.parametrize("data", ["[]", "{", '{"number": 1}'])
def test_an_event_that_is_none_is_a_service_error(client, data: str) -> None:
    broken = stream(f"event: state\nid: 1\ndata: {data}\n\n".encode())
    with pytest.raises(ServiceError, match="event 1 is not as expected"):
        list(client(Script(broken)).events("a"))
