"""The job store over SQLAlchemy Core: one implementation for SQLite and PostgreSQL.

Every change of state goes through `_change`: an UPDATE that names the state, and for workers the
lease, it starts from. What it does not find, it does not change.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from optpipe_api.errors import JobNotFoundError, KeyReusedError, QueueFullError
from optpipe_api.jobs import (
    Claim,
    Job,
    JobError,
    JobEvent,
    JobOptions,
    JobState,
    Lease,
    NewJob,
    TracePoint,
    transition,
)
from optpipe_api.store.database import connect, reading, writing
from optpipe_api.store.tables import events, jobs, problems, schedules

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_api.store.contract import Outcome

__all__ = ["SqlJobStore", "open_store"]

_ID = re.compile(r"[0-9a-f]{32}")


def open_store(url: str, clock: Callable[[], float] = time.time) -> SqlJobStore:
    """Return the store on a database, which is created or migrated as needed."""
    return SqlJobStore(connect(url), clock)


class SqlJobStore:
    """Keeps the promises of `optpipe_api.store.contract`."""

    def __init__(self, engine: sa.Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._now = clock

    def close(self) -> None:
        """Let go of all connections."""
        self._engine.dispose()

    # Submitting

    def add(self, new: NewJob, *, max_queued: int) -> tuple[Job, bool]:
        """Keep a job; see the contract."""
        try:
            with writing(self._engine) as connection:
                known = _by_key(connection, new)
                if known is not None:
                    return known, False
                _refuse_when_full(connection, max_queued)
                return self._insert(connection, new), True
        except IntegrityError:
            # Another server inserted the same key between our look and our insert.
            with reading(self._engine) as connection:
                known = _by_key(connection, new)
            if known is None:
                raise
            return known, False

    def _insert(self, connection: sa.Connection, new: NewJob) -> Job:
        values = {
            "id": uuid.uuid4().hex,
            "state": JobState.QUEUED.value,
            "name": _storable(new.name),
            "problem_hash": new.problem_hash,
            "objective": new.objective,
            "options": _dump(asdict(new.options)),
            "idempotency_key": new.idempotency_key,
            "created_at": self._now(),
            "cancel_requested": False,
            "attempt": 0,
            "deaths": 0,
            "spent_s": 0.0,
        }
        row = connection.execute(sa.insert(jobs).values(values).returning(jobs)).one()
        connection.execute(sa.insert(problems).values(position=row.position, document=new.problem))
        return _job(row)

    # Reading

    def get(self, job_id: str) -> Job:
        """Return a job."""
        with reading(self._engine) as connection:
            return _job(_row(connection, job_id))

    def page(self, limit: int, before: int | None = None) -> list[Job]:
        """Return jobs, newest first."""
        query = sa.select(jobs).order_by(jobs.c.position.desc()).limit(limit)
        if before is not None:
            query = query.where(jobs.c.position < before)
        with reading(self._engine) as connection:
            return [_job(row) for row in connection.execute(query)]

    def problem(self, job_id: str) -> str:
        """Return the problem of a job."""
        with reading(self._engine) as connection:
            text = _document(connection, problems, _row(connection, job_id).position)
        if text is None:
            raise JobNotFoundError(job_id)
        return text

    def schedule(self, job_id: str) -> str | None:
        """Return the best schedule so far."""
        with reading(self._engine) as connection:
            return _document(connection, schedules, _row(connection, job_id).position)

    def trace(self, job_id: str) -> list[TracePoint]:
        """Return the improvements of a job."""
        with reading(self._engine) as connection:
            position = _row(connection, job_id).position
            query = (
                sa.select(events)
                .where(events.c.position == position, events.c.kind.in_(("incumbent", "bound")))
                .order_by(events.c.number)
            )
            return [
                TracePoint(
                    seconds=row.seconds,
                    method=row.method,
                    objective_ms=row.objective_ms,
                    bound_ms=row.bound_ms,
                )
                for row in connection.execute(query)
            ]

    def counts(self) -> dict[JobState, int]:
        """Return the number of jobs in each state."""
        query = sa.select(jobs.c.state, sa.func.count()).group_by(jobs.c.state)
        with reading(self._engine) as connection:
            found = {row[0]: row[1] for row in connection.execute(query)}
        return {state: found.get(state.value, 0) for state in JobState}

    # Changing

    def request_cancel(self, job_id: str) -> Job:
        """Cancel a queued job, mark a running one, leave a finished one."""
        with writing(self._engine) as connection:
            row = _row(connection, job_id, for_update=True)
            state = JobState(row.state)
            if state is JobState.QUEUED:
                changed = self._change(connection, row, JobEvent.CANCEL)
                return _job(row) if changed is None else changed
            if state is JobState.RUNNING and not row.cancel_requested:
                connection.execute(
                    sa.update(jobs)
                    .where(jobs.c.position == row.position, jobs.c.state == state.value)
                    .values(cancel_requested=True)
                )
            return _job(_row(connection, job_id))

    def claim(self, owner: str, lease_s: float) -> Claim | None:
        """Take the oldest queued job."""
        oldest = (
            sa.select(jobs)
            .where(jobs.c.state == JobState.QUEUED.value)
            .order_by(jobs.c.position)
            .limit(1)
            .with_for_update(skip_locked=True)
        )
        with writing(self._engine) as connection:
            row = connection.execute(oldest).one_or_none()
            if row is None:
                return None
            now = self._now()
            job = self._change(
                connection,
                row,
                JobEvent.CLAIM,
                attempt=row.attempt + 1,
                lease_owner=owner,
                lease_expires_at=now + lease_s,
                claimed_at=now,
                started_at=now if row.started_at is None else row.started_at,
            )
            problem = _document(connection, problems, row.position)
            if job is None or problem is None:
                return None
            start = _document(connection, schedules, row.position)
            lease = Lease(job.id, owner, job.attempt)
            return Claim(lease=lease, job=job, problem=problem, start=start)

    def heartbeat(self, lease: Lease, lease_s: float) -> Job | None:
        """Renew a lease."""
        with writing(self._engine) as connection:
            row = _leased(connection, lease)
            return None if row is None else self._renew(connection, row, lease_s)

    def record(
        self, lease: Lease, point: TracePoint, lease_s: float, *, schedule: str | None = None
    ) -> Job | None:
        """Keep an improvement."""
        with writing(self._engine) as connection:
            row = _leased(connection, lease)
            if row is None:
                return None
            values = asdict(point) | {"method": _storable(point.method)[:100]}
            kind = "bound" if point.objective_ms is None else "incumbent"
            connection.execute(
                sa.insert(events).values(position=row.position, kind=kind, at=self._now(), **values)
            )
            better = _keep_best(connection, row, schedule, point.objective_ms, point.bound_ms)
            return self._renew(connection, row, lease_s, **better)

    def finish(self, lease: Lease, outcome: Outcome) -> Job | None:
        """End a running job."""
        with writing(self._engine) as connection:
            row = _leased(connection, lease)
            if row is None:
                return None
            better = _keep_best(
                connection, row, outcome.schedule, outcome.objective_ms, outcome.bound_ms
            )
            error = None if outcome.error is None else _storable(_dump(asdict(outcome.error)))
            return self._change(connection, row, outcome.event, error=error, **better)

    def requeue(
        self, lease: Lease, *, death: str | None = None, max_attempts: int = 1
    ) -> Job | None:
        """Give a job back."""
        with writing(self._engine) as connection:
            row = _leased(connection, lease)
            return None if row is None else self._give_back(connection, row, death, max_attempts)

    def expire(self, max_attempts: int) -> list[Job]:
        """Give back every job whose lease has run out."""
        lapsed = (
            sa.select(jobs)
            .where(jobs.c.state == JobState.RUNNING.value)
            .where(jobs.c.lease_expires_at < self._now())
        )
        # Look before taking the write lock: there is nearly always nothing to do.
        with reading(self._engine) as connection:
            if connection.execute(lapsed.limit(1)).first() is None:
                return []
        death = "its server stopped answering"
        with writing(self._engine) as connection:
            rows = connection.execute(lapsed.with_for_update(skip_locked=True)).all()
            found = [self._give_back(connection, row, death, max_attempts) for row in rows]
        return [job for job in found if job is not None]

    def _give_back(
        self, connection: sa.Connection, row: sa.Row[Any], death: str | None, max_attempts: int
    ) -> Job | None:
        deaths = row.deaths + (death is not None)
        error = None
        event = JobEvent.REQUEUE
        if row.cancel_requested:
            event = JobEvent.CANCEL
        elif death is not None and deaths >= max_attempts:
            event = JobEvent.FAIL
            error = JobError(
                code="job.died",
                message=f"given up after {deaths} attempts that died, the last because {death}; "
                "does the problem fit the solver's memory? Submit a smaller one, or raise "
                "OPTPIPE_SOLVER_MEMORY_BYTES or OPTPIPE_MAX_ATTEMPTS",
            )
        ended = min(self._now(), row.lease_expires_at)
        return self._change(
            connection,
            row,
            event,
            deaths=deaths,
            spent_s=row.spent_s + max(0.0, ended - row.claimed_at),
            error=None if error is None else _dump(asdict(error)),
        )

    def _renew(
        self, connection: sa.Connection, row: sa.Row[Any], lease_s: float, **values: Any
    ) -> Job:
        renewed = (
            sa.update(jobs)
            .where(jobs.c.position == row.position)
            .values(lease_expires_at=self._now() + lease_s, **values)
            .returning(jobs)
        )
        return _job(connection.execute(renewed).one())

    def _change(
        self, connection: sa.Connection, row: sa.Row[Any], event: JobEvent, **values: Any
    ) -> Job | None:
        target = transition(JobState(row.state), event)
        if target is None:
            return None
        if target is not JobState.RUNNING:
            values |= {"lease_owner": None, "lease_expires_at": None, "claimed_at": None}
        if target.is_final:
            values["finished_at"] = self._now()
        changed = (
            sa.update(jobs)
            .where(
                jobs.c.position == row.position,
                jobs.c.state == row.state,
                jobs.c.attempt == row.attempt,
            )
            .values(state=target.value, **values)
            .returning(jobs)
        )
        found = connection.execute(changed).one_or_none()
        return None if found is None else _job(found)


def _row(connection: sa.Connection, job_id: str, *, for_update: bool = False) -> sa.Row[Any]:
    query = sa.select(jobs).where(jobs.c.id == job_id)
    if for_update:
        query = query.with_for_update()
    row = connection.execute(query).one_or_none() if _ID.fullmatch(job_id) else None
    if row is None:
        raise JobNotFoundError(job_id)
    return row


def _leased(connection: sa.Connection, lease: Lease) -> sa.Row[Any] | None:
    query = sa.select(jobs).where(
        jobs.c.id == lease.job_id,
        jobs.c.state == JobState.RUNNING.value,
        jobs.c.lease_owner == lease.owner,
        jobs.c.attempt == lease.attempt,
    )
    return connection.execute(query.with_for_update()).one_or_none()


def _by_key(connection: sa.Connection, new: NewJob) -> Job | None:
    if new.idempotency_key is None:
        return None
    query = sa.select(jobs).where(jobs.c.idempotency_key == new.idempotency_key)
    row = connection.execute(query).one_or_none()
    if row is None:
        return None
    job = _job(row)
    if (job.problem_hash, job.options) != (new.problem_hash, new.options):
        raise KeyReusedError(
            f"the Idempotency-Key {new.idempotency_key!r} made job {job.id} from another problem "
            "or other options; use a new key for a new request"
        )
    return job


def _refuse_when_full(connection: sa.Connection, max_queued: int) -> None:
    query = sa.select(sa.func.count()).where(jobs.c.state == JobState.QUEUED.value)
    queued = connection.execute(query).scalar_one()
    if queued >= max_queued:
        raise QueueFullError(queued, max_queued)


def _keep_best(
    connection: sa.Connection,
    row: sa.Row[Any],
    schedule: str | None,
    objective_ms: float | None,
    bound_ms: float | None,
) -> dict[str, Any]:
    """Store a schedule that is at least as good, and return the columns that change with it."""
    values: dict[str, Any] = {}
    if bound_ms is not None and (row.bound_ms is None or bound_ms > row.bound_ms):
        values["bound_ms"] = bound_ms
    if schedule is None or objective_ms is None:
        return values
    if row.objective_ms is not None and objective_ms > row.objective_ms:
        return values
    connection.execute(sa.delete(schedules).where(schedules.c.position == row.position))
    connection.execute(sa.insert(schedules).values(position=row.position, document=schedule))
    return {**values, "objective_ms": objective_ms}


def _document(connection: sa.Connection, table: sa.Table, position: int) -> str | None:
    query = sa.select(table.c.document).where(table.c.position == position)
    return connection.execute(query).scalar_one_or_none()


def _job(row: sa.Row[Any]) -> Job:
    return Job(
        id=row.id,
        position=row.position,
        state=JobState(row.state),
        name=row.name,
        problem_hash=row.problem_hash,
        objective=row.objective,
        options=JobOptions(**json.loads(row.options)),
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        cancel_requested=row.cancel_requested,
        attempt=row.attempt,
        deaths=row.deaths,
        spent_s=row.spent_s,
        objective_ms=row.objective_ms,
        bound_ms=row.bound_ms,
        error=None if row.error is None else JobError(**json.loads(row.error)),
    )


def _dump(data: dict[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"))


def _storable(text: str) -> str:
    """Return text that PostgreSQL takes: it has no NUL."""
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}")
