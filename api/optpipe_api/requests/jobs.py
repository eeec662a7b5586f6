"""What comes in over HTTP, besides problems and models themselves; and faults, health.

`optpipe_api.views` holds what goes out about jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.json_schema import SkipJsonSchema

from optpipe.errors import InputError, ProblemError, explain, places, pointer, rule_broken
from optpipe.measurements import Measurements
from optpipe.model import Model
from optpipe.problem import Count, Index, Milliseconds, Objective, Problem
from optpipe.schedule import OPTIMAL_GAP
from optpipe.sweep import AXES
from optpipe.wire import DEFAULT_NOISE, CacheUse, JobKind, JobOptions, JobState
from optpipe_api.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Collection

    from optpipe.sweep import FrontierLine
    from optpipe_api.settings import Settings

__all__ = [
    "PROBLEM_EXAMPLE",
    "BatchBody",
    "Fault",
    "FrontierView",
    "Health",
    "OptionsBody",
    "Priority",
    "Readers",
    "Readiness",
    "Registration",
    "ReportBody",
    "Resumption",
    "SearchOptions",
    "StrictBody",
    "Submission",
    "SubmissionOptions",
    "Tag",
    "Tags",
    "WithProblem",
    "no_default",
]


Tag = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/=+-]{1,64}$")]
Tags = Annotated[
    tuple[Tag, ...],
    Field(max_length=16, description="To find jobs again by: `?tag=`."),
    AfterValidator(lambda tags: tuple(sorted(set(tags)))),
]
Priority = Annotated[
    int,
    Field(
        ge=-100,
        le=100,
        strict=True,
        description="Of one owner's jobs higher ones are taken first. Owners take turns, but for "
        "priorities above 10, which only admins may give.",
    ),
]
PlacementName = Literal["linear", "loop", "v", "free"]
_OBJECTIVES = get_args(Objective)

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


Readers = Mapping[str, Callable[[Any], Any]]


def no_default(schema: dict[str, Any]) -> None:
    """Leave null out of a published schema: a field that may be missing may not be null."""
    schema.pop("default", None)


class StrictBody(BaseModel):
    """A part of a request; unknown fields are refused by name.

    ``readers`` read those fields that are documents: their errors say more than pydantic's, and
    count paths from the document.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    readers: ClassVar[Readers] = {}

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Return the request that a JSON-like object describes.

        Raises `RequestError` if it breaks a rule, and what the readers of its documents raise.
        """
        if not isinstance(data, dict):
            names = ", ".join(f'"{name}": ...' for name in cls.model_fields)
            raise RequestError(f"the body must be an object: {{{names}}}")
        lone = str(data.get("format", "")).removeprefix("optpipe/").removesuffix("/v1")
        if lone in cls.readers and lone not in data:
            raise RequestError(f'the {lone} stands alone; wrap it: {{"{lone}": {{...}}}}')
        documents = {
            name: _read_at(name, read, data[name])
            for name, read in cls.readers.items()
            if name in data
        }
        try:
            return cls.model_validate({**data, **documents})
        except ValidationError as error:
            raise RequestError(explain(error, cls)).at(*places(error)) from None


def _read_at(name: str, read: Callable[[Any], Any], value: Any) -> Any:
    try:
        return read(value)
    except InputError as error:
        raise error.inside(pointer(name)) from None


WorkLimitUnits = Annotated[
    float | None,
    Field(
        gt=0,
        allow_inf_nan=False,
        strict=True,
        description="Units of work, about a second of one core each, counted in iterations: the "
        "same result on every machine, unless the time limit cuts it short.",
    ),
]


class SearchOptions(StrictBody):
    """What every search takes; what is left out takes the service's default."""

    time_limit_s: float | None = Field(default=None, gt=0, allow_inf_nan=False, strict=True)
    threads: int = Field(default=1, ge=1, strict=True)
    seed: int = Field(default=0, ge=0, le=2**31 - 1, strict=True)

    def checked_time_limit_s(self, settings: Settings, default_s: float) -> float:
        """Return the time limit; the default where it is left out, as far as that is allowed.

        Raises `InputError` if time limit or threads go beyond what this service allows.
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
                ).at(f"/options/{name}")
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
    work_limit: WorkLimitUnits = None
    cache: CacheUse = Field(
        default="use",
        description="`use` answers at once what was solved before; `refresh` solves it again.",
    )

    def within(self, settings: Settings, methods: Collection[str]) -> JobOptions:
        """Return the options, defaults filled in; ``methods`` are those that exist.

        Raises `InputError` if they go beyond what this service allows, or the method is not one of
        these.
        """
        if self.method not in methods:
            raise InputError(
                f"options.method = {self.method!r}: must be one of {', '.join(methods)}; choose "
                "one (GET /v1/methods describes them)"
            ).at("/options/method")
        return JobOptions(
            time_limit_s=self.checked_time_limit_s(settings, settings.default_time_limit_s),
            work_limit=self.work_limit,
            threads=self.threads,
            seed=self.seed,
            gap=self.gap,
            method=self.method,
            cache=self.cache,
        )


_OF_PLANS = "a problem is cut and placed already, only a model is planned"
_OF_SOLVES = "a model is planned by one method, as well as time or work allow"
_NOT_OF: dict[JobKind, dict[str, str]] = {
    JobKind.SOLVE: dict.fromkeys(("chunks", "placements"), _OF_PLANS),
    JobKind.PLAN: dict.fromkeys(("method", "gap", "robust", "jitter", "stragglers"), _OF_SOLVES),
}


class SubmissionOptions(OptionsBody):
    """How to solve a problem, or how to plan a model; the last two fields are of plans alone."""

    objective: Objective | None = Field(
        default=None, description="Instead of the one that the problem or the model names."
    )
    robust: str | None = Field(
        default=None,
        pattern=r"^P[1-9][0-9]?(\.[0-9]{1,3})?$",
        description="Of a solve: by which percentile of the objective under noise, as `P90`, what "
        "is found is ranked, instead of the objective. Bound and gap stay those without noise.",
    )
    jitter: float = Field(
        default=DEFAULT_NOISE,
        ge=0,
        lt=1,
        strict=True,
        description="With `robust`: by which share every action's time varies, up and down.",
    )
    stragglers: float = Field(
        default=DEFAULT_NOISE,
        ge=0,
        lt=1,
        strict=True,
        description="With `robust`: by which share the times of all that a device computes vary "
        "together.",
    )
    chunks: tuple[Annotated[int, Field(ge=1, le=8, strict=True)], ...] | None = Field(
        default=None,
        min_length=1,
        max_length=8,
        description="Of a plan: numbers of stages per device that are tried; 1, 2, 4 by default.",
    )
    placements: tuple[PlacementName, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=4,
        description="Of a plan: kinds of placement that are tried; all by default.",
    )

    def within(
        self, settings: Settings, methods: Collection[str], kind: JobKind = JobKind.SOLVE
    ) -> JobOptions:
        """Return the options of a job of this kind; see `OptionsBody.within`.

        Raises `InputError` also for an option that a job of this kind does not have.
        """
        others = _NOT_OF[kind]
        foreign = sorted(name for name in self.model_fields_set if name in others)
        if foreign:
            message = f"options.{foreign[0]}: {others[foreign[0]]}; leave it out"
            raise InputError(message).at(f"/options/{foreign[0]}")
        noise = sorted(self.model_fields_set & {"jitter", "stragglers"})
        if noise and self.robust is None:
            message = f"options.{noise[0]}: is noise, for robust; add robust, or leave it out"
            raise InputError(message).at(f"/options/{noise[0]}")
        return replace(
            super().within(settings, methods),
            robust=self.robust,
            jitter=self.jitter,
            stragglers=self.stragglers,
            chunks=self.chunks,
            placements=self.placements,
        )


class WithProblem(StrictBody):
    """A request about a problem."""

    readers: ClassVar[Readers] = {"problem": Problem.parse}

    problem: Problem


class Submission(StrictBody):
    """A problem to solve, or a model to plan: to cut, to place and to schedule."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"problem": PROBLEM_EXAMPLE, "options": {"time_limit_s": 10}}],
            "oneOf": [{"required": ["problem"]}, {"required": ["model"]}],
        }
    )

    problem: Problem | SkipJsonSchema[None] = Field(default=None, json_schema_extra=no_default)
    model: Model | SkipJsonSchema[None] = Field(default=None, json_schema_extra=no_default)
    options: SubmissionOptions = SubmissionOptions()
    tags: Tags = ()
    priority: Priority = 0

    readers: ClassVar[Readers] = {"problem": Problem.parse, "model": Model.parse}

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Return the submission; its problem or model has the objective that its options name."""
        return super().parse(_with_objective(data))

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if self.problem is None and self.model is None:
            raise rule_broken("problem: is missing", "give it, or a model to plan")
        if self.problem is not None and self.model is not None:
            raise rule_broken("a problem and a model are two jobs", "submit one after the other")
        return self

    @property
    def kind(self) -> JobKind:
        return JobKind.SOLVE if self.model is None else JobKind.PLAN


class Resumption(StrictBody):
    """More time for a job that has ended."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"time_limit_s": 60}]})

    time_limit_s: float = Field(
        gt=0, allow_inf_nan=False, strict=True, description="Seconds on top of those it had."
    )


