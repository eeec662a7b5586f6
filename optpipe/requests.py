"""Every request, once: what a caller may ask for, with units, ranges and defaults.

Command-line options, HTTP bodies, the client's arguments, OpenAPI and the reference of options are
made from these models. A new option is a field here and the code that uses it.

* The command line makes an option of each field (`Option`, `optpipe.cli.options`).
* The service parses a body with `Request.parse`; `optpipe_api` adds its own limits.
* The client checks its keyword arguments by sending them.

`optpipe.answers` holds what the service answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from optpipe.errors import (
    FieldError,
    FieldRef,
    InputError,
    ProblemError,
    RequestError,
    explain,
    places,
    pointer,
    rule_broken,
)
from optpipe.measurements import Measurements
from optpipe.model import Model
from optpipe.presets import (
    Hardware,
    Training,
    estimate,
    find_gpus,
    find_model,
    find_model_of,
    read_megatron,
    shape_from_config,
)
from optpipe.presets.shape import (
    RECOMPUTABLE,
    Dispatch,
    Dispatcher,
    GradientType,
    Optimizer,
    OptimizerName,
    Precision,
    StateType,
)
from optpipe.problem import Count, Index, Milliseconds, Objective, Problem
from optpipe.schedule import OPTIMAL_GAP
from optpipe.stage import MOST_COSTS
from optpipe.sweep import AXES

if TYPE_CHECKING:
    from optpipe.presets import Estimate, ModelShape
    from optpipe.presets.accelerators import Accelerators

__all__ = [
    "DEFAULT_NOISE",
    "CacheUse",
    "CompareOptions",
    "CompareRequest",
    "CurrentRun",
    "DeployRequest",
    "EstimateRequest",
    "FixedDegrees",
    "Framework",
    "JobKind",
    "ModelOnGpus",
    "Option",
    "PlacementKind",
    "PlanOptions",
    "ProfileRequest",
    "ReportRequest",
    "Request",
    "ResumeRequest",
    "SearchOptions",
    "SolveOptions",
    "SolveRequest",
    "SubmitOptions",
    "SweepRequest",
    "Tag",
    "TuneOptions",
    "TuneRequest",
    "VariantRequest",
    "WorkloadFacts",
]


DEFAULT_NOISE = 0.1
"""Share by which durations vary up and down under noise, unless the request gives another."""

CacheUse = Literal["use", "refresh"]
"""Whether a job may be answered by an earlier result; "refresh" solves again."""

Framework = Literal["any", "megatron", "torchtitan"]
PlacementKind = Literal["linear", "loop", "v", "free"]


class JobKind(StrEnum):
    """What a job does.

    It solves a problem; plans a model (cut, placement and schedule); compares methods on a problem;
    or tunes a whole training configuration. The schedule of a tune is the winner's, its objective
    the whole step. A comparison has rows instead of a schedule.
    """

    SOLVE = "solve"
    PLAN = "plan"
    COMPARE = "compare"
    TUNE = "tune"


# --- What all requests have in common.


@dataclass(frozen=True, kw_only=True)
class Option:
    """How the command line writes a field, where that does not follow from the field.

    Parameters
    ----------
    flag
        Such as ``--time-limit``; by default the field's name.
    metavar
        What stands for the value in the help: its unit, or N, X, NAME, FILE.
    scale
        Multiplies the number on the command line, where its unit is not the field's.
    repeated
        Whether the option is given once for each value of a list, instead of values with commas.
    """

    flag: str = ""
    metavar: str = ""
    scale: float = 1
    repeated: bool = False


Readers = Mapping[str, Callable[[Any], Any]]


def no_default(schema: dict[str, Any]) -> None:
    """Leave null out of a published schema: the field may be left out, and may not be null."""
    schema.pop("default", None)


class Request(BaseModel):
    """A request, or a part of one; unknown fields are refused by name.

    ``readers`` read those fields that are documents. Their errors say more than pydantic's, and
    their paths begin at the document.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    readers: ClassVar[Readers] = {}

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Return the request that a JSON-like object describes.

        Raises `RequestError` if it breaks a rule, and the errors of the readers of its documents.
        """
        if not isinstance(data, dict):
            names = ", ".join(f'"{name}": ...' for name in cls.model_fields)
            raise RequestError(f"the body must be an object: {{{names}}}")
        lone = str(data.get("format", "")).removeprefix("optpipe/").removesuffix("/v1")
        if lone in cls.readers and lone not in data:
            raise RequestError(f'the {lone} is not wrapped; wrap it: {{"{lone}": {{...}}}}')
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


Degree = Annotated[int, Field(ge=1, le=4096, strict=True)]
Size = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]
Many = Annotated[int, Field(ge=1, le=2**17, strict=True)]
Zero = Literal[0, 1, 2, 3]
Chunks = Annotated[int, Field(ge=1, le=64, strict=True)]
Layers = Annotated[int, Field(ge=1, le=1024, strict=True)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
Seconds = Annotated[float, Field(gt=0, lt=1e6, allow_inf_nan=False, strict=True)]
Noise = Annotated[float, Field(ge=0, lt=1, strict=True)]
Gap = Annotated[float, Field(ge=0, lt=1, strict=True)]
Switch = Annotated[bool, Field(strict=True)]
ShortName = Annotated[str, Field(max_length=80)]
Modules = Annotated[frozenset[ShortName], Field(max_length=16)]
Tag = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/=+-]{1,64}$")]
Tags = Annotated[
    tuple[Tag, ...],
    Field(max_length=16, description="Labels to find the job by: `?tag=`."),
    AfterValidator(lambda tags: tuple(sorted(set(tags)))),
    Option(flag="--tag", metavar="TAG", repeated=True),
]
Priority = Annotated[
    int,
    Field(
        ge=-100,
        le=100,
        strict=True,
        description="Of one owner's jobs, higher priorities are taken first. Owners take turns, "
        "except for priorities above 10, which only admins may give.",
    ),
    Option(metavar="N"),
]
_DEGREE = Option(metavar="N")


def _check_percentile(text: str) -> str:
    if not re.fullmatch(_PERCENTILE, text):
        raise rule_broken("must be a percentile from P1 to P99.999", "write P90")
    return text


_PERCENTILE = r"^P[1-9][0-9]?(\.[0-9]{1,3})?$"
Percentile = Annotated[
    str,
    AfterValidator(_check_percentile),
    WithJsonSchema({"type": "string", "pattern": _PERCENTILE}),
]

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


# --- How to search: the options of every job.


class SearchOptions(Request):
    """Options of every search."""

    time_limit_s: Annotated[Positive | None, Option(flag="--time-limit", metavar="S")] = Field(
        default=None, description="Seconds to search."
    )
    threads: Annotated[int, Field(ge=1, strict=True), Option(metavar="N")] = Field(
        default=1, description="Threads; from 2 on, search and proofs run side by side."
    )
    seed: Annotated[int, Field(ge=0, le=2**31 - 1, strict=True), Option(metavar="N")] = Field(
        default=0, description="Seed of all random numbers."
    )


WorkLimit = Annotated[Positive | None, Option(metavar="N")]
_WORK_LIMIT = (
    "Units of work, about a second of one core each, counted in iterations. The result is then the "
    "same on every machine, unless the time limit ends the search first."
)
Cache = Annotated[CacheUse, Option(metavar="use|refresh")]
_CACHE = "`use` may answer with an earlier result; `refresh` solves again."


class SolveOptions(SearchOptions):
    """How to solve a problem."""

    method: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.+-]{1,60}$"), Option(metavar="NAME")] = (
        Field(
            default="auto",
            description="auto optimises; or milp, or a published method as `optpipe compare` and "
            "`/v1/methods` name it.",
        )
    )
    gap: Annotated[Gap, Option(metavar="X")] = Field(
        default=OPTIMAL_GAP,
        description="Stop where (objective - bound) / objective is at most this, e.g. 0.01.",
    )
    work_limit: WorkLimit = Field(default=None, description=_WORK_LIMIT)
    cache: Cache = Field(default="use", description=_CACHE)


class PlanOptions(SearchOptions):
    """How to plan a model: cut, placement and schedule."""

    work_limit: WorkLimit = Field(default=None, description=_WORK_LIMIT)
    chunks: (
        Annotated[
            tuple[Annotated[int, Field(ge=1, le=8, strict=True)], ...],
            Field(min_length=1, max_length=8),
        ]
        | None
    ) = Field(
        default=None, description="Numbers of stages per device to try, each 1-8; default 1,2,4."
    )
    placements: Annotated[tuple[PlacementKind, ...], Field(min_length=1, max_length=4)] | None = (
        Field(
            default=None,
            description="Placements to try: linear, loop, v, and free (other orders of the "
            "devices); default all.",
        )
    )


_NOT_OF: dict[JobKind, dict[str, str]] = {
    JobKind.SOLVE: dict.fromkeys(
        ("chunks", "placements"), "a problem is already cut and placed; only a model is planned"
    ),
    JobKind.PLAN: dict.fromkeys(
        ("method", "gap", "robust", "jitter", "stragglers"),
        "a model is planned by one method, until its time or work limit",
    ),
}


class SubmitOptions(SolveOptions, PlanOptions):
    """How to solve a problem, or how to plan a model; chunks and placements are of plans."""

    objective: Objective | None = Field(
        default=None,
        description="Objective to minimise, instead of the one that the problem or model names.",
    )
    robust: Annotated[Percentile, Option(metavar="P90")] | None = Field(
        default=None,
        description="Rank schedules by this percentile of the objective under noise, as P90. Bound "
        "and gap stay those without noise.",
    )
    jitter: Annotated[Noise, Option(metavar="X")] = Field(
        default=DEFAULT_NOISE,
        description="With robust: share by which the duration of every action varies.",
    )
    stragglers: Annotated[Noise, Option(metavar="X")] = Field(
        default=DEFAULT_NOISE,
        description="With robust: share by which all compute times of a device vary together.",
    )

    @model_validator(mode="after")
    def _noise_needs_a_percentile(self) -> Self:
        noise = sorted(self.model_fields_set & {"jitter", "stragglers"})
        if noise and self.robust is None:
            raise FieldError(
                FieldRef(noise[0]),
                ": is noise, which only ",
                FieldRef("robust"),
                " uses; add ",
                FieldRef("robust"),
                " P90, or leave it out",
            )
        return self

    def check_kind(self, kind: JobKind) -> None:
        """Refuse options that a job of a kind does not have. Raises `InputError`."""
        others = _NOT_OF[kind]
        foreign = sorted(name for name in self.model_fields_set if name in others)
        if foreign:
            raise InputError(f"options.{foreign[0]}: {others[foreign[0]]}; leave it out").at(
                f"/options/{foreign[0]}"
            )


class WorkloadFacts(Request):
    """Facts that durations do not tell; tokens/s and MFU are computed from them."""

    tokens_per_microbatch: Annotated[Positive | None, Option(metavar="N")] = Field(
        default=None, description="Tokens of one micro-batch; adds tokens/s."
    )
    flops_per_microbatch: Annotated[
        Positive | None, Option(flag="--tflop-per-microbatch", metavar="TFLOP", scale=1e12)
    ] = Field(
        default=None,
        description="Model FLOPs of one micro-batch, forward and backward, without recomputation; "
        "with the peak rate adds MFU.",
    )
    peak_flops_per_s: Annotated[
        Positive | None, Option(flag="--peak-tflops", metavar="TFLOP/s", scale=1e12)
    ] = Field(default=None, description="Peak rate, the sum over all devices.")

    @model_validator(mode="after")
    def _mfu_takes_both(self) -> Self:
        if (self.flops_per_microbatch is None) != (self.peak_flops_per_s is None):
            raise FieldError(
                FieldRef("flops_per_microbatch"),
                " and ",
                FieldRef("peak_flops_per_s"),
                " make MFU only together; give both or none",
            )
        return self


class CompareOptions(SearchOptions):
    """How to compare methods; the time limit is the optimiser's, by default 20 s."""

    workload: WorkloadFacts = WorkloadFacts()


