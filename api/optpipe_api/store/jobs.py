"""The store of jobs, over SQLite and PostgreSQL; `tests/api/store` holds it to this.

1. **Atomic.** Each method is one transaction. A process killed inside leaves all of it or nothing.
2. **Accepted is kept.** When `add` returns, the job survives a kill of the server.
3. **Compare and set.** A state changes only along `jobs.transition`, and only if the job is still
   in the state, and under the lease, that the caller believes in. Whoever comes too late gets None
   and must stop working on the job. Two claims never return the same attempt of a job.
4. **Final is final.** A finished job refuses every write, until `resume`, or the end of a tighter
   item of its batch, queues it again.
5. **Leases.** A running job has an owner and a time until which it is his; `heartbeat` and
   `record` move that time. `expire` takes jobs whose time has passed, whoever owned them, and
   those whose owner the caller knows to be gone, and puts them back (or ends them: cancelled where
   asked for, failed at too many deaths). A lease that ran out but was not yet taken away may still
   be renewed. Servers that share a store must agree on the time to well below a lease.
6. **The best is kept.** The schedule is replaced only by one at least as good, the bound only by a
   higher one, across attempts. Neither is ever lost, not by failure nor by cancellation.
7. **Once.** A second `add` under the same idempotency key of the same owner returns the first job,
   or refuses when the request differs. Two at the same time too.
8. **Owners take turns.** Next is a job of the owner of whom the fewest run, among those the one
   served longest ago; within an owner the highest priority, then the oldest. Only priorities above
   `MAX_SHARED_PRIORITY` go before all turns. `page` lists newest first, without doubles or holes
   for jobs that existed when the first page was read.
9. **History.** Every change of state, better schedule and higher bound is an entry, written in the
   transaction of the change; so is every death. Its numbers grow within a job in the order in
   which entries can be read: who has read up to a number misses nothing by asking for later ones.
   A finished job's last entry is its state; a job that has a schedule has an incumbent entry of
   its objective.

A database that does not answer raises `StoreUnavailableError`. Methods block: call them from a
thread, never from the event loop. All are safe to call from several threads at once.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy as sa

from optpipe.answers import EventKind, JobState
from optpipe.errors import InputError
from optpipe_api.errors import StateConflictError
from optpipe_api.jobs import (
    MAX_SHARED_PRIORITY,
    AttemptOutcome,
    Claim,
    JobError,
    JobEvent,
    JobRecord,
    Lease,
    NewJob,
    TracePoint,
    Waiting,
)
from optpipe_api.store.database import (
    added_once,
    batches,
    checkpoints,
    comparisons,
    deployments,
    events,
    job_tags,
    jobs,
    models,
    problems,
    questions,
    reading,
    schedules,
    tuned,
    turns,
    writing,
)
from optpipe_api.store.job_rows import (
    ASKED_LIMIT,
    JobReads,
    change,
    document_of,
    dump,
    find_by_key,
    find_row,
    insert,
    job_of,
    jobs_of,
    keep,
    leased_row,
    note,
    options_of,
    plan_of,
    put,
    refuse_when_full,
    refuse_when_kept,
    refuse_when_many,
    spent,
    storable,
    update,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

__all__ = ["AttemptOutcome", "JobStore", "finish", "forget", "give_back", "hand_on", "prolong"]


_IS_QUEUED = jobs.c.state == JobState.QUEUED.value
_IS_RUNNING = jobs.c.state == JobState.RUNNING.value
_FIRST_OF = (
    sa.select(jobs)
    .where(_IS_QUEUED, jobs.c.owner == sa.bindparam("owner"))
    .order_by(jobs.c.priority.desc(), jobs.c.position)
    .limit(1)
    .with_for_update(skip_locked=True)
)
_WAITING = (
    sa.select(jobs.c.owner, sa.func.max(jobs.c.priority), sa.func.min(jobs.c.position))
    .where(_IS_QUEUED)
    .group_by(jobs.c.owner)
)
_CLAIM_LOCK = 0x0F71D1FF
_MOST_PLACES = 5000
_MOST_WORDS = 1000


class JobStore(JobReads):
    """Keeps jobs; the promises are in the module's docstring."""

    def __init__(self, engine: sa.Engine, clock: Callable[[], float]) -> None:
        super().__init__(engine)
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
        """Keep a job and return it; the flag is False where the key had made it before.

        Raises `QueueFullError` if ``max_queued`` jobs wait already; one that is born finished needs
        no room; `TooManyJobsError` if ``max_of_owner`` jobs of its owner wait or run already,
        likewise; `TooManyKeptError` if ``max_kept`` are kept; `KeyReusedError` if the idempotency
        key belongs to another request. Of the job of a deployment, which counts itself, only the
        first.
        """

        def insert_new(connection: sa.Connection) -> tuple[JobRecord, bool]:
            if new.finished is None:
                refuse_when_full(connection, max_queued)
            if new.deployment_id is None:
                refuse_when_kept(connection, new.owner, max_kept)
                if new.finished is None:
                    refuse_when_many(connection, new.owner, max_of_owner)
            return insert(connection, new, self._now()), True

        def find(connection: sa.Connection) -> tuple[JobRecord, bool] | None:
            known = find_by_key(connection, new)
            return None if known is None else (known, False)

        return added_once(self._engine, find, insert_new)

    # Changing

    def request_cancel(self, job_id: str) -> JobRecord:
        """Cancel a queued job; mark a running one; leave a finished one. Return the job."""
        with writing(self._engine) as connection:
            row = find_row(connection, job_id, for_update=True)
            if row.state == JobState.QUEUED.value:
                change(connection, row, JobEvent.CANCEL, self._now())
            elif row.state == JobState.RUNNING.value:
                update(connection, row, cancel_requested=True)
            return job_of(connection, find_row(connection, job_id))

    def resume(
        self,
        job_id: str,
        seconds: float,
        *,
        max_time_limit_s: float,
        max_queued: int,
        max_of_owner: int | None = None,
    ) -> JobRecord:
        """Queue a finished job again with a longer time limit; it keeps its best.

        Raises `StateConflictError` if it has not ended, or is proven optimal or infeasible;
        `InputError` if the limit would exceed ``max_time_limit_s``; `QueueFullError`,
        `TooManyJobsError` as `add`.
        """
        with writing(self._engine) as connection:
            row = find_row(connection, job_id, for_update=True)
            job = job_of(connection, row)
            _refuse_pointless(job)
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

    def claim(self, owner: str, lease_s: float, max_running: int | None = None) -> Claim | None:
        """Take the queued job that is next; None where there is none.

        ``owner``: of the lease. ``max_running``: so many jobs of one key may run under leases of
        this owner; None = any number.
        """
        # Idle slots ask often: look before taking the write lock.
        with reading(self._engine) as connection:
            if not _turns(connection, owner, max_running):
                return None
        with writing(self._engine) as connection:
            if connection.dialect.name == "postgresql":
                # Two that count at the same time would both think it is the same owner's turn.
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_CLAIM_LOCK)))
            # A row that somebody holds is being cancelled.
            found = (
                connection.execute(_FIRST_OF, {"owner": turn.owner}).one_or_none()
                for turn in _turns(connection, owner, max_running)
            )
            row = next((row for row in found if row is not None), None)
            if row is None:
                return None
            _note_turn(connection, row.owner)
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

    def heartbeat(self, lease: Lease, lease_s: float) -> JobRecord | None:
        """Renew a lease; None where it is lost."""
        with writing(self._engine) as connection:
            row = leased_row(connection, lease)
            if row is None:
                return None
            renewed = update(connection, row, lease_expires_at=self._now() + lease_s)
            return job_of(connection, renewed)

    def record(
        self,
        lease: Lease,
        point: TracePoint,
        lease_s: float,
        *,
        schedule: str | None = None,
        problem: str | None = None,
        found: str | None = None,
        checkpoint: str | None = None,
    ) -> JobRecord | None:
        """Keep an improvement, renewing the lease; None where it is lost.

        ``problem`` is what a plan or tune chose, and replaces the job's along with the schedule;
        ``found`` is what a tune says by now, and ``checkpoint`` where its search stands.
        """
        with writing(self._engine) as connection:
            row = leased_row(connection, lease)
            if row is None:
                return None
            now = self._now()
            better = keep(
                connection, row, point, now, schedule=schedule, problem=problem, found=found
            )
            if checkpoint is not None:
                put(connection, checkpoints, row.position, checkpoint)
            renewed = update(connection, row, lease_expires_at=now + lease_s, **better)
            return job_of(connection, renewed)

    def tell(self, lease: Lease, text: str, lease_s: float) -> JobRecord | None:
        """Write a sentence of a search into the history, renewing the lease; None where lost."""
        with writing(self._engine) as connection:
            row = leased_row(connection, lease)
            if row is None:
                return None
            now = self._now()
            words = storable(text)[:_MOST_WORDS]
            note(connection, row.position, now, EventKind.LOG, text=words)
            return job_of(connection, update(connection, row, lease_expires_at=now + lease_s))

    def finish(self, lease: Lease, outcome: AttemptOutcome) -> JobRecord | None:
        """End a running job; None where the lease is lost."""
        with writing(self._engine) as connection:
            row = leased_row(connection, lease)
            ended = None if row is None else finish(connection, row, outcome, self._now())
            return None if ended is None else job_of(connection, ended)

    def requeue(
        self, lease: Lease, *, death: str | None = None, max_attempts: int = 1
    ) -> JobRecord | None:
        """Give a job back. ``death`` says what died; None is a planned stop and does not count."""
        with writing(self._engine) as connection:
            row = leased_row(connection, lease)
            if row is None:
                return None
            given = give_back(connection, row, death, max_attempts, self._now())
            return None if given is None else job_of(connection, given)

    def expire(
        self, max_attempts: int, is_gone: Callable[[str], bool] | None = None
    ) -> list[JobRecord]:
        """Give back every job whose lease has run out, or whose owner is gone; return them.

        ``is_gone`` says of an owner whether it has certainly ended.
        """
        now = self._now()
        owners = sa.select(jobs.c.lease_owner, sa.func.min(jobs.c.lease_expires_at))
        # Look before taking the write lock: there is nearly always nothing to do.
        with reading(self._engine) as connection:
            leases = connection.execute(
                owners.where(_IS_RUNNING).group_by(jobs.c.lease_owner)
            ).all()
        gone = [owner for owner, _ in leases if is_gone is not None and is_gone(owner)]
        if not gone and all(expires_at >= now for _, expires_at in leases):
            return []
        is_over = (jobs.c.lease_expires_at < now) | jobs.c.lease_owner.in_(gone)
        lapsed = sa.select(jobs).where(_IS_RUNNING, is_over)
        death = "its server stopped answering"
        with writing(self._engine) as connection:
            rows = connection.execute(lapsed.with_for_update(skip_locked=True)).all()
            given = [give_back(connection, row, death, max_attempts, now) for row in rows]
            return jobs_of(connection, [row for row in given if row is not None])

    def delete_finished(self, before: float, limit: int = 500) -> int:
        """Forget up to ``limit`` jobs that ended before a time, oldest first; return how many.

        Jobs of a deployment that has not ended are kept, and those of a batch until all are old;
        with the last of them goes the batch.
        """
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
            forget(connection, rows)
            return len(rows)

    def delete(self, job_id: str) -> None:
        """Forget an ended job, its documents and its history; with the last of a batch, that too.

        Raises `StateConflictError` if it has not ended, or its deployment has not.
        """
        with writing(self._engine) as connection:
            row = find_row(connection, job_id, for_update=True)
            if not JobState(row.state).is_final:
                raise StateConflictError(
                    f"job {job_id} is {row.state}: only an ended job can be deleted; cancel it "
                    f"first: POST /v1/jobs/{job_id}/cancel"
                )
            live = sa.select(deployments.c.id).where(
                deployments.c.id == row.deployment_id, deployments.c.ended_at.is_(None)
            )
            if connection.execute(live).first() is not None:
                raise StateConflictError(
                    f"job {job_id} belongs to deployment {row.deployment_id}, which goes on and "
                    f"reads it; end that first: POST /v1/deployments/{row.deployment_id}/end"
                )
            forget(connection, [row])

    # Waiting

    def queue(self, num_slots: int, max_running: int | None = None) -> dict[str, Waiting]:
        """Return the places of queued jobs, by their ids: of the oldest 5,000.

        As if ``num_slots`` (or as many as are busy) took them in turn, nothing else came, and every
        job used all of its time.
        """
        columns = (jobs.c.id, jobs.c.owner, jobs.c.options, jobs.c.spent_s)
        oldest = sa.select(*columns, jobs.c.priority, jobs.c.position).where(_IS_QUEUED)
        with reading(self._engine) as connection:
            busy = connection.execute(sa.select(*columns, jobs.c.claimed_at).where(_IS_RUNNING))
            running = busy.all()
            queued = connection.execute(oldest.order_by(jobs.c.position).limit(_MOST_PLACES)).all()
            served = _served(connection)
        limits: dict[str, Any] = {"num_slots": num_slots, "max_running": max_running}
        return _simulated(running, queued, served, self._now(), **limits)


