"""Event streams and waiting requests: as many as the limits allow, counted to their end."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import httpx
import pytest

from optpipe_api.access import ANYBODY, Principal, Role
from optpipe_api.errors import TooManyFollowersError, TooManyFollowersOfKeyError
from optpipe_api.services.events import ConnectionLimit, Purpose
from optpipe_api.store import open_stores
from tests.api.live import client, make_settings, running, two_stages, until
from tests.api.routes.test_jobs import fault, submit
from tests.api.test_telemetry import read, value

ANN, BOB, CLEO = (Principal(name, Role.SUBMIT) for name in ("ann", "bob", "cleo"))
MOST, MOST_PER_KEY = 3, 2


def test_without_keys_only_the_server_s_own_number_counts() -> None:
    connections = ConnectionLimit(MOST, 1)
    with connections.counted(ANYBODY, Purpose.STREAM), connections.counted(ANYBODY, Purpose.STREAM):
        assert connections.num_open(Purpose.STREAM) == 2


class Crowd:
    """A server of few connections, three keys, and a job that goes on for long."""

    def __init__(self, url: str, app: Any, keys: dict[str, str]) -> None:
        self.url, self.keys = url, keys
        self.service = app.state.service
        with self.client("ann") as http:
            self.job = submit(http, "improve:1:60", wait=0).json()["id"]

    def client(self, name: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.keys[name]}"}
        return client(self.url, headers=headers)

    @contextmanager
    def stream(self, name: str) -> Iterator[httpx.Response]:
        path = f"/v1/jobs/{self.job}/events"
        with self.client(name) as http, http.stream("GET", path) as answer:
            if answer.status_code != 200:
                answer.read()
            yield answer

    @contextmanager
    def unanswered(self, request: httpx.Request) -> Iterator[None]:
        """Send a request and hang up when the block ends, whether an answer has come or not."""
        headers = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        head = f"{request.method} {request.url.raw_path.decode()} HTTP/1.1\r\n{headers}\r\n"
        with socket.create_connection((request.url.host, request.url.port)) as connection:
            connection.sendall(head.encode() + request.content)
            yield

    def counts(self) -> tuple[int, int]:
        connections = self.service.connections
        return connections.num_open(Purpose.STREAM), connections.num_open(Purpose.WAIT)

    def num_jobs(self) -> int:
        return sum(self.service.counts().values())

    def until(self, *counts: int) -> None:
        until(lambda: self.counts() == counts)


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[Crowd]:
    folder = tmp_path_factory.mktemp("crowd")
    settings = make_settings(
        folder, require_keys=True, max_followers=MOST, max_followers_per_key=MOST_PER_KEY
    )
    with closing(open_stores(settings.database_url)) as stores:
        keys = {name: stores.keys.create(name, Role.ADMIN)[1] for name in ("ann", "bob", "cleo")}
    with running(settings) as (url, app):
        yield Crowd(url, app, keys)


@pytest.fixture
def crowd(shared: Crowd) -> Iterator[Crowd]:
    yield shared
    shared.until(0, 0)


def test_streams_beyond_the_limit_are_refused_until_one_ends(crowd: Crowd) -> None:
    with ExitStack() as stack:
        for name in ("ann", "ann"):
            assert stack.enter_context(crowd.stream(name)).status_code == 200
        with crowd.stream("ann") as answer:
            refused(answer, "key.too_many_followers")
        with crowd.stream("bob") as answer:
            assert answer.status_code == 200
            with crowd.stream("cleo") as refusal:
                refused(refusal, "followers.full")
        crowd.until(2, 0)
        with crowd.stream("cleo") as answer:
            assert answer.status_code == 200
    crowd.until(0, 0)


def refused(answer: httpx.Response, code: str) -> None:
    fault(answer, 429, code)
    assert answer.headers["Retry-After"] == "5"


def test_a_stream_that_ends_by_itself_gives_its_place_back(crowd: Crowd) -> None:
    with crowd.client("ann") as http:
        # Not behind the jobs that go on.
        job = http.post("/v1/jobs", json={"problem": two_stages()}).json()
        http.post(f"/v1/jobs/{job['id']}/cancel")
        for _ in range(MOST + 1):
            answer = http.get(f"/v1/jobs/{job['id']}/events")
            assert answer.status_code == 200
            assert http.get(f"/v1/jobs/{job['id']}/events?after=9999999").status_code == 204
            assert http.get(f"/v1/jobs/{'0' * 32}/events").status_code == 404
    crowd.until(0, 0)


WAITS: dict[str, Callable[[Crowd], dict[str, Any]]] = {
    "submission": lambda _: {
        "method": "POST",
        "url": "/v1/jobs",
        "json": {"problem": two_stages("improve:1:60")},
    },
    "schedule": lambda crowd: {
        "method": "GET",
        "url": f"/v1/jobs/{crowd.job}/schedule",
        "headers": {"If-None-Match": f'"{crowd.job}.{latest(crowd)}"'},
    },
    "batch": lambda _: {
        "method": "POST",
        "url": "/v1/batches",
        "json": {"problems": [two_stages("improve:1:60")]},
    },
}


def latest(crowd: Crowd) -> int:
    return int(until(lambda: crowd.service.jobs._store.get(crowd.job).num_schedules))


@pytest.mark.parametrize("kind", WAITS)
def test_a_waiting_request_takes_a_place_until_its_client_hangs_up(crowd: Crowd, kind: str) -> None:
    """Long before its time is up; at the limit it is refused before it does anything."""
    request = {"params": {"wait": 50}, **WAITS[kind](crowd)}
    with crowd.client("bob") as http, ExitStack() as stack:
        num_jobs = crowd.num_jobs() + (0 if kind == "schedule" else MOST_PER_KEY)
        for _ in range(MOST_PER_KEY):
            stack.enter_context(crowd.unanswered(http.build_request(**request)))
        crowd.until(0, MOST_PER_KEY)
        until(lambda: crowd.num_jobs() >= num_jobs)
        refused(http.request(**request), "key.too_many_followers")
        assert crowd.num_jobs() == num_jobs
        # Who does not wait is not counted.
        assert http.request(**{**request, "params": {}}).status_code in (200, 202, 304)
    crowd.until(0, 0)


def test_open_connections_are_a_metric(crowd: Crowd) -> None:
    with crowd.client("cleo") as http:

        def shown(kind: str) -> float:
            return value(read(http.get("/metrics").text), "optpipe_followers", kind=kind)

        assert (shown("stream"), shown("wait")) == (0, 0)
        with crowd.stream("ann"), crowd.stream("bob"):
            assert (shown("stream"), shown("wait")) == (2, 0)
        crowd.until(0, 0)
        assert shown("stream") == 0


def test_connections_are_counted_per_server_and_per_key() -> None:
    """A key's reader and its submitter are one; nobody takes another key's share for long."""
    connections = ConnectionLimit(MOST, MOST_PER_KEY)
    with connections.counted(ANN, Purpose.STREAM), connections.counted(ANN, Purpose.WAIT):
        with pytest.raises(TooManyFollowersOfKeyError, match="the key 'ann' has 2"):
            connections.counted(Principal("ann", Role.READ), Purpose.STREAM).__enter__()
        with connections.counted(BOB, Purpose.STREAM):
            with pytest.raises(TooManyFollowersError, match=r"3 event streams.*try again in 5 s"):
                connections.counted(CLEO, Purpose.STREAM).__enter__()
            assert connections.num_open(Purpose.STREAM) == 2
        with connections.counted(CLEO, Purpose.WAIT):
            assert connections.num_open(Purpose.WAIT) == 2
    assert [connections.num_open(purpose) for purpose in Purpose] == [0, 0]
    assert not connections._by_key


def test_a_place_is_given_back_when_the_block_fails() -> None:
    connections = ConnectionLimit(1, 1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), connections.counted(ANN, Purpose.WAIT):
            raise ZeroDivisionError
    assert connections.num_open(Purpose.WAIT) == 0
