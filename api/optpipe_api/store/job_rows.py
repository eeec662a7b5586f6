"""Rows of jobs: found and made into values; written, with all that is kept beside them.

Whoever changes a job that exists holds its row.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections import defaultdict
from dataclasses import asdict, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from optpipe.answers import Cache, EventKind, JobOptions, JobState
from optpipe.requests import JobKind
from optpipe_api.errors import (
    JobNotFoundError,
    KeyReusedError,
    QueueFullError,
    TooManyJobsError,
    TooManyKeptError,
)
from optpipe_api.jobs import (
    BatchPlan,
    HistoryEntry,
    ItemPlan,
    JobError,
    JobRecord,
    Standing,
    StoredSchedule,
    TracePoint,
    transition,
)
from optpipe_api.store.database import (
    checkpoints,
    comparisons,
    deployments,
    events,
    in_groups,
    job_tags,
    jobs,
    models,
    problems,
    questions,
    reading,
    record_of,
    row_with_id,
    schedules,
    tuned,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe_api.jobs import AttemptOutcome, JobEvent, JobStart, Lease, NewJob

__all__ = [
    "ASKED_LIMIT",
    "JobReads",
    "change",
    "digest_key",
    "document_of",
    "dump",
    "find_by_key",
    "find_row",
    "insert",
    "job_of",
    "jobs_of",
    "keep",
    "leased_row",
    "note",
    "options_of",
    "plan_of",
    "put",
    "refuse_when_full",
    "refuse_when_kept",
    "refuse_when_many",
    "spent",
    "storable",
    "update",
]


ASKED_LIMIT = "asked_time_limit_s"
"""In a resumed job's options: the time limit that was asked for when it was submitted."""

_EQUAL = 1e-9
_VALUES = ("bound_ms", "objective_ms")
"""Objectives that differ by no more than this share of them are equal."""
_OPTIONS = frozenset(item.name for item in fields(JobOptions))
# Made once: to put a query together takes longer than to answer it.
_BY_ID = sa.select(jobs).where(jobs.c.id == sa.bindparam("id"))
_TAGS = sa.select(job_tags).where(
    job_tags.c.position.in_(sa.bindparam("positions", expanding=True))
)


def find_row(connection: sa.Connection, job_id: str, *, for_update: bool = False) -> sa.Row[Any]:
    """Return the row of a job, held until the end of the transaction where it is to be changed.

    Raises `JobNotFoundError` if no job has this id.
    """
    query = _BY_ID.with_for_update() if for_update else _BY_ID
    return row_with_id(connection, query, job_id, JobNotFoundError)


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


def job_of(
    connection: sa.Connection, row: sa.Row[Any], tags: tuple[str, ...] | None = None
) -> JobRecord:
    """Return the job of a row; its tags are read unless they are known."""
    return jobs_of(connection, [row])[0] if tags is None else _job(row, tags)


def jobs_of(connection: sa.Connection, rows: Sequence[sa.Row[Any]]) -> list[JobRecord]:
    """Return the jobs of rows, in their order."""
    tags = _tags_of(connection, [row.position for row in rows])
    return [_job(row, tags[row.position]) for row in rows]


def _tags_of(connection: sa.Connection, positions: list[int]) -> dict[int, tuple[str, ...]]:
    found: dict[int, list[str]] = defaultdict(list)
    for row in connection.execute(_TAGS, {"positions": positions}):
        found[row.position].append(row.tag)
    return defaultdict(tuple, {place: tuple(sorted(tags)) for place, tags in found.items()})


def _job(row: sa.Row[Any], tags: tuple[str, ...]) -> JobRecord:
    return record_of(
        JobRecord,
        row,
        state=JobState(row.state),
        kind=JobKind(row.kind),
        options=options_of(row),
        tags=tags,
        cache=Cache(row.cache),
        error=None if row.error is None else JobError(**json.loads(row.error)),
    )


def options_of(row: sa.Row[Any]) -> JobOptions:
    """Return a job's options as they are now."""
    said = json.loads(row.options)
    return JobOptions(**{name: value for name, value in said.items() if name in _OPTIONS})


