"""How a job comes to be: queued, with a start, or answered at once; once for each key."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from optpipe_api.errors import KeyReusedError, QueueFullError, TooManyJobsError
from optpipe_api.jobs import Cache, EntryKind, JobState, transition
from optpipe_api.store.jobs_entries import note, put
from optpipe_api.store.jobs_rows import (
    ASKED_LIMIT,
    digest_key,
    dump,
    job_of,
    options_of,
    storable,
)
from optpipe_api.store.jobs_sharing import begin_sharing, find_solving
from optpipe_api.store.tables import job_tags, jobs, models, problems, schedules

if TYPE_CHECKING:
    from optpipe_api.jobs import Job, NewJob, Outcome, Start

__all__ = ["find_by_key", "insert", "refuse_when_full", "refuse_when_many"]


_INSERT = sa.insert(jobs).returning(jobs)
_INSERT_TAG = sa.insert(job_tags)
_QUEUED = sa.select(sa.func.count()).where(jobs.c.state == JobState.QUEUED.value)


def insert(connection: sa.Connection, new: NewJob, now: float) -> Job:
    """Keep a job with its documents and tags, and write the first entries of its history."""
    solving = find_solving(connection, new)
    if solving is not None:
        new = replace(new, cache=Cache.HIT, source_id=solving.id, start=None)
    values = {**_columns(new, now), "awaits_id": None if solving is None else solving.id}
    row = connection.execute(_INSERT, values).one()
    for table, text in ((problems, new.problem), (models, new.model)):
        if text is not None:
            put(connection, table, row.position, text, is_first=True)
    tags = tuple(sorted(set(new.tags)))
    if tags:
        connection.execute(_INSERT_TAG, [{"position": row.position, "tag": tag} for tag in tags])
    if new.finished is not None:
        _tell_the_end(connection, row.position, new, new.finished, now)
    else:
        note(connection, row.position, now, EntryKind.STATE, text=JobState.QUEUED.value)
        if new.start is not None:
            _tell_the_start(connection, row.position, new, new.start, now)
    if solving is not None:
        row = begin_sharing(connection, row, solving, now)
    return job_of(connection, row, tags)


def _columns(new: NewJob, now: float) -> dict[str, Any]:
    return {
        "id": uuid.uuid4().hex,
        "kind": new.kind.value,
        "state": JobState.QUEUED.value,
        "name": storable(new.name),
        "owner": new.owner,
        "problem_hash": new.problem_hash,
        "shape_hash": new.shape_hash,
        "objective": new.objective,
        "options": dump(new.options),
        "priority": new.priority,
        "idempotency_key": digest_key(new.owner, new.idempotency_key),
        "cache": new.cache.value,
        "source_id": new.source_id,
        "batch_id": new.batch_id,
        "batch_index": new.batch_index,
        "deployment_id": new.deployment_id,
        "created_at": now,
        "cancel_requested": False,
        "attempt": 0,
        "deaths": 0,
        "spent_s": 0.0,
        "num_schedules": 0,
        **_known_at_birth(new, now),
    }


def _known_at_birth(new: NewJob, now: float) -> dict[str, Any]:
    known = new.start if new.finished is None else new.finished
    if known is None:
        return {}
    values: dict[str, Any] = {
        "num_schedules": int(known.schedule is not None),
        "objective_ms": known.objective_ms,
        "bound_ms": known.bound_ms,
    }
    if new.finished is not None:
        state = transition(JobState.RUNNING, new.finished.event) or JobState.SUCCEEDED
        error = None if new.finished.error is None else dump(new.finished.error)
        values |= {"state": state.value, "started_at": now, "finished_at": now, "error": error}
    return values


def _tell_the_start(
    connection: sa.Connection, position: int, new: NewJob, start: Start, now: float
) -> None:
    put(connection, schedules, position, start.schedule, is_first=True)
    if new.cache is Cache.NEAR:
        text = f"started from a schedule of job {new.source_id}"
        note(connection, position, now, EntryKind.LOG, text=text)
    _note_incumbent(connection, position, start, now)


def _tell_the_end(
    connection: sa.Connection, position: int, new: NewJob, outcome: Outcome, now: float
) -> None:
    if outcome.schedule is not None:
        put(connection, schedules, position, outcome.schedule, is_first=True)
        _note_incumbent(connection, position, outcome, now)
    state = _known_at_birth(new, now)["state"]
    note(connection, position, now, EntryKind.STATE, text=state)


def _note_incumbent(
    connection: sa.Connection, position: int, known: Start | Outcome, now: float
) -> None:
    note(
        connection,
        position,
        now,
        EntryKind.INCUMBENT,
        seconds=0.0,
        method=storable(known.method)[:100],
        objective_ms=known.objective_ms,
        bound_ms=known.bound_ms,
    )


def find_by_key(connection: sa.Connection, new: NewJob) -> Job | None:
    """Return the job that this owner's key made before.

    Raises
    ------
    KeyReusedError
        If it was made from another request.
    """
    digest = digest_key(new.owner, new.idempotency_key)
    if digest is None:
        return None
    query = sa.select(jobs).where(jobs.c.idempotency_key == digest)
    row = connection.execute(query).one_or_none()
    if row is None:
        return None
    job = job_of(connection, row)
    if _request_of(row, job) != (
        new.kind,
        new.problem_hash,
        new.options,
        new.priority,
        tuple(sorted(set(new.tags))),
    ):
        raise KeyReusedError(
            f"the Idempotency-Key {new.idempotency_key!r} made job {job.id} from another problem "
            "or other options; use a new key for a new request"
        )
    return job


def _request_of(row: sa.Row[Any], job: Job) -> tuple[object, ...]:
    """Return what the job was made of; a resumed one was asked for with less time."""
    options = options_of(row)
    asked_s = json.loads(row.options).get(ASKED_LIMIT)
    if asked_s is not None:
        options = replace(options, time_limit_s=asked_s)
    return (job.kind, job.problem_hash, options, job.priority, job.tags)


def refuse_when_full(connection: sa.Connection, max_queued: int, num_new: int = 1) -> None:
    """Refuse new jobs where the queue has no room for them.

    Raises
    ------
    QueueFullError
        If more than ``max_queued`` would wait.
    """
    queued = connection.execute(_QUEUED).scalar_one()
    if queued + num_new > max_queued:
        raise QueueFullError(queued, max_queued)


def refuse_when_many(
    connection: sa.Connection, owner: str, max_of_owner: int | None, num_new: int = 1
) -> None:
    """Refuse new jobs of an owner who has many under way already.

    Raises
    ------
    TooManyJobsError
        If more than ``max_of_owner`` of them would wait or run.
    """
    if max_of_owner is None:
        return
    unfinished = (JobState.QUEUED.value, JobState.RUNNING.value)
    query = sa.select(sa.func.count()).where(jobs.c.state.in_(unfinished), jobs.c.owner == owner)
    num_unfinished = connection.execute(query).scalar_one()
    if num_unfinished + num_new > max_of_owner:
        raise TooManyJobsError(owner, num_unfinished, max_of_owner)
