"""Rows of jobs: found, read, and made into values."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from dataclasses import asdict, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from optpipe_api.errors import JobNotFoundError
from optpipe_api.jobs import (
    Cache,
    EntryKind,
    HistoryEntry,
    Job,
    JobError,
    JobKind,
    JobOptions,
    JobState,
)
from optpipe_api.store.tables import job_tags, jobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe_api.jobs import Lease

__all__ = [
    "ASKED_LIMIT",
    "digest_key",
    "document_of",
    "dump",
    "entry_of",
    "find_row",
    "is_id",
    "job_of",
    "jobs_of",
    "leased_row",
    "options_of",
    "spent",
    "storable",
]

ASKED_LIMIT = "asked_time_limit_s"
"""In a resumed job's options: the time limit that was asked for when it was submitted."""

_ID = re.compile(r"[0-9a-f]{32}")
_OPTIONS = frozenset(item.name for item in fields(JobOptions))
# Made once: to put a query together takes longer than to answer it.
_BY_ID = sa.select(jobs).where(jobs.c.id == sa.bindparam("job_id"))
_TAGS = sa.select(job_tags).where(
    job_tags.c.position.in_(sa.bindparam("positions", expanding=True))
)


def is_id(text: str) -> bool:
    """Whether it may be the id of a job; what is not may be what a database refuses to hear."""
    return _ID.fullmatch(text) is not None


def find_row(connection: sa.Connection, job_id: str, *, for_update: bool = False) -> sa.Row[Any]:
    """Return the row of a job, held until the end of the transaction where it is to be changed.

    Raises
    ------
    JobNotFoundError
        If no job has this id.
    """
    query = _BY_ID.with_for_update() if for_update else _BY_ID
    row = connection.execute(query, {"job_id": job_id}).one_or_none() if is_id(job_id) else None
    if row is None:
        raise JobNotFoundError(job_id)
    return row


def leased_row(connection: sa.Connection, lease: Lease) -> sa.Row[Any] | None:
    """Return the row of a job that runs under this lease, and hold it; None where it is lost."""
    query = sa.select(jobs).where(
        jobs.c.id == lease.job_id,
        jobs.c.state == JobState.RUNNING.value,
        jobs.c.lease_owner == lease.owner,
        jobs.c.attempt == lease.attempt,
    )
    return connection.execute(query.with_for_update()).one_or_none()


def document_of(connection: sa.Connection, table: sa.Table, position: int) -> str | None:
    """Return a job's document of one kind, where it has one."""
    found: str | None = connection.execute(
        _document_query(table), {"at": position}
    ).scalar_one_or_none()
    return found


@lru_cache
def _document_query(table: sa.Table) -> sa.Select[Any]:
    return sa.select(table.c.document).where(table.c.position == sa.bindparam("at"))


def job_of(connection: sa.Connection, row: sa.Row[Any], tags: tuple[str, ...] | None = None) -> Job:
    """Return the job of a row; its tags are read unless they are known."""
    return jobs_of(connection, [row])[0] if tags is None else _job(row, tags)


def jobs_of(connection: sa.Connection, rows: Sequence[sa.Row[Any]]) -> list[Job]:
    """Return the jobs of rows, in their order."""
    tags = _tags_of(connection, [row.position for row in rows])
    return [_job(row, tags[row.position]) for row in rows]


def _tags_of(connection: sa.Connection, positions: list[int]) -> dict[int, tuple[str, ...]]:
    found: dict[int, list[str]] = defaultdict(list)
    for row in connection.execute(_TAGS, {"positions": positions}):
        found[row.position].append(row.tag)
    return defaultdict(tuple, {place: tuple(sorted(tags)) for place, tags in found.items()})


def _job(row: sa.Row[Any], tags: tuple[str, ...]) -> Job:
    return Job(
        id=row.id,
        position=row.position,
        state=JobState(row.state),
        kind=JobKind(row.kind),
        name=row.name,
        owner=row.owner,
        problem_hash=row.problem_hash,
        shape_hash=row.shape_hash,
        objective=row.objective,
        options=options_of(row),
        priority=row.priority,
        tags=tags,
        cache=Cache(row.cache),
        source_id=row.source_id,
        awaits_id=row.awaits_id,
        batch_id=row.batch_id,
        batch_index=row.batch_index,
        deployment_id=row.deployment_id,
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        cancel_requested=row.cancel_requested,
        attempt=row.attempt,
        deaths=row.deaths,
        spent_s=row.spent_s,
        num_schedules=row.num_schedules,
        objective_ms=row.objective_ms,
        bound_ms=row.bound_ms,
        error=None if row.error is None else JobError(**json.loads(row.error)),
    )


def options_of(row: sa.Row[Any]) -> JobOptions:
    """Return a job's options as they are now."""
    said = json.loads(row.options)
    return JobOptions(**{name: value for name, value in said.items() if name in _OPTIONS})


def entry_of(row: sa.Row[Any]) -> HistoryEntry:
    """Return the history entry of a row of events."""
    return HistoryEntry(
        number=row.number,
        kind=EntryKind(row.kind),
        at=row.at,
        seconds=row.seconds,
        method=row.method,
        objective_ms=row.objective_ms,
        bound_ms=row.bound_ms,
        text=row.text,
    )


def spent(row: sa.Row[Any], now: float) -> float:
    """Return the seconds of solving over all attempts; a dead server's end with its lease."""
    ended = min(now, row.lease_expires_at)
    return float(row.spent_s + max(0.0, ended - row.claimed_at))


def digest_key(owner: str, key: str | None) -> str | None:
    """Return what is stored of an idempotency key: keys of different owners never meet."""
    return None if key is None else hashlib.sha256(f"{owner}\0{key}".encode()).hexdigest()


def dump(value: Any) -> str:
    """Return a dataclass or a dictionary as compact JSON that both databases take."""
    data = value if isinstance(value, dict) else asdict(value)
    return json.dumps(data, separators=(",", ":"))


def storable(text: str) -> str:
    """Return text that PostgreSQL takes: it has no NUL."""
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}")