# --- Whose turn it is.


class _Turn(NamedTuple):
    """An owner who waits; the least is next."""

    urgency: int
    num_running: int
    served: int
    position: int
    owner: str

    @classmethod
    def of(cls, owner: str, priority: int, position: int, num_running: int, served: int) -> _Turn:
        urgency = min(0, MAX_SHARED_PRIORITY - priority)
        return cls(urgency, num_running, served, position, owner)


def _turns(connection: sa.Connection, server: str, max_running: int | None) -> list[_Turn]:
    """Return the owners whose jobs may be claimed, the next one first."""
    waiting = connection.execute(_WAITING).all()
    if not waiting:
        return []
    here = sa.func.sum(sa.case((jobs.c.lease_owner == server, 1), else_=0))
    query = sa.select(jobs.c.owner, sa.func.count(), here).where(_IS_RUNNING).group_by(jobs.c.owner)
    running = {owner: (number, own) for owner, number, own in connection.execute(query)}
    served = _served(connection)
    return sorted(
        _Turn.of(owner, priority, position, running.get(owner, (0, 0))[0], served[owner])
        for owner, priority, position in waiting
        if not _is_at_limit(owner, running.get(owner, (0, 0))[1], max_running)
    )


def _is_at_limit(owner: str, num_running: int, max_running: int | None) -> bool:
    """Whether a key has as many jobs running as it may; who needs no key has no limit."""
    return bool(owner) and max_running is not None and num_running >= max_running