class TuneOptions(SearchOptions):
    """How to tune; the time limit is 120 s by default."""

    gap: Annotated[Gap, Option(metavar="X")] = Field(
        default=0.002,
        description="Stop where no configuration is faster than the best by more than this share.",
    )
    work_limit: WorkLimit = Field(default=None, description=_WORK_LIMIT)
    cache: Cache = Field(default="use", description=_CACHE)


# --- Jobs: solve, plan, compare.


class SolveRequest(Request):
    """A problem to solve, or a model to plan: to cut, to place and to schedule."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"problem": PROBLEM_EXAMPLE, "options": {"time_limit_s": 10}}],
            "oneOf": [{"required": ["problem"]}, {"required": ["model"]}],
        }
    )

    problem: Problem | SkipJsonSchema[None] = Field(default=None, json_schema_extra=no_default)
    model: Model | SkipJsonSchema[None] = Field(default=None, json_schema_extra=no_default)
    options: SubmitOptions = SubmitOptions()
    tags: Tags = ()
    priority: Priority = 0

    readers: ClassVar[Readers] = {"problem": Problem.parse, "model": Model.parse}

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Return the request; its problem or model has the objective that its options name."""
        if isinstance(data, dict) and isinstance(data.get("options"), dict):
            objective = data["options"].get("objective")
            changed = {
                name: {**data[name], "objective": objective}
                for name in ("problem", "model")
                if objective in get_args(Objective) and isinstance(data.get(name), dict)
            }
            data = {**data, **changed}
        return super().parse(data)

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if self.problem is None and self.model is None:
            raise rule_broken("problem: is missing", "give it, or a model to plan")
        if self.problem is not None and self.model is not None:
            raise rule_broken("a problem and a model are two jobs", "submit one after the other")
        return self

    @property
    def kind(self) -> JobKind:
        """Whether a problem is solved or a model planned."""
        return JobKind.SOLVE if self.model is None else JobKind.PLAN


