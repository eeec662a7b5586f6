"""What happens to a job that exists: its state, its best, and the history that tells of both.

Every change of state goes through `change`: an UPDATE that names the state and the attempt it
starts from. What it does not find, it does not change. Whoever calls holds the job's row.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from optpipe.errors import InputError
from optpipe_api.errors import ConflictError
from optpipe_api.jobs import (
    EntryKind,
    JobError,
    JobEvent,
    JobState,
    TracePoint,
    transition,
)
from optpipe_api.store.jobs_rows import ASKED_LIMIT, dump, storable
from optpipe_api.store.tables import events, jobs, problems, schedules

if TYPE_CHECKING:
    from optpipe_api.jobs import Job, Outcome

__all__ = [
    "change",
    "finish",
    "give_back",
    "keep",
    "note",
    "prolong",
    "put",
    "refuse_pointless",
    "renew",
    "spent",
]

_MAX_METHOD = 100
_NOTE = sa.insert(events)


def note(
    connection: sa.Connection, position: int, at: float, kind: EntryKind, **values: Any
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


def renew(
    connection: sa.Connection, row: sa.Row[Any], expires_at: float, values: dict[str, Any]
) -> sa.Row[Any]:
    """Move the end of a lease, and change other columns along."""
    renewed = (
        sa.update(jobs)
        .where(jobs.c.position == row.position)
        .values(lease_expires_at=expires_at, **values)
        .returning(jobs)
    )
    return connection.execute(renewed).one()


def change(
    connection: sa.Connection, row: sa.Row[Any], event: JobEvent, now: float, **values: Any
) -> sa.Row[Any] | None:
    """Change a job's state, and note it; None where the event is not possible (any more)."""
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
        note(connection, row.position, now, EntryKind.STATE, text=target.value)
    return found


def keep(
    connection: sa.Connection,
    row: sa.Row[Any],
    point: TracePoint,
    now: float,
    *,
    schedule: str | None = None,
    problem: str | None = None,
) -> dict[str, Any]:
    """Keep what is better, note it, and return the columns that change with it.

    A schedule at least as good replaces the one before, a higher bound the one before. History
    tells what improved: a start that is found again under its old length, and schedules on the way
    up to it, would only be noise there.
    """
    values: dict[str, Any] = {}
    if point.bound_ms is not None and (row.bound_ms is None or point.bound_ms > row.bound_ms):
        values["bound_ms"] = point.bound_ms
    if schedule is not None and _is_as_good(row, point.objective_ms):
        put(connection, schedules, row.position, schedule)
        if problem is not None:
            put(connection, problems, row.position, problem)
        values |= {"objective_ms": point.objective_ms, "num_schedules": row.num_schedules + 1}
    _note_improvement(connection, row, point, now, values)
    return values


def _is_as_good(row: sa.Row[Any], objective_ms: float | None) -> bool:
    return objective_ms is not None and (
        row.objective_ms is None or objective_ms <= row.objective_ms
    )


def _note_improvement(
    connection: sa.Connection,
    row: sa.Row[Any],
    point: TracePoint,
    now: float,
    values: dict[str, Any],
) -> None:
    is_shorter = "objective_ms" in values and values["objective_ms"] != row.objective_ms
    if not is_shorter and "bound_ms" not in values:
        return
    note(
        connection,
        row.position,
        now,
        EntryKind.INCUMBENT if is_shorter else EntryKind.BOUND,
        seconds=point.seconds,
        method=storable(point.method)[:_MAX_METHOD],
        objective_ms=point.objective_ms if is_shorter else None,
        bound_ms=values.get("bound_ms", row.bound_ms),
    )


def finish(
    connection: sa.Connection, row: sa.Row[Any], outcome: Outcome, now: float
) -> sa.Row[Any] | None:
    """End a running job, keeping its last word where that is better than what is known."""
    spent_s = spent(row, now)
    last = TracePoint(
        seconds=spent_s,
        method=outcome.method,
        objective_ms=outcome.objective_ms,
        bound_ms=outcome.bound_ms,
    )
    better = keep(connection, row, last, now, schedule=outcome.schedule, problem=outcome.problem)
    error = None if outcome.error is None else dump(outcome.error)
    return change(connection, row, outcome.event, now, error=error, spent_s=spent_s, **better)


def spent(row: sa.Row[Any], now: float) -> float:
    """Return the seconds of solving over all attempts; a dead server's end with its lease."""
    ended = min(now, row.lease_expires_at)
    return float(row.spent_s + max(0.0, ended - row.claimed_at))


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
            EntryKind.LOG,
            text=storable(f"attempt {row.attempt}: {death}"),
        )
    if row.cancel_requested:
        event = JobEvent.CANCEL
    elif death is not None and deaths >= max_attempts:
        event = JobEvent.FAIL
        error = dump(_given_up(deaths, death))
    return change(connection, row, event, now, deaths=deaths, spent_s=spent(row, now), error=error)


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
    job: Job,
    now: float,
    *,
    seconds: float,
    max_time_limit_s: float,
) -> sa.Row[Any] | None:
    """Give a finished job more time; it waits in the queue again, as it stands.

    Raises
    ------
    ConflictError
        If it has not ended, or nothing better can be found.
    InputError
        If its time limit would exceed the largest one.
    """
    refuse_pointless(job)
    limit_s = job.options.time_limit_s + seconds
    if limit_s > max_time_limit_s:
        raise InputError(
            f"time_limit_s = {seconds}: with the {job.options.time_limit_s} s it had, job {job.id} "
            f"would get {limit_s} s, more than {max_time_limit_s} (OPTPIPE_MAX_TIME_LIMIT_S); "
            "ask for less"
        )
    options = json.loads(row.options)
    asked = {ASKED_LIMIT: options.get(ASKED_LIMIT, job.options.time_limit_s)}
    note(connection, row.position, now, EntryKind.LOG, text=f"resumed with {seconds:g} s more")
    return change(
        connection,
        row,
        JobEvent.RESUME,
        now,
        options=dump({**options, "time_limit_s": limit_s, **asked}),
        # What it overran is not taken from the new time.
        spent_s=min(row.spent_s, job.options.time_limit_s),
        finished_at=None,
        cancel_requested=False,
        error=None,
        deaths=0,
    )


def refuse_pointless(job: Job) -> None:
    """Refuse more time for a job that it would not help.

    Raises
    ------
    ConflictError
        If it has not ended, or nothing better can be found.
    """
    if not job.state.is_final:
        raise ConflictError(
            f"job {job.id} is {job.state.value}: only a finished job can be resumed; wait for its "
            "end, or cancel it first"
        )
    if job.is_proven:
        proven = "infeasible" if job.state is JobState.INFEASIBLE else "optimal"
        raise ConflictError(
            f"job {job.id} is proven {proven}: more time changes nothing; submit another problem"
        )