def _served(connection: sa.Connection) -> dict[str, int]:
    """Return the number of each owner's last claim; 0 for those who had none."""
    return defaultdict(int, {row.owner: row.number for row in connection.execute(sa.select(turns))})


def _note_turn(connection: sa.Connection, owner: str) -> None:
    last = connection.execute(sa.select(sa.func.max(turns.c.number))).scalar_one() or 0
    values = {"owner": owner, "number": last + 1}
    known = connection.execute(sa.update(turns).where(turns.c.owner == owner).values(values))
    if known.rowcount == 0:
        connection.execute(sa.insert(turns).values(values))


def _simulated(
    running: Sequence[Any],
    queued: Sequence[Any],
    served: dict[str, int],
    now: float,
    *,
    num_slots: int,
    max_running: int | None,
) -> dict[str, Waiting]:
    """Return when queued jobs are claimed, in that order, from rows; see `JobStore.queue`."""
    ends = [(max(now, row.claimed_at + _left_s(row)), row.owner) for row in running]
    heapify(ends)
    num_running = Counter(row.owner for row in running)
    lines: dict[str, deque[Any]] = defaultdict(deque)
    for row in sorted(queued, key=lambda row: (-row.priority, row.position)):
        lines[row.owner].append(row)
    found: dict[str, Waiting] = {}
    last, at = max(served.values(), default=0), now
    num_free = max(0, num_slots - len(running))
    while True:
        next_ones = [
            _Turn.of(owner, line[0].priority, line[0].position, num_running[owner], served[owner])
            for owner, line in lines.items()
            if num_free > 0 and not _is_at_limit(owner, num_running[owner], max_running)
        ]
        if next_ones:
            owner = min(next_ones).owner
            row = lines[owner].popleft()
            if not lines[owner]:
                del lines[owner]
            found[row.id] = Waiting(place=len(found) + 1, starts_at=at)
            last = served[owner] = last + 1
            num_running[owner] += 1
            num_free -= 1
            heappush(ends, (at + _left_s(row), owner))
        elif lines and ends:
            at, owner = heappop(ends)
            num_running[owner] -= 1
            num_free += 1
        else:
            return found


