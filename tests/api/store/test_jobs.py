"""What the job store must do on every database: the promises of `optpipe_api.store.jobs`."""

import itertools
import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from optpipe.answers import Cache, JobOptions, JobState
from optpipe.requests import JobKind
from optpipe_api.access import Role
from optpipe_api.errors import (
    JobNotFoundError,
    KeyReusedError,
    QueueFullError,
    StateConflictError,
)
from optpipe_api.jobs import (
    MAX_SHARED_PRIORITY,
    Claim,
    DocumentKind,
    JobError,
    JobEvent,
    JobRecord,
    Lease,
    NewJob,
    TracePoint,
)
from optpipe_api.store import AttemptOutcome, JobStore, Stores
from tests.api.live import Clock

LEASE_S = 10.0
FINAL = [
    (JobEvent.SUCCEED, JobState.SUCCEEDED),
    (JobEvent.PROVE_INFEASIBLE, JobState.INFEASIBLE),
    (JobEvent.FAIL, JobState.FAILED),
    (JobEvent.CANCEL, JobState.CANCELLED),
]


def document_text(store: JobStore, job_id: str, kind: str) -> str | None:
    """A document of a job."""
    return store.documents(job_id, DocumentKind(kind)).get(kind)


def new(
    name: str = "a", key: str | None = None, changes: dict[str, Any] | None = None, **options
) -> NewJob:
    job = NewJob(
        name=name,
        problem_hash=f"sha256:{name.encode().hex()}",
        objective="makespan",
        documents={"problem": json.dumps({"name": name})},
        options=JobOptions(**({"time_limit_s": 5.0} | options)),
        idempotency_key=key,
    )
    return replace(job, **(changes or {}))


def point(objective_ms: float | None = None, bound_ms: float | None = None) -> TracePoint:
    return TracePoint(seconds=1.0, method="m", objective_ms=objective_ms, bound_ms=bound_ms)


@pytest.fixture
def open_store(open_all) -> Callable[[], JobStore]:
    return lambda: open_all().jobs


@pytest.fixture
def store(stores: Stores) -> JobStore:
    return stores.jobs


def add(store: JobStore, *args, **kwargs) -> JobRecord:
    return store.add(new(*args, **kwargs), max_queued=100)[0]


def claimed(store: JobStore, **kwargs) -> Claim:
    add(store, **kwargs)
    claim = store.claim("worker", LEASE_S)
    assert claim is not None
    return claim


# Submitting and reading


def test_an_added_job_is_read_back_whole_by_another_server(store, open_store) -> None:
    changes = {
        "owner": "ci",
        "priority": -7,
        "tags": ("b", "a/1", "b"),
        "shape_hash": "sha256:s",
        "source_id": "1" * 32,
        "batch_id": "2" * 32,
        "batch_index": 3,
    }
    options: dict[str, Any] = {
        "threads": 2,
        "method": "greedy",
        "cache": "refresh",
        "chunks": (1, 2),
    }
    job = add(store, "n\x00ame", changes=changes, **options)
    other = open_store()
    assert other.get(job.id) == job
    assert {name: getattr(job, name) for name in changes} == changes | {"tags": ("a/1", "b")}
    assert (document_text(other, job.id, "problem"), document_text(other, job.id, "model")) == (
        new("n\x00ame").documents["problem"],
        None,
    )
    assert job.options == JobOptions(time_limit_s=5.0, **options)
    assert (job.kind, job.cache, job.state) == (JobKind.SOLVE, Cache.MISS, JobState.QUEUED)
    assert (job.has_schedule, job.gap, job.attempt) == (False, None, 0)


# Once


@pytest.mark.parametrize(
    "other",
    [
        new("b", key="k"),
        new(key="k", seed=1),
        new(key="k", changes={"tags": ("x",)}),
        new(key="k", changes={"priority": 1}),
    ],
)
def test_a_key_refuses_another_request(store, other: NewJob) -> None:
    add(store, key="k")
    with pytest.raises(KeyReusedError, match="'k'"):
        store.add(other, max_queued=100)