class CompareRequest(Request):
    """A problem on which to compare every method."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "problem": PROBLEM_EXAMPLE,
                    "options": {
                        "time_limit_s": 1,
                        "workload": {
                            "tokens_per_microbatch": 2048,
                            "flops_per_microbatch": 1e12,
                            "peak_flops_per_s": 1.16e14,
                        },
                    },
                }
            ]
        }
    )

    kind: ClassVar[JobKind] = JobKind.COMPARE
    readers: ClassVar[Readers] = {"problem": Problem.parse}

    problem: Problem
    options: CompareOptions = CompareOptions()
    tags: Tags = ()
    priority: Priority = 0


class ResumeRequest(Request):
    """More time for a job that has ended."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"time_limit_s": 60}]})

    time_limit_s: Annotated[Positive, Option(flag="--time-limit", metavar="S")] = Field(
        description="Seconds to add to those that the job had."
    )


# --- A model on accelerators: what estimates and tunes have in common.


def _not_null(value: Any) -> Any:
    if value is None:
        raise RequestError("model or config = null: is neither; leave it out")
    return value


class ModelOnGpus(Request):
    """A model, accelerators, and the settings of a training that no degree of parallelism is."""

    model: Annotated[ShortName, Option(metavar="NAME")] | SkipJsonSchema[None] = Field(
        default=None,
        json_schema_extra=no_default,
        description="Model of the catalogue (`optpipe estimate --list`, `/v1/presets`).",
    )
    config: Annotated[dict[str, Any], Option(metavar="FILE")] | SkipJsonSchema[None] = Field(
        default=None,
        json_schema_extra=no_default,
        description="Instead of model: a Hugging Face config.json.",
    )
    name: ShortName = Field(default="", description="Name of the config's model, for people.")
    gpu: Annotated[ShortName, Option(metavar="NAME[:N]", repeated=True)] = Field(
        description="Accelerator of the catalogue, and how many (h100:64). With several kinds "
        "(h100:32,a100:32) each is a part of the pipeline."
    )
    sequence: Annotated[Size, _DEGREE] = Field(default=4096, description="Tokens per sequence.")
    precision: Annotated[Precision, Option(metavar="NAME")] = Field(
        default="bf16",
        description=f"Precision of the layers' matrix products: {', '.join(get_args(Precision))}.",
    )
    flash: Switch = Field(
        default=True, description="Flash attention; without it, scores are stored."
    )
    cuda_graphs: Switch = Field(
        default=False, description="CUDA graphs: kernel launches cost the host nothing."
    )
    ep_overlap: Switch = Field(
        default=False,
        description="The all-to-all of experts runs while other micro-batches compute.",
    )
    dispatcher: Annotated[Dispatcher, Option(metavar="NAME")] = Field(
        default="alltoall",
        description="alltoall sends a copy of a token per expert; deduplicated sends one per rank "
        "(DeepEP, HybridEP).",
    )
    dispatch: Dispatch = Field(
        default="bf16", description="Precision of tokens on the way to their experts."
    )
    overlap: Switch = Field(
        default=True, description="Collectives run next to compute where they can."
    )
    optimizer: OptimizerName = Field(
        default="adam", description="Optimizer: adam (two moments) or sgd (momentum)."
    )
    precision_aware_optimizer: Switch = Field(
        default=False,
        description="Adam's moments may be narrower than fp32, and master weights take 2 bytes "
        "(Megatron-Core's flag of this name).",
    )
    exp_avg_dtype: StateType = Field(
        default="fp32",
        description="Type of Adam's first moment; fp8, bf16 and fp16 need the "
        "precision-aware optimizer.",
    )
    exp_avg_sq_dtype: StateType = Field(default="fp32", description="Type of Adam's second moment.")
    gradient_dtype: GradientType = Field(
        default="fp32", description="Type in which gradients are accumulated and reduced."
    )
    optimizer_offload: Annotated[float, Field(ge=0, le=1, strict=True), Option(metavar="X")] = (
        Field(
            default=0.0,
            description="Share (0-1) of the optimizer's states and step on the CPU "
            "(Megatron-Core's optimizer_offload_fraction).",
        )
    )
    network: Annotated[ShortName, Option(metavar="KIND[:GBIT]")] | None = Field(
        default=None,
        description="Network between nodes: infiniband, ethernet or tcp, and Gbit/s per GPU.",
    )
    oversubscription: Annotated[float, Field(ge=1, le=64, strict=True), Option(metavar="X")] = (
        Field(default=1.0, description="Divides the bandwidth between nodes.")
    )
    memory_bytes: Annotated[
        Annotated[int, Field(ge=1, le=10**15, strict=True)] | None,
        Option(flag="--memory-gb", metavar="GB", scale=1e9),
    ] = Field(default=None, description="Memory per device, instead of all that it has.")
    measured_step_s: Annotated[Seconds | None, Option(metavar="S")] = Field(
        default=None, description="Measured seconds of a step; calibrates every duration."
    )

    readers: ClassVar[Readers] = {"model": _not_null, "config": _not_null}

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        has_script = getattr(self, "current_file", None) is not None
        if (self.model is None) == (self.config is None) and not (has_script and not self.model):
            raise FieldError(
                "give either ",
                FieldRef("model"),
                " or ",
                FieldRef("config"),
                ": a model of the catalogue, or its config.json",
            )
        return self

    @cached_property
    def shape(self) -> ModelShape:
        """The model's sizes. Raises `InputError` if it is unknown, or its config is not read."""
        if self.model is not None:
            return find_model(self.model)
        try:
            return shape_from_config(json.dumps(self.config), self.name or "config")
        except InputError as error:
            raise error.inside("/config") from None

    @property
    def optimizer_settings(self) -> Optimizer:
        """The optimizer and what it stores; raises `FieldError` if its settings conflict."""
        return Optimizer(
            name=self.optimizer,
            precision_aware=self.precision_aware_optimizer,
            exp_avg=self.exp_avg_dtype,
            exp_avg_sq=self.exp_avg_sq_dtype,
            gradients=self.gradient_dtype,
            offload=self.optimizer_offload,
        )

    @cached_property
    def gpus(self) -> list[Accelerators]:
        """Each kind of accelerator and how many there are, on the network that was given."""
        return find_gpus(self.gpu.split(","), self.network, self.oversubscription)


