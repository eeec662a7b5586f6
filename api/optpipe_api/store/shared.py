"""Functions that several stores use: rows and records, limits, and changes of a job.

They take an open connection, and belong to the caller's transaction. A caller that changes an
existing job has locked its row.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections import Counter, defaultdict
from dataclasses import asdict, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy.exc import IntegrityError

from optpipe.answers import Cache, EventKind, JobOptions, JobState
from optpipe.requests import JobKind
from optpipe_api.errors import KeyReusedError, QueueFullError, TooManyJobsError, TooManyKeptError
from optpipe_api.jobs import (
    AuditAction,
    BatchPlan,
    ItemPlan,
    JobError,
    JobEvent,
    JobRecord,
    transition,
)
from optpipe_api.store import statements as sql
from optpipe_api.store.database import writing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import sqlalchemy as sa

    from optpipe_api.jobs import Documents, NewBatch

T = TypeVar("T")

EQUAL = 1e-9
"""Objectives are equal if they differ by at most this share of them."""
FIRST_LIMIT = "asked_time_limit_s"
"""In the options of a resumed job: the time limit of its submission."""

_ID = re.compile(r"[0-9a-f]{32}")
_MAX_IDS = 1000
_MAX_INSERTS = 3
_OPTIONS = frozenset(item.name for item in fields(JobOptions))
_MAX_METHOD = 100


# --- Rows: found by id, by idempotency key, or by page.


def is_id(text: str) -> bool:
    """Whether a text has the form of an id; PostgreSQL refuses some other texts, such as NUL."""
    return _ID.fullmatch(text) is not None


def groups_of_ids(ids: Sequence[str]) -> Iterator[list[str]]:
    """Yield ids in groups for one query each, without texts that are no ids."""
    for start in range(0, len(ids), _MAX_IDS):
        yield [one for one in ids[start : start + _MAX_IDS] if is_id(one)]


def row_by_id(
    connection: sa.Connection,
    query: sa.Select[Any],
    thing_id: str,
    error: Callable[[str], Exception],
) -> sa.Row[Any]:
    """Return the row that a query with the parameter ``id`` finds; raise the error without one."""
    if is_id(thing_id):
        row = connection.execute(query, {"id": thing_id}).one_or_none()
        if row is not None:
            return row
    raise error(thing_id)


def row_by_key(
    connection: sa.Connection, query: sa.Select[Any], new: NewBatch, thing: str
) -> sa.Row[Any] | None:
    """Return the row that was added under an idempotency key before; None without one.

    Raises `KeyReusedError` if the row was added for another request than ``new``.
    """
    digest = key_digest(new.owner, new.idempotency_key)
    if digest is None:
        return None
    row = connection.execute(query, {"key": digest}).one_or_none()
    if row is not None and row.request_hash != new.request_hash:
        raise KeyReusedError(
            f"the Idempotency-Key {new.idempotency_key!r} made {thing} {row.id} from another "
            "request; use a new key for a new request"
        )
    return row


def page_rows(
    connection: sa.Connection, table: sa.Table, limit: int, filters: Mapping[str, Any]
) -> Sequence[sa.Row[Any]]:
    """Return up to ``limit`` rows, newest first; a filter of None selects all rows."""
    given = {name: value for name, value in filters.items() if value is not None}
    return connection.execute(sql.page_of(table, *given), {**given, "most": limit}).all()


def add_once(
    engine: sa.Engine,
    find: Callable[[sa.Connection], T | None],
    insert: Callable[[sa.Connection], T],
) -> T:
    """Return what an idempotency key added before, or insert it now."""
    num_tries = 0
    while True:
        num_tries += 1
        try:
            with writing(engine) as connection:
                known = find(connection)
                return insert(connection) if known is None else known
        except IntegrityError:
            # Another server may insert the same key between our look and our insert. Its row may
            # be deleted again before the next look.
            if num_tries == _MAX_INSERTS:
                raise


def key_digest(owner: str, key: str | None) -> str | None:
    """Return the stored form of an idempotency key; equal keys of two owners differ."""
    return None if key is None else hashlib.sha256(f"{owner}\0{key}".encode()).hexdigest()


# --- Values: from rows and to columns.


def to_record(kind: type[T], row: sa.Row[Any], /, **others: Any) -> T:
    """Return a dataclass whose fields are the columns of the same names, except the others."""
    names = [item.name for item in fields(kind) if item.name not in others]  # type: ignore[arg-type]
    return kind(**{name: getattr(row, name) for name in names}, **others)


def new_columns(new: NewBatch, now: float) -> dict[str, Any]:
    """Return the columns of a new batch, without its document."""
    return {
        "id": uuid.uuid4().hex,
        "name": storable(new.name),
        "owner": new.owner,
        "idempotency_key": key_digest(new.owner, new.idempotency_key),
        "created_at": now,
        "request_hash": new.request_hash,
    }


def to_json(value: Any) -> str:
    """Return a dataclass or a dictionary as compact JSON that both databases accept."""
    data = value if isinstance(value, dict) else asdict(value)
    return json.dumps(data, separators=(",", ":"))


def storable(text: str) -> str:
    """Return a text without NUL, which PostgreSQL refuses."""
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}")


def jobs_of(connection: sa.Connection, rows: Sequence[sa.Row[Any]]) -> list[JobRecord]:
    """Return the jobs of rows, in their order."""
    tags: dict[int, list[str]] = defaultdict(list)
    for row in connection.execute(sql.TAGS_OF_JOBS, {"positions": [row.position for row in rows]}):
        tags[row.position].append(row.tag)
    return [job_of(row, tags[row.position]) for row in rows]


def job_of(row: sa.Row[Any], tags: Sequence[str]) -> JobRecord:
    """Return the job of a row, whose tags the caller knows."""
    return to_record(
        JobRecord,
        row,
        state=JobState(row.state),
        kind=JobKind(row.kind),
        options=options_of(row),
        tags=tuple(sorted(set(tags))),
        cache=Cache(row.cache),
        error=None if row.error is None else JobError(**json.loads(row.error)),
    )


def options_of(row: sa.Row[Any]) -> JobOptions:
    """Return the present options of a job."""
    values = json.loads(row.options)
    return JobOptions(**{name: value for name, value in values.items() if name in _OPTIONS})


@lru_cache(maxsize=4)
def plan_of(document: str) -> BatchPlan:
    """Return the plan of a batch's document; it never changes, and clients read it often."""
    values = json.loads(document)
    return BatchPlan(
        axes=values["axes"],
        options=JobOptions(**values["options"]),
        tags=tuple(values["tags"]),
        priority=values["priority"],
        items=tuple(ItemPlan(**item) for item in values["items"]),
    )