# Claims and leases


def submit(store: JobStore, owner: str, *, number: int = 1, **changes: Any) -> list[str]:
    jobs = [new(changes={"owner": owner, **changes}) for _ in range(number)]
    return [store.add(job, max_queued=100)[0].id for job in jobs]


def owners(claims: list[Claim | None]) -> str:
    return "".join("-" if claim is None else claim.job.owner for claim in claims)


def test_the_owner_with_the_fewest_running_is_next_then_the_one_served_longest_ago(store) -> None:
    submit(store, "a", number=4)
    first = [store.claim("w", LEASE_S) for _ in range(2)]
    submit(store, "b", number=3)
    submit(store, "c", number=1)
    assert owners(first + [store.claim("w", LEASE_S) for _ in range(7)]) == "aabcbaba-"


def test_who_deletes_what_was_served_has_been_served_all_the_same(store) -> None:
    submit(store, "a", number=3)
    submit(store, "b", number=3)
    turns = []
    for _ in range(4):
        claim = store.claim("w", LEASE_S)
        turns.append(claim)
        store.finish(claim.lease, AttemptOutcome(event=JobEvent.CANCEL))
        store.delete(claim.job.id)
    assert owners(turns) == "abab"


def test_a_key_borrows_idle_slots_until_another_key_waits(store) -> None:
    """Another server counts for itself, and no key means no limit."""
    submit(store, "a", number=5)
    assert owners([store.claim("w", LEASE_S, 2) for _ in range(3)]) == "aaa"
    assert store.entitled("w", 2) == set()
    assert store.entitled("v", 2) == {"a"}
    submit(store, "b", number=2)
    assert store.entitled("w", 2) == {"b"}
    assert owners([store.claim("w", LEASE_S, 2) for _ in range(4)]) == "bbaa"
    submit(store, "", number=3)
    assert store.entitled("w", 0) == {""}


def test_an_admins_priority_precedes_all_turns_and_other_priorities_none(store) -> None:
    """Not even the limit of its owner holds it; within an owner the priority is the order."""
    submit(store, "a", number=2)
    assert owners([store.claim("w", LEASE_S, 1), store.claim("w", LEASE_S, 1)]) == "aa"
    submit(store, "b", number=2)
    submit(store, "a", priority=MAX_SHARED_PRIORITY)
    submit(store, "a", priority=MAX_SHARED_PRIORITY + 1)
    claims = [store.claim("w", LEASE_S, 1) for _ in range(4)]
    assert owners(claims) == "abba"
    assert [claim.job.priority for claim in claims] == [11, 0, 0, 10]


def test_the_audit_log_says_who_changed_a_job_and_outlives_it(stores, clock: Clock) -> None:
    store = stores.jobs
    (first, second) = submit(store, "ann", number=2)
    store.request_cancel(first, "ops")
    store.request_cancel(first, "late")
    store.resume(first, 1.0, actor="ann", max_time_limit_s=99.0, max_queued=9)
    assert [job.id for job in store.cancel_owner("ann", "ops")] == [first, second]
    clock.now += 5.0
    store.delete(first, "ann")
    log = [(one.actor, one.action.value) for one in store.audit(9, subject=first)]
    changes = ["cancel", "resume", "cancel", "submit", "delete"]
    assert log[::-1] == list(zip(["ops", "ann", "ops", "ann", "ann"], changes, strict=True))
    by_ops = store.audit(9, actor="ops")
    assert [one.subject for one in by_ops] == [second, first, first]
    assert store.audit(9, by_ops[0].position, actor="ops") == by_ops[1:]
    store.delete_finished(clock())
    assert [one.action.value for one in store.audit(9, subject=first)] == ["delete"]


