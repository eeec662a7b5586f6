"""What is written about a job: entries of its history, its documents, its best; and its state.

Whoever calls holds the job's row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from optpipe_api.jobs import EntryKind, JobState, transition
from optpipe_api.store.jobs_rows import storable
from optpipe_api.store.tables import events, jobs, problems, schedules

if TYPE_CHECKING:
    from optpipe_api.jobs import JobEvent, TracePoint

__all__ = ["keep", "move", "note", "put", "update"]

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


def update(connection: sa.Connection, row: sa.Row[Any], **values: Any) -> sa.Row[Any]:
    """Change columns that are not the state, and return the row as it is now."""
    changed = sa.update(jobs).where(jobs.c.position == row.position).values(**values)
    return connection.execute(changed.returning(jobs)).one()


def move(
    connection: sa.Connection, row: sa.Row[Any], event: JobEvent, now: float, **values: Any
) -> sa.Row[Any] | None:
    """Change a job's state, and note it; None where the event is not possible (any more).

    An UPDATE that names the state and the attempt it starts from: what it does not find, it does
    not change. Use `jobs_changes.change`, which also sees to the jobs that share its solve.
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
