"""More promises of `optpipe_api.store.jobs`: births, history, more time, finding jobs."""

from typing import Any

import pytest

from optpipe.answers import Cache, EventKind, JobState
from optpipe.requests import JobKind
from optpipe_api.errors import KeyReusedError, QueueFullError, StateConflictError, TooManyJobsError
from optpipe_api.jobs import (
    AttemptOutcome,
    DocumentKind,
    JobError,
    JobEvent,
    JobRecord,
    JobStart,
    Standing,
    StoredSchedule,
)
from tests.api.store.test_jobs import LEASE_S, add, claimed, document_text, new, point, store

__all__ = ["store"]

MOST_S = 100.0


def history_of(store, job_id: str, after: int = 0) -> list[Any]:
    """What a history says, in short: states and sentences, objectives, bounds."""
    short = {
        EventKind.STATE: lambda entry: entry.text,
        EventKind.LOG: lambda entry: entry.text,
        EventKind.INCUMBENT: lambda entry: (entry.objective_ms, entry.bound_ms),
        EventKind.BOUND: lambda entry: entry.bound_ms,
    }
    return [short[entry.kind](entry) for entry in store.history(job_id, after)]


def finished(store, event=JobEvent.SUCCEED, bound_ms=1.0, **kwargs):
    claim = claimed(store, **kwargs)
    store.record(claim.lease, point(9.0, bound_ms), LEASE_S, documents={"schedule": "S"})
    return store.finish(claim.lease, AttemptOutcome(event=event))


def resume(store, job_id: str, seconds: float) -> Any:
    return store.resume(job_id, seconds, max_time_limit_s=MOST_S, max_queued=9)


# Births


def test_a_plan_has_a_model_and_gets_its_problem_with_its_schedule(store) -> None:
    plan = {"kind": JobKind.PLAN, "documents": {"model": "M"}}
    claim = claimed(store, changes=plan)
    assert (claim.job.kind, claim.documents.get("model"), claim.documents.get("problem")) == (
        JobKind.PLAN,
        "M",
        None,
    )
    assert (
        document_text(store, claim.job.id, "model"),
        document_text(store, claim.job.id, "problem"),
    ) == ("M", None)
    store.record(
        claim.lease,
        point(9.0),
        LEASE_S,
        documents={"schedule": "S9", "problem": "P9"},
    )
    store.record(
        claim.lease,
        point(9.5),
        LEASE_S,
        documents={"schedule": "S9.5", "problem": "P9.5"},
    )
    assert document_text(store, claim.job.id, "problem") == "P9"
    outcome = AttemptOutcome(
        event=JobEvent.SUCCEED,
        documents={"schedule": "S8", "problem": "P8"},
        objective_ms=8.0,
        method="plan",
    )
    job = store.finish(claim.lease, outcome)
    assert (document_text(store, job.id, "problem"), store.schedule(job.id).document) == (
        "P8",
        "S8",
    )
    assert store.trace(job.id)[1][-1].method == "plan"


def test_a_tune_has_a_question_and_what_it_found_goes_on_with_it(store) -> None:
    """Like a plan's cut; found is what comes last, unless with a schedule that is worse."""
    tune = {"kind": JobKind.TUNE, "documents": {"question": "Q"}}
    claim = claimed(store, changes=tune)
    assert (
        claim.documents.get("question"),
        claim.documents.get("problem"),
        claim.documents.get("tuned"),
    ) == ("Q", None, None)
    store.tell(claim.lease, "100 configurations", LEASE_S)
    store.record(
        claim.lease,
        point(9.0),
        LEASE_S,
        documents={"schedule": "S9", "problem": "P9", "tuned": "T9"},
    )
    store.record(
        claim.lease,
        point(9.5),
        LEASE_S,
        documents={"schedule": "S9.5", "problem": "P9.5", "tuned": "T9.5"},
    )
    store.record(
        claim.lease,
        point(None, 4.0),
        LEASE_S,
        documents={"tuned": "T9+", "checkpoint": "C"},
    )
    assert document_text(store, claim.lease.job_id, "checkpoint") == "C"
    store.requeue(claim.lease)
    again = store.claim("w", LEASE_S)
    assert (
        again.documents.get("question"),
        again.documents.get("problem"),
        again.documents.get("schedule"),
        again.documents.get("tuned"),
    ) == ("Q", "P9", "S9", "T9+")
    assert again.documents.get("checkpoint") == "C"
    assert store.tell(claim.lease, "too late", LEASE_S) is None
    job = store.finish(
        again.lease,
        AttemptOutcome(
            event=JobEvent.CANCEL,
            documents={"tuned": "T", "checkpoint": "C2"},
        ),
    )
    known = (
        document_text(store, job.id, "tuned"),
        document_text(store, job.id, "question"),
        document_text(store, job.id, "checkpoint"),
    )
    assert known == ("T", "Q", "C2")
    assert history_of(store, job.id)[:3] == ["queued", "running", "100 configurations"]
    store.delete(job.id)
    assert store.claim("w", LEASE_S) is None


