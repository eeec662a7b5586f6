"""What travels over HTTP, besides problems and schedules: requests, jobs, faults."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from optpipe.errors import InputError
from optpipe.problem import Problem
from optpipe.schedule import OPTIMAL_GAP
from optpipe.validation import explain
from optpipe_api.errors import RequestError
from optpipe_api.jobs import Job, JobOptions, JobState, TracePoint

if TYPE_CHECKING:
    from collections.abc import Collection

    from optpipe_api.settings import Settings

__all__ = [
    "PROBLEM_EXAMPLE",
    "Fault",
    "Health",
    "JobFault",
    "JobList",
    "JobView",
    "OptionsBody",
    "Readiness",
    "SearchOptions",
    "StrictBody",
    "Submission",
    "TraceView",
    "WithProblem",
]

_ID = "0f6b7e4a3c1d4e5f8a9b0c1d2e3f4a5b"
_JOB_EXAMPLE: dict[str, Any] = {
    "id": _ID,
    "state": "running",
    "has_schedule": True,
    "name": "two-stages",
    "problem_hash": "sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae",
    "objective": "makespan",
    "objective_ms": 118.0,
    "bound_ms": 112.5,
    "gap": 0.0466,
    "options": {"time_limit_s": 60.0, "threads": 1, "seed": 0, "method": "auto"},
    "cancel_requested": False,
    "attempt": 1,
    "error": None,
    "created_at": "2026-01-31T12:00:00Z",
    "started_at": "2026-01-31T12:00:00.120000Z",
    "finished_at": None,
    "trace": [{"seconds": 0.01, "method": "1f1b", "objective_ms": 130.0, "bound_ms": 112.5}],
}
PROBLEM_EXAMPLE: dict[str, Any] = {
    "format": "optpipe/problem/v1",
    "name": "two-stages",
    "num_microbatches": 4,
    "devices": [{"memory_bytes": 4000}, {"memory_bytes": 4000}],
    "stages": [
        {
            "device": device,
            "forward_ms": 10.0,
            "backward_input_ms": 10.0,
            "backward_weight_ms": 8.0,
            "activation_bytes": 1000,
            "weight_context_bytes": 500,
        }
        for device in range(2)
    ],
}


class StrictBody(BaseModel):
    """A part of a request; unknown fields are refused by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SearchOptions(StrictBody):
    """What every search takes; what is left out takes the service's default."""

    time_limit_s: float | None = Field(default=None, gt=0, allow_inf_nan=False, strict=True)
    threads: int = Field(default=1, ge=1, strict=True)
    seed: int = Field(default=0, ge=0, le=2**31 - 1, strict=True)

    def checked_time_limit_s(self, settings: Settings, default_s: float) -> float:
        """Return the time limit; the default where it is left out, as far as that is allowed.

        Raises
        ------
        InputError
            If time limit or threads go beyond what this service allows.
        """
        default_s = min(default_s, settings.max_time_limit_s)
        time_limit_s = default_s if self.time_limit_s is None else self.time_limit_s
        for name, value, limit in (
            ("time_limit_s", time_limit_s, settings.max_time_limit_s),
            ("threads", self.threads, settings.max_threads),
        ):
            if value > limit:
                raise InputError(
                    f"options.{name} = {value}: must be <= {limit} on this service "
                    f"(OPTPIPE_MAX_{name.upper()}); lower it"
                )
        return time_limit_s


class OptionsBody(SearchOptions):
    """How to solve; what is left out takes the service's default."""

    method: str = Field(
        default="auto",
        pattern=r"^[A-Za-z0-9_.+-]{1,60}$",
        description="`auto` optimises; `/v1/methods` lists the others.",
    )
    gap: float = Field(
        default=OPTIMAL_GAP,
        ge=0,
        lt=1,
        strict=True,
        description="Stop where (objective - bound) / objective is at most this.",
    )
    work_limit: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        strict=True,
        description="Units of work, about a second of one core each, counted in iterations: the "
        "same result on every machine, unless the time limit cuts it short.",
    )

    def within(self, settings: Settings, methods: Collection[str]) -> JobOptions:
        """Return the options, defaults filled in; ``methods`` are those that exist.

        Raises
        ------
        InputError
            If they go beyond what this service allows, or the method is not one of these.
        """
        if self.method not in methods:
            raise InputError(
                f"options.method = {self.method!r}: must be one of {', '.join(methods)}; choose "
                "one (GET /v1/methods describes them)"
            )
        return JobOptions(
            time_limit_s=self.checked_time_limit_s(settings, settings.default_time_limit_s),
            work_limit=self.work_limit,
            threads=self.threads,
            seed=self.seed,
            gap=self.gap,
            method=self.method,
        )


