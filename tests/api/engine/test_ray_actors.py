"""Actors on a cluster of stubs: they are used again, a dead head is noticed, and many run at once.

`make test-long` runs 1,000 jobs, the gate 200.
"""

import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from optpipe import Problem
from optpipe.answers import JobOptions, JobState
from optpipe_api.engine import ray as engine_ray
from optpipe_api.engine.engine import SlotEngine
from optpipe_api.engine.processes import Message, decode, encode
from optpipe_api.engine.ray import RayProcess, RaySolvers
from optpipe_api.services.submission import solved_job
from optpipe_api.store import open_stores
from tests.api.bench import Bench
from tests.api.live import make_settings, two_stages, until
from tests.strategies import IS_LONG


def remote(call: Callable[..., Any]) -> Any:
    """A method of an actor."""
    return SimpleNamespace(remote=call)


def says(kind: str, **header: Any) -> bytes:
    values = {"seconds": 0.0, "method": "stub", "objective_ms": 9.0, "bound_ms": 1.0}
    return encode(Message(kind, values | header, {"schedule": "{}"} if header else {}))


class StubActor:
    """An actor without thread or process; its search ends at once, or when it is told to stop.

    A pending result is a number. The stub of Ray has the message of each that is done.
    """

    def __init__(self, cluster: "StubRay") -> None:
        self._cluster = cluster
        self._said: deque[bytes] = deque([says("ready")])
        self._reads: deque[int] = deque()
        self.read = remote(self._read)
        self.write = remote(self._write)
        self.end = remote(lambda: cluster.new_result(None))

    def _read(self, _timeout_s: float) -> int:
        number = self._cluster.new_result()
        self._reads.append(number)
        self._answer()
        return number

    def _answer(self) -> None:
        while self._reads and self._said:
            self._cluster.results[self._reads.popleft()] = self._said.popleft()

    def _write(self, data: bytes) -> None:
        message = decode(data)
        if message.kind == "job":
            self._said.append(says("progress", objective_ms=9.0))
        if message.kind == "stop" or "at once" in json.loads(message.documents["problem"])["name"]:
            self._said += [says("result", status="feasible"), says("ready")]
        self._answer()


class StubRay:
    """What `optpipe_api.engine.ray` calls of Ray, with results that are done or not."""

    def __init__(self) -> None:
        self.results: dict[int, bytes | None] = {}
        self.last = 0
        self._lock = threading.Lock()

    def new_result(self, *done: bytes | None) -> int:
        with self._lock:
            self.last += 1
            self.results |= dict.fromkeys([self.last] if done else [], *done)
            return self.last

    def wait(
        self, calls: list[int], *, num_returns: int = 1, timeout: float
    ) -> tuple[list[int], list[int]]:
        deadline = time.monotonic() + timeout
        while True:
            found = [call for call in calls if call in self.results][:num_returns]
            if len(found) == num_returns or time.monotonic() >= deadline:
                return found, []
            time.sleep(0.005)

    def get(self, call: int, **_: object) -> bytes | None:
        return self.results.pop(call)

    def kill(self, actor: StubActor) -> None:
        return

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address="127.0.0.1:1")


@pytest.fixture
def cluster(monkeypatch) -> StubRay:
    """A cluster of stubs in place of Ray."""
    stub = StubRay()
    monkeypatch.setattr(engine_ray, "ray", stub)
    return stub


class StubSolvers(RaySolvers):
    """Starts stub actors."""

    def __init__(self, cluster: StubRay) -> None:
        self._cluster = cluster
        self.num_started = 0

    def start(self) -> RayProcess:
        self.num_started += 1
        return RayProcess(StubActor(self._cluster))

    def close(self) -> None:
        return


@pytest.mark.parametrize(("keep_s", "num_actors"), [(60.0, 1), (0.0, 8)])
def test_jobs_share_an_actor_for_a_minute(
    cluster, tmp_path, monkeypatch, keep_s: float, num_actors: int
) -> None:
    """After that its cores go to the next in line; each job then has another actor."""
    monkeypatch.setattr(engine_ray, "_KEEP_S", keep_s)
    solvers = StubSolvers(cluster)
    with closing(Bench(tmp_path, solvers)) as bench:
        for number in range(8):
            assert bench.end(bench.submit(f"at once {number}")).state == "succeeded"
        assert num_actors <= solvers.num_started <= num_actors + 1


NUM_JOBS = 1000 if IS_LONG else 200
HEARTBEAT_S = 2.0


def test_many_running_jobs_need_few_threads_and_one_renewal_at_a_time(cluster, tmp_path) -> None:
    """And each of them can be cancelled, and is given back when the server stops."""
    settings = make_settings(
        tmp_path, solver_processes=NUM_JOBS, heartbeat_s=HEARTBEAT_S, lease_s=60.0, poll_s=1.0
    )
    others = set(threading.enumerate())
    with closing(open_stores(settings.database_url)) as stores:
        engine = SlotEngine(stores.jobs, settings, lambda _: None, StubSolvers(cluster))
        new = solved_job(Problem.parse(two_stages()), JobOptions(time_limit_s=900.0))
        for number in range(NUM_JOBS):
            stores.jobs.add(replace(new, name=str(number)), max_queued=NUM_JOBS)
        engine.start()
        try:
            began = time.monotonic()
            until(lambda: stores.jobs.counts()[JobState.RUNNING] == NUM_JOBS)
            claimed_s = time.monotonic() - began
            until(lambda: all(job.has_schedule for job in stores.jobs.page(NUM_JOBS)))
            writes: list[str] = []

            def note(connection: Any) -> None:
                writes.append(connection.get_execution_options().get("optpipe_begin", "BEGIN"))

            sa.event.listen(stores.engine, "begin", note)
            began, cpu_s = time.monotonic(), time.process_time()
            time.sleep(5 * HEARTBEAT_S)
            seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu_s
            sa.event.remove(stores.engine, "begin", note)
            threads = set(threading.enumerate()) - others
            (first, *_) = stores.jobs.page(1)
            stores.jobs.request_cancel(first.id)
            engine.cancel(first.id)
            until(lambda: stores.jobs.get(first.id).state is JobState.CANCELLED)
        finally:
            engine.close()
        counts = stores.jobs.counts()
    num_renewals = writes.count("BEGIN IMMEDIATE")
    print(
        f"{NUM_JOBS} running jobs: {len(threads)} threads, {num_renewals / seconds:.2f} writing "
        f"and {len(writes) / seconds:.2f} transactions in total per second, "
        f"{cpu_s / seconds:.0%} of a core; claimed in {claimed_s:.1f} s"
    )
    assert len(threads) <= 20
    assert 2 <= num_renewals <= seconds / HEARTBEAT_S + 1
    assert len(writes) / seconds < 5
    assert counts[JobState.QUEUED] == NUM_JOBS - 1


def test_a_cluster_without_a_head_is_not_reachable(cluster, monkeypatch) -> None:
    solvers = StubSolvers(cluster)
    assert not solvers.is_reachable
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        context = SimpleNamespace(gcs_address=address)
        monkeypatch.setattr(cluster, "get_runtime_context", lambda: context)
        assert solvers.is_reachable
