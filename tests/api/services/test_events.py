"""Waiting costs one query a round, however many clients wait and for however many things."""

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import httpx
import pytest

from optpipe.answers import JobState
from optpipe_api.errors import StoreUnavailableError
from optpipe_api.jobs import AttemptOutcome, JobEvent, Standing, TracePoint
from optpipe_api.services import events
from optpipe_api.services.events import Changes, Purpose, SharedCalls, Watch
from tests.api.live import connected, make_settings, running, two_stages
from tests.api.services.test_jobs import bench, until
from tests.api.store import test_batches as batches_of_test
from tests.api.store.test_jobs import LEASE_S, new

__all__ = ["bench"]

pytestmark = pytest.mark.anyio

NOBODY = Standing("", JobState.QUEUED, 0, 1)
ROUND_S = 0.25


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch) -> None:
    """What each second brings comes four times as often."""
    monkeypatch.setattr(events, "_POLL_S", ROUND_S)


class Book:
    """A store of standings, which counts how often it is asked and about how many jobs."""

    def __init__(self) -> None:
        self.standings_of: dict[str, Standing] = {}
        self.queries: list[tuple[str, ...]] = []
        self.fault: Exception | None = None

    def standings(self, job_ids: Sequence[str]) -> dict[str, Standing]:
        self.queries.append(tuple(job_ids))
        if self.fault is not None:
            raise self.fault
        return {
            job_id: self.standings_of[job_id] for job_id in job_ids if job_id in self.standings_of
        }


class Scene:
    """A watch over a book; made inside an event loop."""

    def __init__(self, num_jobs: int) -> None:
        self.book = Book()
        self.changes = Changes()
        store: Any = self.book
        self.watch = Watch(store, self.changes)
        self.ids = [f"{number:032x}" for number in range(num_jobs)]
        self.book.standings_of = dict.fromkeys(self.ids, NOBODY)

    def waiter(self, job_id: str, seconds: float | None = None) -> asyncio.Task[None]:
        return asyncio.create_task(self.watch.until(job_id, has_ended, seconds))

    def end(self, job_id: str) -> None:
        self.book.standings_of[job_id] = Standing("ann", JobState.SUCCEEDED, 1, 9)


def has_ended(standing: Standing) -> bool:
    return standing.state.is_final


@pytest.fixture
async def stage(request) -> Scene:
    """A parameter says how many jobs there are."""
    return Scene(getattr(request, "param", 1))


@pytest.mark.parametrize(("stage", "num_each"), [(1, 1000), (1000, 1)], indirect=["stage"])
async def test_a_thousand_who_wait_cost_one_query_a_round(stage: Scene, num_each: int) -> None:
    """For one job or for many: a round a second, whoever came in between."""
    loop = asyncio.get_running_loop()
    waiting = [stage.waiter(job_id) for job_id in stage.ids for _ in range(num_each)]
    await until(lambda: stage.book.queries[-1:] == [tuple(stage.ids)])
    began, before = loop.time(), len(stage.book.queries)
    assert before <= 3
    await until(lambda: len(stage.book.queries) >= before + 2)
    # The first of the two may come at once; between them is a round.
    assert loop.time() - began > 0.9 * ROUND_S
    assert stage.book.queries[-2:] == [tuple(stage.ids)] * 2
    assert not any(task.done() for task in waiting)
    for job_id in stage.ids:
        stage.end(job_id)
    await asyncio.gather(*waiting)
    assert len(stage.book.queries) <= before + 4


@pytest.mark.parametrize("stage", [6], indirect=True)
async def test_a_change_here_is_seen_at_once_and_asks_about_that_job_alone(
    stage: Scene, monkeypatch
) -> None:
    monkeypatch.setattr(events, "_POLL_S", 3600.0)
    waiting = [stage.waiter(job_id) for job_id in stage.ids]
    await until(lambda: len(stage.book.queries) > 0)
    await asyncio.sleep(0.1)
    stage.end(stage.ids[3])
    stage.end(stage.ids[4])
    stage.changes.publish(stage.ids[3])
    stage.changes.publish("f" * 32)
    await waiting[3]
    assert stage.book.queries[-1] == (stage.ids[3],)
    assert not waiting[4].done()
    for task in waiting:
        task.cancel()


async def test_whoever_comes_while_the_store_is_asked_is_asked_for_anew(stage: Scene) -> None:
    """What was read before he came is not held against him."""
    (job_id,) = stage.ids
    first = stage.waiter(job_id)
    await until(lambda: len(stage.book.queries) == 1)
    stage.end(job_id)
    await asyncio.gather(first, stage.waiter(job_id))


async def test_a_burst_of_changes_costs_a_few_queries(stage: Scene) -> None:
    (job_id,) = stage.ids
    waiting = stage.waiter(job_id)
    began = asyncio.get_running_loop().time()
    for _ in range(300):
        stage.changes.publish(job_id)
        await asyncio.sleep(0.001)
    took_s = asyncio.get_running_loop().time() - began
    stage.end(job_id)
    await waiting
    assert len(stage.book.queries) <= 10 + took_s / 0.02


