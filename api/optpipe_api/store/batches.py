"""The store of batches, over SQLite and PostgreSQL.

1. **Atomic.** Each method is one transaction. A batch is there with all of its jobs, or not at all.
2. **One truth.** How far a batch is, is read from its jobs in the transaction that reads the batch.
3. **Once.** A second `add` under the same idempotency key of the same owner returns the first
   batch and adds no job, or refuses where the request differs. Two at the same time too.
4. **Limits.** A batch whose jobs do not all find room in the queue is not taken; nor is a retry.

What is done to the jobs of a batch obeys `optpipe_api.store.jobs`. A batch goes when the last
of its jobs is deleted. Methods block, and raise `StoreUnavailableError` where the database does not
answer.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from optpipe.answers import JobState
from optpipe_api.errors import BatchNotFoundError, StateConflictError
from optpipe_api.jobs import BatchPlan, BatchRecord, BatchStanding, JobEvent
from optpipe_api.store.database import (
    added_once,
    batches,
    in_groups,
    jobs,
    made_before,
    newest_first,
    reading,
    record_of,
    row_with_id,
    writing,
)
from optpipe_api.store.job_rows import (
    change,
    digest_key,
    dump,
    insert,
    jobs_of,
    plan_of,
    refuse_when_full,
    refuse_when_kept,
    refuse_when_many,
    storable,
)
from optpipe_api.store.jobs import forget, hand_on, prolong

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optpipe_api.jobs import JobRecord, NewBatch, NewJob

__all__ = ["BatchStore"]

_RECORD = [column for column in batches.c if column.name != "document"]
_BY_ID = sa.select(*_RECORD).where(batches.c.id == sa.bindparam("id"))
_UNFINISHED = [state.value for state in JobState if not state.is_final]
# Made once: to put a query together takes longer than to answer it.
_GOES_ON = sa.exists().where(jobs.c.batch_id == batches.c.id, jobs.c.state.in_(_UNFINISHED))
_STANDINGS = sa.select(batches.c.id, batches.c.owner, _GOES_ON.label("goes_on")).where(
    batches.c.id.in_(sa.bindparam("ids", expanding=True))
)


class BatchStore:
    """Keeps batches; the promises are in the module's docstring."""

    def __init__(self, engine: sa.Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._now = clock

    # Submitting

    def add(
        self,
        new: NewBatch,
        items: Sequence[NewJob],
        *,
        max_queued: int,
        max_of_owner: int | None = None,
        max_kept: int | None = None,
    ) -> tuple[BatchRecord, list[JobRecord]]:
        """Keep a batch and its jobs, in order; no jobs are returned where the key had made it.

        Raises `QueueFullError` if more than ``max_queued`` jobs would wait; those that are born
        finished do not; `TooManyJobsError` if more than ``max_of_owner`` jobs of its owner would
        wait or run, likewise; `TooManyKeptError` if more than ``max_kept`` would be kept;
        `KeyReusedError` if the idempotency key belongs to another request.
        """
        key = digest_key(new.owner, new.idempotency_key)
        num_waiting = sum(item.finished is None for item in items)

        def insert_new(connection: sa.Connection) -> tuple[BatchRecord, list[JobRecord]]:
            _refuse(connection, new.owner, num_waiting, max_queued, max_of_owner)
            refuse_when_kept(connection, new.owner, max_kept, len(items))
            return self._insert(connection, new, items, key)

        def find(connection: sa.Connection) -> tuple[BatchRecord, list[JobRecord]] | None:
            query = sa.select(*_RECORD).where(batches.c.idempotency_key == key)
            row = None if key is None else made_before(connection, query, new, "batch")
            return None if row is None else (_batches_of(connection, [row])[0], [])

        return added_once(self._engine, find, insert_new)

    def _insert(
        self, connection: sa.Connection, new: NewBatch, items: Sequence[NewJob], key: str | None
    ) -> tuple[BatchRecord, list[JobRecord]]:
        now = self._now()
        values = {
            "id": uuid.uuid4().hex,
            "name": storable(new.name),
            "owner": new.owner,
            "idempotency_key": key,
            "created_at": now,
            "request_hash": new.request_hash,
            "document": dump(new.plan),
        }
        row = connection.execute(sa.insert(batches).values(values).returning(*_RECORD)).one()
        tighter = [item.tighter for item in new.plan.items]
        # They are claimed in this order: tighter ones first, whose schedules the others start from.
        for index in sorted(range(len(items)), key=lambda index: len(tighter[index])):
            insert(connection, replace(items[index], batch_id=row.id, batch_index=index), now)
        query = sa.select(jobs).where(jobs.c.batch_id == row.id).order_by(jobs.c.batch_index)
        for job in connection.execute(query).all():
            hand_on(connection, job, now, tighter)
        return _batches_of(connection, [row])[0], jobs_of(
            connection, connection.execute(query).all()
        )

    # Reading

    def get(self, batch_id: str) -> BatchRecord:
        """Return a batch.

        Raises `BatchNotFoundError` here and below, if none has this id.
        """
        with reading(self._engine) as connection:
            return _batches_of(connection, [_find(connection, batch_id)])[0]

    def standings(self, batch_ids: Sequence[str]) -> dict[str, BatchStanding]:
        """Return whether batches are finished, by their ids; unknown ids are left out.

        One query for up to a thousand batches, along indices: while anybody waits for a batch, it
        is asked each second.
        """
        with reading(self._engine) as connection:
            return {
                row.id: BatchStanding(row.owner, not row.goes_on)
                for ids in in_groups(batch_ids)
                for row in connection.execute(_STANDINGS, {"ids": ids})
            }

    def page(
        self, limit: int, before: int | None = None, *, owner: str | None = None
    ) -> list[BatchRecord]:
        """Return batches, newest first, of positions below ``before``."""
        query = newest_first(sa.select(*_RECORD), batches, limit, before, owner)
        with reading(self._engine) as connection:
            return _batches_of(connection, connection.execute(query).all())

    def plan(self, batch_id: str) -> BatchPlan:
        with reading(self._engine) as connection:
            return _plan_of(connection, _find(connection, batch_id))

    def jobs(self, batch_id: str) -> list[JobRecord]:
        """Return the jobs of a batch in the order of its items."""
        query = sa.select(jobs).where(jobs.c.batch_id == batch_id).order_by(jobs.c.batch_index)
        with reading(self._engine) as connection:
            _find(connection, batch_id)
            return jobs_of(connection, connection.execute(query).all())

    # Changing

    def cancel(self, batch_id: str) -> list[JobRecord]:
        """Cancel the queued jobs of a batch, mark the running ones; return both as they are now."""
        with writing(self._engine) as connection:
            _find(connection, batch_id)
            rows = connection.execute(_held(batch_id, _UNFINISHED)).all()
            for row in rows:
                if row.state == JobState.QUEUED.value:
                    change(connection, row, JobEvent.CANCEL, self._now())
            running = [row.position for row in rows if row.state == JobState.RUNNING.value]
            connection.execute(
                sa.update(jobs).where(jobs.c.position.in_(running)).values(cancel_requested=True)
            )
            return _as_they_are(connection, rows)

    def delete(self, batch_id: str) -> None:
        """Forget a batch and its jobs, documents and histories.

        Raises `StateConflictError` if one has not ended.
        """
        with writing(self._engine) as connection:
            _find(connection, batch_id)
            rows = connection.execute(_held(batch_id, list(JobState))).all()
            num_left = sum(row.state in _UNFINISHED for row in rows)
            if num_left:
                raise StateConflictError(
                    f"batch {batch_id} has {num_left} jobs that wait or run: only an ended batch "
                    f"can be deleted; cancel it first: POST /v1/batches/{batch_id}/cancel"
                )
            forget(connection, rows)

    def retry(
        self, batch_id: str, *, max_queued: int, max_of_owner: int | None = None
    ) -> list[JobRecord]:
        """Queue the failed jobs of a batch again, each with as much time as it was given first.

        They start from what they have found. Nothing happens where none has failed.

        Raises `QueueFullError`, `TooManyJobsError` as `add`.
        """
        with writing(self._engine) as connection:
            batch = _find(connection, batch_id)
            rows = connection.execute(_held(batch_id, [JobState.FAILED.value])).all()
            # A schedule that is proven optimal is all that there is to find.
            failed = [
                (row, job)
                for row, job in zip(rows, jobs_of(connection, rows), strict=True)
                if not job.is_proven
            ]
            _refuse(connection, batch.owner, len(failed), max_queued, max_of_owner)
            asked_s = _plan_of(connection, batch).options.time_limit_s
            for row, job in failed:
                _begin_again(connection, row, job, asked_s, self._now())
            return _as_they_are(connection, [row for row, _ in failed])


def _refuse(
    connection: sa.Connection,
    owner: str,
    num_waiting: int,
    max_queued: int,
    max_of_owner: int | None,
) -> None:
    if num_waiting > 0:
        refuse_when_full(connection, max_queued, num_waiting)
        refuse_when_many(connection, owner, max_of_owner, num_waiting)


def _begin_again(
    connection: sa.Connection, row: sa.Row[Any], job: JobRecord, asked_s: float, now: float
) -> None:
    """Queue a failed job with ``asked_s`` left of its time; what it overran does not count."""
    limit_s = job.options.time_limit_s
    more_s = max(0.0, asked_s + min(job.spent_s, limit_s) - limit_s)
    prolong(connection, row, job, now, seconds=more_s, max_time_limit_s=float("inf"))


def _find(connection: sa.Connection, batch_id: str) -> sa.Row[Any]:
    return row_with_id(connection, _BY_ID, batch_id, BatchNotFoundError)


def _held(batch_id: str, states: list[str]) -> sa.Select[Any]:
    """Return the query for jobs of a batch in these states, which holds them."""
    return (
        sa.select(jobs)
        .where(jobs.c.batch_id == batch_id, jobs.c.state.in_(states))
        .order_by(jobs.c.position)
        .with_for_update()
    )


def _as_they_are(connection: sa.Connection, rows: Sequence[sa.Row[Any]]) -> list[JobRecord]:
    """Return the jobs that rows were read from before they were changed."""
    positions = [row.position for row in rows]
    query = sa.select(jobs).where(jobs.c.position.in_(positions)).order_by(jobs.c.position)
    return jobs_of(connection, connection.execute(query).all())


def _batches_of(connection: sa.Connection, rows: Sequence[sa.Row[Any]]) -> list[BatchRecord]:
    """Return the batches of rows, with what their jobs say."""
    query = (
        sa.select(jobs.c.batch_id, jobs.c.state, sa.func.count(), sa.func.max(jobs.c.finished_at))
        .where(jobs.c.batch_id.in_([row.id for row in rows]))
        .group_by(jobs.c.batch_id, jobs.c.state)
    )
    counts: dict[str, dict[JobState, int]] = {row.id: {} for row in rows}
    ends: dict[str, list[float]] = {row.id: [] for row in rows}
    for batch_id, state, number, ended_at in connection.execute(query):
        counts[batch_id][JobState(state)] = number
        ends[batch_id] += [] if ended_at is None else [ended_at]
    return [
        record_of(
            BatchRecord,
            row,
            counts=counts[row.id],
            finished_at=max(ends[row.id], default=None) if _is_over(counts[row.id]) else None,
        )
        for row in rows
    ]


def _is_over(counts: dict[JobState, int]) -> bool:
    return all(state.is_final for state in counts)


def _plan_of(connection: sa.Connection, row: sa.Row[Any]) -> BatchPlan:
    query = sa.select(batches.c.document).where(batches.c.position == row.position)
    return plan_of(connection.execute(query).scalar_one())
