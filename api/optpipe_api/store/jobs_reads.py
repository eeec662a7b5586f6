"""What the job store is asked: jobs, their documents, their history, and jobs like them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from optpipe_api.jobs import EntryKind, JobState, Standing, StoredSchedule, TracePoint
from optpipe_api.store.database import reading
from optpipe_api.store.jobs_rows import document_of, entry_of, find_row, is_id, job_of, jobs_of
from optpipe_api.store.tables import events, job_tags, jobs, models, problems, schedules

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe_api.jobs import HistoryEntry, Job, JobKind

__all__ = ["JobReads"]

_FINAL = [state.value for state in JobState if state.is_final]
_ANSWERED = [JobState.SUCCEEDED.value, JobState.INFEASIBLE.value]
_TRACED = [EntryKind.INCUMBENT.value, EntryKind.BOUND.value]

# Made once: to put a query together takes longer than to answer it.
_NEWEST = sa.select(jobs).where(jobs.c.owner == sa.bindparam("owner"))
_NEWEST = _NEWEST.order_by(jobs.c.position.desc()).limit(sa.bindparam("most"))
_SAME = _NEWEST.where(
    jobs.c.problem_hash == sa.bindparam("hash"),
    jobs.c.state.in_(_ANSWERED),
    jobs.c.kind == sa.bindparam("kind"),
)
_ALIKE = _NEWEST.where(
    jobs.c.shape_hash == sa.bindparam("hash"),
    jobs.c.state.in_(_FINAL),
    jobs.c.objective_ms.is_not(None),
)
_LAST_ENTRY = (
    sa.select(sa.func.max(events.c.number))
    .where(events.c.position == jobs.c.position)
    .scalar_subquery()
)
_STANDINGS = sa.select(
    jobs.c.id,
    jobs.c.owner,
    jobs.c.state,
    jobs.c.num_schedules,
    sa.func.coalesce(_LAST_ENTRY, 0).label("last"),
).where(jobs.c.id.in_(sa.bindparam("ids", expanding=True)))
_STANDINGS_AT_ONCE = 1000
_SHARING = sa.select(jobs.c.id).where(jobs.c.awaits_id == sa.bindparam("id"))
_HISTORY = (
    sa.select(events)
    .where(events.c.position == sa.bindparam("at"), events.c.number > sa.bindparam("after"))
    .order_by(events.c.number)
    .limit(sa.bindparam("most"))
)
_TRACE = (
    sa.select(events)
    .where(events.c.position == sa.bindparam("at"), events.c.kind.in_(_TRACED))
    .order_by(events.c.number)
)


class JobReads:
    """The half of the job store that changes nothing; see `optpipe_api.store.contract`."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def get(self, job_id: str) -> Job:
        """Return a job."""
        with reading(self._engine) as connection:
            return job_of(connection, find_row(connection, job_id))

    def standings(self, job_ids: Sequence[str]) -> dict[str, Standing]:
        """Return how far jobs have come; of those that are none, nothing."""
        found: dict[str, Standing] = {}
        with reading(self._engine) as connection:
            for start in range(0, len(job_ids), _STANDINGS_AT_ONCE):
                ids = [one for one in job_ids[start : start + _STANDINGS_AT_ONCE] if is_id(one)]
                for row in connection.execute(_STANDINGS, {"ids": ids}):
                    state = JobState(row.state)
                    found[row.id] = Standing(row.owner, state, row.num_schedules, row.last)
        return found

    def page(
        self,
        limit: int,
        before: int | None = None,
        *,
        owner: str | None = None,
        state: JobState | None = None,
        tag: str | None = None,
        batch_id: str | None = None,
    ) -> list[Job]:
        """Return jobs, newest first."""
        query = sa.select(jobs).limit(limit)
        place = jobs.c.position
        if tag is not None:
            # Along the index of the tag, newest first: it may be on every job, or on few.
            query = query.join(job_tags, job_tags.c.position == place).where(job_tags.c.tag == tag)
            place = job_tags.c.position
        wanted = {"owner": owner, "state": state and state.value, "batch_id": batch_id}
        for column, value in wanted.items():
            if value is not None:
                query = query.where(jobs.c[column] == value)
        if before is not None:
            query = query.where(place < before)
        return self._found(query.order_by(place.desc()))

    def same(self, problem_hash: str, *, kind: JobKind, owner: str, limit: int) -> list[Job]:
        """Return answered jobs of one problem or model, newest first."""
        asked = {"hash": problem_hash, "kind": kind.value, "owner": owner, "most": limit}
        return self._found(_SAME, asked)

    def alike(self, shape_hash: str, *, owner: str, limit: int) -> list[Job]:
        """Return finished jobs of one shape that have a schedule, newest first."""
        return self._found(_ALIKE, {"hash": shape_hash, "owner": owner, "most": limit})

    def _found(self, query: sa.Select[Any], asked: dict[str, Any] | None = None) -> list[Job]:
        with reading(self._engine) as connection:
            return jobs_of(connection, connection.execute(query, asked).all())

    def sharing(self, job_id: str) -> list[str]:
        """Return the ids of jobs that share, or shared, the solve of this one."""
        with reading(self._engine) as connection:
            return list(connection.execute(_SHARING, {"id": job_id}).scalars())

    def problem(self, job_id: str) -> str | None:
        """Return the problem of a job."""
        with reading(self._engine) as connection:
            return document_of(connection, problems, find_row(connection, job_id).position)

    def model(self, job_id: str) -> str | None:
        """Return the model of a plan."""
        with reading(self._engine) as connection:
            return document_of(connection, models, find_row(connection, job_id).position)

    def schedule(self, job_id: str) -> StoredSchedule | None:
        """Return the best schedule so far."""
        with reading(self._engine) as connection:
            row = find_row(connection, job_id)
            text = document_of(connection, schedules, row.position)
            if text is None:
                return None
            return StoredSchedule(document=text, number=row.num_schedules, owner=row.owner)

    def history(self, job_id: str, after: int = 0, limit: int = 500) -> list[HistoryEntry]:
        """Return what happened to a job."""
        with reading(self._engine) as connection:
            asked = {"at": find_row(connection, job_id).position, "after": after, "most": limit}
            return [entry_of(row) for row in connection.execute(_HISTORY, asked)]

    def trace(self, job_id: str) -> list[TracePoint]:
        """Return the improvements of a job."""
        with reading(self._engine) as connection:
            asked = {"at": find_row(connection, job_id).position}
            return [
                TracePoint(
                    seconds=row.seconds,
                    method=row.method,
                    objective_ms=row.objective_ms,
                    bound_ms=row.bound_ms,
                )
                for row in connection.execute(_TRACE, asked)
            ]

    def made_by(self, job_id: str) -> str:
        """Return the method of the newest incumbent."""
        with reading(self._engine) as connection:
            query = (
                sa.select(events.c.method)
                .where(events.c.position == find_row(connection, job_id).position)
                .where(events.c.kind == EntryKind.INCUMBENT.value)
                .order_by(events.c.number.desc())
                .limit(1)
            )
            return connection.execute(query).scalar_one_or_none() or ""

    def counts(self) -> dict[JobState, int]:
        """Return the number of jobs in each state."""
        query = sa.select(jobs.c.state, sa.func.count()).group_by(jobs.c.state)
        with reading(self._engine) as connection:
            found = {row[0]: row[1] for row in connection.execute(query)}
        return {state: found.get(state.value, 0) for state in JobState}
