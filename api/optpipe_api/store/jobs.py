"""The job store over SQLAlchemy Core: one implementation for SQLite and PostgreSQL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from optpipe_api.jobs import (
    Claim,
    Job,
    JobEvent,
    JobState,
    Lease,
    NewJob,
    TracePoint,
)
from optpipe_api.store.database import reading, writing
from optpipe_api.store.jobs_births import find_by_key, insert, refuse_when_full, refuse_when_many
from optpipe_api.store.jobs_changes import (
    change,
    finish,
    give_back,
    prolong,
    refuse_pointless,
)
from optpipe_api.store.jobs_entries import keep, update
from optpipe_api.store.jobs_reads import JobReads
from optpipe_api.store.jobs_rows import (
    document_of,
    find_row,
    job_of,
    jobs_of,
    leased_row,
)
from optpipe_api.store.jobs_sharing import answer_early, hold_problems, share_improvement
from optpipe_api.store.tables import (
    batches,
    deployments,
    events,
    job_tags,
    jobs,
    models,
    problems,
    schedules,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_api.jobs import Outcome

__all__ = ["SqlJobStore"]

_FIRST = (
    sa.select(jobs.c.position)
    .where(jobs.c.state == JobState.QUEUED.value, jobs.c.awaits_id.is_(None))
    .order_by(jobs.c.priority.desc(), jobs.c.position)
    .limit(1)
)
_FIRST_HELD = _FIRST.with_only_columns(*jobs.c).with_for_update(skip_locked=True)


class SqlJobStore(JobReads):
    """Keeps the promises of `optpipe_api.store.contract`."""

    def __init__(self, engine: sa.Engine, clock: Callable[[], float]) -> None:
        super().__init__(engine)
        self._now = clock

    # Submitting

    def add(
        self, new: NewJob, *, max_queued: int, max_of_owner: int | None = None
    ) -> tuple[Job, bool]:
        """Keep a job; see the contract."""
        try:
            with writing(self._engine) as connection:
                known = find_by_key(connection, new)
                if known is not None:
                    return known, False
                if new.finished is None:
                    refuse_when_full(connection, max_queued)
                    refuse_when_many(connection, new.owner, max_of_owner)
                hold_problems(connection, [new])
                return insert(connection, new, self._now()), True
        except IntegrityError:
            # Another server inserted the same key between our look and our insert.
            with reading(self._engine) as connection:
                known = find_by_key(connection, new)
            if known is None:
                raise
            return known, False

    # Changing

    def request_cancel(self, job_id: str) -> Job:
        """Cancel a queued job, mark a running one, leave a finished one."""
        with writing(self._engine) as connection:
            row = find_row(connection, job_id, for_update=True)
            if row.state == JobState.QUEUED.value:
                change(connection, row, JobEvent.CANCEL, self._now())
            elif row.state == JobState.RUNNING.value:
                connection.execute(
                    sa.update(jobs)
                    .where(jobs.c.position == row.position)
                    .values(cancel_requested=True)
                )
            return job_of(connection, find_row(connection, job_id))

    def resume(
        self,
        job_id: str,
        seconds: float,
        *,
        max_time_limit_s: float,
        max_queued: int,
        max_of_owner: int | None = None,
    ) -> Job:
        """Give a finished job more time."""
        with writing(self._engine) as connection:
            row = find_row(connection, job_id, for_update=True)
            job = job_of(connection, row)
            refuse_pointless(job)
            refuse_when_full(connection, max_queued)
            refuse_when_many(connection, job.owner, max_of_owner)
            prolong(
                connection,
                row,
                job,
                self._now(),
                seconds=seconds,
                max_time_limit_s=max_time_limit_s,
            )
            return job_of(connection, find_row(connection, job_id))

    def claim(self, owner: str, lease_s: float) -> Claim | None:
        """Take the first queued job of the highest priority."""
        # Idle slots ask often: look before taking the write lock.
        with reading(self._engine) as connection:
            if connection.execute(_FIRST).one_or_none() is None:
                return None
        with writing(self._engine) as connection:
            row = connection.execute(_FIRST_HELD).one_or_none()
            if row is None:
                return None
            now = self._now()
            claimed = change(
                connection,
                row,
                JobEvent.CLAIM,
                now,
                attempt=row.attempt + 1,
                lease_owner=owner,
                lease_expires_at=now + lease_s,
                claimed_at=now,
                started_at=now if row.started_at is None else row.started_at,
            )
            return None if claimed is None else _claim_of(connection, claimed)

    def heartbeat(self, lease: Lease, lease_s: float) -> Job | None:
        """Renew a lease."""
        with writing(self._engine) as connection:
            row = leased_row(connection, lease)
            if row is None:
                return None
            now = self._now()
            renewed = update(connection, row, lease_expires_at=now + lease_s)
            answer_early(connection, renewed, now)
            return job_of(connection, renewed)

    def record(
        self,
        lease: Lease,
        point: TracePoint,
        lease_s: float,
        *,
        schedule: str | None = None,
        problem: str | None = None,
    ) -> Job | None:
        """Keep an improvement."""
        with writing(self._engine) as connection:
            row = leased_row(connection, lease)
            if row is None:
                return None
            now = self._now()
            better = keep(connection, row, point, now, schedule=schedule, problem=problem)
            renewed = update(connection, row, lease_expires_at=now + lease_s, **better)
            share_improvement(connection, renewed, now)
            return job_of(connection, renewed)

    def finish(self, lease: Lease, outcome: Outcome) -> Job | None:
        """End a running job."""
        with writing(self._engine) as connection:
            row = leased_row(connection, lease)
            ended = None if row is None else finish(connection, row, outcome, self._now())
            return None if ended is None else job_of(connection, ended)

    def requeue(
        self, lease: Lease, *, death: str | None = None, max_attempts: int = 1
    ) -> Job | None:
        """Give a job back."""
        with writing(self._engine) as connection:
            row = leased_row(connection, lease)
            if row is None:
                return None
            given = give_back(connection, row, death, max_attempts, self._now())
            return None if given is None else job_of(connection, given)

    def expire(self, max_attempts: int, is_gone: Callable[[str], bool] | None = None) -> list[Job]:
        """Give back every job whose lease has run out, or whose owner is gone."""
        now = self._now()
        running = jobs.c.state == JobState.RUNNING.value
        owners = sa.select(jobs.c.lease_owner, sa.func.min(jobs.c.lease_expires_at))
        # Look before taking the write lock: there is nearly always nothing to do.
        with reading(self._engine) as connection:
            held = connection.execute(owners.where(running).group_by(jobs.c.lease_owner)).all()
        gone = [owner for owner, _ in held if is_gone is not None and is_gone(owner)]
        if not gone and all(expires_at >= now for _, expires_at in held):
            return []
        is_over = (jobs.c.lease_expires_at < now) | jobs.c.lease_owner.in_(gone)
        lapsed = sa.select(jobs).where(running, is_over)
        death = "its server stopped answering"
        with writing(self._engine) as connection:
            rows = connection.execute(lapsed.with_for_update(skip_locked=True)).all()
            given = [give_back(connection, row, death, max_attempts, now) for row in rows]
            return jobs_of(connection, [row for row in given if row is not None])

    def delete_finished(self, before: float, limit: int = 500) -> int:
        """Forget jobs that ended long ago, and batches of which none is left."""
        live = sa.select(deployments.c.id).where(deployments.c.ended_at.is_(None))
        old = (
            sa.select(jobs.c.position, jobs.c.batch_id)
            # Whatever has ended has this, and nothing else has it.
            .where(jobs.c.finished_at < before)
            .where(jobs.c.deployment_id.is_(None) | jobs.c.deployment_id.not_in(live))
            .where(~_is_in_young_batch(before))
            .order_by(jobs.c.finished_at)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        with writing(self._engine) as connection:
            rows = connection.execute(old).all()
            if not rows:
                return 0
            positions = [row.position for row in rows]
            for table in (problems, models, schedules, job_tags, events, jobs):
                connection.execute(sa.delete(table).where(table.c.position.in_(positions)))
            left = sa.select(jobs.c.id).where(jobs.c.batch_id == batches.c.id).exists()
            emptied = batches.c.id.in_({row.batch_id for row in rows} - {None})
            connection.execute(sa.delete(batches).where(emptied, ~left))
            return len(rows)


def _is_in_young_batch(before: float) -> sa.ColumnElement[bool]:
    """Whether a job's batch has one that has not ended before a time: they go whole or not."""
    others = jobs.alias("others")
    young = others.c.finished_at.is_(None) | (others.c.finished_at >= before)
    same = others.c.batch_id == jobs.c.batch_id
    return jobs.c.batch_id.is_not(None) & sa.select(others.c.id).where(same, young).exists()


def _claim_of(connection: sa.Connection, row: sa.Row[Any]) -> Claim | None:
    job = job_of(connection, row)
    return Claim(
        lease=Lease(job.id, row.lease_owner, job.attempt),
        job=job,
        problem=document_of(connection, problems, row.position),
        model=document_of(connection, models, row.position),
        start=document_of(connection, schedules, row.position),
    )
