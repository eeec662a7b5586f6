"""What the service does about jobs, without HTTP and without solving: a test plays the engine."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

import pytest

from optpipe import Problem
from optpipe.wire import JobOptions, JobState
from optpipe_api.access import ANYBODY, Principal, Role
from optpipe_api.errors import (
    JobNotFoundError,
    ScheduleNotFoundError,
)
from optpipe_api.jobs import (
    AttemptOutcome,
    HistoryEntry,
    JobEvent,
    JobRecord,
    TracePoint,
)
from optpipe_api.services.cache import JobCache
from optpipe_api.services.events import Changes
from optpipe_api.services.jobs import JobService
from optpipe_api.services.parse_pool import ParsePool
from optpipe_api.services.submission import solved_job
from optpipe_api.store import open_stores
from tests.api.live import make_settings, two_stages

pytestmark = pytest.mark.anyio

ANN, BOB, READER = (
    Principal("ann", Role.SUBMIT),
    Principal("bob", Role.SUBMIT),
    Principal("ann", Role.READ),
)
LEASE_S = 60.0


class Engine:
    """Notes what it is told, and does nothing."""

    def __init__(self) -> None:
        self.woken = 0
        self.cancelled: list[str] = []

    def wake(self) -> None:
        self.woken += 1

    def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)


class Bench:
    """The job service over a store of its own; used inside an event loop."""

    def __init__(self, folder, **settings) -> None:
        self.settings = make_settings(folder, **settings)
        self.stores = open_stores(self.settings.database_url)
        self.store = self.stores.jobs
        engine: Any = Engine()
        self.engine = engine
        self.changes = Changes()
        self.pool = ParsePool()
        self.held: list[asyncio.Future[Any]] = []
        cache = JobCache(self.settings, self.store, self.pool)
        self.jobs = JobService(self.settings, self.store, engine, self.changes, cache=cache)

    def submit(self, who: Principal = ANYBODY, key: str | None = None, **kwargs) -> JobRecord:
        options = JobOptions(time_limit_s=5.0)
        new = solved_job(Problem.parse(two_stages()), options, **kwargs)
        return self.jobs.submit(new, who, key)

    def claim(self) -> Any:
        return self.store.claim("worker", LEASE_S)

    def improve(self, claim: Any, objective_ms: float, *, publish: bool = True) -> None:
        point = TracePoint(seconds=1.0, method="m", objective_ms=objective_ms, bound_ms=1.0)
        self.store.record(claim.lease, point, LEASE_S, schedule=f"S{objective_ms:g}")
        if publish:
            self.changes.publish(claim.job.id)

    def end(self, claim: Any, event: JobEvent = JobEvent.SUCCEED, **outcome) -> None:
        self.store.finish(claim.lease, AttemptOutcome(event=event, **outcome))
        self.changes.publish(claim.job.id)

    def hold(self, waiting: Any) -> None:
        self.held.append(asyncio.ensure_future(waiting))

    async def collect(self, job_id: str, after: int = 0) -> list[HistoryEntry]:
        entries = await self.jobs.events(job_id, after, ANYBODY)
        return [] if entries is None else [entry async for entry in entries]

    def close(self) -> None:
        self.pool.close()
        self.stores.close()


@pytest.fixture
async def bench(tmp_path, request) -> AsyncIterator[Bench]:
    """A parameter holds settings."""
    with closing(Bench(tmp_path, **getattr(request, "param", {}))) as bench:
        yield bench
        for waiting in bench.held:
            waiting.cancel()
        await asyncio.gather(*bench.held, return_exceptions=True)


async def until(condition) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.01)


def texts(entries: list[HistoryEntry]) -> list[object]:
    return [entry.text or entry.objective_ms for entry in entries]


# Taking in


async def test_a_new_job_wakes_the_engine_and_a_repeated_key_does_not(bench: Bench) -> None:
    first, again = (bench.submit(ANN, "k", tags=["b", "a"], priority=3) for _ in range(2))
    assert (first, bench.engine.woken) == (again, 1)
    assert (first.owner, first.tags, first.priority) == ("ann", ("a", "b"), 3)
    assert bench.submit(BOB, "k").id != first.id


@pytest.mark.parametrize("bench", [{"cache": True}], indirect=True)
async def test_an_answer_that_is_known_wakes_nobody(bench: Bench) -> None:
    bench.submit()
    bench.end(bench.claim(), schedule="S", objective_ms=9.0)
    bench.engine.woken = 0
    job = bench.submit()
    assert (job.state, bench.engine.woken) == (JobState.SUCCEEDED, 0)
    assert texts(await bench.collect(job.id)) == [9.0, "succeeded"]


# Changing


async def test_a_cancellation_reaches_store_engine_and_followers(bench: Bench) -> None:
    job_id = bench.submit().id
    following = asyncio.create_task(bench.collect(job_id))
    await asyncio.sleep(0.05)
    bench.jobs.cancel(job_id, ANYBODY)
    assert texts(await following) == ["queued", "cancelled"]
    assert bench.engine.cancelled == [job_id]


async def test_more_time_wakes_the_engine(bench: Bench) -> None:
    job_id = bench.submit().id
    bench.jobs.cancel(job_id, ANYBODY)
    bench.engine.woken = 0
    assert bench.jobs.resume(job_id, 1.0, ANYBODY).state is JobState.QUEUED
    assert bench.engine.woken == 1


# Waiting


async def test_waiting_for_the_next_schedule_ends_with_it(bench: Bench) -> None:
    job_id = bench.submit().id
    claim = bench.claim()
    for number, objective_ms in enumerate((9.0, 8.0), start=1):
        waiting = asyncio.create_task(bench.jobs.wait_schedule(job_id, number - 1, 30.0, ANYBODY))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        bench.improve(claim, objective_ms)
        stored = await waiting
        assert stored is not None
        assert (stored.number, stored.document) == (number, f"S{objective_ms:g}")


async def test_waiting_ends_with_its_time_or_with_the_job(bench: Bench) -> None:
    job_id = bench.submit().id
    with pytest.raises(ScheduleNotFoundError):
        await bench.jobs.wait_schedule(job_id, 0, 0.05, ANYBODY)
    claim = bench.claim()
    bench.improve(claim, 9.0)
    assert await bench.jobs.wait_schedule(job_id, 1, 0.05, ANYBODY) is None
    assert await bench.jobs.wait_schedule(job_id, 7, 30.0, ANYBODY) is not None
    waiting = asyncio.create_task(bench.jobs.wait_schedule(job_id, 1, 30.0, ANYBODY))
    await asyncio.sleep(0.05)
    bench.end(claim)
    assert await waiting is None
    assert (await bench.jobs.wait(bench.store.get(job_id), 30.0)).state is JobState.SUCCEEDED


@pytest.mark.parametrize("bench", [{"max_wait_s": 0.1}], indirect=True)
async def test_nobody_waits_longer_than_the_service_wants(bench: Bench) -> None:
    began = time.monotonic()
    job = await bench.jobs.wait(bench.submit(), 1e9)
    assert job.state is JobState.QUEUED
    assert time.monotonic() - began >= 0.1


# Following


async def test_many_followers_of_one_job_ask_the_store_as_often_as_one(
    bench: Bench, monkeypatch
) -> None:
    job_id = bench.submit().id
    claim = bench.claim()
    asked: list[str] = []
    history = bench.store.history

    def counted(*arguments: Any) -> list[HistoryEntry]:
        asked.append("")
        return history(*arguments)

    monkeypatch.setattr(bench.store, "history", counted)
    following = [asyncio.create_task(bench.collect(job_id)) for _ in range(100)]
    tails = bench.jobs._followers._tails
    await until(lambda: tails and tails[job_id].num_followers == 100)
    for objective_ms in (9.0, 8.0, 7.0):
        bench.improve(claim, objective_ms)
        await asyncio.sleep(0.05)
    bench.end(claim)
    found = await asyncio.gather(*following)
    assert all(entries == history(job_id) for entries in found)
    assert len(asked) < 30
    assert tails == {}


async def test_a_resumed_job_is_followed_through_its_first_end(bench: Bench) -> None:
    job_id = bench.submit().id
    bench.jobs.cancel(job_id, ANYBODY)
    patient = await bench.jobs.events(job_id, 0, ANYBODY)
    assert patient is not None
    assert (await anext(patient)).text == "queued"
    bench.jobs.resume(job_id, 1.0, ANYBODY)
    following = asyncio.create_task(bench.collect(job_id))
    await asyncio.sleep(0.05)
    bench.end(bench.claim())
    sentence = "resumed with 1 s more"
    assert texts(await following) == [
        "queued",
        "cancelled",
        sentence,
        "queued",
        "running",
        "succeeded",
    ]
    assert texts([entry async for entry in patient])[0] == "cancelled"


async def test_followers_of_a_deleted_job_are_let_go(bench: Bench) -> None:
    job_id = bench.submit().id
    bench.jobs.cancel(job_id, ANYBODY)
    assert await bench.jobs.events(job_id, 10**9, ANYBODY) is None
    late = await bench.jobs.events(job_id, 0, ANYBODY)
    assert late is not None
    assert bench.store.delete_finished(time.time() + 1) == 1
    assert await anext(late, None) is None
    with pytest.raises(JobNotFoundError):
        await bench.collect(job_id)
