"""The store of batches, over SQLite and PostgreSQL.

1. **Atomic.** Each method is one transaction. A batch exists with all of its jobs, or not at all.
2. **One source.** The progress of a batch is read from its jobs, in the transaction that reads the
   batch.
3. **Idempotent.** A second `add` under the same idempotency key of the same owner adds no job. It
   returns the first batch, or refuses if the request differs. This also holds for two calls at the
   same time.
4. **Limits.** A batch or a retry is refused if the queue has not enough places for all of its jobs.

Changes of a batch's jobs obey `optpipe_api.store.jobs`. A batch is deleted with its last job.
Methods block. They raise `StoreUnavailableError` if the database does not answer. Methods that take
the id of a batch raise `BatchNotFoundError` if no batch has this id.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from optpipe.answers import JobState
from optpipe_api.errors import BatchNotFoundError, StateConflictError
from optpipe_api.jobs import AuditAction, BatchPlan, BatchRecord, BatchStanding
from optpipe_api.store import statements as sql
from optpipe_api.store.database import reading, writing
from optpipe_api.store.jobs import insert_job
from optpipe_api.store.shared import (
    add_audit,
    add_once,
    cancel,
    check_limits,
    delete_jobs,
    groups_of_ids,
    jobs_of,
    new_columns,
    page_rows,
    plan_of,
    prolong,
    row_by_id,
    row_by_key,
    to_json,
    to_record,
)
from optpipe_api.store.tables import batches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import sqlalchemy as sa

    from optpipe_api.jobs import JobRecord, NewBatch, NewJob

__all__ = ["BatchStore"]


class BatchStore:
    """Stores batches; the module's docstring is the contract."""

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
        """Store a batch and its jobs, in order; no jobs return if the key had stored it before.

        Jobs that are added finished take no place in the queue. Raises `QueueFullError`,
        `TooManyJobsError` or `TooManyKeptError` if the jobs exceed a limit of `check_limits`.
        Raises `KeyReusedError` if the idempotency key belongs to another request.
        """
        num_waiting = sum(item.finished is None for item in items)

        def insert(connection: sa.Connection) -> tuple[BatchRecord, list[JobRecord]]:
            check_limits(
                connection,
                new.owner,
                num_waiting,
                max_queued,
                max_of_owner=max_of_owner,
                num_new=len(items),
                max_kept=max_kept,
            )
            now = self._now()
            values = new_columns(new, now) | {"document": to_json(new.plan)}
            row = connection.execute(sql.INSERT_BATCH, values).one()
            # Claims take the tighter items first, so that the others can start near theirs.
            num_tighter = [len(item.tighter) for item in new.plan.items]
            for index in sorted(range(len(items)), key=num_tighter.__getitem__):
                item = replace(items[index], batch_id=row.id, batch_index=index)
                insert_job(connection, item, now)
            jobs = connection.execute(sql.ITEMS, {"batch_id": row.id}).all()
            return _batches_of(connection, [row])[0], jobs_of(connection, jobs)

        def find(connection: sa.Connection) -> tuple[BatchRecord, list[JobRecord]] | None:
            row = row_by_key(connection, sql.BATCH_BY_KEY, new, "batch")
            return None if row is None else (_batches_of(connection, [row])[0], [])

        return add_once(self._engine, find, insert)

    # Reading

    def get(self, batch_id: str) -> BatchRecord:
        """Return a batch."""
        with reading(self._engine) as connection:
            return _batches_of(connection, [_find(connection, batch_id)])[0]

    def standings(self, batch_ids: Sequence[str]) -> dict[str, BatchStanding]:
        """Return whether batches are finished, by their ids, without ids that do not exist.

        Clients that wait for a batch cause a call each second. It is one query along indices for
        up to a thousand batches.
        """
        with reading(self._engine) as connection:
            return {
                row.id: BatchStanding(row.owner, not row.is_unfinished)
                for ids in groups_of_ids(batch_ids)
                for row in connection.execute(sql.BATCH_STANDINGS, {"ids": ids})
            }

    def page(
        self, limit: int, before: int | None = None, *, owner: str | None = None
    ) -> list[BatchRecord]:
        """Return batches, newest first, of positions below ``before``."""
        with reading(self._engine) as connection:
            rows = page_rows(connection, batches, limit, {"before": before, "owner": owner})
            return _batches_of(connection, rows)

    def plan(self, batch_id: str) -> BatchPlan:
        with reading(self._engine) as connection:
            row = row_by_id(connection, sql.BATCH_PLAN, batch_id, BatchNotFoundError)
            return plan_of(row.document)

    def jobs(self, batch_id: str) -> list[JobRecord]:
        """Return the jobs of a batch in the order of its items."""
        with reading(self._engine) as connection:
            _find(connection, batch_id)
            rows = connection.execute(sql.ITEMS, {"batch_id": batch_id}).all()
            return jobs_of(connection, rows)

    # Changing

    def cancel(self, batch_id: str, actor: str = "") -> list[JobRecord]:
        """Cancel the queued jobs of a batch, mark the running jobs; return both as they are now."""
        with writing(self._engine) as connection:
            _find(connection, batch_id)
            rows, now = _lock_items(connection, batch_id, sql.UNFINISHED), self._now()
            ids = [row.id for row in rows]
            add_audit(connection, now, actor, AuditAction.CANCEL, batch_id, *ids)
            return jobs_of(connection, [cancel(connection, row, now) for row in rows])

    def delete(self, batch_id: str, actor: str = "") -> None:
        """Delete a batch with its jobs, documents and histories.

        Raises `StateConflictError` if a job has not ended.
        """
        with writing(self._engine) as connection:
            batch = _find(connection, batch_id)
            rows = _lock_items(connection, batch_id, [*sql.UNFINISHED, *sql.FINAL])
            num_left = sum(row.state in sql.UNFINISHED for row in rows)
            if num_left:
                raise StateConflictError(
                    f"batch {batch_id} has {num_left} jobs that wait or run: only an ended batch "
                    f"can be deleted; cancel it first: POST /v1/batches/{batch_id}/cancel"
                )
            subjects = [batch_id, *(row.id for row in rows)]
            add_audit(connection, batch.created_at, batch.owner, AuditAction.SUBMIT, *subjects)
            add_audit(connection, self._now(), actor, AuditAction.DELETE, *subjects)
            delete_jobs(connection, rows)

    def retry(
        self, batch_id: str, *, max_queued: int, max_of_owner: int | None = None, actor: str = ""
    ) -> list[JobRecord]:
        """Queue the failed jobs of a batch again, each with the time limit of its submission.

        They keep their best schedules. A batch without failed jobs does not change. Raises
        `QueueFullError` or `TooManyJobsError` as `add`.
        """
        with writing(self._engine) as connection:
            batch = row_by_id(connection, sql.BATCH_PLAN, batch_id, BatchNotFoundError)
            rows = _lock_items(connection, batch_id, [JobState.FAILED.value])
            # A search finds nothing better than a schedule that is proven optimal.
            failed = [
                (row, job)
                for row, job in zip(rows, jobs_of(connection, rows), strict=True)
                if not job.is_proven
            ]
            owner, num_failed = batch.owner, len(failed)
            ids = [job.id for _, job in failed]
            add_audit(connection, self._now(), actor, AuditAction.RESUME, batch_id, *ids)
            check_limits(connection, owner, num_failed, max_queued, max_of_owner=max_of_owner)
            first_s = plan_of(batch.document).options.time_limit_s
            retried = []
            for row, job in failed:
                # Time that a job spent beyond its limit does not count.
                limit_s = job.options.time_limit_s
                more_s = max(0.0, first_s + min(job.spent_s, limit_s) - limit_s)
                retried.append(prolong(connection, row, job, more_s, self._now()))
            return jobs_of(connection, retried)


