"""What a batch store must do: the promises of `optpipe_api.store.batches`, one by one."""

import threading
from dataclasses import replace
from typing import Any

import pytest

from optpipe.answers import JobOptions, JobState
from optpipe_api.errors import QueueFullError, TooManyJobsError
from optpipe_api.jobs import (
    AttemptOutcome,
    AuditAction,
    BatchPlan,
    BatchRecord,
    Claim,
    ItemPlan,
    JobError,
    JobEvent,
    JobRecord,
    NewBatch,
    NewJob,
)
from optpipe_api.store import Stores
from tests.api.store.test_jobs import LEASE_S, new, point, together

OPTIONS = JobOptions(time_limit_s=5.0, seed=3)
FAILED = AttemptOutcome(
    event=JobEvent.FAIL, error=JobError(code="solver.nothing_found", message="no")
)
ANSWERED = AttemptOutcome(
    event=JobEvent.SUCCEED, documents={"schedule": "{}"}, objective_ms=9.0, bound_ms=9.0, method="m"
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
    new_batch = NewBatch(
        name=name,
        owner="ann",
        plan=plan(),
        request_hash=f"sha256:{name.encode().hex()}",
        idempotency_key=key,
    )
    return replace(new_batch, **changes)


def items(number: int = 3, owner: str = "ann") -> list[NewJob]:
    jobs = (new(f"item {at}", changes={"owner": owner, "tags": ("a",)}) for at in range(number))
    return [replace(item, options=OPTIONS) for item in jobs]


def add(stores: Stores, number: int = 3, **changes: Any) -> tuple[BatchRecord, list[JobRecord]]:
    new_batch = batch(**{"plan": plan(number)} | changes)
    return stores.batches.add(new_batch, items(number), max_queued=100)


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


# Reading


def test_each_batch_of_a_page_counts_its_own_items(stores) -> None:
    for number in range(3):
        add(stores, number)
    assert [found.num_items for found in stores.batches.page(10)] == [2, 1, 0]


def test_a_batch_goes_whole_when_its_last_job_is_old(stores, clock) -> None:
    added, _ = add(stores)
    for _ in range(2):
        stores.jobs.finish(claimed(stores).lease, ANSWERED)
    clock.now += 100
    assert stores.jobs.delete_finished(clock()) == 0
    stores.batches.cancel(added.id)
    clock.now += 10
    assert stores.jobs.delete_finished(clock() - 50) == 0
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
    assert [job.id for job in stores.batches.cancel(added.id, "ops")] == [running.id]
    for subject in (added.id, running.id):
        (entry,) = stores.jobs.audit(9, actor="ops", subject=subject)
        assert entry.action is AuditAction.CANCEL


def test_retry_gives_failed_jobs_their_whole_time_again_and_their_schedules(stores, clock) -> None:
    added, _ = add(stores)
    first = claimed(stores)
    stores.jobs.record(first.lease, point(9.0, 1.0), 100.0, documents={"schedule": "{}"})
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
        assert (claim.job.id, claim.documents.get("schedule")) == (first.job.id, "{}")
        # It overruns its time.
        clock.now += 6
        stores.jobs.heartbeat([claim.lease], LEASE_S)
        stores.jobs.finish(claim.lease, FAILED)


def test_retry_leaves_alone_what_has_not_failed_or_is_proven(stores) -> None:
    added, _ = add(stores)
    died = claimed(stores).lease
    stores.jobs.record(died, point(9.0, 9.0), LEASE_S, documents={"schedule": "{}"})
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


# Tighter items


def test_tighter_items_are_claimed_first_and_each_ends_as_it_ends(stores) -> None:
    """The jobs know nothing of each other: a worse end of a looser item is final."""
    three, tighter = plan(), ((1, 2), (), (1,))
    items = zip(three.items, tighter, strict=True)
    nested = replace(three, items=tuple(replace(item, tighter=them) for item, them in items))
    added, _ = add(stores, plan=nested)
    claims = [claimed(stores) for _ in range(3)]
    assert [claim.job.batch_index for claim in claims] == [1, 2, 0]
    lengths = {2: 12.0, 0: None, 1: 9.0}
    for claim in sorted(claims, key=lambda one: one.job.batch_index == 1):
        objective_ms = lengths[claim.job.batch_index or 0]
        outcome = replace(ANSWERED, objective_ms=objective_ms, bound_ms=1.0)
        stores.jobs.finish(claim.lease, FAILED if objective_ms is None else outcome)
    jobs = stores.batches.jobs(added.id)
    assert [job.state.value for job in jobs] == ["failed", "succeeded", "succeeded"]
    assert [job.objective_ms for job in jobs] == [None, 9.0, 12.0]
    assert stores.batches.get(added.id).is_finished


def test_the_standing_of_a_batch_says_when_its_last_job_has_ended(stores) -> None:
    added, jobs = stores.batches.add(batch(), items(2), max_queued=9)
    other, _ = stores.batches.add(batch("other"), items(1), max_queued=9)

    def are_finished() -> list[bool]:
        found = stores.batches.standings([added.id, other.id])
        return [found[one].is_finished for one in (added.id, other.id)]

    assert are_finished() == [False, False]
    stores.jobs.request_cancel(jobs[0].id)
    claim = stores.jobs.claim("w", LEASE_S)
    assert are_finished() == [False, False]
    assert claim.job.id == jobs[1].id
    stores.jobs.finish(claim.lease, FAILED)
    assert are_finished() == [True, False]
    stores.batches.retry(added.id, max_queued=9)
    assert are_finished() == [False, False]