_TRAINING = set(Training.__dataclass_fields__)
_GIVEN_BY_LENGTHS = ("sequence", "micro_batch", "num_microbatches")
_VALUES = (
    f"Axis -> its value: {', '.join(AXES)}, or the path of a field; as the axes of `/v1/batches`."
)
Values = Annotated[dict[Annotated[str, Field(max_length=200)], Any], Field(max_length=16)]


class EstimateRequest(ModelOnGpus):
    """A model on accelerators with degrees of parallelism, and values to vary the problem by."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "llama3-8b",
                    "gpu": "h100",
                    "pp": 4,
                    "num_microbatches": 16,
                    "values": {"memory_scale": 0.5},
                }
            ],
            "oneOf": [{"required": ["model"]}, {"required": ["config"]}],
        }
    )

    pp: Annotated[Degree, _DEGREE] = Field(default=4, description="Devices of the pipeline.")
    tp: Annotated[Degree, _DEGREE] = Field(default=1, description="Tensor-parallel degree.")
    cp: Annotated[Degree, _DEGREE] = Field(default=1, description="Context-parallel degree.")
    ep: Annotated[Degree, _DEGREE] = Field(
        default=1, description="Expert-parallel degree; ep x etp divides tp x cp x dp."
    )
    etp: Annotated[Degree, _DEGREE] = Field(
        default=1, description="Tensor-parallel degree of the experts."
    )
    dp: Annotated[Degree | None, _DEGREE] = Field(
        default=None,
        description="Data-parallel degree; by default 1, or what the number of GPUs leaves.",
    )
    micro_batch: Annotated[Size, _DEGREE] = Field(
        default=1, description="Sequences per micro-batch."
    )
    num_microbatches: Annotated[Size, Option(flag="--microbatches", metavar="N")] = Field(
        default=16, description="Micro-batches per step."
    )
    chunks: Annotated[Chunks, _DEGREE] = Field(default=1, description="Stages per device.")
    placement: Annotated[Literal["linear", "loop", "v"] | None, Option(metavar="NAME")] = Field(
        default=None, description="linear, loop or v; by default linear, with several chunks loop."
    )
    layout: Literal["balanced", "even"] = Field(
        default="balanced",
        description="balanced: the slowest stage is as fast as possible; even: as frameworks cut.",
    )
    zero: Zero = Field(
        default=1,
        description="What is sharded over dp: 0 nothing, 1 optimizer states, 2 gradients too, 3 "
        "weights too (FSDP).",
    )
    sequence_parallel: Switch = Field(
        default=True, description="Tensor parallelism also splits norms and the residual stream."
    )
    lean: Switch = Field(
        default=False,
        description="Outputs of norms and activation functions are recomputed in I.",
    )
    recompute: Annotated[Modules, Option(metavar="LIST")] = Field(
        default=frozenset(),
        description=f"Modules that the backward recomputes, of {', '.join(RECOMPUTABLE)}.",
    )
    offloaded_layers: Annotated[int, Field(ge=0, le=4096, strict=True), _DEGREE] = Field(
        default=0, description="Layers whose activations stay in host memory."
    )
    time_factor: Annotated[Seconds | None, Option(metavar="X")] = Field(
        default=None, description="Multiplies every duration: the factor of another configuration."
    )
    mfu: Annotated[Share | None, Option(metavar="X")] = Field(
        default=None, description="Share (0-1) of peak FLOP/s that F, I and W reach together."
    )
    pcie_efficiency: Annotated[Share | None, Option(metavar="X")] = Field(
        default=None, description="Share (0-1) of the PCIe bandwidth that copies reach."
    )
    modes: Annotated[int, Field(ge=0, le=64, strict=True), _DEGREE] = Field(
        default=0,
        description="Maximum number of modes per stage, e.g. 8; 0: keep, offload and recompute "
        "whole micro-batches.",
    )
    pairs: Switch = Field(
        default=False,
        description="Forwards and backwards may run together; the experts' exchange is hidden.",
    )
    slices: Annotated[int, Field(ge=1, le=256, strict=True), _DEGREE] = Field(
        default=1, description="Slices of each sequence, each a micro-batch of the problem."
    )
    lengths: Annotated[list[Annotated[list[Size], Field(min_length=1)]], Option(metavar="FILE")] = (
        Field(
            default=[],
            description="Unequal micro-batches: for each one, the lengths in tokens of the "
            "sequences packed into it.",
        )
    )
    costs: Annotated[int, Field(ge=1, le=MOST_COSTS, strict=True), _DEGREE] = Field(
        default=8, description="With lengths: maximum number of kinds of micro-batches, rounded up."
    )
    values: Values = Field(default={}, description=_VALUES)

    @model_validator(mode="after")
    def _lengths_replace_sizes(self) -> Self:
        also = [name for name in _GIVEN_BY_LENGTHS if name in self.model_fields_set]
        if self.lengths and also:
            raise FieldError(
                FieldRef(also[0]),
                " and ",
                FieldRef("lengths"),
                ": the lengths give it; leave one of them out",
            )
        if "costs" in self.model_fields_set and not self.lengths:
            raise FieldError(
                FieldRef("costs"), ": groups lengths; add ", FieldRef("lengths"), " FILE"
            )
        return self

    def estimate(self) -> Estimate:
        """Return the estimate that is asked for; raises as `optpipe.presets.estimate`."""
        of_replica = self.tp * self.cp * self.pp
        given = self.model_dump(include=_TRAINING - {"dp", "slices", "lengths", "optimizer"})
        optimizer = self.optimizer_settings
        training = Training(**given, dp=self._dp(of_replica), optimizer=optimizer)
        return estimate(
            self.shape,
            self._pipeline_ranks(training.ranks),
            training,
            pp=self.pp,
            num_microbatches=len(self.lengths) or self.num_microbatches,
            chunks=self.chunks,
            placement=self.placement or ("linear" if self.chunks == 1 else "loop"),
            layout=self.layout,
            pcie_efficiency=self.pcie_efficiency,
            mfu=self.mfu,
            time_factor=self.time_factor,
            measured_step_s=self.measured_step_s,
            memory_bytes=self.memory_bytes,
            modes=self.modes,
            pairs=self.pairs,
            slices=self.slices,
            lengths=self.lengths,
            costs=self.costs,
        )

    def _dp(self, of_replica: int) -> int:
        counts = [kind.number for kind in self.gpus if kind.number is not None]
        if not counts:
            return self.dp or 1
        total = sum(counts)
        if self.dp is None and total % of_replica == 0:
            return total // of_replica
        if self.dp is None or self.dp * of_replica != total:
            replicas = f" x dp = {self.dp} replicas" if self.dp else ", nor a multiple"
            raise FieldError(
                f"{total} GPUs are not tp x cp x pp = {of_replica}{replicas}; change ",
                FieldRef("gpu"),
                " or the degrees",
            )
        return self.dp

    def _pipeline_ranks(self, of_stage: int) -> Hardware | list[Hardware]:
        """Return the accelerator; with several kinds, the one of each pipeline rank."""
        if len(self.gpus) == 1:
            return self.gpus[0].hardware
        ranks: list[Hardware] = []
        for kind in self.gpus:
            count = kind.number or 0
            if count % of_stage:
                raise FieldError(
                    FieldRef("gpu", f"{kind.hardware.name}:{count}"),
                    f": is no multiple of the {of_stage} GPUs that share a stage (tp x cp x dp), "
                    "so a stage would be on two kinds; change it",
                )
            ranks += [kind.hardware] * (count // of_stage)
        return ranks


class VariantRequest(Request):
    """A problem, and one value on each axis that changes."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"problem": PROBLEM_EXAMPLE, "values": {"memory_scale": 0.75}}]
        }
    )

    readers: ClassVar[Readers] = {"problem": Problem.parse}

    problem: Problem
    values: Values = Field(default={}, description=_VALUES)