def test_the_audit_log_names_batches_and_keys_too(stores) -> None:
    stores.keys.create("ann", Role.SUBMIT)
    stores.keys.rotate("ann", 60.0)
    (job_id,) = submit(stores.jobs, "ann")
    stores.keys.revoke("ann")
    found = [(one.action.value, one.subject) for one in stores.jobs.audit(9)]
    assert found[::-1] == [
        ("create_key", "ann"),
        ("rotate_key", "ann"),
        ("revoke_key", "ann"),
        ("cancel", job_id),
    ]
    (created, *_) = stores.jobs.audit(1, subject="ann", actor=None)
    assert created.actor.startswith(f"uid {os.getuid()} on ")


def test_a_queued_job_has_a_place_in_its_owners_queue(store) -> None:
    first, second = submit(store, "a", number=2)
    submit(store, "b", number=3)
    (urgent,) = submit(store, "a", priority=1)
    assert store.places("a") == {urgent: 1, first: 2, second: 3}
    assert store.claim("w", LEASE_S).job.id == urgent
    assert store.places("a") == {first: 1, second: 2}


def test_a_full_queue_takes_each_owners_share(store) -> None:
    """Four owners fill the queue; a fifth has its fifth of it, and no owner has more than that."""

    def admit(owner: str) -> bool:
        try:
            store.add(new(changes={"owner": owner}), max_queued=20)
        except QueueFullError:
            return False
        return True

    assert all(admit(owner) for owner in "abcd" for _ in range(5))
    assert [owner for owner in "abcd" if admit(owner)] == []
    assert [admit("e") for _ in range(5)] == [True] * 4 + [False]
    assert [owner for owner in "abcd" if admit(owner)] == []


def test_a_deleted_job_is_gone_and_one_that_goes_on_is_not_deleted(store, stores: Stores) -> None:
    job = add(store, changes={"tags": ("t",)}, key="k")
    with pytest.raises(StateConflictError, match=r"queued.*cancel it first: POST"):
        store.delete(job.id)
    claim = store.claim("w", LEASE_S)
    with pytest.raises(StateConflictError, match=r"running.*cancel it first: POST"):
        store.delete(job.id)
    store.finish(
        claim.lease,
        AttemptOutcome(event=JobEvent.SUCCEED, documents={"schedule": "S"}, objective_ms=1),
    )
    store.delete(job.id)
    with pytest.raises(JobNotFoundError):
        store.get(job.id)
    with stores.engine.connect() as connection:
        for name in ("jobs", "documents", "job_tags", "events"):
            count = connection.exec_driver_sql(f"SELECT count(*) FROM {name}").scalar_one()
            assert (name, count) == (name, 0)
    assert add(store, key="k").id != job.id


def test_many_claimers_at_once_never_share_a_job_and_keep_turns_and_limits(
    store, open_store, monkeypatch
) -> None:
    """Each counts what the others have taken: a key borrows only when the other is done.

    A ticking clock says in which order jobs were claimed: threads may return in another order.
    """
    ticks = itertools.count(1)
    monkeypatch.setattr(Clock, "__call__", lambda clock: clock.now + 1e-3 * next(ticks))
    ids = {one for owner in "ab" for one in submit(store, owner, number=6)}
    stores = [open_store() for _ in range(4)]
    taken: list[JobRecord] = []

    def take(other: JobStore) -> None:
        for _ in range(16):
            claim = other.claim("w", LEASE_S, 2)
            if claim is not None:
                taken.append(claim.job)

    together([partial(take, other) for other in stores])
    taken.sort(key=lambda job: job.started_at or 0.0)
    assert sorted(job.owner for job in taken[:4]) == ["a", "a", "b", "b"]
    assert len(taken) == 12
    assert {job.id for job in taken} == ids


def test_a_heartbeat_and_a_record_keep_a_lease(store, clock: Clock) -> None:
    lease = claimed(store).lease
    clock.now += LEASE_S - 1
    assert store.heartbeat([lease], LEASE_S) == {lease: False}
    clock.now += LEASE_S - 1
    assert store.record(lease, point(bound_ms=1.0), LEASE_S) is not None
    clock.now += LEASE_S - 1
    assert store.expire(3) == []
    clock.now += LEASE_S
    assert store.heartbeat([lease], LEASE_S) == {lease: False}, "it lapsed, and nobody took it"
    assert store.expire(3) == []


