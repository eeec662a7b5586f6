"""Every SQL statement of the store, by what it is about; the stores execute them.

Each statement is built once, because to build one takes longer than to execute it. ``at`` is the
position of a row, ``most`` the maximum number of rows. A statement whose name ends in ``_LOCKED``
locks its rows until the end of the transaction. An INSERT or UPDATE without columns takes them
from the names of its parameters.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam as param
from sqlalchemy import func, select

from optpipe.answers import EventKind, JobState
from optpipe_api.jobs import DocumentKind
from optpipe_api.store.tables import (
    api_keys,
    audit,
    batches,
    documents,
    events,
    job_tags,
    jobs,
    service_values,
    turns,
)

job, tag, document, event = jobs.c, job_tags.c, documents.c, events.c
batch, key = batches.c, api_keys.c

FINAL = [state.value for state in JobState if state.is_final]
UNFINISHED = [state.value for state in JobState if not state.is_final]

_AT: sa.BindParameter[Any] = param("at")
_MOST: sa.BindParameter[Any] = param("most")
_IDS: sa.BindParameter[Any] = param("ids", expanding=True)
_POSITIONS: sa.BindParameter[Any] = param("positions", expanding=True)
_COUNT = func.count()
_QUEUED = job.state == JobState.QUEUED.value
_RUNNING = job.state == JobState.RUNNING.value
_BATCH_RECORD = [column for column in batches.c if column.name != "document"]


# --- The database as a whole. The locks are PostgreSQL's, and end with the transaction.

LOCK_MIGRATIONS = select(func.pg_advisory_xact_lock(0x0F71D1FE))
LOCK_CLAIMS = select(func.pg_advisory_xact_lock(0x0F71D1FF))
# It fails if the disk is full or the file is read-only.
PUT_VALUE = sa.text(
    "INSERT INTO service_values (name, value) VALUES (:name, :value) "
    "ON CONFLICT (name) DO UPDATE SET value = excluded.value"
)
ADD_VALUE = sa.text(
    "INSERT INTO service_values (name, value) VALUES (:name, :value) ON CONFLICT (name) DO NOTHING"
)
VALUE = select(service_values.c.value).where(service_values.c.name == param("name"))


@cache
def page_of(table: sa.Table, *filters: str) -> sa.Select[Any]:
    """Return the query for a table's rows, newest first; each filter is the name of its parameter.

    ``before`` bounds the positions, ``tag`` is a tag of a job, and all others name columns.
    """
    query = select(*(_BATCH_RECORD if table is batches else table.c))
    position = table.c.position
    if "tag" in filters:
        # Along the index of the tag: a tag may be on every job, or on few.
        query = query.join(job_tags, tag.position == position)
        position = tag.position
    for name in filters:
        if name == "before":
            query = query.where(position < param(name))
        else:
            column = tag.tag if name == "tag" else table.c[name]
            query = query.where(column == param(name))
    return query.order_by(position.desc()).limit(_MOST)


# --- Jobs: one row each.

INSERT_JOB = sa.insert(jobs).returning(jobs)
JOB_BY_ID = select(jobs).where(job.id == param("id"))
JOB_BY_ID_LOCKED = JOB_BY_ID.with_for_update()
JOB_BY_KEY = select(jobs).where(job.idempotency_key == param("key"))
JOB_UNDER_LEASE_LOCKED = JOB_BY_ID_LOCKED.where(
    _RUNNING, job.lease_owner == param("lease_owner"), job.attempt == param("attempt")
)
UPDATE_JOB = sa.update(jobs).where(job.position == _AT).returning(jobs)
# Compare and set: the UPDATE finds the job only in the state and attempt that it starts from.
RENEW_LEASES = (
    sa.update(jobs)
    .where(_RUNNING, job.lease_owner == param("server"), job.id.in_(_IDS))
    .values(lease_expires_at=param("expires_at"))
    .returning(job.id, job.attempt, job.cancel_requested)
)
CHANGE_STATE = UPDATE_JOB.where(
    job.state == param("from_state"), job.attempt == param("from_attempt")
)
NUM_JOBS_BY_STATE = select(job.state, _COUNT).group_by(job.state)

_NEWEST_OF_OWNER = (
    select(jobs).where(job.owner == param("owner")).order_by(job.position.desc()).limit(_MOST)
)
ALIKE_JOBS = _NEWEST_OF_OWNER.with_only_columns(job.id).where(
    job.shape_hash == param("hash"), job.state.in_(FINAL), job.objective_ms.is_not(None)
)
_LAST_ENTRY = select(func.max(event.number)).where(event.position == job.position).scalar_subquery()
JOB_STANDINGS = select(
    job.id,
    job.owner,
    job.state,
    job.num_schedules,
    func.coalesce(_LAST_ENTRY, 0).label("last_entry"),
).where(job.id.in_(_IDS))


# --- Limits: how many jobs there are already.

NUM_QUEUED_BY_OWNER = select(job.owner, _COUNT).where(_QUEUED).group_by(job.owner)
NUM_JOBS_OF_OWNER = select(_COUNT).where(job.owner == param("owner"))
NUM_UNFINISHED_OF_OWNER = select(_COUNT).where(
    job.state.in_(UNFINISHED), job.owner == param("owner")
)


# --- What belongs to a job: tags, documents, history.

INSERT_TAG = sa.insert(job_tags)
TAGS_OF_JOBS = select(job_tags).where(tag.position.in_(_POSITIONS))

# The form of ON CONFLICT that both databases know.
PUT_DOCUMENT = sa.text(
    "INSERT INTO documents (position, kind, document) VALUES (:position, :kind, :document) "
    "ON CONFLICT (position, kind) DO UPDATE SET document = excluded.document"
)
# At least one row for a job that exists; its kind is null if the job has no such document.
DOCUMENTS_OF_JOB = (
    select(job.owner, job.num_schedules, document.kind, document.document)
    .outerjoin(
        documents,
        (document.position == job.position) & document.kind.in_(param("kinds", expanding=True)),
    )
    .where(job.id == param("id"))
)
DOCUMENTS_TO_CLAIM = select(document.kind, document.document).where(
    document.position == _AT, document.kind != DocumentKind.COMPARISON.value
)

INSERT_EVENT = sa.insert(events)
HISTORY = (
    select(events)
    .where(event.position == _AT, event.number > param("after"))
    .order_by(event.number)
    .limit(_MOST)
)
TRACE = (
    select(events)
    .where(event.position == _AT)
    .where(event.kind.in_([EventKind.INCUMBENT.value, EventKind.BOUND.value]))
    .order_by(event.number)
)


_NEWEST_METHOD = (
    select(event.method)
    .where(event.position == job.position, event.kind == EventKind.INCUMBENT.value)
    .order_by(event.number.desc())
    .limit(1)
    .scalar_subquery()
)
_SAME_JOB = (
    select(func.max(job.position))
    .where(job.owner == param("owner"), job.problem_hash == param("hash"))
    .where(job.kind == param("kind"), job.position < param("before"))
    .where(job.state.in_([JobState.SUCCEEDED.value, JobState.INFEASIBLE.value]))
    .scalar_subquery()
)
# A row for each document of the newest job; at least one row if there is such a job.
SAME_JOB = (
    select(
        jobs,
        document.kind.label("document_kind"),
        document.document,
        _NEWEST_METHOD.label("method"),
    )
    .outerjoin(
        documents,
        (document.position == job.position) & document.kind.in_(param("kinds", expanding=True)),
    )
    .where(job.position == _SAME_JOB)
)


# --- The queue: whose turn it is, and which job is next.

WAITING_OWNERS = (
    select(job.owner, func.max(job.priority), func.min(job.position))
    .where(_QUEUED)
    .group_by(job.owner)
)
# How many jobs of each owner run in total, and how many of them under leases of one server.
RUNNING_OWNERS = (
    select(job.owner, _COUNT, func.sum(sa.case((job.lease_owner == param("server"), 1), else_=0)))
    .where(_RUNNING)
    .group_by(job.owner)
)
TURNS = select(turns)
TAKE_TURN = sa.text(
    "INSERT INTO turns (owner, number) "
    "VALUES (:owner, (SELECT COALESCE(MAX(number), 0) + 1 FROM turns)) "
    "ON CONFLICT (owner) DO UPDATE SET number = excluded.number"
)
# A row that another transaction has locked is about to be cancelled: the claim passes it over.
FIRST_OF_OWNER_LOCKED = (
    select(jobs)
    .where(_QUEUED, job.owner == param("owner"))
    .order_by(job.priority.desc(), job.position)
    .limit(1)
    .with_for_update(skip_locked=True)
)
QUEUE_OF_OWNER = (
    select(job.id)
    .where(_QUEUED, job.owner == param("owner"))
    .order_by(job.priority.desc(), job.position)
)
LEASE_OWNERS = (
    select(job.lease_owner, func.min(job.lease_expires_at))
    .where(_RUNNING)
    .group_by(job.lease_owner)
)
LAPSED_JOBS_LOCKED = (
    select(jobs)
    .where(_RUNNING)
    .where(
        (job.lease_expires_at < param("now")) | job.lease_owner.in_(param("gone", expanding=True))
    )
    .with_for_update(skip_locked=True)
)


# --- Deletion of jobs.

_others = jobs.alias("others")
_IN_YOUNG_BATCH = (
    select(_others.c.id)
    .where(_others.c.batch_id == job.batch_id)
    .where(_others.c.finished_at.is_(None) | (_others.c.finished_at >= param("before")))
    .exists()
)
# Only an ended job has ``finished_at``. A batch is deleted only when all of its jobs are old.
OLD_JOBS_LOCKED = (
    select(job.position, job.batch_id)
    .where(job.finished_at < param("before"))
    .where(~(job.batch_id.is_not(None) & _IN_YOUNG_BATCH))
    .order_by(job.finished_at)
    .limit(_MOST)
    .with_for_update(skip_locked=True)
)
DELETE_JOBS = [
    sa.delete(table).where(table.c.position.in_(_POSITIONS))
    for table in (documents, job_tags, events, jobs)
]
DELETE_EMPTY_BATCHES = sa.delete(batches).where(
    batch.id.in_(_IDS), ~select(job.id).where(job.batch_id == batch.id).exists()
)


# --- Batches.

INSERT_BATCH = sa.insert(batches).returning(*_BATCH_RECORD)
BATCH_BY_ID = select(*_BATCH_RECORD).where(batch.id == param("id"))
BATCH_BY_KEY = select(*_BATCH_RECORD).where(batch.idempotency_key == param("key"))
BATCH_PLAN = select(batch.owner, batch.document).where(batch.id == param("id"))
BATCH_STANDINGS = select(
    batch.id,
    batch.owner,
    sa.exists().where(job.batch_id == batch.id, job.state.in_(UNFINISHED)).label("is_unfinished"),
).where(batch.id.in_(_IDS))
COUNTS_OF_BATCHES = (
    select(
        job.batch_id, job.state, _COUNT.label("number"), func.max(job.finished_at).label("ended_at")
    )
    .where(job.batch_id.in_(_IDS))
    .group_by(job.batch_id, job.state)
)
_OF_BATCH = job.batch_id == param("batch_id")
ITEMS = select(jobs).where(_OF_BATCH).order_by(job.batch_index)
ITEMS_IN_STATES_LOCKED = (
    select(jobs)
    .where(_OF_BATCH, job.state.in_(param("states", expanding=True)))
    .order_by(job.position)
    .with_for_update()
)

# --- The audit log.

INSERT_AUDIT = sa.insert(audit)
DELETE_OLD_AUDIT = sa.delete(audit).where(audit.c.at < param("before"))


# --- API keys.

INSERT_KEY = sa.insert(api_keys)
_IS_VALID = key.revoked_at.is_(None) & (key.expires_at.is_(None) | (key.expires_at > param("now")))
ALL_KEYS = select(api_keys).order_by(key.name, key.created_at)
VALID_KEYS = ALL_KEYS.where(_IS_VALID)
KEYS_OF_NAME = ALL_KEYS.where(key.name == param("name"))
DELETE_INVALID_KEYS = sa.delete(api_keys).where(key.name == param("name"), ~_IS_VALID)
# A rotated key expires; one that would expire sooner does.
EXPIRE_KEYS = (
    sa.update(api_keys)
    .where(key.name == param("of_name"), _IS_VALID)
    .where(key.expires_at.is_(None) | (key.expires_at > param("until")))
    .values(expires_at=param("until"))
)
REVOKE_KEYS = (
    sa.update(api_keys)
    .where(key.name == param("of_name"), key.revoked_at.is_(None))
    .values(revoked_at=param("now"))
)
UNFINISHED_OF_OWNER_LOCKED = (
    select(jobs)
    .where(job.owner == param("owner"), job.state.in_(UNFINISHED))
    .order_by(job.position)
    .with_for_update()
)