# --- Limits.


def check_limits(
    connection: sa.Connection,
    owner: str,
    num_waiting: int,
    max_queued: int,
    *,
    max_of_owner: int | None = None,
    num_new: int = 0,
    max_kept: int | None = None,
) -> None:
    """Refuse new or resumed jobs of an owner that exceed a limit; None is no limit.

    ``num_waiting`` jobs would be queued, ``num_new`` jobs stored. An owner's share of the queue is
    ``max_queued`` divided by the number of owners with queued jobs.

    Raises `QueueFullError` if the queue would exceed ``max_queued`` and the owner its share. Raises
    `TooManyJobsError` if more than ``max_of_owner`` jobs of the owner would be unfinished. Raises
    `TooManyKeptError` if more than ``max_kept`` jobs of the owner would be stored.
    """
    if num_waiting:
        queued = Counter({row[0]: row[1] for row in connection.execute(sql.NUM_QUEUED_BY_OWNER)})
        share = max_queued // len({*queued, owner})
        is_full = queued.total() + num_waiting > max_queued
        if is_full and queued[owner] + num_waiting > share:
            raise QueueFullError(queued.total(), max_queued, queued[owner], share)
    if num_waiting and max_of_owner is not None:
        number = connection.execute(sql.NUM_UNFINISHED_OF_OWNER, {"owner": owner}).scalar_one()
        if number + num_waiting > max_of_owner:
            raise TooManyJobsError(owner, number, max_of_owner)
    if max_kept is not None:
        number = connection.execute(sql.NUM_JOBS_OF_OWNER, {"owner": owner}).scalar_one()
        if number + num_new > max_kept:
            raise TooManyKeptError(owner, number, max_kept)


# --- Changes of a job.


