"""Equal jobs at one time: solved once, and none pays for another's end. Promise 10."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from optpipe_api.jobs import (
    Cache,
    EntryKind,
    JobError,
    JobEvent,
    JobKind,
    JobState,
    Outcome,
    Start,
)
from tests.api.store_contract import LEASE_S, StoreBench, new, point

if TYPE_CHECKING:
    from optpipe_api.jobs import Job
    from optpipe_api.store import JobStore

SOLVED = Outcome(
    event=JobEvent.SUCCEED, schedule="best", objective_ms=7.0, bound_ms=6.0, method="ls"
)
CANCELLED = Outcome(event=JobEvent.CANCEL)
FAILED = Outcome(event=JobEvent.FAIL, error=JobError(code="solver.failed", message="it broke"))


def add(store: JobStore, changes: dict[str, Any] | None = None, **options: Any) -> Job:
    job, _ = store.add(new(changes={"may_share": True} | (changes or {}), **options), max_queued=99)
    return job


def told(store: JobStore, job: Job, kind: EntryKind) -> list[Any]:
    """What the history of a job says of one kind."""
    return [
        entry.text if entry.objective_ms is None else entry.objective_ms
        for entry in store.history(job.id)
        if entry.kind is kind
    ]


class SharingContract(StoreBench):
    """One job is solved, and others of the same problem come meanwhile."""

    def test_a_second_one_is_not_claimed_and_ends_with_the_first(self, store) -> None:
        """It has the schedule, the bound, and a history of its own."""
        first, second = add(store), add(store)
        claim = store.claim("w", LEASE_S)
        assert claim.job.id == first.id
        assert store.claim("w", LEASE_S) is None
        assert (second.cache, second.source_id, second.awaits_id) == (Cache.HIT, first.id, first.id)
        store.finish(claim.lease, SOLVED)
        ended = store.get(second.id)
        assert (ended.state, ended.objective_ms, ended.bound_ms) == (JobState.SUCCEEDED, 7.0, 6.0)
        assert ended.finished_at is not None
        assert store.schedule(second.id).document == "best"
        assert store.made_by(second.id) == "ls"
        assert told(store, second, EntryKind.STATE) == ["queued", "succeeded"]
        assert store.history(second.id)[-1].is_final
        assert store.sharing(first.id) == [second.id]

    def test_what_the_first_finds_the_second_has_at_once(self, store) -> None:
        """Also what was found before it came; and only what is better."""
        add(store)
        claim = store.claim("w", LEASE_S)
        store.record(claim.lease, point(9.0, 5.0), LEASE_S, schedule="nine")
        second = add(store)
        assert (second.state, second.objective_ms, second.bound_ms) == (JobState.QUEUED, 9.0, 5.0)
        store.record(claim.lease, point(8.0, 5.5), LEASE_S, schedule="eight")
        store.record(claim.lease, point(9.5, 5.0), LEASE_S, schedule="worse")
        assert store.schedule(second.id).document == "eight"
        assert store.get(second.id).bound_ms == 5.5
        assert told(store, second, EntryKind.INCUMBENT) == [9.0, 8.0]
        assert [one.objective_ms for one in store.trace(second.id)] == [9.0, 8.0]

    @pytest.mark.parametrize("found_ms", [None, 8.5, 8.0])
    def test_one_whose_start_is_promised_shares_only_what_is_as_good_already(
        self, store, found_ms: float | None
    ) -> None:
        """So it never has a worse schedule, also where the first ends without a better one."""
        start = Start(schedule="start", objective_ms=8.0, method="m")
        promised = {"start": start, "is_start_promised": True}
        add(store)
        claim = store.claim("w", LEASE_S)
        if found_ms is not None:
            store.record(claim.lease, point(found_ms, 5.0), LEASE_S, schedule="found")
        second = add(store, promised)
        shares = found_ms == 8.0
        assert second.awaits_id == (claim.job.id if shares else None)
        assert store.schedule(second.id).document == ("found" if shares else "start")
        # Another one of the kind has one to share with.
        assert add(store, promised).awaits_id == (claim.job.id if shares else second.id)
        store.finish(claim.lease, CANCELLED)
        assert store.get(second.id).objective_ms == 8.0

    def test_infeasible_is_infeasible_for_both(self, store) -> None:
        add(store)
        second = add(store)
        error = JobError(code="problem.infeasible", message="too small", needs={"gpu0": 9})
        outcome = Outcome(event=JobEvent.PROVE_INFEASIBLE, error=error)
        store.finish(store.claim("w", LEASE_S).lease, outcome)
        ended = store.get(second.id)
        assert (ended.state, ended.error) == (JobState.INFEASIBLE, error)

    @pytest.mark.parametrize("outcome", [CANCELLED, FAILED])
    def test_the_second_outlives_the_firsts_end(self, store, outcome: Outcome) -> None:
        """It is solved itself then, from what was found."""
        first = add(store)
        claim = store.claim("w", LEASE_S)
        store.record(claim.lease, point(9.0), LEASE_S, schedule="nine")
        second, third = add(store), add(store)
        store.finish(claim.lease, outcome)
        again = store.claim("w", LEASE_S)
        assert (again.job.id, again.start) == (second.id, "nine")
        assert (again.job.cache, again.job.source_id) == (Cache.NEAR, first.id)
        assert store.claim("w", LEASE_S) is None
        store.finish(again.lease, SOLVED)
        ended = store.get(third.id)
        assert (ended.state, ended.source_id) == (JobState.SUCCEEDED, second.id)
        assert "solved by itself" in told(store, second, EntryKind.LOG)[-1]

    def test_a_first_one_that_never_began_can_be_cancelled_too(self, store) -> None:
        first, second = add(store), add(store)
        store.request_cancel(first.id)
        claim = store.claim("w", LEASE_S)
        assert (claim.job.id, claim.job.cache, claim.job.source_id) == (
            second.id,
            Cache.MISS,
            None,
        )

    def test_a_second_one_can_be_cancelled_and_the_first_goes_on(self, store) -> None:
        first, second = add(store), add(store)
        claim = store.claim("w", LEASE_S)
        assert store.request_cancel(second.id).state is JobState.CANCELLED
        assert store.finish(claim.lease, SOLVED).id == first.id
        assert store.get(second.id).state is JobState.CANCELLED
        assert store.schedule(second.id) is None

    def test_dead_servers_part_nobody_until_the_job_is_given_up(self, store, clock) -> None:
        """Given back it is still the one that is solved; failed it is not."""
        first, second = add(store), add(store)
        for _ in range(2):
            assert store.claim("w", LEASE_S).job.id == first.id
            clock.now += LEASE_S + 1
            store.expire(max_attempts=2)
        assert store.get(first.id).state is JobState.FAILED
        assert store.claim("w", LEASE_S).job.id == second.id

    def test_a_released_one_answers_only_those_it_covers(self, store) -> None:
        """Who asked for more is solved by itself; the others find their place again."""
        add(store, time_limit_s=60.0)
        claim = store.claim("w", LEASE_S)
        short = add(store, time_limit_s=10.0)
        long = add(store, time_limit_s=60.0)
        shorter = add(store, time_limit_s=5.0)
        store.finish(claim.lease, FAILED)
        assert store.get(shorter.id).awaits_id == short.id
        claimed = [store.claim("w", LEASE_S).job.id for _ in range(2)]
        assert claimed == [short.id, long.id]

    @pytest.mark.parametrize(
        "options",
        [{"time_limit_s": 6.0}, {"threads": 2}, {"seed": 1}, {"gap": 0.0}, {"method": "1f1b"}],
    )
    def test_who_asks_for_more_or_for_something_else_does_not_share(self, store, options) -> None:
        add(store)
        assert add(store, **options).awaits_id is None

    @pytest.mark.parametrize(
        "changes",
        [
            {"may_share": False},
            {"owner": "bob"},
            {"kind": JobKind.PLAN, "problem": None, "model": "{}"},
            {"priority": 1},
        ],
    )
    def test_nor_who_may_not_is_somebody_else_or_would_come_first(self, store, changes) -> None:
        """A job of a higher priority does not wait behind one that has not begun."""
        add(store)
        assert add(store, changes).awaits_id is None

    def test_once_it_runs_priority_does_not_matter(self, store) -> None:
        first = add(store)
        store.claim("w", LEASE_S)
        assert add(store, {"priority": 100}).awaits_id == first.id

    def test_nobody_shares_with_a_job_that_is_being_cancelled(self, store) -> None:
        first = add(store)
        store.claim("w", LEASE_S)
        store.request_cancel(first.id)
        assert add(store).awaits_id is None

    def test_who_asked_for_less_time_waits_no_longer(self, store, clock) -> None:
        """At the next sign of life; with nothing found yet it goes on waiting."""
        add(store, time_limit_s=100.0)
        claim = store.claim("w", 1000.0)
        second = add(store, time_limit_s=3.0)
        clock.now += 4.0
        store.heartbeat(claim.lease, 1000.0)
        assert store.get(second.id).state is JobState.QUEUED
        store.record(claim.lease, point(9.0), 1000.0, schedule="nine")
        store.heartbeat(claim.lease, 1000.0)
        ended = store.get(second.id)
        assert (ended.state, ended.objective_ms) == (JobState.SUCCEEDED, 9.0)
        assert store.get(claim.job.id).state is JobState.RUNNING

    def test_a_shared_end_can_be_resumed_for_itself(self, store) -> None:
        add(store)
        second = add(store)
        store.finish(store.claim("w", LEASE_S).lease, replace(SOLVED, bound_ms=1.0))
        store.resume(second.id, 5.0, max_time_limit_s=100.0, max_queued=9)
        claim = store.claim("w", LEASE_S)
        assert (claim.job.id, claim.start) == (second.id, "best")

    def test_equal_jobs_that_come_at_once_are_one_and_its_sharers(self, open_store) -> None:
        """Over two servers."""
        stores = [open_store(), open_store()]
        made: list[Job] = []
        here = threading.Barrier(8)

        def work(index: int) -> None:
            here.wait()
            made.append(add(stores[index % 2]))

        threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (first,) = (job for job in made if job.awaits_id is None)
        assert {job.awaits_id for job in made} == {None, first.id}