# --- Tune.


class FixedDegrees(Request):
    """Degrees that are fixed instead of searched."""

    tp: Degree | None = None
    cp: Degree | None = None
    ep: Degree | None = None
    etp: Degree | None = None
    dp: Many | None = None
    pp: Degree | None = None
    chunks: Chunks | None = None
    micro_batch: Many | None = None
    zero: Zero | None = None
    pairs: Literal[0, 1] | None = None
    slices: Literal[1, 2, 4, 8, 16] | None = None


class CurrentRun(Request):
    """What is run today: 1F1B, or interleaved 1F1B with several chunks."""

    tp: Degree = 1
    cp: Degree = 1
    dp: Many | None = Field(default=None, description="By default what the number of GPUs leaves.")
    ep: Degree = 1
    etp: Degree = 1
    pp: Degree = 1
    chunks: Chunks = 1
    micro_batch: Many = 1
    zero: Zero = 1
    recompute: Modules = frozenset()
    layers: Annotated[tuple[Layers, ...], Field(min_length=1, max_length=512)] | None = Field(
        default=None,
        description="Layers of each stage in model order, embedding and head counted; by default "
        "cut evenly.",
    )


_OF_SCRIPTS = (
    *("sequence", "precision", "flash", "cuda_graphs", "ep_overlap", "dispatcher", "overlap"),
)


