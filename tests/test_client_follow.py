"""Following a job: by its events over connections that break, else by looking at it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from optpipe.client import NotFoundError
from optpipe.errors import InfeasibleProblemError, ServiceError, ServiceUnreachableError
from tests.client_script import Script, event, fault, noted_pauses, plain, stream, told, waited
from tests.test_client import SCHEDULE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STEP = {"seconds": 0.1, "method": "fake", "objective_ms": 3.0}
BROKEN = httpx.ReadError("reset")
SILENT = httpx.ReadTimeout("nothing came")
PING = b": ping\n\n"


@pytest.fixture(params=[plain, waited], ids=["sync", "async"])
def client(request) -> Iterator[Callable[..., Any]]:
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
    """Of six events only the first is not what the job shows, and the last is its end."""
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
    asked = [request.headers.get("Last-Event-ID") for request in script.requests]
    assert asked == [None, "1", "3", "7"]


def test_events_may_begin_anywhere(client) -> None:
    script = Script(stream(event(8, "state", text="succeeded")), httpx.Response(204))
    heard = list(client(script).events("a", after=5))
    assert [(one.number, one.text) for one in heard] == [(8, "succeeded")]
    assert script.requests[0].headers["Last-Event-ID"] == "5"


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
    """As with every other call."""
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