def _left_s(row: sa.Row[Any]) -> float:
    limit_s: float = json.loads(row.options)["time_limit_s"]
    return max(0.0, limit_s - float(row.spent_s))


# --- What goes.


def forget(connection: sa.Connection, rows: Sequence[Any]) -> None:
    """Delete jobs with all that is kept of them, and batches that have none left."""
    positions = [row.position for row in rows]
    documents = (problems, models, questions, schedules, comparisons, tuned, checkpoints)
    for table in (*documents, job_tags, events, jobs):
        connection.execute(sa.delete(table).where(table.c.position.in_(positions)))
    left = sa.select(jobs.c.id).where(jobs.c.batch_id == batches.c.id).exists()
    emptied = batches.c.id.in_({row.batch_id for row in rows} - {None})
    connection.execute(sa.delete(batches).where(emptied, ~left))


def _is_in_young_batch(before: float) -> sa.ColumnElement[bool]:
    """Whether a job's batch has one that has not ended before a time: they go whole or not."""
    others = jobs.alias("others")
    young = others.c.finished_at.is_(None) | (others.c.finished_at >= before)
    same = others.c.batch_id == jobs.c.batch_id
    return jobs.c.batch_id.is_not(None) & sa.select(others.c.id).where(same, young).exists()


def _claim_of(connection: sa.Connection, row: sa.Row[Any]) -> Claim | None:
    job = job_of(connection, row)
    better = _best_tighter(connection, row, _relations(connection, row), row.objective_ms)
    if better is not None:
        text = f"starts from the schedule of job {better.id}, whose problem is tighter"
        note(connection, row.position, row.claimed_at, EventKind.LOG, text=text)
    return Claim(
        lease=Lease(job.id, row.lease_owner, job.attempt),
        job=job,
        problem=document_of(connection, problems, row.position),
        model=document_of(connection, models, row.position),
        question=document_of(connection, questions, row.position),
        tuned=document_of(connection, tuned, row.position),
        checkpoint=document_of(connection, checkpoints, row.position),
        start=document_of(connection, schedules, (better or row).position),
        is_carried=better is not None,
    )


