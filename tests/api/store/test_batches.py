"""What a batch store must do: the promises of `optpipe_api.store.batches`, one by one."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from optpipe.wire import JobOptions, JobState
from optpipe_api.errors import (
    BatchNotFoundError,
    KeyReusedError,
    QueueFullError,
    TooManyJobsError,
)
from optpipe_api.jobs import AttemptOutcome, BatchPlan, ItemPlan, JobError, JobEvent, NewBatch
from tests.api.store.test_jobs import LEASE_S, new, point, together

if TYPE_CHECKING:
    from optpipe_api.jobs import BatchRecord, Claim, JobRecord, NewJob
    from optpipe_api.store import Stores

OPTIONS = JobOptions(time_limit_s=5.0, seed=3)
FAILED = AttemptOutcome(
    event=JobEvent.FAIL, error=JobError(code="solver.nothing_found", message="no")
)
ANSWERED = AttemptOutcome(
    event=JobEvent.SUCCEED, schedule="{}", objective_ms=9.0, bound_ms=9.0, method="m"
)


def plan(size: int = 3) -> BatchPlan:
    return BatchPlan(
        axes={"memory_scale": [1, 0.5, 0.25][:size]},
        options=OPTIONS,
        tags=("a", "b"),
        priority=2,
        items=tuple(
            ItemPlan(values={"memory_scale": 1 / (at + 1)}, memory_bytes=(at, 7), family="f")
            for at in range(size)
        ),
    )


def batch(name: str = "sweep", key: str | None = None, **changes: Any) -> NewBatch:
    made = NewBatch(
        name=name,
        owner="ann",
        plan=plan(),
        request_hash=f"sha256:{name.encode().hex()}",
        idempotency_key=key,
    )
    return replace(made, **changes)


def items(number: int = 3, owner: str = "ann") -> list[NewJob]:
    made = (new(f"item {at}", changes={"owner": owner, "tags": ("a",)}) for at in range(number))
    return [replace(item, options=OPTIONS) for item in made]


def add(stores: Stores, number: int = 3, **changes: Any) -> tuple[BatchRecord, list[JobRecord]]:
    return stores.batches.add(batch(**changes), items(number), max_queued=100)


def claimed(stores: Stores) -> Claim:
    claim = stores.jobs.claim("worker", LEASE_S)
    assert claim is not None
    return claim


# Submitting


def test_a_batch_is_read_back_whole_with_its_jobs_in_order(stores, open_all, clock) -> None:
    added, jobs = add(stores, name="na\x00me")
    other = open_all()
    assert other.batches.get(added.id) == added
    assert other.batches.jobs(added.id) == jobs
    assert other.batches.plan(added.id) == plan()
    assert (added.name, added.owner) == ("na\N{REPLACEMENT CHARACTER}me", "ann")
    assert (added.created_at, added.finished_at) == (clock(), None)
    assert added.counts == {JobState.QUEUED: 3}
    assert (added.num_items, added.num_finished, added.is_finished) == (3, 0, False)
    assert [(job.batch_id, job.batch_index, job.name) for job in jobs] == [
        (added.id, index, f"item {index}") for index in range(3)
    ]
    assert {(job.tags, job.options, job.owner) for job in jobs} == {(("a",), OPTIONS, "ann")}
    assert stores.jobs.page(9, batch_id=added.id) == jobs[::-1]


@pytest.mark.parametrize("batch_id", ["0" * 32, "", "x", "\x00", "é" * 32])
def test_an_unknown_id_is_refused_everywhere(stores, batch_id: str) -> None:
    store = stores.batches
    retry = partial(store.retry, max_queued=9)
    for method in (store.get, store.plan, store.jobs, store.cancel, retry):
        with pytest.raises(BatchNotFoundError):
            method(batch_id)


def test_a_batch_is_taken_whole_or_not_at_all(stores) -> None:
    add(stores)
    for limits, error in (
        ({"max_queued": 5}, QueueFullError),
        ({"max_queued": 100, "max_of_owner": 5}, TooManyJobsError),
    ):
        with pytest.raises(error):
            stores.batches.add(batch("second"), items(), **limits)
    nothing: dict[str, Any] = {"problem_hash": None}
    broken = [*items(2), replace(items()[0], **nothing)]
    with pytest.raises(Exception, match="problem_hash"):
        stores.batches.add(batch("third"), broken, max_queued=100)
    assert len(stores.batches.page(9)) == 1
    assert len(stores.jobs.page(9)) == 3
    stores.batches.add(batch("fourth"), items(), max_queued=6, max_of_owner=6)


def test_items_that_are_answered_at_once_need_no_room(stores) -> None:
    answered = [replace(item, finished=ANSWERED) for item in items()]
    added, jobs = stores.batches.add(batch(), answered, max_queued=0, max_of_owner=0)
    assert added.counts == {JobState.SUCCEEDED: 3}
    assert (added.is_finished, added.finished_at) == (True, added.created_at)
    assert [job.objective_ms for job in jobs] == [9.0] * 3


def test_a_key_makes_one_batch_for_an_owner(stores) -> None:
    first, _ = add(stores, key="k")
    assert stores.batches.add(batch(key="k"), items(), max_queued=0) == (first, [])
    with pytest.raises(KeyReusedError, match="'k'"):
        add(stores, name="other", key="k")
    assert add(stores, key="k", owner="bob")[0].id != first.id
    assert len(stores.jobs.page(20)) == 6


def test_one_key_from_many_threads_makes_one_batch(open_all) -> None:
    found: list[str] = []

    def submit(stores: Stores) -> None:
        found.append(add(stores, key="k")[0].id)

    stores = open_all()
    together([partial(submit, open_all()) for _ in range(4)])
    assert len(found) == 4
    assert len(set(found)) == 1
    assert len(stores.jobs.page(20)) == 3


# Reading


def test_pages_go_from_newest_to_oldest_for_one_owner_or_all(stores) -> None:
    store = stores.batches
    ids = [add(stores, at, owner=who)[0].id for at, who in enumerate(("ann", "bob") * 2)]
    assert [found.id for found in store.page(10)] == ids[::-1]
    assert [found.num_items for found in store.page(10)] == [3, 2, 1, 0]
    first = store.page(1, owner="ann")
    assert [found.id for found in first] == [ids[2]]
    assert [found.id for found in store.page(9, first[0].position, owner="ann")] == [ids[0]]


def test_progress_is_what_the_jobs_say(stores, clock) -> None:
    added, _ = add(stores)
    lease = claimed(stores).lease
    states = stores.batches.get(added.id).counts
    assert states == {JobState.QUEUED: 2, JobState.RUNNING: 1}
    stores.jobs.record(lease, point(9.0, 1.0), LEASE_S, schedule="{}")
    assert stores.batches.jobs(added.id)[0].objective_ms == 9.0
    stores.jobs.finish(lease, FAILED)
    seen = stores.batches.get(added.id)
    assert seen.counts == {JobState.QUEUED: 2, JobState.FAILED: 1}
    assert (seen.num_finished, seen.is_finished, seen.finished_at) == (1, False, None)
    for _ in range(2):
        clock.now += 1
        stores.jobs.finish(claimed(stores).lease, ANSWERED)
    seen = stores.batches.get(added.id)
    assert (seen.num_finished, seen.is_finished) == (3, True)
    assert seen.finished_at == clock()


def test_a_batch_goes_with_the_last_of_its_jobs(stores, clock) -> None:
    added, _ = add(stores)
    stores.batches.cancel(added.id)
    clock.now += 100
    assert stores.jobs.delete_finished(clock(), 2) == 2
    assert [job.batch_index for job in stores.batches.jobs(added.id)] == [2]
    assert stores.jobs.delete_finished(clock(), 2) == 1
    assert stores.batches.page(9) == []


# Changing


def test_cancel_ends_the_queued_marks_the_running_and_leaves_the_rest(stores) -> None:
    added, _ = add(stores)
    stores.jobs.finish(claimed(stores).lease, ANSWERED)
    running = claimed(stores).job
    other = stores.jobs.add(new("other"), max_queued=9)[0]
    cancelled = stores.batches.cancel(added.id)
    assert [(job.batch_index, job.state) for job in cancelled] == [
        (1, JobState.RUNNING),
        (2, JobState.CANCELLED),
    ]
    assert cancelled == stores.batches.jobs(added.id)[1:]
    assert stores.jobs.get(running.id).cancel_requested
    assert stores.jobs.get(other.id) == other
    assert [job.id for job in stores.batches.cancel(added.id)] == [running.id]


def test_retry_gives_failed_jobs_their_whole_time_again_and_their_schedules(stores, clock) -> None:
    added, _ = add(stores)
    first = claimed(stores)
    stores.jobs.record(first.lease, point(9.0, 1.0), 100.0, schedule="{}")
    clock.now += 4
    stores.jobs.finish(first.lease, FAILED)
    stores.jobs.finish(claimed(stores).lease, ANSWERED)
    for spent_s, limit_s in ((4.0, 9.0), (10.0, 14.0)):
        (again,) = stores.batches.retry(added.id, max_queued=2)
        assert (again.id, again.state) == (first.job.id, JobState.QUEUED)
        assert (again.batch_index, again.error, again.objective_ms) == (0, None, 9.0)
        assert (again.options.time_limit_s, again.spent_s) == (limit_s, min(spent_s, 9.0))
        assert again.options.time_limit_s - again.spent_s == OPTIONS.time_limit_s
        claim = claimed(stores)
        assert (claim.job.id, claim.start) == (first.job.id, "{}")
        # It overruns its time.
        clock.now += 6
        stores.jobs.heartbeat(claim.lease, LEASE_S)
        stores.jobs.finish(claim.lease, FAILED)


def test_retry_leaves_alone_what_has_not_failed_or_is_proven(stores) -> None:
    added, _ = add(stores)
    died = claimed(stores).lease
    stores.jobs.record(died, point(9.0, 9.0), LEASE_S, schedule="{}")
    stores.jobs.requeue(died, death="killed", max_attempts=1)
    stores.jobs.finish(claimed(stores).lease, ANSWERED)
    stores.batches.cancel(added.id)
    before = stores.batches.jobs(added.id)
    assert [job.state.value for job in before] == ["failed", "succeeded", "cancelled"]
    assert stores.batches.retry(added.id, max_queued=0) == []
    assert stores.batches.jobs(added.id) == before


def test_a_retry_finds_room_for_all_or_changes_nothing(stores) -> None:
    added, _ = add(stores)
    for _ in range(3):
        stores.jobs.finish(claimed(stores).lease, FAILED)
    for limits, error in (
        ({"max_queued": 2}, QueueFullError),
        ({"max_queued": 9, "max_of_owner": 2}, TooManyJobsError),
    ):
        with pytest.raises(error):
            stores.batches.retry(added.id, **limits)
    assert stores.batches.get(added.id).counts == {JobState.FAILED: 3}
    retried = stores.batches.retry(added.id, max_queued=3, max_of_owner=3)
    assert [job.batch_index for job in retried] == [0, 1, 2]


def test_a_batch_cancelled_while_it_is_worked_on_leaves_no_job_queued(open_all) -> None:
    stores, other = open_all(), open_all()
    added, _ = add(stores, 20)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            claim = other.jobs.claim("worker", LEASE_S)
            if claim is not None:
                other.jobs.finish(claim.lease, ANSWERED)

    def cancel() -> None:
        try:
            stores.batches.cancel(added.id)
        finally:
            stop.set()

    together([work, cancel])
    counts = stores.batches.get(added.id).counts
    assert counts.keys() <= {JobState.SUCCEEDED, JobState.CANCELLED}
    assert sum(counts.values()) == 20
