"""What goes out over HTTP about jobs: their state, their history, lists of them."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, Field

from optpipe.schedule import gap_of
from optpipe_api.access import Role
from optpipe_api.jobs import Cache, EntryKind, JobKind, JobState

if TYPE_CHECKING:
    from optpipe_api.access import Principal
    from optpipe_api.jobs import HistoryEntry, Job, TracePoint

__all__ = ["HistoryView", "JobFault", "JobList", "JobView", "TraceView", "moment"]

_JOB_EXAMPLE: dict[str, Any] = {
    "id": "0f6b7e4a3c1d4e5f8a9b0c1d2e3f4a5b",
    "kind": "solve",
    "state": "running",
    "has_schedule": True,
    "cache": "miss",
    "name": "two-stages",
    "problem_hash": "sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae",
    "objective": "makespan",
    "objective_ms": 118.0,
    "bound_ms": 112.5,
    "gap": 0.0466,
    "options": {"time_limit_s": 60.0, "threads": 1, "seed": 0, "method": "auto"},
    "tags": ["nightly", "team=llm"],
    "priority": 0,
    "cancel_requested": False,
    "attempt": 1,
    "error": None,
    "created_at": "2026-01-31T12:00:00Z",
    "started_at": "2026-01-31T12:00:00.120000Z",
    "finished_at": None,
    "trace": [{"seconds": 0.01, "method": "1f1b", "objective_ms": 130.0, "bound_ms": 112.5}],
}


class TraceView(BaseModel):
    """One improvement; ``seconds`` of solving so far."""

    seconds: float
    method: str
    objective_ms: float | None
    bound_ms: float | None


class JobFault(BaseModel):
    """Why a job ended without success; ``needs`` maps what is too small to what would do."""

    code: str
    message: str
    needs: dict[str, int] = {}


class JobView(BaseModel):
    """A job as clients see it.

    ``has_schedule`` is true from the first schedule on. ``cache`` says what was known when the job
    came: `hit` the answer itself, or another job is solving the same and this one ends with it;
    `near` a schedule of a similar problem, to start from; `miss` neither. ``source_id`` is the job
    that knew it. ``owner`` is for admins.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [_JOB_EXAMPLE]})

    id: str
    kind: JobKind
    state: JobState
    has_schedule: bool
    cache: Cache
    source_id: str | None
    name: str
    owner: str | None
    problem_hash: str
    objective: str
    objective_ms: float | None
    bound_ms: float | None
    gap: float | None
    options: dict[str, Any]
    tags: list[str]
    priority: int
    batch_id: str | None
    batch_index: int | None
    deployment_id: str | None
    cancel_requested: bool
    attempt: int
    spent_s: float = Field(description="Seconds of solving in earlier attempts.")
    num_schedules: int = Field(description="Better schedules so far; the newest one's number.")
    error: JobFault | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    trace: list[TraceView] | None = Field(default=None, description="Null in lists.")

    @classmethod
    def of(
        cls,
        job: Job,
        trace: list[TracePoint] | None = None,
        *,
        who: Principal | None = None,
    ) -> Self:
        """Return the view of a job for somebody."""
        shows_owner = who is not None and who.role is Role.ADMIN
        same = {name: getattr(job, name) for name in _AS_IT_IS}
        return cls(
            **same,
            owner=job.owner if shows_owner else None,
            options=asdict(job.options),
            tags=list(job.tags),
            error=None if job.error is None else JobFault(**asdict(job.error)),
            created_at=moment(job.created_at),
            started_at=None if job.started_at is None else moment(job.started_at),
            finished_at=None if job.finished_at is None else moment(job.finished_at),
            trace=None if trace is None else [TraceView(**asdict(point)) for point in trace],
        )


_MADE = {"owner", "options", "tags", "error", "created_at", "started_at", "finished_at", "trace"}
_AS_IT_IS = tuple(name for name in JobView.model_fields if name not in _MADE)


class HistoryView(BaseModel):
    """One thing that happened to a job: the data of a server-sent event.

    ``text`` is the new state of a `state`, the sentence of a `log`. ``seconds`` of solving so far
    and the numbers are those of an `incumbent` (a better schedule) or a `bound`.
    """

    number: int = Field(description="The event's id; it grows, with holes.")
    kind: EntryKind
    at: datetime
    seconds: float | None
    method: str | None
    objective_ms: float | None
    bound_ms: float | None
    gap: float | None
    text: str | None

    @classmethod
    def of(cls, entry: HistoryEntry) -> Self:
        """Return the view of an entry."""
        objective_ms = entry.objective_ms
        return cls(
            number=entry.number,
            kind=entry.kind,
            at=moment(entry.at),
            seconds=entry.seconds,
            method=entry.method,
            objective_ms=objective_ms,
            bound_ms=entry.bound_ms,
            gap=None if objective_ms is None else gap_of(objective_ms, entry.bound_ms),
            text=entry.text,
        )


class JobList(BaseModel):
    """Jobs, newest first; ``next`` is the ``cursor`` of the next page, null on the last one."""

    jobs: list[JobView]
    next: int | None


def moment(seconds: float) -> datetime:
    """Return a time as views show it, from seconds since the epoch."""
    return datetime.fromtimestamp(seconds, UTC)