class TuneRequest(ModelOnGpus):
    """A model, GPUs and a batch: which configuration trains it fastest."""

    kind: ClassVar[JobKind] = JobKind.TUNE

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "llama3-8b",
                    "gpu": "h100",
                    "num_gpus": 8,
                    "global_batch": 16,
                    "framework": "megatron",
                    "current": {"tp": 2, "pp": 4},
                    "fixed": {"tp": 4, "pp": 2, "chunks": 1, "micro_batch": 1},
                    "options": {"time_limit_s": 10},
                }
            ],
            "oneOf": [{"required": ["model"]}, {"required": ["config"]}],
        }
    )

    num_gpus: Annotated[Many | None, Option(flag="--gpus", metavar="N")] = Field(
        default=None, description="Number of GPUs; by default the sum of those in gpu, or 8."
    )
    global_batch: Annotated[int, Field(ge=1, le=2**20, strict=True), _DEGREE] = Field(
        default=128, description="Sequences of a step, over all replicas."
    )
    framework: Annotated[Framework, Option(metavar="NAME")] = Field(
        default="any",
        description="Whose schedules may be the answer: megatron, torchtitan, or any (those of our "
        "runtime).",
    )
    current: Annotated[CurrentRun, Option(metavar="FILE|FLAGS")] | None = Field(
        default=None,
        description="What you run today, e.g. tp=4,pp=8,chunks=5,micro_batch=1. The gain is over "
        "it.",
    )
    current_file: (
        Annotated[str, Field(min_length=1, max_length=100_000), Option(flag="--current")] | None
    ) = Field(
        default=None,
        description="Instead of current: Megatron arguments or YAML, or a torchtitan config, as "
        "text.",
    )
    current_format: Literal["megatron", "torchtitan"] | None = Field(
        default=None,
        description="Framework of current_file; by default it follows from framework and text.",
    )
    fixed: Annotated[FixedDegrees, Option(flag="--fix", metavar="NAME=N", repeated=True)] = Field(
        default=FixedDegrees(), description="Degrees that are not searched."
    )
    headroom: Annotated[
        float, Field(ge=0, lt=1, allow_inf_nan=False, strict=True), Option(metavar="X")
    ] = Field(
        default=0.05,
        description="Share (0-1) of the memory that answers leave free: bytes are estimates too.",
    )
    options: TuneOptions = TuneOptions()
    tags: Tags = ()
    priority: Priority = 0

    @model_validator(mode="after")
    def _today_is_consistent(self) -> Self:
        if self.current is not None and self.current_file is not None:
            raise rule_broken("current and current_file say the same", "give one of them")
        if self.measured_step_s is not None and self.current is None and self.current_file is None:
            raise FieldError(
                FieldRef("measured_step_s"),
                " is the duration of a step of ",
                FieldRef("current"),
                "; give both or none",
            )
        in_gpu = sum(kind.number or 0 for kind in self.gpus)
        if in_gpu and self.num_gpus not in (None, in_gpu):
            raise FieldError(
                FieldRef("num_gpus", self.num_gpus),
                ": ",
                FieldRef("gpu"),
                f" has {in_gpu} GPUs; give one of them",
            )
        return self

    def complete(self) -> Self:
        """Return the request with what its script says and the caller did not give.

        From a text for Megatron these are model, batch, sequence, precision, optimizer and the
        switches. Raises `InputError` if the text does not say which model it trains.
        """
        text = self.current_file
        is_titan = "torchtitan" in (self.current_format, self.framework)
        if text is None or is_titan or "parallelism." in text:
            return self
        request = self
        try:
            if self.model is None and self.config is None:
                model, config = find_model_of(text)
                request = self.model_copy(update={"model": model, "config": config})
            today = read_megatron(
                text,
                request.shape,
                self.gpus[0].hardware,
                self.total_gpus,
                global_batch=self.global_batch,
                sequence=self.sequence,
            )
        except InputError as error:
            raise FieldError(FieldRef("current_file"), f": {error}") from None
        training, optimizer = today.training, today.training.optimizer
        script = {
            **{name: getattr(training, name) for name in _OF_SCRIPTS},
            "global_batch": today.global_batch,
            "optimizer": optimizer.name,
            "precision_aware_optimizer": optimizer.precision_aware,
            "exp_avg_dtype": optimizer.exp_avg,
            "exp_avg_sq_dtype": optimizer.exp_avg_sq,
            "gradient_dtype": optimizer.gradients,
            "optimizer_offload": optimizer.offload,
        }
        given = self.model_fields_set
        update = {name: value for name, value in script.items() if name not in given}
        return request.model_copy(update=update)

    @property
    def total_gpus(self) -> int:
        """The number of GPUs, of all kinds together."""
        return self.num_gpus or sum(kind.number or 0 for kind in self.gpus) or 8

    def question(self) -> dict[str, Any]:
        """Return everything that the answer depends on, options excepted, as JSON values."""
        values = self.model_dump(mode="json", exclude={"options", "tags", "priority"})
        values["num_gpus"] = self.total_gpus
        values["fixed"] = self.fixed.model_dump(exclude_none=True)
        if self.current is not None:
            values["current"]["recompute"] = sorted(self.current.recompute)
            if self.current.layers is None:
                del values["current"]["layers"]
        return {name: value for name, value in values.items() if value not in (None, "")}