def _find(connection: sa.Connection, batch_id: str) -> sa.Row[Any]:
    return row_by_id(connection, sql.BATCH_BY_ID, batch_id, BatchNotFoundError)


def _lock_items(
    connection: sa.Connection, batch_id: str, states: list[str]
) -> Sequence[sa.Row[Any]]:
    parameters = {"batch_id": batch_id, "states": states}
    return connection.execute(sql.ITEMS_IN_STATES_LOCKED, parameters).all()


def _batches_of(connection: sa.Connection, rows: Sequence[sa.Row[Any]]) -> list[BatchRecord]:
    """Return the batches of rows, with the counts of their jobs."""
    counts: dict[str, dict[JobState, int]] = defaultdict(dict)
    ends: dict[str, list[float]] = defaultdict(list)
    ids = [row.id for row in rows]
    for row in connection.execute(sql.COUNTS_OF_BATCHES, {"ids": ids}):
        counts[row.batch_id][JobState(row.state)] = row.number
        ends[row.batch_id] += [] if row.ended_at is None else [row.ended_at]
    return [
        to_record(
            BatchRecord,
            row,
            counts=counts[row.id],
            finished_at=max(ends[row.id], default=None)
            if all(state.is_final for state in counts[row.id])
            else None,
        )
        for row in rows
    ]