def add_audit(
    connection: sa.Connection, now: float, actor: str, action: AuditAction, *subjects: str
) -> None:
    """Add an entry to the audit log for each subject, in the transaction of the change."""
    rows = [
        {"at": now, "actor": actor, "action": action.value, "subject": subject}
        for subject in subjects
    ]
    if rows:
        connection.execute(sql.INSERT_AUDIT, rows)


def put_documents(connection: sa.Connection, position: int, texts: Documents) -> None:
    """Store documents of a job, in place of earlier ones of their kinds."""
    rows = [
        {"position": position, "kind": str(kind), "document": text} for kind, text in texts.items()
    ]
    if rows:
        connection.execute(sql.PUT_DOCUMENT, rows)


def add_entry(
    connection: sa.Connection, row: sa.Row[Any], now: float, kind: EventKind, **values: Any
) -> None:
    """Add an entry to a job's history."""
    connection.execute(sql.INSERT_EVENT, new_entry(row, now, kind, **values))


def new_entry(row: sa.Row[Any], now: float, kind: EventKind, **values: Any) -> dict[str, Any]:
    """Return an entry of a job's history with all of its columns."""
    if "method" in values:
        values["method"] = storable(values["method"])[:_MAX_METHOD]
    columns = dict.fromkeys(("seconds", "method", "objective_ms", "bound_ms", "text"))
    return {**columns, "position": row.position, "at": now, "kind": kind.value, **values}


def change_state(
    connection: sa.Connection, row: sa.Row[Any], event: JobEvent, now: float, **values: Any
) -> sa.Row[Any] | None:
    """Change a job's state and add it to the history; None if the event is not possible now."""
    target = transition(JobState(row.state), event)
    if target is None:
        return None
    if target is not JobState.RUNNING:
        values |= {"lease_owner": None, "lease_expires_at": None, "claimed_at": None}
    if target.is_final:
        values["finished_at"] = now
    expected = {"at": row.position, "from_state": row.state, "from_attempt": row.attempt}
    values |= expected | {"state": target.value}
    changed = connection.execute(sql.CHANGE_STATE, values).one_or_none()
    if changed is not None:
        add_entry(connection, row, now, EventKind.STATE, text=target.value)
    return changed


def cancel(connection: sa.Connection, row: sa.Row[Any], now: float) -> sa.Row[Any]:
    """Cancel a queued job, mark a running job, leave a finished job; return the row as it is."""
    if row.state == JobState.QUEUED.value:
        return change_state(connection, row, JobEvent.CANCEL, now) or row
    if row.state == JobState.RUNNING.value:
        values = {"at": row.position, "cancel_requested": True}
        return connection.execute(sql.UPDATE_JOB, values).one()
    return row


def cancel_owner(
    connection: sa.Connection, owner: str, actor: str, now: float
) -> list[sa.Row[Any]]:
    """Cancel the queued jobs of an owner, mark the running jobs; return both."""
    rows = connection.execute(sql.UNFINISHED_OF_OWNER_LOCKED, {"owner": owner}).all()
    add_audit(connection, now, actor, AuditAction.CANCEL, *(row.id for row in rows))
    return [cancel(connection, row, now) for row in rows]


def prolong(
    connection: sa.Connection, row: sa.Row[Any], job: JobRecord, seconds: float, now: float
) -> sa.Row[Any]:
    """Queue a finished job again with more time; it keeps its best schedule and bound."""
    add_entry(connection, row, now, EventKind.LOG, text=f"resumed with {seconds:g} s more")
    options, limit_s = json.loads(row.options), job.options.time_limit_s
    first_s = options.get(FIRST_LIMIT, limit_s)
    options |= {"time_limit_s": limit_s + seconds, FIRST_LIMIT: first_s}
    values = {
        "options": to_json(options),
        # Time beyond the old limit is not taken from the new time.
        "spent_s": min(row.spent_s, limit_s),
        "finished_at": None,
        "cancel_requested": False,
        "error": None,
        "deaths": 0,
    }
    return change_state(connection, row, JobEvent.RESUME, now, **values) or row


def delete_jobs(connection: sa.Connection, rows: Sequence[Any]) -> None:
    """Delete jobs with all that belongs to them, and each batch whose last job is deleted."""
    for statement in sql.DELETE_JOBS:
        connection.execute(statement, {"positions": [row.position for row in rows]})
    batch_ids = sorted({row.batch_id for row in rows} - {None})
    connection.execute(sql.DELETE_EMPTY_BATCHES, {"ids": batch_ids})