def test_a_job_with_a_start_has_a_schedule_from_its_birth(store) -> None:
    start = JobStart(documents={"schedule": "S"}, objective_ms=7.0, method="zb")
    near = {"start": start, "cache": Cache.NEAR, "source_id": "1" * 32}
    job = add(store, changes=near)
    assert (job.state, job.cache, job.objective_ms) == (JobState.QUEUED, Cache.NEAR, 7.0)
    assert store.schedule(job.id) == StoredSchedule(document="S", number=1)
    queued, sentence, incumbent = history_of(store, job.id)
    assert (queued, incumbent) == ("queued", (7.0, None))
    assert "1" * 32 in sentence
    assert store.claim("worker", LEASE_S).documents.get("schedule") == "S"


@pytest.mark.parametrize(
    ("outcome", "state", "history"),
    [
        (
            AttemptOutcome(
                event=JobEvent.SUCCEED, documents={"schedule": "S"}, objective_ms=7.0, bound_ms=6.0
            ),
            JobState.SUCCEEDED,
            [(7.0, 6.0), "succeeded"],
        ),
        (
            AttemptOutcome(
                event=JobEvent.PROVE_INFEASIBLE,
                error=JobError(code="problem.infeasible", message="why", needs={"d": 5}),
            ),
            JobState.INFEASIBLE,
            ["infeasible"],
        ),
    ],
)
def test_a_job_that_is_answered_at_once_is_born_finished(
    store, clock, outcome: AttemptOutcome, state: JobState, history: list[object]
) -> None:
    changes = {"finished": outcome, "cache": Cache.HIT, "source_id": "1" * 32}
    job, is_new = store.add(new(changes=changes), max_queued=0)
    assert (job.state, is_new, job.finished_at) == (state, True, clock.now)
    assert (job.objective_ms, job.bound_ms) == (outcome.objective_ms, outcome.bound_ms)
    assert job.error == outcome.error
    assert history_of(store, job.id) == history
    assert store.claim("worker", LEASE_S) is None
    assert store.get(job.id) == job


# Once, for each owner


def test_a_key_still_names_its_job_when_that_was_given_more_time(store) -> None:
    job = finished(store, key="k")
    for seconds in (0.7, 0.1):
        resume(store, job.id, seconds)
        store.request_cancel(job.id)
    again = add(store, key="k")
    assert (again.id, again.options.time_limit_s) == (job.id, 5.0 + 0.7 + 0.1)
    with pytest.raises(KeyReusedError):
        add(store, key="k", time_limit_s=5.8)


# History


def test_a_standing_moves_with_all_that_happens_and_only_then(store) -> None:
    ids = [add(store, str(number)).id for number in range(2)]
    seen = [store.standings(ids)]

    def step(happens) -> None:
        happens()
        seen.append(store.standings(ids))
        changed = [job_id for job_id in ids if seen[-1][job_id] != seen[-2][job_id]]
        assert changed == ids[:1]
        assert seen[-1][ids[0]].last_entry == store.history(ids[0])[-1].number

    claims = []
    step(lambda: claims.append(store.claim("worker", LEASE_S)))
    (claim,) = claims
    step(lambda: store.record(claim.lease, point(9.0), LEASE_S, documents={"schedule": "S"}))
    step(lambda: store.record(claim.lease, point(None, 1.0), LEASE_S))
    store.heartbeat([claim.lease], LEASE_S)
    assert store.standings(ids) == seen[-1]
    step(lambda: store.requeue(claim.lease, death="it died", max_attempts=9))
    step(lambda: store.request_cancel(ids[0]))
    last = store.history(ids[0])[-1].number
    assert seen[-1][ids[0]] == Standing(
        store.get(ids[0]).owner, JobState.CANCELLED, num_schedules=1, last_entry=last
    )


def test_standings_of_many_jobs_and_of_unknown_ones_are_asked_for_at_once(store) -> None:
    known = add(store).id
    unknown = [f"{number:032x}" for number in range(2500)]
    # One that the database would refuse is not the fault of the others.
    assert list(store.standings([*unknown, "\0", known, "", "x" * 9999, "\ud800"])) == [known]
    assert store.standings([]) == {}


def test_a_history_tells_all_that_happened_in_order(store, clock) -> None:
    claim = claimed(store)
    store.record(claim.lease, point(9.0), LEASE_S, documents={"schedule": "S9"})
    store.record(claim.lease, point(bound_ms=2.0), LEASE_S)
    store.requeue(claim.lease, death="its process\x00 died", max_attempts=3)
    claim = store.claim("worker", LEASE_S)
    store.record(claim.lease, point(8.0, 2.0), LEASE_S, documents={"schedule": "S8"})
    store.finish(
        claim.lease,
        AttemptOutcome(event=JobEvent.SUCCEED, documents={"schedule": "S7"}, objective_ms=7.0),
    )
    *most, sentence, queued, running, better, best, end = history_of(store, claim.job.id)
    assert most == ["queued", "running", (9.0, None), 2.0]
    assert "attempt 1: its process\N{REPLACEMENT CHARACTER} died" in sentence
    assert (queued, running, better, best) == ("queued", "running", (8.0, 2.0), (7.0, 2.0))
    assert end == "succeeded"
    entries = store.history(claim.job.id)
    assert [entry.is_final for entry in entries] == [False] * 9 + [True]
    assert {entry.at for entry in entries} == {clock.now}
    trace = [(one.objective_ms, one.bound_ms) for one in store.trace(claim.job.id)[1]]
    assert trace == [(9.0, None), (None, 2.0), (8.0, 2.0), (7.0, 2.0)]


