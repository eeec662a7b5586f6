"""Equal problems that are asked for at the same time are solved once.

1. A new job whose problem an unfinished job of its owner is solved for already, with at least its
   budget and not after it, *shares* that solve: it waits in the queue, names the other one
   (``awaits_id``), and nobody claims it. One whose start is promised does so only where as good a
   schedule was found already.
2. What the solving job finds it has found too, at once, with a history of its own.
3. When the solving job succeeds or is proven infeasible, so is it. It need not wait so long: it
   succeeds as soon as the time that it asked for has been spent, where there is a schedule by then.
4. When the solving job ends otherwise (cancelled, failed), the first of those that share becomes
   the solving one, from what was found; the others share with it as far as its budget goes.
5. All of that is done in the transaction of what it follows from: no kill parts the two.

So one who cancels his job, or whose job fails, takes nothing from another. Whoever calls holds the
row of the solving job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from optpipe_api.jobs import Cache, EntryKind, JobEvent, JobState, TracePoint
from optpipe_api.store.jobs_entries import keep, move, note, update
from optpipe_api.store.jobs_rows import document_of, options_of, spent
from optpipe_api.store.tables import events, jobs, problems, schedules

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from optpipe_api.jobs import NewJob

__all__ = [
    "answer_early",
    "begin_sharing",
    "find_solving",
    "hold_problems",
    "settle",
    "share_improvement",
]

_LOOKED_AT = 20
_ANSWERING = {
    JobState.SUCCEEDED.value: JobEvent.SUCCEED,
    JobState.INFEASIBLE.value: JobEvent.PROVE_INFEASIBLE,
}
_UNFINISHED = [state.value for state in JobState if not state.is_final]
_SOLVING = (
    sa.select(jobs)
    .where(
        jobs.c.problem_hash == sa.bindparam("hash"),
        jobs.c.owner == sa.bindparam("owner"),
        jobs.c.kind == sa.bindparam("kind"),
        jobs.c.state.in_(_UNFINISHED),
        jobs.c.awaits_id.is_(None),
        jobs.c.cancel_requested.is_(False),
    )
    .order_by(jobs.c.position)
    .limit(_LOOKED_AT)
    .with_for_update()
)
_SHARING = (
    sa.select(jobs)
    .where(jobs.c.awaits_id == sa.bindparam("id"), jobs.c.state == JobState.QUEUED.value)
    .order_by(jobs.c.priority.desc(), jobs.c.position)
    .with_for_update()
)
_MADE_BY = (
    sa.select(events.c.method)
    .where(events.c.position == sa.bindparam("at"), events.c.kind == EntryKind.INCUMBENT.value)
    .order_by(events.c.number.desc())
    .limit(1)
)


def hold_problems(connection: sa.Connection, news: Iterable[NewJob]) -> None:
    """Let equal jobs that come at once come one after the other: the second finds the first.

    In SQLite they do anyway.
    """
    if connection.dialect.name != "postgresql":
        return
    for name in sorted({f"{new.owner} {new.problem_hash}" for new in news if new.may_share}):
        key = sa.func.hashtextextended(name, 0)
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(key)))


def find_solving(connection: sa.Connection, new: NewJob) -> sa.Row[Any] | None:
    """Return the row of a job whose solve answers a new one too, and hold it."""
    if not new.may_share or new.finished is not None:
        return None
    asked = {"hash": new.problem_hash, "owner": new.owner, "kind": new.kind.value}
    for row in connection.execute(_SOLVING, asked):
        is_in_time = _is_in_time(row, new.priority) and options_of(row).covers(new.options)
        if is_in_time and new.is_content_with(row.objective_ms):
            return row
    return None


def _is_in_time(row: sa.Row[Any], priority: int) -> bool:
    return bool(row.state == JobState.RUNNING.value or row.priority >= priority)


def begin_sharing(
    connection: sa.Connection, row: sa.Row[Any], solving: sa.Row[Any], now: float
) -> sa.Row[Any]:
    """Let a new job share a solve, and have what was found so far."""
    note(connection, row.position, now, EntryKind.LOG, text=_shares_with(solving.id))
    better = _taken_over(connection, row, solving, now)
    return update(connection, row, **better) if better else row


def share_improvement(connection: sa.Connection, solving: sa.Row[Any], now: float) -> None:
    """Let those that share have what was just found."""
    for row in _sharing(connection, solving):
        better = _taken_over(connection, row, solving, now)
        if better:
            update(connection, row, **better)


def answer_early(connection: sa.Connection, solving: sa.Row[Any], now: float) -> None:
    """End those that share and have asked for no more time than was spent."""
    if solving.objective_ms is None:
        return
    spent_s = spent(solving, now)
    for row in _sharing(connection, solving):
        if options_of(row).time_limit_s <= spent_s:
            _answer(connection, row, solving, JobEvent.SUCCEED, now)


def settle(connection: sa.Connection, ended: sa.Row[Any], now: float) -> None:
    """See to those that share the solve of a job that has ended."""
    sharing = _sharing(connection, ended)
    event = _ANSWERING.get(ended.state)
    if event is None:
        _part(connection, ended, sharing, now)
        return
    for row in sharing:
        _answer(connection, row, ended, event, now)


def _sharing(connection: sa.Connection, solving: sa.Row[Any]) -> Sequence[sa.Row[Any]]:
    return connection.execute(_SHARING, {"id": solving.id}).all()


def _answer(
    connection: sa.Connection,
    row: sa.Row[Any],
    solving: sa.Row[Any],
    event: JobEvent,
    now: float,
) -> None:
    better = _taken_over(connection, row, solving, now, is_last=True)
    move(connection, row, event, now, started_at=now, error=solving.error, **better)


def _taken_over(
    connection: sa.Connection,
    row: sa.Row[Any],
    solving: sa.Row[Any],
    now: float,
    *,
    is_last: bool = False,
) -> dict[str, Any]:
    """Keep what a solving job has and the other has not; return the columns that change with it.

    The last schedule is taken even if it is no better: it says how the search ended.
    """
    is_new = is_last or row.objective_ms is None or solving.objective_ms < row.objective_ms
    takes = solving.objective_ms is not None and is_new
    if not takes and solving.bound_ms == row.bound_ms:
        return {}
    point = TracePoint(
        seconds=_seconds(solving, now),
        method=connection.execute(_MADE_BY, {"at": solving.position}).scalar_one_or_none() or "",
        objective_ms=solving.objective_ms if takes else None,
        bound_ms=solving.bound_ms,
    )
    return keep(
        connection,
        row,
        point,
        now,
        schedule=document_of(connection, schedules, solving.position) if takes else None,
        problem=document_of(connection, problems, solving.position) if takes else None,
    )


def _seconds(solving: sa.Row[Any], now: float) -> float:
    is_running = solving.state == JobState.RUNNING.value
    return spent(solving, now) if is_running else float(solving.spent_s)


def _part(
    connection: sa.Connection, ended: sa.Row[Any], sharing: Sequence[sa.Row[Any]], now: float
) -> None:
    """Let the first solve, and those it answers share with it; and so on."""
    solving: list[sa.Row[Any]] = []
    for row in sharing:
        asked = options_of(row)
        other = next((one for one in solving if options_of(one).covers(asked)), None)
        text = f"job {ended.id}, whose solve was shared, is {ended.state}; "
        text += "this job is solved by itself" if other is None else _shares_with(other.id)
        note(connection, row.position, now, EntryKind.LOG, text=text)
        better = _taken_over(connection, row, ended, now)
        if other is None:
            row_now = update(connection, row, awaits_id=None, **better)
            solving.append(update(connection, row, **_known_to(row_now, ended)))
        else:
            update(connection, row, awaits_id=other.id, source_id=other.id, **better)


def _known_to(row: sa.Row[Any], ended: sa.Row[Any]) -> dict[str, Any]:
    """Return what a job that has to be solved after all says of where it came from."""
    if row.objective_ms is None:
        return {"cache": Cache.MISS.value, "source_id": None}
    return {"cache": Cache.NEAR.value, "source_id": ended.id}


def _shares_with(job_id: str) -> str:
    return f"shares the solve of job {job_id}, which has the same problem"
