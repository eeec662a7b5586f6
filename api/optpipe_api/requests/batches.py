"""What travels over HTTP about batches: submissions, views, tables, frontiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.json_schema import SkipJsonSchema  # noqa: TC002 - pydantic reads it

from optpipe.errors import ProblemError, rule_broken
from optpipe.problem import Problem
from optpipe.sweep import AXES
from optpipe_api.errors import RequestError
from optpipe_api.requests.jobs import (
    PROBLEM_EXAMPLE,
    OptionsBody,
    Priority,
    Readers,
    StrictBody,
    Tags,
    no_default,
)

if TYPE_CHECKING:
    from optpipe.sweep import FrontierLine

__all__ = ["BatchBody", "FrontierView"]


_JOB_ID = "0f6b7e4a3c1d4e5f8a9b0c1d2e3f4a5b"
Axes = Annotated[
    dict[Annotated[str, Field(max_length=200)], Annotated[list[Any], Field(min_length=1)]],
    Field(max_length=8),
]


_AXES = (
    "Name -> values; every combination is an item, the last axis fastest. "
    f"{', '.join(AXES)}, or the path of a field: devices[*].memory_bytes, stages[3].forward_ms."
)


def _parse_all(listed: Any) -> list[Problem]:
    if not isinstance(listed, list):
        raise RequestError("problems: must be a list; put the problems in [ ]")
    return [_parse_one(index, data) for index, data in enumerate(listed)]


def _parse_one(index: int, data: Any) -> Problem:
    try:
        return Problem.parse(data)
    except ProblemError as error:
        message = f"problems[{index}]: {error}"
        raise ProblemError(message).at(*error.inside(f"/{index}").pointers) from None


class BatchBody(StrictBody):
    """A problem and axes to vary it along, a list of problems, or a job to ask what more would buy.

    Each item becomes a job.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "problem": PROBLEM_EXAMPLE,
                    "axes": {"memory_scale": [1, 0.5]},
                    "options": {"time_limit_s": 10},
                },
                {"what_if": _JOB_ID, "options": {"time_limit_s": 20}},
            ],
            "oneOf": [{"required": [name]} for name in ("problem", "problems", "what_if")],
        }
    )

    problem: Problem | SkipJsonSchema[None] = Field(default=None, json_schema_extra=no_default)
    axes: Axes = Field(default={}, description=_AXES)
    problems: tuple[Problem, ...] | SkipJsonSchema[None] = Field(
        default=None, min_length=1, json_schema_extra=no_default
    )
    what_if: str = Field(
        default="",
        min_length=1,
        max_length=200,
        description="Id of an ended job; the items are what a little more of something would buy.",
        json_schema_extra=no_default,
    )
    name: str = Field(default="", max_length=200, description="For people; else the problem's.")
    options: OptionsBody = Field(default=OptionsBody(), description="Of every item.")
    tags: Tags = ()
    priority: Priority = 0

    readers: ClassVar[Readers] = {"problem": Problem.parse, "problems": _parse_all}

    @model_validator(mode="after")
    def _one_of_three(self) -> Self:
        if [self.problem is None, self.problems is None, not self.what_if].count(False) != 1:
            raise rule_broken(
                "a batch has a problem (with axes), a list of problems, or what_if, a job's id",
                "give one of them",
            )
        if self.axes and self.problem is None:
            raise rule_broken("axes vary one problem", "give problem instead of problems")
        return self


def refuse_many(num_items: int, max_items: int) -> None:
    """Refuse a batch of too many items.

    Raises `RequestError` if there are more than ``max_items``.
    """
    if num_items > max_items:
        raise RequestError(
            f"the batch has {num_items} items, and may have {max_items} "
            "(OPTPIPE_MAX_BATCH_ITEMS); take values out, or send several batches"
        )


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
    def of(cls, lines: list[FrontierLine]) -> Self:
        return cls(
            lines=[
                FrontierLineView(
                    label=line.label,
                    points=[
                        FrontierPointView(
                            index=point.index,
                            memory_bytes=point.limit_bytes,
                            objective_ms=point.objective_ms,
                            bound_ms=point.bound_ms,
                            is_infeasible=point.is_infeasible,
                        )
                        for point in line.points
                    ],
                )
                for line in lines
            ]
        )
