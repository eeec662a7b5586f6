"""What travels over HTTP about batches: submissions, views, tables, frontiers."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.json_schema import SkipJsonSchema  # noqa: TC002 - pydantic reads it

from optpipe.errors import ProblemError
from optpipe.problem import Problem
from optpipe.sweep import AXES
from optpipe.validation import rule_broken
from optpipe_api.access import Role
from optpipe_api.errors import RequestError
from optpipe_api.job_views import JobFault, moment
from optpipe_api.jobs import Cache, JobState
from optpipe_api.schemas import PROBLEM_EXAMPLE, OptionsBody, Priority, StrictBody, Tags, parsed

if TYPE_CHECKING:
    from optpipe.frontier import Line
    from optpipe_api.access import Principal
    from optpipe_api.batches import Batch, BatchPlan, Item

__all__ = [
    "BatchBody",
    "BatchList",
    "BatchView",
    "FrontierView",
    "ItemView",
    "SweepRow",
    "SweepRowList",
]

_BATCH_ID, _JOB_ID = "7c9e6679742540de944be07fc1f90ae7", "0f6b7e4a3c1d4e5f8a9b0c1d2e3f4a5b"
_ITEM_EXAMPLE: dict[str, Any] = {
    "index": 1,
    "job_id": _JOB_ID,
    "name": "two-stages memory_scale = 0.5",
    "values": {"memory_scale": 0.5},
    "state": "succeeded",
    "cache": "miss",
    "memory_bytes": 2000,
    "objective_ms": 118.0,
    "bound_ms": 112.5,
    "gap": 0.0466,
    "error": None,
    "started_at": "2026-01-31T12:00:00.120000Z",
    "finished_at": "2026-01-31T12:00:10.120000Z",
}
_BATCH_EXAMPLE: dict[str, Any] = {
    "id": _BATCH_ID,
    "name": "how much memory",
    "owner": None,
    "is_finished": False,
    "progress": 0.5,
    "num_items": 2,
    "counts": {"queued": 0, "running": 1, "succeeded": 1, "infeasible": 0, "failed": 0},
    "created_at": "2026-01-31T12:00:00Z",
    "finished_at": None,
    "axes": {"memory_scale": [1, 0.5]},
    "options": {"time_limit_s": 10.0, "threads": 1, "seed": 0, "method": "auto"},
    "tags": ["nightly"],
    "priority": 0,
    "items": [_ITEM_EXAMPLE],
}
Axes = Annotated[
    dict[Annotated[str, Field(max_length=200)], Annotated[list[Any], Field(min_length=1)]],
    Field(max_length=8),
]


def _no_default(schema: dict[str, Any]) -> None:
    schema.pop("default", None)


_AXES = (
    "Name -> values; every combination is an item, the last axis fastest. "
    f"{', '.join(AXES)}, or the path of a field: devices[*].memory_bytes, stages[3].forward_ms."
)


class BatchBody(StrictBody):
    """A problem and axes to vary it along, or a list of problems; each item becomes a job."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "problem": PROBLEM_EXAMPLE,
                    "axes": {"memory_scale": [1, 0.5]},
                    "options": {"time_limit_s": 10},
                }
            ],
            "oneOf": [{"required": ["problem"]}, {"required": ["problems"]}],
        }
    )

    problem: Problem | SkipJsonSchema[None] = Field(default=None, json_schema_extra=_no_default)
    axes: Axes = Field(default={}, description=_AXES)
    problems: tuple[Problem, ...] | SkipJsonSchema[None] = Field(
        default=None, min_length=1, json_schema_extra=_no_default
    )
    name: str = Field(default="", max_length=200, description="For people; else the problem's.")
    options: OptionsBody = Field(default=OptionsBody(), description="Of every item.")
    tags: Tags = ()
    priority: Priority = 0

    @classmethod
    def parse(cls, data: Any, max_items: int) -> Self:
        """Return the batch a JSON-like object describes.

        Raises
        ------
        ProblemError
            If a problem breaks a rule; the path of a listed one begins with its place.
        RequestError
            If anything around them does, or more than ``max_items`` are listed.
        """
        if isinstance(data, dict) and isinstance(data.get("problems"), list):
            refuse_many(len(data["problems"]), max_items)
        return parsed(cls, data, {"problem": Problem.parse, "problems": _parse_all})

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.problem is None) == (self.problems is None):
            raise rule_broken(
                "a batch has a problem (with axes) or a list of problems", "give one of them"
            )
        if self.axes and self.problem is None:
            raise rule_broken("axes vary one problem", "give problem instead of problems")
        return self


def refuse_many(num_items: int, max_items: int) -> None:
    """Refuse a batch of too many items.

    Raises
    ------
    RequestError
        If there are more than ``max_items``.
    """
    if num_items > max_items:
        raise RequestError(
            f"the batch has {num_items} items, and may have {max_items} "
            "(OPTPIPE_MAX_BATCH_ITEMS); take values out, or send several batches"
        )


def _parse_all(listed: Any) -> list[Problem]:
    if not isinstance(listed, list):
        raise RequestError("problems: must be a list; put the problems in [ ]")
    return [_parse_one(index, data) for index, data in enumerate(listed)]