# --- What happens to a job that exists: it ends, is given back, gets more time.
# Whoever calls holds the job's row.


def finish(
    connection: sa.Connection, row: sa.Row[Any], outcome: AttemptOutcome, now: float
) -> sa.Row[Any] | None:
    """End a running job, keeping its last word where that is better than what is known."""
    spent_s = spent(row, now)
    last = TracePoint(
        seconds=spent_s,
        method=outcome.method,
        objective_ms=outcome.objective_ms,
        bound_ms=outcome.bound_ms,
    )
    better = keep(
        connection,
        row,
        last,
        now,
        schedule=outcome.schedule,
        problem=outcome.problem,
        # Under noise the best one is not the shortest.
        is_chosen=options_of(row).robust is not None,
    )
    last_words = (
        (comparisons, outcome.comparison),
        (tuned, outcome.tuned),
        (checkpoints, outcome.checkpoint),
    )
    for table, text in last_words:
        if text is not None:
            put(connection, table, row.position, text)
    relations = _relations(connection, row, hold=True)
    event, error = outcome.event, None if outcome.error is None else dump(outcome.error)
    if row.attempt <= _MOST_ROUNDS.get(event, 0):
        own_ms = better.get("objective_ms", row.objective_ms)
        if _best_tighter(connection, row, relations, own_ms, has_ended=True) is not None:
            event, error = JobEvent.REQUEUE, None
    ended = change(connection, row, event, now, error=error, spent_s=spent_s, **better)
    hand_on(connection, ended, now, relations)
    return ended