@pytest.mark.parametrize("stage", [3], indirect=True)
async def test_waiting_ends_with_its_time_with_a_deletion_and_with_the_server(stage: Scene) -> None:
    first, second, third = stage.ids
    await stage.watch.until(first, has_ended, 0.05)
    gone, patient = stage.waiter(second), stage.waiter(third)
    await asyncio.sleep(0.1)
    del stage.book.standings_of[second]
    await gone
    stage.changes.close()
    await patient
    await stage.watch.until(first, has_ended)
    number = len(stage.book.queries)
    await asyncio.sleep(1.2 * ROUND_S)
    assert len(stage.book.queries) == number
    assert stage.watch._waiting == {}


@pytest.mark.parametrize("stage", [5], indirect=True)
async def test_those_who_leave_early_leave_nothing_behind(stage: Scene) -> None:
    stay, *leave = [stage.waiter(job_id) for job_id in stage.ids]
    await asyncio.sleep(0.1)
    for task in leave:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    assert set(stage.watch._waiting) == {stage.ids[0]}
    stay.cancel()
    with suppress(asyncio.CancelledError):
        await stay
    assert (stage.watch._waiting, stage.watch._rounds) == ({}, None)


@pytest.mark.parametrize("stage", [2], indirect=True)
async def test_hundreds_who_ask_at_the_same_time_are_one_or_two_queries(stage: Scene) -> None:
    first, second = stage.ids
    stage.end(first)
    waiting = stage.waiter(second)
    wanted = [first, second, "f" * 32] * 100
    found = await asyncio.gather(*(stage.watch.standing(job_id) for job_id in wanted))
    assert found == [Standing("ann", JobState.SUCCEEDED, 1, 9), NOBODY, None] * 100
    assert len(stage.book.queries) <= 2
    assert not waiting.done()
    waiting.cancel()


async def test_whoever_asks_while_the_server_stops_is_told(stage: Scene) -> None:
    """No job is said to be gone because the server is going."""
    (job_id,) = stage.ids
    asking = asyncio.create_task(stage.watch.standing(job_id))
    await asyncio.sleep(0)
    stage.changes.close()
    assert await asking == await stage.watch.standing(job_id) == NOBODY


@pytest.mark.parametrize("turns", range(6))
async def test_whoever_hangs_up_just_after_news_leaves_no_rounds_behind(
    stage: Scene, turns: int
) -> None:
    """Each that went on would ask the store for the next ones, too."""
    (job_id,) = stage.ids
    for _ in range(3):
        waiting = stage.waiter(job_id)
        await until(lambda: stage.watch._due == set())
        await asyncio.sleep(0.05)
        stage.changes._notify(job_id)
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(0.05)
    names = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]  # type: ignore[union-attr]
    assert "Watch._poll" not in names


async def test_a_store_that_is_gone_for_a_moment_is_asked_again(stage: Scene) -> None:
    """Those who wait hear nothing of it; who asks for an answer now is told."""
    (job_id,) = stage.ids
    stage.book.fault = StoreUnavailableError("it is being restarted")
    waiting = stage.waiter(job_id)
    await asyncio.sleep(0.2)
    with pytest.raises(StoreUnavailableError):
        await stage.watch.standing(job_id)
    stage.book.fault = None
    stage.end(job_id)
    await waiting


async def test_a_fault_is_raised_by_all_who_wait_and_the_next_are_served(stage: Scene) -> None:
    (job_id,) = stage.ids
    stage.book.fault = RuntimeError("a fault of ours")
    found = await asyncio.gather(
        *(stage.waiter(job_id) for _ in range(3)),
        stage.watch.standing(job_id),
        return_exceptions=True,
    )
    assert [str(error) for error in found] == ["a fault of ours"] * 4
    stage.book.fault = None
    stage.end(job_id)
    await stage.waiter(job_id)


# With a store, and another server on it


async def test_what_another_server_does_is_seen_within_a_second_or_two(open_all) -> None:
    """Nobody notifies anybody: each asks. One waits in three ways for what the other writes."""
    ours, theirs = open_all(), open_all()
    watch = Watch(ours.jobs, Changes())
    job, _ = ours.jobs.add(new(), max_queued=9)
    ended = asyncio.create_task(watch.until(job.id, has_ended))
    found = asyncio.create_task(watch.until(job.id, lambda now: now.num_schedules > 0))
    await watch.until(job.id, lambda now: now.last_entry > 0)
    claim = theirs.jobs.claim("another server", LEASE_S)
    assert claim is not None
    point = TracePoint(seconds=1.0, method="m", objective_ms=9.0, bound_ms=1.0)
    theirs.jobs.record(claim.lease, point, LEASE_S, documents={"schedule": "S"})
    await found
    assert not ended.done()
    theirs.jobs.finish(claim.lease, AttemptOutcome(event=JobEvent.SUCCEED))
    await ended