class WithProblem(StrictBody):
    """A request about a problem."""

    problem: Problem

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Return the request a JSON-like object describes.

        Raises
        ------
        ProblemError
            If the problem breaks a rule; paths count from the problem.
        RequestError
            If anything around it does.
        """
        if not isinstance(data, dict):
            raise RequestError('the body must be an object: {"problem": {...}, "options": {...}}')
        if "format" in data and "problem" not in data:
            raise RequestError('the problem stands alone; wrap it: {"problem": {...}}')
        problem = Problem.parse(data["problem"]) if "problem" in data else None
        try:
            return cls.model_validate({**data, **({"problem": problem} if problem else {})})
        except ValidationError as error:
            raise RequestError(explain(error, cls)) from None


class Submission(WithProblem):
    """A problem to solve."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"problem": PROBLEM_EXAMPLE, "options": {"time_limit_s": 10}}]
        }
    )

    options: OptionsBody = OptionsBody()


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
    """A job as clients see it. ``has_schedule`` is true from the first schedule on."""

    model_config = ConfigDict(json_schema_extra={"examples": [_JOB_EXAMPLE]})

    id: str
    state: JobState
    has_schedule: bool
    name: str
    problem_hash: str
    objective: str
    objective_ms: float | None
    bound_ms: float | None
    gap: float | None
    options: dict[str, Any]
    cancel_requested: bool
    attempt: int
    error: JobFault | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    trace: list[TraceView] | None = Field(default=None, description="Absent in lists.")

    @classmethod
    def of(cls, job: Job, trace: list[TracePoint] | None = None) -> Self:
        """Return the view of a job."""
        return cls(
            id=job.id,
            state=job.state,
            has_schedule=job.has_schedule,
            name=job.name,
            problem_hash=job.problem_hash,
            objective=job.objective,
            objective_ms=job.objective_ms,
            bound_ms=job.bound_ms,
            gap=job.gap,
            options=asdict(job.options),
            cancel_requested=job.cancel_requested,
            attempt=job.attempt,
            error=None if job.error is None else JobFault(**asdict(job.error)),
            created_at=_moment(job.created_at),
            started_at=None if job.started_at is None else _moment(job.started_at),
            finished_at=None if job.finished_at is None else _moment(job.finished_at),
            trace=None if trace is None else [TraceView(**asdict(point)) for point in trace],
        )


class JobList(BaseModel):
    """Jobs, newest first; ``next`` is the ``cursor`` of the next page, null on the last one."""

    jobs: list[JobView]
    next: int | None


class Health(BaseModel):
    """The process answers."""

    status: str = "ok"


class Readiness(BaseModel):
    """The store answers and the engine solves."""

    status: str = "ready"
    jobs: dict[JobState, int]


class Fault(BaseModel):
    """A problem detail (RFC 9457). ``code`` is stable, ``errors`` holds one line per fault."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "type": "urn:optpipe:error:problem.invalid",
                    "title": "Unprocessable Content",
                    "status": 422,
                    "detail": "stages[0].forward_ms = -1: must be >= 0; change it",
                    "code": "problem.invalid",
                    "instance": "/v1/jobs",
                    "errors": ["stages[0].forward_ms = -1: must be >= 0; change it"],
                }
            ]
        }
    )

    type: str
    title: str
    status: int
    detail: str
    code: str
    instance: str
    errors: list[str] | None = None
    needs: dict[str, int] | None = None
    id: str | None = Field(default=None, description="Names the entry in the server's log.")


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