# --- Profile: measuring stages on this machine. Only the command line has it.


class ProfileRequest(Request):
    """Stages to measure, and how."""

    stages: Annotated[str, Option(metavar="MODULE:FUNCTION")] = Field(
        description="Function that returns (stages, sample) or (stages, sample, loss_fn, target)."
    )
    microbatch: Annotated[Size | None, _DEGREE] = Field(
        default=None, description="Samples per micro-batch, passed to the function."
    )
    num_microbatches: Annotated[
        Annotated[int, Field(ge=1, le=2_000_000, strict=True)] | None, _DEGREE
    ] = Field(default=None, description="Micro-batches of a step; default 4 per device.")
    placement: Annotated[
        tuple[Annotated[int, Field(ge=0, strict=True)], ...] | None, Option(metavar="N,N")
    ] = Field(
        default=None, description="Device of each stage; default one each, or a loop over ranks."
    )
    device: Annotated[str | None, Option(metavar="NAME")] = Field(
        default=None, description="cuda or cpu; default cuda if there is one."
    )
    memory_bytes: Annotated[
        Annotated[int, Field(ge=1, le=2**53, strict=True)] | None, Option(metavar="BYTES")
    ] = Field(default=None, description="Memory of each device; default what it has.")
    state_copies: Annotated[float, Field(ge=0, le=100, strict=True), Option(metavar="X")] = Field(
        default=2.0, description="Optimizer states in copies of the weights; Adam has 2."
    )
    recompute: Switch = Field(
        default=True, description="Schedules may recompute whole micro-batches."
    )
    modes: Annotated[int, Field(ge=0, le=64, strict=True), _DEGREE] = Field(
        default=8,
        description="Maximum number of modes per stage; 0: keep, offload and recompute whole "
        "micro-batches.",
    )
    overlap: Annotated[str | None, Option(metavar="MODULE:FUNCTION")] = Field(
        default=None,
        description="Function that runs pairs, e.g. optpipe.runtime.overlap:interleave; what pairs "
        "hide is then measured.",
    )
    link_latency_ms: Annotated[float | None, Option(metavar="MS")] = Field(
        default=None, description="Latency of links that were not measured."
    )
    link_gb_per_s: Annotated[float | None, Option(metavar="GB/s")] = Field(
        default=None, description="Bandwidth of links that were not measured."
    )
    threads: Annotated[int, Field(ge=1, strict=True), _DEGREE] = Field(
        default=1, description="CPU threads, as a rank will have."
    )
    repeats: Annotated[int, Field(ge=1, strict=True), _DEGREE] = Field(
        default=20, description="Samples per pass."
    )
    warmups: Annotated[int, Field(ge=0, strict=True), _DEGREE] = Field(
        default=5, description="Rounds before the samples."
    )


