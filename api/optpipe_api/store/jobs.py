"""The store of jobs, over SQLite and PostgreSQL; this docstring is its contract.

The tests in `tests/api/store` check it on both databases.

1. **Atomic.** Each method is one transaction. If the process is killed inside a method, all of its
   changes are stored or none.
2. **Durable.** When `add` returns, the job survives a kill of the server.
3. **Compare and set.** A state changes only along `jobs.transition`. The job must still be in the
   state, and under the lease, that the caller names. Otherwise the method returns None, and the
   caller must stop working on the job. Two claims never return the same attempt of a job.
4. **Final.** A finished job refuses every write. Only its owner queues it again, by `resume` or by
   the retry of its batch.
5. **Leases.** A running job has an owner, and a time until which the lease holds. `heartbeat`,
   `record` and `tell` move that time. `expire` takes back the jobs whose lease has run out, and
   those whose owner the caller knows to be gone. It queues them again; it cancels a job if that was
   requested, and fails one that died too often. A lease that ran out can be renewed until `expire`
   takes the job. Servers that share a store must agree on the time to well below a lease.
6. **The best is kept.** Across attempts, a schedule is replaced only by one at least as good, and a
   bound only by a higher one. Failure and cancellation lose neither.
7. **Idempotent.** A second `add` under the same idempotency key of the same owner returns the first
   job, or refuses if the request differs. This also holds for two calls at the same time.
8. **Owners take turns.** The next job belongs to the owner with the fewest running jobs. Among
   several such owners, it belongs to the one whose last claim is the oldest. Within an owner the
   highest priority is first, then the oldest job. Only priorities above `MAX_SHARED_PRIORITY`
   precede all turns. Below that an owner that runs its maximum at a server gets another slot of it
   only if no other owner has a queued job. `page` lists newest first. It neither repeats nor skips
   a job that existed when the first page was read.
9. **History.** Every change of state, better schedule, higher bound and death is an entry, written
   in the transaction of the change. Numbers of entries grow within a job in the order in which
   readers can see them. A reader of all entries up to a number misses none by reading later ones.
   The last entry of a finished job is its state. A job with a schedule has an incumbent entry of
   its objective.
10. **Audit.** A cancellation, resumption or deletion is an entry of the audit log, with its
   ``actor``, in the same transaction. The entry remains when the job is deleted. A job itself says
   who submitted it and when; its deletion makes that an entry, too.

Methods block: call them from a thread, never from the event loop. Several threads may call them at
the same time. They raise `StoreUnavailableError` if the database does not answer. Methods that take
the id of a job raise `JobNotFoundError` if no job has this id.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from optpipe.answers import Cache, EventKind, JobState
from optpipe.errors import InputError
from optpipe_api.errors import JobNotFoundError, KeyReusedError, StateConflictError
from optpipe_api.jobs import (
    MAX_SHARED_PRIORITY,
    AttemptOutcome,
    AuditAction,
    AuditEntry,
    Claim,
    DocumentKind,
    Documents,
    HistoryEntry,
    JobError,
    JobEvent,
    JobRecord,
    Lease,
    NewJob,
    Standing,
    StoredSchedule,
    TracePoint,
    transition,
)
from optpipe_api.store import statements as sql
from optpipe_api.store.database import reading, writing
from optpipe_api.store.shared import (
    EQUAL,
    FIRST_LIMIT,
    add_audit,
    add_entry,
    add_once,
    cancel,
    cancel_owner,
    change_state,
    check_limits,
    delete_jobs,
    groups_of_ids,
    is_id,
    job_of,
    jobs_of,
    key_digest,
    new_entry,
    options_of,
    page_rows,
    prolong,
    put_documents,
    row_by_id,
    storable,
    to_json,
    to_record,
)
from optpipe_api.store.tables import audit, jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import sqlalchemy as sa

    from optpipe.requests import JobKind

__all__ = ["AttemptOutcome", "JobStore", "insert_job"]

_MAX_LOG_CHARACTERS = 1000
_LAST_POSITION = 2**62
_OF_SCHEDULE = {DocumentKind.SCHEDULE, DocumentKind.PROBLEM, DocumentKind.TUNED}
"""The documents that are replaced only with a schedule at least as good."""
NO_DOCUMENTS: Documents = {}

# Columns that a new job has from its record as they are.
_COPIED = (
    *("owner", "problem_hash", "shape_hash", "objective", "priority", "source_id", "batch_id"),
    *("batch_index", "cancel_requested", "attempt", "deaths", "spent_s"),
    "num_schedules",
)


class JobStore:
    """Stores jobs; the module's docstring is the contract."""

    def __init__(self, engine: sa.Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._now = clock

    # Submitting

    def add(
        self,
        new: NewJob,
        *,
        max_queued: int,
        max_of_owner: int | None = None,
        max_kept: int | None = None,
    ) -> tuple[JobRecord, bool]:
        """Store a job and return it; the flag is False if the key had stored it before.

        A job that is added finished takes no place in the queue. Raises `QueueFullError`,
        `TooManyJobsError` or `TooManyKeptError` if it exceeds a limit of `check_limits`. Raises
        `KeyReusedError` if the idempotency key belongs to another request.
        """
        digest = key_digest(new.owner, new.idempotency_key)

        def insert(connection: sa.Connection) -> tuple[JobRecord, bool]:
            check_limits(
                connection,
                new.owner,
                int(new.finished is None),
                max_queued,
                max_of_owner=max_of_owner,
                num_new=1,
                max_kept=max_kept,
            )
            return job_of(insert_job(connection, new, self._now()), new.tags), True

        def find(connection: sa.Connection) -> tuple[JobRecord, bool] | None:
            if digest is None:
                return None
            row = connection.execute(sql.JOB_BY_KEY, {"key": digest}).one_or_none()
            if row is None:
                return None
            (job,) = jobs_of(connection, [row])
            # The request of a resumed job had a shorter time limit.
            first_s = json.loads(row.options).get(FIRST_LIMIT, job.options.time_limit_s)
            options = replace(job.options, time_limit_s=first_s)
            request = (job.kind, job.problem_hash, options, job.priority, job.tags)
            tags = tuple(sorted(set(new.tags)))
            if request != (new.kind, new.problem_hash, new.options, new.priority, tags):
                raise KeyReusedError(
                    f"the Idempotency-Key {new.idempotency_key!r} made job {job.id} from another "
                    "problem or other options; use a new key for a new request"
                )
            return job, False

        return add_once(self._engine, find, insert)

    # Reading

    def get(self, job_id: str) -> JobRecord:
        """Return a job."""
        with reading(self._engine) as connection:
            return jobs_of(connection, [_find(connection, job_id)])[0]

    def standings(self, job_ids: Sequence[str]) -> dict[str, Standing]:
        """Return how far jobs have come, by their ids, without ids that do not exist.

        Clients that wait for a job cause a call each second. It is one query along indices for up
        to a thousand jobs.
        """
        with reading(self._engine) as connection:
            return {
                row.id: Standing(row.owner, JobState(row.state), row.num_schedules, row.last_entry)
                for ids in groups_of_ids(job_ids)
                for row in connection.execute(sql.JOB_STANDINGS, {"ids": ids})
            }

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

        An owner, a state, a tag and a batch restrict the jobs if they are given.
        """
        filters = {"before": before, "owner": owner, "tag": tag, "batch_id": batch_id}
        filters["state"] = None if state is None else state.value
        with reading(self._engine) as connection:
            return jobs_of(connection, page_rows(connection, jobs, limit, filters))

    def answer(
        self,
        problem_hash: str,
        *kinds: DocumentKind,
        kind: JobKind,
        owner: str,
        limit: int,
        accepts: Callable[[JobRecord], bool],
    ) -> tuple[JobRecord, dict[str, str], str] | None:
        """Return an owner's newest accepted job of one problem or model that has an answer.

        The job has no tags here. Its documents of these kinds and its method come with it, all of
        one moment. Of the jobs that succeeded or are infeasible, ``limit`` are looked at.
        """
        parameters: dict[str, Any] = {"hash": problem_hash, "kind": kind.value, "owner": owner}
        parameters |= {"kinds": [one.value for one in kinds], "before": _LAST_POSITION}
        with reading(self._engine) as connection:
            # One at a time, with its documents: the newest is nearly always accepted.
            for _ in range(limit):
                rows = connection.execute(sql.SAME_JOB, parameters).all()
                if not rows:
                    return None
                job = job_of(rows[0], ())
                texts = {row.document_kind: row.document for row in rows if row.document_kind}
                has_answer = job.state is JobState.INFEASIBLE or DocumentKind.SCHEDULE in texts
                if has_answer and accepts(job):
                    return job, texts, rows[0].method or ""
                parameters["before"] = job.position
            return None

    def near(self, shape_hash: str, *, owner: str, limit: int) -> dict[str, dict[str, str]]:
        """Return problem and schedule of an owner's newest finished jobs of one shape, by id."""
        parameters = {"hash": shape_hash, "owner": owner, "most": limit}
        kinds = [DocumentKind.PROBLEM.value, DocumentKind.SCHEDULE.value]
        with reading(self._engine) as connection:
            ids = connection.execute(sql.ALIKE_JOBS, parameters).scalars().all()
            found: dict[str, dict[str, str]] = {}
            for job_id in ids:
                rows = connection.execute(sql.DOCUMENTS_OF_JOB, {"id": job_id, "kinds": kinds})
                texts = {row.kind: row.document for row in rows}
                if len(texts) == len(kinds):
                    found[job_id] = texts
            return found

    def documents(self, job_id: str, *kinds: DocumentKind) -> dict[str, str]:
        """Return the documents of these kinds that a job has, all of one moment."""
        rows = self._document_rows(job_id, *kinds)
        return {row.kind: row.document for row in rows if row.kind is not None}

    def schedule(self, job_id: str, *, with_problem: bool = False) -> StoredSchedule | None:
        """Return the best schedule of a job; None before the first.

        ``with_problem``: read the problem that it solves, too.
        """
        kinds = [DocumentKind.SCHEDULE, *([DocumentKind.PROBLEM] if with_problem else [])]
        rows = self._document_rows(job_id, *kinds)
        texts = {row.kind: row.document for row in rows}
        if DocumentKind.SCHEDULE not in texts:
            return None
        return StoredSchedule(
            document=texts[DocumentKind.SCHEDULE],
            number=rows[0].num_schedules,
            owner=rows[0].owner,
            problem=texts.get(DocumentKind.PROBLEM),
        )

    def _document_rows(self, job_id: str, *kinds: DocumentKind) -> Sequence[Any]:
        parameters = {"id": job_id, "kinds": [kind.value for kind in kinds]}
        if is_id(job_id):
            with reading(self._engine) as connection:
                rows = connection.execute(sql.DOCUMENTS_OF_JOB, parameters).all()
            if rows:
                return rows
        raise JobNotFoundError(job_id)

    def history(self, job_id: str, after: int = 0, limit: int = 500) -> list[HistoryEntry]:
        """Return up to ``limit`` entries of numbers above ``after``, oldest first."""
        with reading(self._engine) as connection:
            at = _find(connection, job_id).position
            rows = connection.execute(sql.HISTORY, {"at": at, "after": after, "most": limit})
            return [to_record(HistoryEntry, row, kind=EventKind(row.kind)) for row in rows]

    def trace(self, job_id: str) -> tuple[JobRecord, list[TracePoint]]:
        """Return a job, and the better schedules and higher bounds of its history, oldest first."""
        with reading(self._engine) as connection:
            row = _find(connection, job_id)
            rows = connection.execute(sql.TRACE, {"at": row.position})
            points = [to_record(TracePoint, one) for one in rows]
            return jobs_of(connection, [row])[0], points

    def counts(self) -> dict[JobState, int]:
        """Return the number of jobs in each state; health checks call it, too."""
        with reading(self._engine) as connection:
            found = {row[0]: row[1] for row in connection.execute(sql.NUM_JOBS_BY_STATE)}
        return {state: found.get(state.value, 0) for state in JobState}

    def places(self, owner: str) -> dict[str, int]:
        """Return the places of an owner's queued jobs in the owner's own queue; 1 = next."""
        with reading(self._engine) as connection:
            ids = connection.execute(sql.QUEUE_OF_OWNER, {"owner": owner}).scalars()
            return {job_id: place for place, job_id in enumerate(ids, 1)}

    def audit(
        self,
        limit: int,
        before: int | None = None,
        *,
        subject: str | None = None,
        actor: str | None = None,
    ) -> list[AuditEntry]:
        """Return up to ``limit`` entries of the audit log, newest first, below ``before``.

        A subject and an actor restrict the entries if they are given.
        """
        filters = {"before": before, "subject": subject, "actor": actor}
        with reading(self._engine) as connection:
            rows = page_rows(connection, audit, limit, filters)
            return [to_record(AuditEntry, row, action=AuditAction(row.action)) for row in rows]

    # Changing a job from outside

    def request_cancel(self, job_id: str, actor: str = "") -> JobRecord:
        """Cancel a queued job, mark a running job, leave a finished job; return the job."""
        with writing(self._engine) as connection:
            row = _find(connection, job_id, lock=True)
            now = self._now()
            if row.state in sql.UNFINISHED:
                add_audit(connection, now, actor, AuditAction.CANCEL, job_id)
            return jobs_of(connection, [cancel(connection, row, now)])[0]

    def cancel_owner(self, owner: str, actor: str = "") -> list[JobRecord]:
        """Cancel the queued jobs of an owner, mark the running jobs; return both."""
        with writing(self._engine) as connection:
            return jobs_of(connection, cancel_owner(connection, owner, actor, self._now()))

    def resume(
        self,
        job_id: str,
        seconds: float,
        *,
        actor: str = "",
        max_time_limit_s: float,
        max_queued: int,
        max_of_owner: int | None = None,
    ) -> JobRecord:
        """Queue a finished job again with a longer time limit; it keeps its best.

        Raises `StateConflictError` if it has not ended, or is proven optimal or infeasible. Raises
        `QueueFullError` or `TooManyJobsError` as `add`, and `InputError` if its time limit would
        exceed ``max_time_limit_s``.
        """
        with writing(self._engine) as connection:
            row = _find(connection, job_id, lock=True)
            (job,) = jobs_of(connection, [row])
            if not job.state.is_final:
                raise StateConflictError(
                    f"job {job.id} is {job.state.value}: only a finished job can be resumed; wait "
                    "for its end, or cancel it first"
                )
            if job.is_proven:
                proven = "infeasible" if job.state is JobState.INFEASIBLE else "optimal"
                raise StateConflictError(
                    f"job {job.id} is proven {proven}: more time changes nothing; submit another "
                    "problem"
                )
            check_limits(connection, job.owner, 1, max_queued, max_of_owner=max_of_owner)
            old_s = job.options.time_limit_s
            if old_s + seconds > max_time_limit_s:
                raise InputError(
                    f"time_limit_s = {seconds}: with the {old_s} s it had, job {job.id} would get "
                    f"{old_s + seconds} s, more than {max_time_limit_s} "
                    "(OPTPIPE_MAX_TIME_LIMIT_S); ask for less"
                ).at("/time_limit_s")
            now = self._now()
            add_audit(connection, now, actor, AuditAction.RESUME, job_id)
            return jobs_of(connection, [prolong(connection, row, job, seconds, now)])[0]

    def delete(self, job_id: str, actor: str = "") -> None:
        """Delete an ended job, its documents and its history, and the batch of the last job.

        Raises `StateConflictError` if the job has not ended.
        """
        with writing(self._engine) as connection:
            row = _find(connection, job_id, lock=True)
            if not JobState(row.state).is_final:
                raise StateConflictError(
                    f"job {job_id} is {row.state}: only an ended job can be deleted; cancel it "
                    f"first: POST /v1/jobs/{job_id}/cancel"
                )
            add_audit(connection, row.created_at, row.owner, AuditAction.SUBMIT, job_id)
            add_audit(connection, self._now(), actor, AuditAction.DELETE, job_id)
            delete_jobs(connection, [row])

    def delete_finished(self, before: float, limit: int = 500) -> int:
        """Delete up to ``limit`` jobs that ended before a time, oldest first; return how many.

        Jobs of a batch remain until all of them are old; the batch is deleted with the last of
        them. Entries of the audit log from before that time are deleted, too.
        """
        with writing(self._engine) as connection:
            connection.execute(sql.DELETE_OLD_AUDIT, {"before": before})
            parameters = {"before": before, "most": limit}
            rows = connection.execute(sql.OLD_JOBS_LOCKED, parameters).all()
            if rows:
                delete_jobs(connection, rows)
            return len(rows)

    # Working on a job

    def claim(self, owner: str, lease_s: float, max_running: int | None = None) -> Claim | None:
        """Take the queued job that is next; None without one.

        ``owner`` is the owner of the lease. ``max_running`` limits the running jobs of an API key
        under leases of this owner while other keys have queued jobs; None = no limit.
        """
        # Idle slots claim often. A look needs no write lock.
        with reading(self._engine) as connection:
            if not _next_owners(connection, owner, max_running):
                return None
        with writing(self._engine) as connection:
            if connection.dialect.name == "postgresql":
                # Two claims that count at the same time would both take the same owner's turn.
                connection.execute(sql.LOCK_CLAIMS)
            for _, name in _next_owners(connection, owner, max_running):
                row = connection.execute(sql.FIRST_OF_OWNER_LOCKED, {"owner": name}).one_or_none()
                if row is not None:
                    break
            else:
                return None
            connection.execute(sql.TAKE_TURN, {"owner": row.owner})
            now = self._now()
            claimed = change_state(
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
            if claimed is None:
                return None
            rows = connection.execute(sql.DOCUMENTS_TO_CLAIM, {"at": row.position})
            return Claim(
                lease=Lease(row.id, owner, claimed.attempt),
                job=jobs_of(connection, [claimed])[0],
                documents={row.kind: row.document for row in rows},
            )

    def entitled(self, server: str, max_running: int) -> set[str]:
        """Return the owners with queued jobs that run fewer than ``max_running`` at a server."""
        with reading(self._engine) as connection:
            order = _next_owners(connection, server, max_running)
            return {owner for borrows, owner in order if not borrows}

    def heartbeat(self, leases: Sequence[Lease], lease_s: float) -> dict[Lease, bool]:
        """Renew the leases of one owner in one transaction.

        Returns the leases that hold, each with whether the end of its job is requested.
        """
        wanted = set(leases)
        is_cancelled: dict[Lease, bool] = {}
        with writing(self._engine) as connection:
            for ids in groups_of_ids([lease.job_id for lease in leases]):
                values: dict[str, Any] = {"ids": ids, "server": leases[0].owner}
                values["expires_at"] = self._now() + lease_s
                for row in connection.execute(sql.RENEW_LEASES, values):
                    is_cancelled[Lease(row.id, leases[0].owner, row.attempt)] = row.cancel_requested
        return {lease: ends for lease, ends in is_cancelled.items() if lease in wanted}

    def record(
        self,
        lease: Lease,
        point: TracePoint,
        lease_s: float,
        documents: Documents = NO_DOCUMENTS,
    ) -> JobRecord | None:
        """Store an improvement and renew the lease; None if the lease is lost.

        ``documents``: what is better now. The problem of a plan or tune replaces the job's along
        with the schedule.
        """
        with writing(self._engine) as connection:
            row = _leased(connection, lease)
            if row is None:
                return None
            better = _store_improvement(connection, row, point, self._now(), documents)
            return self._renew(connection, row, lease_s, **better)

    def note_near(self, lease: Lease, source_id: str, lease_s: float) -> JobRecord | None:
        """Store the near job that a job starts from, and renew the lease; None if it is lost."""
        with writing(self._engine) as connection:
            row = _leased(connection, lease)
            if row is None:
                return None
            text = f"started from a schedule of job {source_id}"
            add_entry(connection, row, self._now(), EventKind.LOG, text=text)
            near = {"cache": Cache.NEAR.value, "source_id": source_id}
            return self._renew(connection, row, lease_s, **near)

    def tell(self, lease: Lease, text: str, lease_s: float) -> JobRecord | None:
        """Add a sentence of a search to the history and renew the lease; None if it is lost."""
        with writing(self._engine) as connection:
            row = _leased(connection, lease)
            if row is None:
                return None
            sentence = storable(text)[:_MAX_LOG_CHARACTERS]
            add_entry(connection, row, self._now(), EventKind.LOG, text=sentence)
            return self._renew(connection, row, lease_s)

    def _renew(
        self, connection: sa.Connection, row: sa.Row[Any], lease_s: float, **values: Any
    ) -> JobRecord:
        values |= {"at": row.position, "lease_expires_at": self._now() + lease_s}
        renewed = connection.execute(sql.UPDATE_JOB, values).one()
        return jobs_of(connection, [renewed])[0]

    def finish(self, lease: Lease, outcome: AttemptOutcome) -> JobRecord | None:
        """End a running job; None if the lease is lost.

        The outcome replaces the job's best where it is better.
        """
        with writing(self._engine) as connection:
            row = _leased(connection, lease)
            if row is None:
                return None
            now = self._now()
            spent_s = _spent_s(row, now)
            last = TracePoint(
                seconds=spent_s,
                method=outcome.method,
                objective_ms=outcome.objective_ms,
                bound_ms=outcome.bound_ms,
            )
            better = _store_improvement(
                connection,
                row,
                last,
                now,
                outcome.documents,
                # Under noise the best schedule is not the shortest.
                is_chosen=options_of(row).robust is not None,
            )
            better["error"] = None if outcome.error is None else to_json(outcome.error)
            ended = change_state(connection, row, outcome.event, now, spent_s=spent_s, **better)
            return None if ended is None else jobs_of(connection, [ended])[0]

    def requeue(
        self, lease: Lease, *, death: str | None = None, max_attempts: int = 1
    ) -> JobRecord | None:
        """Return a job to the queue; None if the lease is lost.

        ``death``: what died; None = a planned stop, which does not count.
        """
        with writing(self._engine) as connection:
            row = _leased(connection, lease)
            if row is None:
                return None
            left = _give_back(connection, row, death, max_attempts, self._now())
            return None if left is None else jobs_of(connection, [left])[0]

    def expire(
        self, max_attempts: int, is_gone: Callable[[str], bool] | None = None
    ) -> list[JobRecord]:
        """Take back every job whose lease has run out, or whose owner is gone; return them.

        ``is_gone``: whether an owner has certainly ended.
        """
        now = self._now()
        # There is nearly always nothing to do. A look needs no write lock.
        with reading(self._engine) as connection:
            leases = connection.execute(sql.LEASE_OWNERS).all()
        gone = [owner for owner, _ in leases if is_gone is not None and is_gone(owner)]
        if not gone and all(expires_at >= now for _, expires_at in leases):
            return []
        death = "its server stopped answering"
        with writing(self._engine) as connection:
            rows = connection.execute(sql.LAPSED_JOBS_LOCKED, {"now": now, "gone": gone}).all()
            left = [_give_back(connection, row, death, max_attempts, now) for row in rows]
            return jobs_of(connection, [row for row in left if row is not None])


# --- Rows: found, locked and updated.


def _find(connection: sa.Connection, job_id: str, *, lock: bool = False) -> sa.Row[Any]:
    statement = sql.JOB_BY_ID_LOCKED if lock else sql.JOB_BY_ID
    return row_by_id(connection, statement, job_id, JobNotFoundError)


def insert_job(connection: sa.Connection, new: NewJob, now: float) -> sa.Row[Any]:
    """Insert a job with its documents, tags and first history entries; return its row."""
    known = new.start if new.finished is None else new.finished
    state = JobState.QUEUED
    values: dict[str, Any] = {
        **{name: getattr(new, name) for name in _COPIED},
        "id": uuid.uuid4().hex,
        "kind": new.kind.value,
        "name": storable(new.name),
        "options": to_json(new.options),
        "idempotency_key": key_digest(new.owner, new.idempotency_key),
        "cache": new.cache.value,
        "created_at": now,
    }
    texts = dict(new.documents)
    if known is not None:
        texts |= known.documents
        values["num_schedules"] = int(DocumentKind.SCHEDULE in texts)
        values |= {"objective_ms": known.objective_ms, "bound_ms": known.bound_ms}
    if new.finished is not None:
        state = transition(JobState.RUNNING, new.finished.event) or JobState.SUCCEEDED
        error = None if new.finished.error is None else to_json(new.finished.error)
        values |= {"started_at": now, "finished_at": now, "error": error}
    row = connection.execute(sql.INSERT_JOB, {**values, "state": state.value}).one()
    put_documents(connection, row.position, texts)
    if new.tags:
        tags = [{"position": row.position, "tag": tag} for tag in set(new.tags)]
        connection.execute(sql.INSERT_TAG, tags)
    entries = []
    if new.finished is None and new.start is not None and new.cache is Cache.NEAR:
        text = f"started from a schedule of job {new.source_id}"
        entries.append(new_entry(row, now, EventKind.LOG, text=text))
    if known is not None and DocumentKind.SCHEDULE in texts:
        numbers = {"objective_ms": known.objective_ms, "bound_ms": known.bound_ms}
        incumbent = {"seconds": 0.0, "method": known.method, **numbers}
        entries.append(new_entry(row, now, EventKind.INCUMBENT, **incumbent))
    entry = new_entry(row, now, EventKind.STATE, text=state.value)
    entries.insert(0 if new.finished is None else len(entries), entry)
    connection.execute(sql.INSERT_EVENT, entries)
    return row


def _leased(connection: sa.Connection, lease: Lease) -> sa.Row[Any] | None:
    """Return the locked row of a job that runs under this lease; None if the lease is lost."""
    parameters = {"id": lease.job_id, "lease_owner": lease.owner, "attempt": lease.attempt}
    return connection.execute(sql.JOB_UNDER_LEASE_LOCKED, parameters).one_or_none()


def _spent_s(row: sa.Row[Any], now: float) -> float:
    """Return the seconds of solving over all attempts; a dead server's end with its lease."""
    ended_at = min(now, row.lease_expires_at)
    return float(row.spent_s + max(0.0, ended_at - row.claimed_at))


def _store_improvement(
    connection: sa.Connection,
    row: sa.Row[Any],
    point: TracePoint,
    now: float,
    documents: Documents,
    *,
    is_chosen: bool = False,
) -> dict[str, Any]:
    """Store what is better, add it to the history, and return the columns that change with it.

    A schedule at least as good replaces the earlier one, along with its problem. A higher bound
    replaces the earlier one. The result of a tune replaces the earlier result, unless it comes with
    a worse schedule. Other documents replace the earlier ones. The history has no entry for a
    schedule of the same length.

    ``is_chosen``: the schedule replaces the earlier one even if it is longer.
    """
    values: dict[str, Any] = {}
    texts = dict(documents)
    best_ms, objective_ms = row.objective_ms, point.objective_ms
    if point.bound_ms is not None and (row.bound_ms is None or point.bound_ms > row.bound_ms):
        values["bound_ms"] = point.bound_ms
    is_as_good = objective_ms is not None and (
        best_ms is None or objective_ms <= best_ms * (1 + EQUAL)
    )
    has_schedule = DocumentKind.SCHEDULE in documents
    is_replaced = has_schedule and (is_chosen or is_as_good)
    if is_replaced:
        values |= {"objective_ms": objective_ms, "num_schedules": row.num_schedules + 1}
    elif has_schedule:
        for kind in _OF_SCHEDULE & texts.keys():
            del texts[kind]
    put_documents(connection, row.position, texts)
    # The solver's bound exceeds its schedule by rounding alone.
    bound_ms, length_ms = values.get("bound_ms", row.bound_ms), values.get("objective_ms", best_ms)
    if bound_ms is not None and length_ms is not None and bound_ms > length_ms:
        values["bound_ms"] = length_ms
    is_shorter = is_replaced and (best_ms is None or values["objective_ms"] < best_ms)
    if is_shorter or "bound_ms" in values:
        add_entry(
            connection,
            row,
            now,
            EventKind.INCUMBENT if is_shorter else EventKind.BOUND,
            seconds=point.seconds,
            method=point.method,
            objective_ms=objective_ms if is_shorter else None,
            bound_ms=values.get("bound_ms", row.bound_ms),
        )
    return values


def _give_back(
    connection: sa.Connection, row: sa.Row[Any], death: str | None, max_attempts: int, now: float
) -> sa.Row[Any] | None:
    """Return a running job to the queue; end it if it was cancelled or died too often."""
    deaths = row.deaths + (death is not None)
    event, error = JobEvent.REQUEUE, None
    if death is not None:
        text = storable(f"attempt {row.attempt}: {death}")
        add_entry(connection, row, now, EventKind.LOG, text=text)
    if row.cancel_requested:
        event = JobEvent.CANCEL
    elif death is not None and deaths >= max_attempts:
        event = JobEvent.FAIL
        message = (
            f"given up after {deaths} attempts that died, the last because {death}; does the "
            "problem fit the solver's memory? Submit a smaller one, or raise "
            "OPTPIPE_SOLVER_MEMORY_BYTES or OPTPIPE_MAX_ATTEMPTS"
        )
        error = to_json(JobError(code="job.died", message=message))
    spent_s = _spent_s(row, now)
    return change_state(connection, row, event, now, deaths=deaths, spent_s=spent_s, error=error)


# --- Turns: which owner is next.


def _next_owners(
    connection: sa.Connection, server: str, max_running: int | None
) -> list[tuple[bool, str]]:
    """Return the owners with queued jobs, the next one first, each with whether it would borrow.

    An owner borrows if it runs its maximum at this server already. Without keys there is none.
    A priority above `MAX_SHARED_PRIORITY` is an admin's decision, so it also precedes that limit.
    """
    waiting = connection.execute(sql.WAITING_OWNERS).all()
    if not waiting:
        return []
    counts = connection.execute(sql.RUNNING_OWNERS, {"server": server})
    running = {owner: (in_total, here) for owner, in_total, here in counts}
    turns = {row.owner: row.number for row in connection.execute(sql.TURNS)}
    order = []
    for owner, priority, position in waiting:
        in_total, here = running.get(owner, (0, 0))
        borrows = bool(owner) and max_running is not None and here >= max_running
        rank = min(0, MAX_SHARED_PRIORITY - priority)
        order.append((rank, borrows, in_total, turns.get(owner, 0), position, owner))
    return [(key[1], key[-1]) for key in sorted(order)]