def _parse_one(index: int, data: Any) -> Problem:
    try:
        return Problem.parse(data)
    except ProblemError as error:
        raise ProblemError(f"problems[{index}]: {error}") from None


class ItemView(BaseModel):
    """One item of a batch: its values on the axes, and its job.

    ``memory_bytes`` is the budget of the device that has most.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [_ITEM_EXAMPLE]})

    index: int
    job_id: str
    name: str
    values: dict[str, Any]
    state: JobState
    cache: Cache
    memory_bytes: int
    objective_ms: float | None
    bound_ms: float | None
    gap: float | None
    error: JobFault | None
    started_at: datetime | None
    finished_at: datetime | None

    @classmethod
    def of(cls, item: Item) -> Self:
        """Return the view of an item."""
        job, error = item.job, item.job.error
        return cls(
            index=item.index,
            job_id=job.id,
            name=job.name,
            values=item.plan.values,
            state=job.state,
            cache=job.cache,
            memory_bytes=max(item.plan.memory_bytes),
            objective_ms=job.objective_ms,
            bound_ms=job.bound_ms,
            gap=job.gap,
            error=None if error is None else JobFault(**asdict(error)),
            started_at=None if job.started_at is None else moment(job.started_at),
            finished_at=None if job.finished_at is None else moment(job.finished_at),
        )


class BatchView(BaseModel):
    """A batch as clients see it; ``owner`` is for admins.

    All of it is read from the jobs of its items. What lists leave out is null there.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [_BATCH_EXAMPLE]})

    id: str
    name: str
    owner: str | None
    is_finished: bool
    progress: float = Field(description="Share of the items that have ended, 0 to 1.")
    num_items: int
    counts: dict[JobState, int] = Field(description="Items in each state.")
    created_at: datetime
    finished_at: datetime | None
    axes: dict[str, list[Any]] | None = Field(default=None, description="Null in lists.")
    options: dict[str, Any] | None = Field(default=None, description="Null in lists.")
    tags: list[str] | None = Field(default=None, description="Null in lists.")
    priority: int | None = Field(default=None, description="Null in lists.")
    items: list[ItemView] | None = Field(default=None, description="Null in lists.")

    @classmethod
    def of(
        cls,
        batch: Batch,
        who: Principal,
        plan: BatchPlan | None = None,
        items: list[Item] | None = None,
    ) -> Self:
        """Return the view of a batch for somebody."""
        ended_at = batch.finished_at
        return cls(
            id=batch.id,
            name=batch.name,
            owner=batch.owner if who.role is Role.ADMIN else None,
            is_finished=batch.is_finished,
            progress=batch.progress,
            num_items=batch.num_items,
            counts={state: batch.counts.get(state, 0) for state in JobState},
            created_at=moment(batch.created_at),
            finished_at=None if ended_at is None else moment(ended_at),
            items=None if items is None else [ItemView.of(item) for item in items],
            **({} if plan is None else _planned(plan)),
        )


def _planned(plan: BatchPlan) -> dict[str, Any]:
    return {
        "axes": plan.axes,
        "options": asdict(plan.options),
        "tags": list(plan.tags),
        "priority": plan.priority,
    }


class BatchList(BaseModel):
    """Batches, newest first; ``next`` is the ``cursor`` of the next page, null on the last one."""

    batches: list[BatchView]
    next: int | None


class SweepRow(BaseModel):
    """One row of a batch's table; times of schedules in ms, ``seconds`` of solving.

    ``memory_bytes`` is the budget of the device that has most.
    """

    index: int
    name: str
    values: dict[str, Any]
    state: JobState
    objective_ms: float | None
    bound_ms: float | None
    gap: float | None
    memory_bytes: int
    seconds: float | None
    problem_hash: str
    job_id: str | None
    message: str | None


class SweepRowList(BaseModel):
    """The items of a batch, in order."""

    rows: list[SweepRow]


class FrontierPointView(BaseModel):
    """One item on a line.

    ``objective_ms`` is the best that is known under this memory, here or at a smaller limit,
    ``bound_ms`` the highest bound proven here or at a larger one.
    """

    index: int
    memory_bytes: int = Field(description="The budget of the device that has most.")
    objective_ms: float | None
    bound_ms: float | None
    is_infeasible: bool


class FrontierLineView(BaseModel):
    """Items that differ in nothing but the memory of devices, from the least to the most."""

    label: str
    points: list[FrontierPointView]


class FrontierView(BaseModel):
    """What memory buys."""

    lines: list[FrontierLineView]

    @classmethod
    def of(cls, lines: list[Line]) -> Self:
        """Return the view of a frontier."""
        return cls(
            lines=[FrontierLineView(label=line.label, points=_points(line)) for line in lines]
        )


def _points(line: Line) -> list[FrontierPointView]:
    return [
        FrontierPointView(
            index=point.index,
            memory_bytes=point.limit_bytes,
            objective_ms=point.objective_ms,
            bound_ms=point.bound_ms,
            is_infeasible=point.is_infeasible,
        )
        for point in line.points
    ]