def _with_objective(data: Any) -> Any:
    """Return a submission whose problem or model names the objective that its options ask for."""
    if not isinstance(data, dict) or not isinstance(data.get("options"), dict):
        return data
    objective = data["options"].get("objective")
    changed = {
        name: {**data[name], "objective": objective}
        for name in ("problem", "model")
        if objective in _OBJECTIVES and isinstance(data.get(name), dict)
    }
    return {**data, **changed}


class Health(BaseModel):
    """The process answers."""

    status: str = "ok"


class Readiness(BaseModel):
    """The store answers and the engine solves."""

    status: str = "ready"
    jobs: dict[JobState, int]


class Fault(BaseModel):
    """A problem detail (RFC 9457). ``code`` is stable, ``errors`` holds one line per fault.

    ``pointers`` says where each of them is in the body (RFC 6901; empty = all of it), or, of a
    parameter, in the request: `/query/limit`, `/path/name`, `/header/name`.
    """

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
                    "pointers": ["/problem/stages/0/forward_ms"],
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
    pointers: list[str] | None = None
    needs: dict[str, int] | None = None
    id: str | None = Field(default=None, description="Names the entry in the server's log.")


# --- What training runs send: registrations and reports.

_REPORT_EXAMPLE: dict[str, Any] = {
    "version": 1,
    "step": 400,
    "step_ms": 127.9,
    "actions": {
        "source": "training, 8 sampled steps up to step 400",
        "samples": [
            {"stage": 0, "action": "F", "time_ms": 10.2},
            {"stage": 0, "action": "B", "time_ms": 18.4},
        ],
    },
}


class Registration(WithProblem):
    """A training run that wants to follow the newest schedule of its problem."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"problem": PROBLEM_EXAMPLE, "options": {"time_limit_s": 10}, "threshold": 0.02}
            ]
        }
    )

    name: str = Field(default="", max_length=200, description="For people; else the problem's.")
    options: OptionsBody = Field(default=OptionsBody(), description="Of every solve.")
    threshold: float = Field(
        default=0.01,
        ge=0,
        lt=1,
        strict=True,
        description="A new version is published only where it gains at least this share of the "
        "step, and solved for only where drift costs more.",
    )


class ReportBody(StrictBody):
    """What a training run measured: the value of `ActionTimer.measurements`, and the step's time.

    Only times count, those of copies and messages among them; sizes stay as registered.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [_REPORT_EXAMPLE]})

    version: Count = Field(description="Of the schedule that ran.")
    step: Index | None = Field(default=None, description="When it was measured.")
    step_ms: Milliseconds | None = Field(default=None, description="From start to end of a step.")
    actions: Measurements


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
