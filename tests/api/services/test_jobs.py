"""Jobs as the service takes, shows and follows them; and what known answers save."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from optpipe import Problem, evaluate
from optpipe.answers import Cache, JobOptions, JobState
from optpipe.requests import JobKind
from optpipe.schedule import Provenance
from optpipe_api.access import ANYBODY, Principal, Role
from optpipe_api.errors import JobNotFoundError, ScheduleNotFoundError
from optpipe_api.jobs import (
    AttemptOutcome,
    HistoryEntry,
    JobError,
    JobEvent,
    JobRecord,
    NewJob,
    TracePoint,
)
from optpipe_api.services.events import Changes
from optpipe_api.services.jobs import (
    JobService,
    complete_from_cache,
    is_reusable,
)
from optpipe_api.services.submission import solved_job
from optpipe_api.store import open_stores
from tests.api.live import make_settings, two_stages
from tests.api.serial import serial

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
        self.waiting: list[asyncio.Future[Any]] = []
        self.jobs = JobService(self.settings, self.store, engine, self.changes)

    def submit(self, who: Principal = ANYBODY, key: str | None = None, **kwargs) -> JobRecord:
        options = JobOptions(time_limit_s=5.0)
        new = solved_job(Problem.parse(two_stages()), options, **kwargs)
        return self.jobs.submit(new, who, key)[0]

    def claim(self) -> Any:
        return self.store.claim("worker", LEASE_S)

    def improve(self, claim: Any, objective_ms: float, *, publish: bool = True) -> None:
        point = TracePoint(seconds=1.0, method="m", objective_ms=objective_ms, bound_ms=1.0)
        self.store.record(claim.lease, point, LEASE_S, documents={"schedule": f"S{objective_ms:g}"})
        if publish:
            self.changes.publish(claim.job.id)

    def end(self, claim: Any, event: JobEvent = JobEvent.SUCCEED, **outcome) -> None:
        self.store.finish(claim.lease, AttemptOutcome(event=event, **outcome))
        self.changes.publish(claim.job.id)

    def hold(self, waiting: Any) -> None:
        self.waiting.append(asyncio.ensure_future(waiting))

    async def collect(self, job_id: str, after: int = 0) -> list[HistoryEntry]:
        entries = await self.jobs.events(job_id, after, ANYBODY)
        return [] if entries is None else [entry async for entry in entries]

    def close(self) -> None:
        self.stores.close()


@pytest.fixture
async def bench(tmp_path, request) -> AsyncIterator[Bench]:
    """A parameter holds settings."""
    with closing(Bench(tmp_path, **getattr(request, "param", {}))) as bench:
        yield bench
        for waiting in bench.waiting:
            waiting.cancel()
        await asyncio.gather(*bench.waiting, return_exceptions=True)


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
    bench.end(bench.claim(), documents={"schedule": "S"}, objective_ms=9.0)
    bench.engine.woken = 0
    job = bench.submit()
    assert (job.state, bench.engine.woken) == (JobState.SUCCEEDED, 0)
    assert texts(await bench.collect(job.id)) == [9.0, "succeeded"]


# Changing


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
    async with asyncio.timeout(15):
        assert await bench.jobs.wait_schedule(job_id, 1, 30.0, ANYBODY) is None
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
    queries: list[str] = []
    history = bench.store.history

    def counted(*arguments: Any) -> list[HistoryEntry]:
        queries.append("")
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
    assert len(queries) < 30
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


ASKED = JobOptions(time_limit_s=10.0, work_limit=5.0, threads=2, seed=1, gap=0.01)


def two(name: str = "", **stage: Any) -> Problem:
    """The problem of `two_stages`, with other numbers in both of its stages."""
    data = two_stages(name)
    return Problem.parse(data | {"stages": [{**one, **stage} for one in data["stages"]]})


class Shelf:
    """A store with finished jobs, and what the cache finds of them."""

    def __init__(self, folder) -> None:
        self.stores = open_stores(make_settings(folder).database_url)
        self.store = self.stores.jobs

    def new(self, problem: Problem, owner: str = "", **options) -> NewJob:
        return solved_job(problem, replace(JobOptions(time_limit_s=5.0), **options), owner=owner)

    def ask(self, problem: Problem, owner: str = "", **options) -> NewJob:
        return complete_from_cache(self.new(problem, owner, **options), self.store)

    def solved(
        self,
        problem: Problem,
        num_fused: int = 1,
        event: JobEvent = JobEvent.SUCCEED,
        bound_ms: float | None = 1.0,
        owner: str = "",
        **options,
    ) -> Any:
        """A job that ended with a serial schedule: the more fused backwards, the shorter."""
        self.store.add(self.new(problem, owner, **options), max_queued=99)
        claim: Any = self.store.claim("worker", 60.0)
        programs = serial(problem, num_fused)
        schedule = evaluate(problem, programs, Provenance(method="zb"), bound_ms=bound_ms)
        outcome = AttemptOutcome(
            event=event,
            documents={"schedule": schedule.model_dump_json(by_alias=True)},
            objective_ms=schedule.objective_ms,
            bound_ms=bound_ms,
            method="zb",
        )
        return self.store.finish(claim.lease, outcome)

    def close(self) -> None:
        self.stores.close()


@pytest.fixture
def shelf(tmp_path):
    with closing(Shelf(tmp_path)) as shelf:
        yield shelf


# Which answers answer


def answer_of(objective_ms: float | None, bound_ms: float | None, **options) -> JobRecord:
    return JobRecord(
        id="",
        position=1,
        state=JobState.SUCCEEDED,
        name="",
        problem_hash="",
        objective="makespan",
        options=replace(ASKED, **options),
        created_at=0.0,
        objective_ms=objective_ms,
        bound_ms=bound_ms,
    )


@pytest.mark.parametrize(
    ("had", "wanted", "is_answer"),
    [
        # Found with the same budget, or with more.
        ({}, {}, True),
        ({"time_limit_s": 11.0, "threads": 3, "work_limit": None, "gap": 0.001}, {}, True),
        ({"time_limit_s": 9.0}, {}, False),
        ({"threads": 1}, {}, False),
        ({"work_limit": 4.0}, {}, False),
        ({}, {"work_limit": None}, False),
        ({"gap": 0.02}, {}, False),
        ({"seed": 2}, {}, False),
        ({"cache": "refresh"}, {}, True),
        # Proven, or close enough to what is proven: the budget does not matter.
        ({"time_limit_s": 1.0, "seed": 2, "bound_ms": 100.0}, {}, True),
        ({"time_limit_s": 1.0, "seed": 2, "bound_ms": 99.5}, {}, True),
        ({"time_limit_s": 1.0, "seed": 2, "bound_ms": 98.0}, {}, False),
        ({"time_limit_s": 1.0, "gap": 0.5, "bound_ms": 98.0}, {"gap": 0.02}, True),
        # Another method finds something else, proven or not.
        ({"method": "1f1b"}, {}, False),
        ({"method": "1f1b", "bound_ms": 100.0}, {}, False),
        ({"chunks": (1,), "bound_ms": 100.0}, {}, False),
        ({"placements": ("v",)}, {"placements": ("v",)}, True),
        # Under noise nothing is proven: the same percentile and noise, the same budget or more.
        ({"robust": "P90"}, {"robust": "P90"}, True),
        ({"robust": "P90", "jitter": 0.2}, {"robust": "P90"}, False),
        ({"robust": "P95"}, {"robust": "P90"}, False),
        ({"bound_ms": 100.0}, {"robust": "P90"}, False),
        ({"robust": "P90", "bound_ms": 100.0}, {}, False),
        ({"robust": "P90", "bound_ms": 100.0, "seed": 2}, {"robust": "P90"}, False),
        ({"jitter": 0.2}, {}, True),
    ],
)
def test_an_answer_counts_where_it_would_be_found_again(
    had: dict[str, Any], wanted: dict[str, Any], is_answer: bool
) -> None:
    """The job has an objective of 100 ms, and a bound of 50 ms where nothing else is said."""
    job = answer_of(100.0, had.pop("bound_ms", 50.0), **had)
    assert is_reusable(job, replace(ASKED, **wanted)) is is_answer


def test_a_hit_is_the_other_jobs_answer_under_another_name(shelf) -> None:
    job = shelf.solved(two("first"))
    new = shelf.ask(two("second"))
    assert (new.cache, new.source_id, new.name) == (Cache.HIT, job.id, "second")
    assert new.finished == AttemptOutcome(
        event=JobEvent.SUCCEED,
        documents={"schedule": shelf.store.schedule(job.id).document},
        objective_ms=job.objective_ms,
        bound_ms=1.0,
        method="zb",
    )


def test_a_proof_that_there_is_none_is_a_hit_too(shelf) -> None:
    shelf.store.add(shelf.new(two(), time_limit_s=1.0), max_queued=9)
    error = JobError(code="problem.infeasible", message="why", needs={"d": 5})
    outcome = AttemptOutcome(event=JobEvent.PROVE_INFEASIBLE, error=error)
    shelf.store.finish(shelf.store.claim("worker", 60.0).lease, outcome)
    assert shelf.ask(two()).finished == outcome


def test_an_older_answer_counts_where_the_newest_does_not(shelf) -> None:
    job = shelf.solved(two(), time_limit_s=9.0)
    shelf.solved(two(), time_limit_s=1.0)
    assert shelf.ask(two()).source_id == job.id


@pytest.mark.parametrize("event", [JobEvent.FAIL, JobEvent.CANCEL])
def test_what_was_cut_short_is_no_answer_but_a_start(shelf, event: JobEvent) -> None:
    job = shelf.solved(two(), event=event)
    new = shelf.ask(two())
    assert (new.cache, new.finished) == (Cache.MISS, None)
    assert list(shelf.store.near(new.shape_hash, owner="", limit=5)) == [job.id]


def test_a_job_of_somebody_else_is_neither(shelf) -> None:
    shelf.solved(two(), owner="a")
    assert shelf.ask(two(), owner="b").cache is Cache.MISS
    assert shelf.ask(two(), owner="a").cache is Cache.HIT


async def test_refresh_takes_neither_and_a_service_may_want_neither(shelf, bench: Bench) -> None:
    shelf.solved(two())
    assert shelf.ask(two(), cache="refresh").cache is Cache.MISS
    assert bench.submit().cache is Cache.MISS


def test_a_plan_that_was_made_before_comes_with_its_problem(shelf) -> None:
    documents = {"model": "M"}
    plan = replace(shelf.new(two()), kind=JobKind.PLAN, documents=documents, shape_hash="")
    shelf.store.add(plan, max_queued=9)
    outcome = AttemptOutcome(
        event=JobEvent.SUCCEED,
        documents={"schedule": "S", "problem": "P"},
        objective_ms=9.0,
        method="plan",
    )
    shelf.store.finish(shelf.store.claim("worker", 60.0).lease, outcome)
    new: Any = complete_from_cache(plan, shelf.store)
    assert (new.cache, new.documents) == (Cache.HIT, {"model": "M"})
    assert new.finished.documents == {"problem": "P", "schedule": "S"}


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