def test_a_bound_is_never_above_the_schedule_by_rounding(store) -> None:
    """Proven from sums in another order, before a schedule that meets it."""
    lease = claimed(store).lease
    store.record(lease, point(bound_ms=14.520000000000003), LEASE_S)
    job = store.record(
        lease, point(14.519999999999998, 14.519999999999998), LEASE_S, documents={"schedule": "S"}
    )
    assert (job.bound_ms, job.objective_ms) == (14.519999999999998, 14.519999999999998)
    job = store.record(lease, point(bound_ms=14.520000000000001), LEASE_S)
    assert job.bound_ms == job.objective_ms


def test_a_lapsed_job_starts_again_from_its_incumbent(store, clock: Clock) -> None:
    old = claimed(store).lease
    store.record(old, point(7.0, 3.0), LEASE_S, documents={"schedule": "S"})
    clock.now += LEASE_S + 1
    (job,) = store.expire(3)
    assert (job.state, job.deaths, job.spent_s) == (JobState.QUEUED, 1, LEASE_S)
    claim = store.claim("worker", LEASE_S)
    assert (claim.documents.get("schedule"), claim.job.attempt, claim.job.objective_ms) == (
        "S",
        2,
        7.0,
    )


def test_the_jobs_of_an_owner_that_is_gone_need_not_wait_for_their_lease(store) -> None:
    for owner in ("gone", "alive"):
        add(store)
        store.claim(owner, LEASE_S)
    (job,) = store.expire(3, lambda owner: owner == "gone")
    assert (job.state, job.deaths) == (JobState.QUEUED, 1)
    assert store.counts()[JobState.RUNNING] == 1
    assert store.claim("worker", LEASE_S).lease == Lease(job.id, "worker", 2)


def test_who_lost_a_lease_can_write_nothing_more(store, clock: Clock) -> None:
    old = claimed(store).lease
    clock.now += LEASE_S + 1
    store.expire(3)
    current = store.claim("worker", LEASE_S).lease
    assert old.owner == current.owner
    assert_refuses_writes(store, old)
    assert store.heartbeat([old, current], LEASE_S) == {current: False}


def test_a_job_that_dies_too_often_fails_with_a_sentence(store, clock: Clock) -> None:
    add(store)
    for _ in range(2):
        lease = store.claim("worker", LEASE_S).lease
        job = store.requeue(lease, death="its process was ended by SIGKILL", max_attempts=3)
        assert (job.state, job.error) == (JobState.QUEUED, None)
    lease = store.claim("worker", LEASE_S).lease
    store.record(lease, point(7.0), LEASE_S, documents={"schedule": "S"})
    clock.now += LEASE_S + 1
    (job,) = store.expire(3)
    assert (job.state, job.error.code, job.has_schedule) == (JobState.FAILED, "job.died", True)
    assert "after 3 attempts that died, the last because its server" in job.error.message


# The best is kept


def test_only_a_schedule_at_least_as_good_replaces_another(store) -> None:
    """Each that is stored has the next number; only what is better is told."""
    claim = claimed(store)
    for objective_ms, bound_ms, text, kept, number in [
        (9.0, 2.0, "first", "first", 1),
        (9.5, 1.0, "worse", "first", 1),
        (9.0, 2.0, "equal", "equal", 2),
        (8.0, 1.0, "better", "better", 3),
    ]:
        job = store.record(
            claim.lease, point(objective_ms, bound_ms), LEASE_S, documents={"schedule": text}
        )
        found = store.schedule(job.id)
        assert (found.document, found.number, job.num_schedules) == (kept, number, number)
    job = store.finish(
        claim.lease,
        AttemptOutcome(event=JobEvent.SUCCEED, documents={"schedule": "last"}, objective_ms=8.1),
    )
    assert (store.schedule(job.id).document, job.objective_ms) == ("better", 8.0)
    trace = store.trace(job.id)[1]
    assert [(one.objective_ms, one.bound_ms) for one in trace] == [(9.0, 2.0), (8.0, 2.0)]