# More time


@pytest.mark.parametrize("event", [JobEvent.SUCCEED, JobEvent.FAIL, JobEvent.CANCEL])
def test_more_time_queues_a_job_again_as_it_stands(store, clock, event) -> None:
    claim = claimed(store)
    store.record(claim.lease, point(9.0, 1.0), LEASE_S, documents={"schedule": "S"})
    clock.now += 3
    error = JobError(code="c", message="m")
    store.finish(claim.lease, AttemptOutcome(event=event, error=error))
    seen = store.history(claim.job.id)[-1].number
    job = resume(store, claim.job.id, 2.5)
    assert (job.state, job.finished_at, job.error) == (JobState.QUEUED, None, None)
    assert (job.options.time_limit_s, job.spent_s, job.deaths) == (7.5, 3.0, 0)
    assert (job.objective_ms, job.bound_ms) == (9.0, 1.0)
    sentence, queued = history_of(store, job.id, seen)
    assert (sentence, queued) == ("resumed with 2.5 s more", "queued")
    again = store.claim("other", LEASE_S)
    assert (again.documents.get("schedule"), again.job.attempt) == ("S", 2)
    assert store.finish(claim.lease, AttemptOutcome(event=event)) is None
    ended = store.finish(again.lease, AttemptOutcome(event=JobEvent.SUCCEED))
    assert ended.state is JobState.SUCCEEDED


def test_more_time_is_refused_where_it_changes_nothing(store) -> None:
    optimal = finished(store, bound_ms=9.0)
    infeasible = finished(store, JobEvent.PROVE_INFEASIBLE)
    queued = add(store)
    for job, why in (
        (optimal, "proven optimal"),
        (infeasible, "proven infeasible"),
        (queued, "is queued"),
    ):
        with pytest.raises(StateConflictError, match=why):
            resume(store, job.id, 1.0)
        assert store.get(job.id) == job


def test_more_time_waits_in_the_same_queue_as_new_jobs(store) -> None:
    job = finished(store, changes={"owner": "a"})
    waiting = add(store, changes={"owner": "a"})
    limits = {"max_time_limit_s": MOST_S, "max_queued": 9, "max_of_owner": 9}
    for full, error in (
        ({"max_queued": 1}, QueueFullError),
        ({"max_of_owner": 1}, TooManyJobsError),
    ):
        with pytest.raises(error):
            store.resume(job.id, 1.0, **(limits | full))
        with pytest.raises(StateConflictError):
            store.resume(waiting.id, 1.0, **(limits | full))
    assert store.get(job.id) == job
    assert store.resume(job.id, 1.0, **limits).state is JobState.QUEUED


# Finding


def test_the_same_are_answered_jobs_of_one_owner_newest_first(store) -> None:
    older, newer = (finished(store).id for _ in range(2))
    infeasible = finished(store, JobEvent.PROVE_INFEASIBLE).id
    finished(store, JobEvent.FAIL)
    finished(store, JobEvent.CANCEL)
    finished(store, name="other")
    finished(store, changes={"owner": "b"})
    finished(store, changes={"kind": JobKind.PLAN})
    claimed(store)
    seen: list[str] = []

    def accepts(job: JobRecord) -> bool:
        seen.append(job.id)
        return bool(job.id == older)

    def answer(limit: int) -> Any:
        seen.clear()
        key = new().problem_hash
        return store.answer(
            key, *DocumentKind, kind=JobKind.SOLVE, owner="", limit=limit, accepts=accepts
        )

    job, documents, method = answer(9)
    assert (job.id, seen) == (older, [infeasible, newer, older])
    assert (set(documents), method) == ({"problem", "schedule"}, "m")
    assert (answer(2), seen) == (None, [infeasible, newer])


def test_the_alike_have_ended_with_a_schedule(store) -> None:
    shape = {"shape_hash": "sha256:s"}
    ended = [
        finished(store, event, changes=shape).id
        for event in (JobEvent.SUCCEED, JobEvent.FAIL, JobEvent.CANCEL)
    ]
    finished(store)
    finished(store, changes=shape | {"owner": "b"})
    claim = claimed(store, changes=shape)
    store.finish(claim.lease, AttemptOutcome(event=JobEvent.FAIL))
    add(store, changes=shape)
    assert list(store.near("sha256:s", owner="", limit=9)) == ended[::-1]