def give_back(
    connection: sa.Connection, row: sa.Row[Any], death: str | None, max_attempts: int, now: float
) -> sa.Row[Any] | None:
    """Put a running job back into the queue; end it where it was cancelled or died too often."""
    deaths = row.deaths + (death is not None)
    error = None
    event = JobEvent.REQUEUE
    if death is not None:
        note(
            connection,
            row.position,
            now,
            EventKind.LOG,
            text=storable(f"attempt {row.attempt}: {death}"),
        )
    if row.cancel_requested:
        event = JobEvent.CANCEL
    elif death is not None and deaths >= max_attempts:
        event = JobEvent.FAIL
        error = dump(_given_up(deaths, death))
    relations = _relations(connection, row, hold=True) if event is JobEvent.FAIL else ()
    left = change(connection, row, event, now, deaths=deaths, spent_s=spent(row, now), error=error)
    hand_on(connection, left, now, relations)
    return left


# What an item of a batch has found serves the looser ones (see `optpipe_api.jobs`). Whoever ends an
# item holds the row of its batch: of two that end at once, one sees the other.

_MOST_ROUNDS = {JobEvent.SUCCEED: 100, JobEvent.FAIL: 1}
"""After so many attempts an item ends by this event, whatever tighter ones have."""
_EQUAL, _ANY_MS = 1e-9, 1e300
_HANDS_ON = [JobState.SUCCEEDED.value, JobState.FAILED.value]


def hand_on(
    connection: sa.Connection,
    row: sa.Row[Any] | None,
    now: float,
    relations: Sequence[Collection[int]],
) -> None:
    """Queue ended items again that have worse than this one of ``relations``, which ends now."""
    if row is None or row.state not in _HANDS_ON or row.objective_ms is None:
        return
    looser = [index for index, others in enumerate(relations) if row.batch_index in others]
    worse = sa.select(jobs).where(
        jobs.c.batch_id == row.batch_id,
        jobs.c.batch_index.in_(looser),
        jobs.c.state.in_(_HANDS_ON),
        jobs.c.objective_ms.is_(None) | (jobs.c.objective_ms > row.objective_ms * (1 + _EQUAL)),
    )
    for other in connection.execute(worse.order_by(jobs.c.position).with_for_update()).all():
        if not (job := job_of(connection, other)).is_proven:
            text = f"job {row.id}, whose problem is tighter, has {row.objective_ms:g} ms"
            note(connection, other.position, now, EventKind.LOG, text=text)
            prolong(connection, other, job, now, seconds=0.0, max_time_limit_s=float("inf"))