def test_a_schedule_as_long_replaces_another_and_is_no_news(store) -> None:
    """It is better for another reason, and longer by rounding at most."""
    claim = claimed(store)
    store.record(claim.lease, point(9.0), LEASE_S, documents={"schedule": "first"})
    number = len(store.history(claim.job.id))
    job = store.record(
        claim.lease, point(9.0 * (1 + 1e-12)), LEASE_S, documents={"schedule": "leaner"}
    )
    assert (store.schedule(job.id).document, len(store.history(job.id))) == ("leaner", number)
    store.record(claim.lease, point(9.0 * (1 + 1e-6)), LEASE_S, documents={"schedule": "longer"})
    assert store.schedule(job.id).document == "leaner"


@pytest.mark.parametrize(("robust", "kept"), [(None, ("short", 8.0)), ("P90", ("late", 9.0))])
def test_what_was_chosen_under_noise_may_be_longer(store, robust, kept) -> None:
    """The last word of such a job is its answer; what came on the way was the shortest."""
    claim = claimed(store, robust=robust)
    store.record(claim.lease, point(8.0), LEASE_S, documents={"schedule": "short"})
    last = AttemptOutcome(event=JobEvent.SUCCEED, documents={"schedule": "late"}, objective_ms=9.0)
    job = store.finish(claim.lease, last)
    assert (store.schedule(job.id).document, job.objective_ms) == kept


# Ends


@pytest.mark.parametrize(("event", "state"), FINAL)
def test_an_end_is_final(store, clock: Clock, event: JobEvent, state: JobState) -> None:
    claim = claimed(store)
    error = JobError(code="c", message="why\x00", needs={"devices[0].memory_bytes": 5})
    job = store.finish(claim.lease, AttemptOutcome(event=event, error=error))
    assert (job.state, job.finished_at) == (state, clock.now)
    assert store.history(job.id)[-1].text == state.value
    assert job.error.needs == {"devices[0].memory_bytes": 5}
    assert_refuses_writes(store, claim.lease)
    clock.now += LEASE_S * 2
    assert store.expire(1) == []
    assert store.request_cancel(job.id) == job == store.get(job.id)
    assert store.claim("worker", LEASE_S) is None


@pytest.mark.parametrize("how", ["expire", "requeue"])
def test_a_cancelled_job_is_not_started_again(store, clock: Clock, how: str) -> None:
    claim = claimed(store)
    store.request_cancel(claim.job.id)
    clock.now += LEASE_S + 1
    job = store.requeue(claim.lease) if how == "requeue" else store.expire(3)[0]
    assert job.state is JobState.CANCELLED


def assert_refuses_writes(store: JobStore, lease) -> None:
    before = store.get(lease.job_id)
    assert store.heartbeat([lease], LEASE_S) == {}
    assert store.record(lease, point(0.1, 0.1), LEASE_S, documents={"schedule": "late"}) is None
    assert (
        store.finish(lease, AttemptOutcome(event=JobEvent.SUCCEED, documents={"schedule": "late"}))
        is None
    )
    assert store.requeue(lease) is None
    assert store.get(lease.job_id) == before
    stored = store.schedule(lease.job_id)
    assert stored is None or stored.document != "late"


def together(steps: list[Callable[[], object]]) -> None:
    """Run steps in threads that start at the same moment; all must end well."""
    barrier = threading.Barrier(len(steps))
    failures: list[BaseException] = []

    def run(step: Callable[[], object]) -> None:
        barrier.wait()
        try:
            step()
        except BaseException as error:  # noqa: BLE001 - asserted below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