# What many ask for at the same time


async def test_a_call_is_shared_by_those_who_asked_before_it_began() -> None:
    """Of a hundred who ask while a call runs, all get the next one: its answer is younger."""
    shared, may_end, calls = SharedCalls(), threading.Event(), itertools.count(1)

    def read() -> int:
        number = next(calls)
        may_end.wait(30)
        return number

    first = asyncio.create_task(shared.call("a", read))
    await until(lambda: shared._running)
    others = [asyncio.create_task(shared.call("a", read)) for _ in range(100)]
    await asyncio.sleep(0.05)
    others.pop().cancel()
    may_end.set()
    assert (await first, set(await asyncio.gather(*others))) == (1, {2})
    assert (shared._running, shared._upcoming) == ({}, {})


async def test_an_error_is_raised_by_all_who_share_the_call_and_keys_share_nothing() -> None:
    shared = SharedCalls()
    calls = [shared.call(key, lambda: 1 // 0) for key in "aab"] + [shared.call("c", lambda: 7)]
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(one) for one in found] == [ZeroDivisionError] * 3 + [int]
    assert await shared.call("a", lambda: 8) == 8


# Over HTTP, and with each store


@pytest.fixture
def reads(tmp_path, monkeypatch) -> Iterator[tuple[str, Any, Counter[str]]]:
    """A server, and how often its store of batches is asked what."""
    counted: Counter[str] = Counter()
    with running(make_settings(tmp_path, poll_s=5.0)) as (url, app):
        store = app.state.service._stores.batches
        for name in ("get", "plan", "jobs", "standings"):
            monkeypatch.setattr(store, name, _counting(getattr(store, name), counted, name))
        yield url, app.state.service, counted


def _counting(method: Callable[..., Any], counted: Counter[str], key: str) -> Callable[..., Any]:
    def ask(*given: Any, **named: Any) -> Any:
        counted[key] += 1
        return method(*given, **named)

    return ask


async def _waited(
    reads: tuple[str, Any, Counter[str]], path: str, headers: dict[str, str], end: str
) -> list[httpx.Response]:
    """Let 100 clients wait for a path and end what they wait for; return the answers."""
    url, service, counted = reads
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=90, limits=limits) as http:
        calls = [
            asyncio.create_task(http.get(path, params={"wait": 60}, headers=headers))
            for _ in range(100)
        ]
        await until(lambda: service.connections.num_open(Purpose.WAIT) == 100)
        await asyncio.sleep(4 * ROUND_S)
        counted.clear()
        began = time.monotonic()
        await asyncio.sleep(8 * ROUND_S)
        num_rounds = (time.monotonic() - began) / ROUND_S
        # A round each quarter of a second.
        assert counted.total() <= num_rounds + 10, counted
        counted.clear()
        assert (await http.post(end)).status_code in (200, 202)
        return list(await asyncio.gather(*calls))


async def test_a_hundred_who_wait_for_a_batch_cost_one_query_a_round_and_share_its_view(
    reads,
) -> None:
    url, _, counted = reads
    body = {"problem": two_stages("improve:1:60: "), "axes": {"memory_scale": [1, 0.5]}}
    async with httpx.AsyncClient(base_url=url, timeout=90) as http:
        path = f"/v1/batches/{(await http.post('/v1/batches', json=body)).json()['id']}"
    answers = await _waited(reads, path, {}, f"{path}/cancel")
    assert {answer.status_code for answer in answers} == {200}
    assert all(answer.json()["counts"]["cancelled"] == 2 for answer in answers)
    assert counted["plan"] <= 10


async def test_the_end_of_a_batch_is_seen_at_once_on_this_server(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(events, "_POLL_S", 3600.0)
    with connected(make_settings(tmp_path)) as http:
        body = {"problem": two_stages("improve:1:0.3: "), "axes": {"memory_scale": [1, 0.5]}}
        answer = http.post("/v1/batches", json=body, params={"wait": 60})
        assert (answer.status_code, answer.json()["counts"]["succeeded"]) == (200, 2)


async def test_the_end_of_a_batch_on_another_server_is_seen_within_a_round(open_all) -> None:
    ours, theirs = open_all(), open_all()
    watch = Watch(ours.batches, Changes())
    new_batch, jobs = batches_of_test.batch(), batches_of_test.items()
    batch, _ = theirs.batches.add(new_batch, jobs, max_queued=9)
    waiting = asyncio.create_task(watch.until(batch.id, lambda now: now.is_finished))
    await asyncio.sleep(2 * ROUND_S)
    assert not waiting.done()
    theirs.batches.cancel(batch.id)
    async with asyncio.timeout(30):
        await waiting