# --- Sweeps: many problems that are solved together, as a batch.

_JOB_ID = "0f6b7e4a3c1d4e5f8a9b0c1d2e3f4a5b"
_AXES = (
    "Name -> values; every combination is an item, and the last axis varies fastest. Names: "
    f"{', '.join(AXES)}, or the path of a field: devices[*].memory_bytes, stages[3].forward_ms."
)
Axes = Annotated[
    dict[Annotated[str, Field(max_length=200)], Annotated[list[Any], Field(min_length=1)]],
    Field(max_length=8),
]


def _parse_all(listed: Any) -> list[Problem]:
    if not isinstance(listed, list):
        raise RequestError("problems: must be a list; put the problems in [ ]")
    problems = []
    for index, data in enumerate(listed):
        try:
            problems.append(Problem.parse(data))
        except ProblemError as error:
            places_inside = error.inside(f"/{index}").pointers
            raise ProblemError(f"problems[{index}]: {error}").at(*places_inside) from None
    return problems


class SweepRequest(Request):
    """A problem and axes to vary it along, a list of problems, or a job to ask what-ifs about.

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
    axes: Annotated[Axes, Option(flag="--axis", metavar="NAME=V1,V2,...", repeated=True)] = Field(
        default={}, description=_AXES
    )
    problems: tuple[Problem, ...] | SkipJsonSchema[None] = Field(
        default=None, min_length=1, json_schema_extra=no_default
    )
    what_if: str = Field(
        default="",
        min_length=1,
        max_length=200,
        description="Id of an ended job; each item changes a little of its problem (more memory, a "
        "faster bus, more micro-batches).",
        json_schema_extra=no_default,
    )
    name: str = Field(
        default="", max_length=200, description="Name of the batch; by default the problem's."
    )
    options: SolveOptions = Field(default=SolveOptions(), description="Options of every item.")
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


# --- Training runs that follow the newest schedule: registrations and reports.


class DeployRequest(Request):
    """A training run that follows the newest schedule of its problem."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"problem": PROBLEM_EXAMPLE, "options": {"time_limit_s": 10}, "threshold": 0.02}
            ]
        }
    )

    readers: ClassVar[Readers] = {"problem": Problem.parse}

    problem: Problem
    name: str = Field(
        default="", max_length=200, description="Name of the run; by default the problem's."
    )
    options: SolveOptions = Field(default=SolveOptions(), description="Options of every solve.")
    threshold: Noise = Field(
        default=0.01,
        description="Share of the step that a new version gains at least; a solve begins only "
        "where drift costs more.",
    )


class ReportRequest(Request):
    """What a training run measured: the value of `ActionTimer.measurements`, and the step's time.

    Only times count, those of copies and messages included; sizes stay as registered.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
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
            ]
        }
    )

    version: Count = Field(description="Version of the schedule that ran.")
    step: Index | None = Field(default=None, description="Step at which it was measured.")
    step_ms: Milliseconds | None = Field(
        default=None, description="Milliseconds from start to end of a step."
    )
    actions: Measurements