@lru_cache(maxsize=4)
def plan_of(document: str) -> BatchPlan:
    """Return what a batch's document says, which never changes: whoever follows it asks often."""
    said = json.loads(document)
    return BatchPlan(
        axes=said["axes"],
        options=JobOptions(**said["options"]),
        tags=tuple(said["tags"]),
        priority=said["priority"],
        items=tuple(ItemPlan(**item) for item in said["items"]),
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


# --- What the job store is asked: jobs, their documents, their history, and jobs like them.

_FINAL = [state.value for state in JobState if state.is_final]
_ANSWERED = [JobState.SUCCEEDED.value, JobState.INFEASIBLE.value]
_TRACED = [EventKind.INCUMBENT.value, EventKind.BOUND.value]

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
    """The half of the job store that changes nothing; see `optpipe_api.store.jobs`."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def get(self, job_id: str) -> JobRecord:
        """Return a job.

        Raises `JobNotFoundError` here and below, if no job has this id.
        """
        with reading(self._engine) as connection:
            return job_of(connection, find_row(connection, job_id))

    def standings(self, job_ids: Sequence[str]) -> dict[str, Standing]:
        """Return how far jobs have come, by their ids; those that do not exist are left out.

        One query for up to a thousand, along indices: it is asked each second while anybody waits.
        """
        found: dict[str, Standing] = {}
        with reading(self._engine) as connection:
            for ids in in_groups(job_ids):
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
    ) -> list[JobRecord]:
        """Return up to ``limit`` jobs, newest first, of positions below ``before``.

        Only those of an owner, in a state, with a tag, of a batch, where they are given.
        """
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

    def same(self, problem_hash: str, *, kind: JobKind, owner: str, limit: int) -> list[JobRecord]:
        """Return an owner's succeeded and infeasible jobs of one problem or model, newest first."""
        parameters = {"hash": problem_hash, "kind": kind.value, "owner": owner, "most": limit}
        return self._found(_SAME, parameters)

    def alike(self, shape_hash: str, *, owner: str, limit: int) -> list[JobRecord]:
        """Return an owner's finished jobs of one shape that have a schedule, newest first."""
        return self._found(_ALIKE, {"hash": shape_hash, "owner": owner, "most": limit})

    def _found(
        self, query: sa.Select[Any], parameters: dict[str, Any] | None = None
    ) -> list[JobRecord]:
        with reading(self._engine) as connection:
            return jobs_of(connection, connection.execute(query, parameters).all())

    def problem(self, job_id: str) -> str | None:
        """Return the problem of a job as JSON text; None for a plan or tune without schedule."""
        with reading(self._engine) as connection:
            return document_of(connection, problems, find_row(connection, job_id).position)

    def model(self, job_id: str) -> str | None:
        """Return the model of a plan as JSON text; None for other jobs."""
        with reading(self._engine) as connection:
            return document_of(connection, models, find_row(connection, job_id).position)

    def comparison(self, job_id: str) -> str | None:
        """Return the rows of a comparison as JSON text; None for other jobs, and until it ends."""
        with reading(self._engine) as connection:
            return document_of(connection, comparisons, find_row(connection, job_id).position)

    def question(self, job_id: str) -> str | None:
        """Return what a tune is asked as JSON text; None for other jobs."""
        with reading(self._engine) as connection:
            return document_of(connection, questions, find_row(connection, job_id).position)

    def tuned(self, job_id: str) -> str | None:
        """Return what a tune has found as JSON text; None for other jobs, and until it has any."""
        with reading(self._engine) as connection:
            return document_of(connection, tuned, find_row(connection, job_id).position)

    def checkpoint(self, job_id: str) -> str | None:
        """Return where the search of a tune stands as JSON text; None where it never said."""
        with reading(self._engine) as connection:
            return document_of(connection, checkpoints, find_row(connection, job_id).position)

    def schedule(self, job_id: str) -> StoredSchedule | None:
        with reading(self._engine) as connection:
            row = find_row(connection, job_id)
            text = document_of(connection, schedules, row.position)
            if text is None:
                return None
            return StoredSchedule(document=text, number=row.num_schedules, owner=row.owner)

    def history(self, job_id: str, after: int = 0, limit: int = 500) -> list[HistoryEntry]:
        """Return up to ``limit`` entries of numbers above ``after``, oldest first."""
        with reading(self._engine) as connection:
            parameters = {
                "at": find_row(connection, job_id).position,
                "after": after,
                "most": limit,
            }
            return [
                record_of(HistoryEntry, row, kind=EventKind(row.kind))
                for row in connection.execute(_HISTORY, parameters)
            ]

    def trace(self, job_id: str) -> list[TracePoint]:
        """Return the improvements of a job, oldest first: incumbents and bounds of its history."""
        with reading(self._engine) as connection:
            parameters = {"at": find_row(connection, job_id).position}
            return [record_of(TracePoint, row) for row in connection.execute(_TRACE, parameters)]

    def made_by(self, job_id: str) -> str:
        """Return the method of the newest incumbent; empty where there is none."""
        with reading(self._engine) as connection:
            query = (
                sa.select(events.c.method)
                .where(events.c.position == find_row(connection, job_id).position)
                .where(events.c.kind == EventKind.INCUMBENT.value)
                .order_by(events.c.number.desc())
                .limit(1)
            )
            return connection.execute(query).scalar_one_or_none() or ""

    def counts(self) -> dict[JobState, int]:
        """Return the number of jobs in each state; doubles as the sign that the store answers."""
        query = sa.select(jobs.c.state, sa.func.count()).group_by(jobs.c.state)
        with reading(self._engine) as connection:
            found = {row[0]: row[1] for row in connection.execute(query)}
        return {state: found.get(state.value, 0) for state in JobState}


# --- How a job comes to be: queued, with a start, or answered at once; once for each key.

_INSERT = sa.insert(jobs).returning(jobs)
_INSERT_TAG = sa.insert(job_tags)
_AS_GIVEN = (
    *("owner", "problem_hash", "shape_hash", "objective", "priority", "source_id", "batch_id"),
    *("batch_index", "deployment_id", "cancel_requested", "attempt", "deaths", "spent_s"),
    "num_schedules",
)
_QUEUED = sa.select(sa.func.count()).where(jobs.c.state == JobState.QUEUED.value)


def insert(connection: sa.Connection, new: NewJob, now: float) -> JobRecord:
    """Keep a job with its documents and tags, and write the first entries of its history."""
    row = connection.execute(_INSERT, _columns(new, now)).one()
    documents = ((problems, new.problem), (models, new.model), (questions, new.question))
    for table, text in documents:
        if text is not None:
            put(connection, table, row.position, text, is_first=True)
    tags = tuple(sorted(set(new.tags)))
    if tags:
        connection.execute(_INSERT_TAG, [{"position": row.position, "tag": tag} for tag in tags])
    if new.finished is not None:
        _tell_the_end(connection, row.position, new, new.finished, now)
    else:
        note(connection, row.position, now, EventKind.STATE, text=JobState.QUEUED.value)
        if new.start is not None:
            _tell_the_start(connection, row.position, new, new.start, now)
    return job_of(connection, row, tags)


def _columns(new: NewJob, now: float) -> dict[str, Any]:
    return {
        **{name: getattr(new, name) for name in _AS_GIVEN},
        "id": uuid.uuid4().hex,
        "kind": new.kind.value,
        "state": JobState.QUEUED.value,
        "name": storable(new.name),
        "options": dump(new.options),
        "idempotency_key": digest_key(new.owner, new.idempotency_key),
        "cache": new.cache.value,
        "created_at": now,
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
    connection: sa.Connection, position: int, new: NewJob, start: JobStart, now: float
) -> None:
    put(connection, schedules, position, start.schedule, is_first=True)
    if new.cache is Cache.NEAR:
        text = f"started from a schedule of job {new.source_id}"
        note(connection, position, now, EventKind.LOG, text=text)
    _note_incumbent(connection, position, start, now)


def _tell_the_end(
    connection: sa.Connection, position: int, new: NewJob, outcome: AttemptOutcome, now: float
) -> None:
    if outcome.schedule is not None:
        put(connection, schedules, position, outcome.schedule, is_first=True)
        _note_incumbent(connection, position, outcome, now)
    for table, text in ((tuned, outcome.tuned), (checkpoints, outcome.checkpoint)):
        if text is not None:
            put(connection, table, position, text, is_first=True)
    state = _known_at_birth(new, now)["state"]
    note(connection, position, now, EventKind.STATE, text=state)


def _note_incumbent(
    connection: sa.Connection, position: int, known: JobStart | AttemptOutcome, now: float
) -> None:
    note(
        connection,
        position,
        now,
        EventKind.INCUMBENT,
        seconds=0.0,
        method=storable(known.method)[:100],
        objective_ms=known.objective_ms,
        bound_ms=known.bound_ms,
    )


def find_by_key(connection: sa.Connection, new: NewJob) -> JobRecord | None:
    """Return the job that this owner's key made before.

    Raises `KeyReusedError` if it was made from another request.
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


def _request_of(row: sa.Row[Any], job: JobRecord) -> tuple[object, ...]:
    """Return what the job was made of; a resumed one was asked for with less time."""
    options = options_of(row)
    asked_s = json.loads(row.options).get(ASKED_LIMIT)
    if asked_s is not None:
        options = replace(options, time_limit_s=asked_s)
    return (job.kind, job.problem_hash, options, job.priority, job.tags)


def refuse_when_full(connection: sa.Connection, max_queued: int, num_new: int = 1) -> None:
    """Refuse new jobs where the queue has no room for them.

    Raises `QueueFullError` if more than ``max_queued`` would wait.
    """
    queued = connection.execute(_QUEUED).scalar_one()
    if queued + num_new > max_queued:
        raise QueueFullError(queued, max_queued)


def refuse_when_many(
    connection: sa.Connection, owner: str, max_of_owner: int | None, num_new: int = 1
) -> None:
    """Refuse new jobs or deployments of an owner who has many under way already.

    A deployment counts as one until it ends, whether a job of it is under way or not.

    Raises `TooManyJobsError` if more than ``max_of_owner`` of them would wait or run.
    """
    if max_of_owner is None:
        return
    unfinished = (JobState.QUEUED.value, JobState.RUNNING.value)
    of_jobs = sa.select(sa.func.count()).where(
        jobs.c.state.in_(unfinished), jobs.c.owner == owner, jobs.c.deployment_id.is_(None)
    )
    of_deployments = sa.select(sa.func.count()).where(
        deployments.c.owner == owner, deployments.c.ended_at.is_(None)
    )
    num_unfinished = sum(connection.execute(one).scalar_one() for one in (of_jobs, of_deployments))
    if num_unfinished + num_new > max_of_owner:
        raise TooManyJobsError(owner, num_unfinished, max_of_owner)


def refuse_when_kept(
    connection: sa.Connection, owner: str, max_kept: int | None, num_new: int = 1
) -> None:
    """Refuse new jobs of an owner of whom many are kept: an answer from the cache is one more.

    Raises `TooManyKeptError` if more than ``max_kept`` would be kept, ended ones among them.
    """
    if max_kept is None:
        return
    query = sa.select(sa.func.count()).where(jobs.c.owner == owner)
    num_kept = connection.execute(query).scalar_one()
    if num_kept + num_new > max_kept:
        raise TooManyKeptError(owner, num_kept, max_kept)


# --- What is written about a job: entries of its history, its documents, its best; and its state.

_MAX_METHOD = 100
_NOTE = sa.insert(events)


def note(
    connection: sa.Connection, position: int, at: float, kind: EventKind, **values: Any
) -> None:
    """Write an entry of a job's history."""
    entry = {"position": position, "at": at, "kind": kind.value, **values}
    connection.execute(_NOTE, entry)


def put(
    connection: sa.Connection,
    table: sa.Table,
    position: int,
    document: str,
    *,
    is_first: bool = False,
) -> None:
    """Store a job's document of one kind, in place of the one before where there may be one."""
    if not is_first:
        connection.execute(sa.delete(table).where(table.c.position == position))
    connection.execute(sa.insert(table), {"position": position, "document": document})


def update(connection: sa.Connection, row: sa.Row[Any], **values: Any) -> sa.Row[Any]:
    """Change columns that are not the state, and return the row as it is now."""
    changed = sa.update(jobs).where(jobs.c.position == row.position).values(**values)
    return connection.execute(changed.returning(jobs)).one()


def change(
    connection: sa.Connection, row: sa.Row[Any], event: JobEvent, now: float, **values: Any
) -> sa.Row[Any] | None:
    """Change a job's state, and note it; None where the event is not possible (any more).

    An UPDATE that names the state and the attempt it starts from: what it does not find, it does
    not change.
    """
    target = transition(JobState(row.state), event)
    if target is None:
        return None
    if target is not JobState.RUNNING:
        values |= {"lease_owner": None, "lease_expires_at": None, "claimed_at": None}
    if target.is_final:
        values["finished_at"] = now
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
    if found is not None:
        note(connection, row.position, now, EventKind.STATE, text=target.value)
    return found


def keep(
    connection: sa.Connection,
    row: sa.Row[Any],
    point: TracePoint,
    now: float,
    *,
    schedule: str | None = None,
    problem: str | None = None,
    found: str | None = None,
    is_chosen: bool = False,
) -> dict[str, Any]:
    """Keep what is better, note it, and return the columns that change with it.

    A schedule at least as good replaces the one before, and with it goes the problem that was
    chosen; a higher bound replaces the one before, and so does what a tune has ``found``, unless it
    comes with a schedule that is worse. A bound that is above the schedule, which the solver makes
    sure is by rounding alone, is the schedule's objective. History tells what
    improved: a start that is found again under its old length, schedules on the way up to it, and
    those that are as long and hold less memory would only be noise there. ``is_chosen``: the
    schedule was chosen for another reason than its length.
    """
    values: dict[str, Any] = {}
    if point.bound_ms is not None and (row.bound_ms is None or point.bound_ms > row.bound_ms):
        values["bound_ms"] = point.bound_ms
    if schedule is not None and (is_chosen or _is_as_good(row, point.objective_ms)):
        put(connection, schedules, row.position, schedule)
        if problem is not None:
            put(connection, problems, row.position, problem)
        values |= {"objective_ms": point.objective_ms, "num_schedules": row.num_schedules + 1}
    bound_ms, objective_ms = (values.get(name, getattr(row, name)) for name in _VALUES)
    if bound_ms is not None and objective_ms is not None and bound_ms > objective_ms:
        values["bound_ms"] = objective_ms
    if found is not None and (schedule is None or "objective_ms" in values):
        put(connection, tuned, row.position, found)
    _note_improvement(connection, row, point, now, values)
    return values


def _is_as_good(row: sa.Row[Any], objective_ms: float | None) -> bool:
    return objective_ms is not None and (
        row.objective_ms is None or objective_ms <= row.objective_ms * (1 + _EQUAL)
    )


def _note_improvement(
    connection: sa.Connection,
    row: sa.Row[Any],
    point: TracePoint,
    now: float,
    values: dict[str, Any],
) -> None:
    is_shorter = "objective_ms" in values and (
        row.objective_ms is None or values["objective_ms"] < row.objective_ms
    )
    if not is_shorter and "bound_ms" not in values:
        return
    note(
        connection,
        row.position,
        now,
        EventKind.INCUMBENT if is_shorter else EventKind.BOUND,
        seconds=point.seconds,
        method=storable(point.method)[:_MAX_METHOD],
        objective_ms=point.objective_ms if is_shorter else None,
        bound_ms=values.get("bound_ms", row.bound_ms),
    )