def _relations(
    connection: sa.Connection, row: sa.Row[Any], *, hold: bool = False
) -> Sequence[Collection[int]]:
    """Return by index the tighter items of each item of a job's batch; nothing without a batch."""
    if row.batch_id is None:
        return ()
    query = sa.select(batches.c.document).where(batches.c.id == row.batch_id)
    found = connection.execute(query.with_for_update() if hold else query).scalar_one_or_none()
    return () if found is None else _tighter_of(found)


@lru_cache(maxsize=4)
def _tighter_of(document: str) -> tuple[frozenset[int], ...]:
    """Return the relations of a batch's document, which never changes: each claim and end asks."""
    return tuple(frozenset(item.tighter) for item in plan_of(document).items)


def _best_tighter(
    connection: sa.Connection,
    row: sa.Row[Any],
    relations: Sequence[Collection[int]],
    own_ms: float | None,
    *,
    has_ended: bool = False,
) -> sa.Row[Any] | None:
    """Return the best of the tighter items, or of those that have ended; None: none is better."""
    tighter = relations[row.batch_index] if relations else ()
    if not tighter:
        return None
    query = sa.select(jobs).where(
        jobs.c.batch_id == row.batch_id,
        jobs.c.batch_index.in_(sorted(tighter)),
        jobs.c.objective_ms < (_ANY_MS if own_ms is None else own_ms * (1 - _EQUAL)),
    )
    if has_ended:
        query = query.where(jobs.c.finished_at.is_not(None))
    return connection.execute(query.order_by(jobs.c.objective_ms, jobs.c.position)).first()


def _given_up(deaths: int, death: str) -> JobError:
    return JobError(
        code="job.died",
        message=f"given up after {deaths} attempts that died, the last because {death}; "
        "does the problem fit the solver's memory? Submit a smaller one, or raise "
        "OPTPIPE_SOLVER_MEMORY_BYTES or OPTPIPE_MAX_ATTEMPTS",
    )


def prolong(
    connection: sa.Connection,
    row: sa.Row[Any],
    job: JobRecord,
    now: float,
    *,
    seconds: float,
    max_time_limit_s: float,
) -> sa.Row[Any] | None:
    """Give a finished job more time; it waits in the queue again, as it stands.

    Raises `StateConflictError` if it has not ended, or nothing better can be found; `InputError` if
    its time limit would exceed the largest one.
    """
    _refuse_pointless(job)
    limit_s = job.options.time_limit_s + seconds
    if limit_s > max_time_limit_s:
        raise InputError(
            f"time_limit_s = {seconds}: with the {job.options.time_limit_s} s it had, job {job.id} "
            f"would get {limit_s} s, more than {max_time_limit_s} (OPTPIPE_MAX_TIME_LIMIT_S); "
            "ask for less"
        ).at("/time_limit_s")
    options = json.loads(row.options)
    first_limit = {ASKED_LIMIT: options.get(ASKED_LIMIT, job.options.time_limit_s)}
    note(connection, row.position, now, EventKind.LOG, text=f"resumed with {seconds:g} s more")
    return change(
        connection,
        row,
        JobEvent.RESUME,
        now,
        options=dump({**options, "time_limit_s": limit_s, **first_limit}),
        # What it overran is not taken from the new time.
        spent_s=min(row.spent_s, job.options.time_limit_s),
        finished_at=None,
        cancel_requested=False,
        error=None,
        deaths=0,
    )


def _refuse_pointless(job: JobRecord) -> None:
    """Refuse more time for a job that it would not help.

    Raises `StateConflictError` if it has not ended, or nothing better can be found.
    """
    if not job.state.is_final:
        raise StateConflictError(
            f"job {job.id} is {job.state.value}: only a finished job can be resumed; wait for its "
            "end, or cancel it first"
        )
    if job.is_proven:
        proven = "infeasible" if job.state is JobState.INFEASIBLE else "optimal"
        raise StateConflictError(
            f"job {job.id} is proven {proven}: more time changes nothing; submit another problem"
        )
