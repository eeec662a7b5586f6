"""What happens to a job that exists: it ends, is given back, gets more time.

Every change of state goes through `change`. Whoever calls holds the job's row.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from optpipe.errors import InputError
from optpipe_api.errors import ConflictError
from optpipe_api.jobs import (
    EntryKind,
    JobError,
    JobEvent,
    JobState,
    TracePoint,
)
from optpipe_api.store.jobs_entries import keep, move, note
from optpipe_api.store.jobs_rows import ASKED_LIMIT, dump, spent, storable
from optpipe_api.store.jobs_sharing import settle

if TYPE_CHECKING:
    import sqlalchemy as sa

    from optpipe_api.jobs import Job, Outcome

__all__ = ["change", "finish", "give_back", "prolong", "refuse_pointless"]


def change(
    connection: sa.Connection, row: sa.Row[Any], event: JobEvent, now: float, **values: Any
) -> sa.Row[Any] | None:
    """Change a job's state, and note it; None where the event is not possible (any more).

    Where it has ended, those that share its solve have an answer, or begin.
    """
    found = move(connection, row, event, now, **values)
    if found is not None and JobState(found.state).is_final:
        settle(connection, found, now)
    return found


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
        awaits_id=None,
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
