"""The requests of OptPipe: type, unit, range, default and description of every field.

Command-line options, HTTP bodies, the client's arguments, OpenAPI and the reference of options are
generated from these models. To add an option, add a field here and the code that uses it.

* The command line has an option for each field (`Option`, `optpipe.cli.options`).
* The service parses a body with `Request.parse`; `optpipe_api` adds its own limits.
* The client sends its keyword arguments, and the service checks them.

`optpipe.answers` has the models of the service's answers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
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
    faults_of,
    pointer,
    rule_broken,
)
from optpipe.measurements import Measurements
from optpipe.model import Model
from optpipe.planning import (
    MEGATRON,
    MODEL_TYPES,
    Hardware,
    TracedModel,
    Training,
    count_launched_gpus,
    estimate,
    find_gpus,
    find_model,
    find_model_of,
    read_megatron,
    read_torchtitan,
    shape_from_config,
    shape_of_trace,
)
from optpipe.planning.frameworks.torchtitan import find_titan_model, is_torchtitan_text
from optpipe.planning.shape import (
    LORA_TARGETS,
    RECOMPUTABLE,
    CostSource,
    Dispatch,
    Dispatcher,
    GradientType,
    Kernels,
    Lora,
    Optimizer,
    OptimizerName,
    Precision,
    Routing,
    StateType,
)
from optpipe.planning.trace import TRAINING_KERNELS
from optpipe.problem import (
    Bandwidth,
    Bytes,
    Count,
    Flag,
    Index,
    Milliseconds,
    Name,
    Objective,
    Problem,
)
from optpipe.schedule import OPTIMAL_GAP, Schedule
from optpipe.stage import MOST_COSTS
from optpipe.sweep import AXES

if TYPE_CHECKING:
    from optpipe.planning import Estimate, ModelShape
    from optpipe.planning.accelerators import Accelerators

__all__ = [
    "ALIASES",
    "CHOSEN_BY_PLAN",
    "DEFAULT_NOISE",
    "DEFAULT_THRESHOLD",
    "MAX_AUTO_GPUS",
    "CacheUse",
    "ChartRequest",
    "CompareOptions",
    "CompareRequest",
    "CurrentRun",
    "EstimateAndPlan",
    "EstimateRequest",
    "FixedDegrees",
    "FollowRequest",
    "Framework",
    "ImportRequest",
    "JobKind",
    "ModelOnGpus",
    "Option",
    "PlacementKind",
    "PlanOptions",
    "ProfileRequest",
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
"""Default share by which durations vary up and down under noise."""

DEFAULT_THRESHOLD = 0.01
"""Default minimum gain, as a share of the step, for which a training run switches its schedule."""

CacheUse = Literal["use", "refresh"]
"""Source of a job's result: "use" accepts an earlier result, "refresh" solves again."""

Framework = Literal["any", "megatron", "torchtitan", "huggingface"]
PlacementKind = Literal["linear", "loop", "v", "free"]


class JobKind(StrEnum):
    """Kind of a job.

    * ``solve`` schedules a problem.
    * ``plan`` cuts, places and schedules a model.
    * ``compare`` runs every method on a problem. Its result has rows and no schedule.
    * ``tune`` searches a training configuration. Its schedule is that of the best configuration,
      its objective the duration of a whole step.
    * ``follow`` compares a running schedule with measured times, and solves again after drift. Its
      problem and schedule are those that a training run continues with.
    """

    SOLVE = "solve"
    PLAN = "plan"
    COMPARE = "compare"
    TUNE = "tune"
    FOLLOW = "follow"


# --- The base of all requests.


ALIASES = {"vpp": "chunks", "mbs": "micro_batch", "gbs": "global_batch"}
"""Megatron's abbreviation -> field; the command line takes both."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """Command-line form of a field, where it differs from the default form.

    Parameters
    ----------
    flag
        Flag, such as ``--time-limit``; by default the field's name.
    metavar
        Value in the help text: a unit, N, X, NAME or FILE; by default it follows from the type.
    scale
        Factor from the option's number to the field's number, where their units differ.
    repeated
        Whether the option is repeated for each value of a list, instead of values with commas.
    is_text
        Whether the field converts the option's text itself.
    """

    flag: str = ""
    metavar: str = ""
    scale: float = 1
    repeated: bool = False
    is_text: bool = False


Readers = Mapping[str, Callable[[Any], Any]]


class Request(BaseModel):
    """A request or a part of a request; unknown fields are refused by name.

    ``readers`` parse the fields that are documents. Their errors are more precise than pydantic's,
    and their paths begin at the document.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    readers: ClassVar[Readers] = {}

    def __init__(self, /, **fields: Any) -> None:
        with faults_of(type(self), RequestError):
            super().__init__(**fields)

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Return the request that a JSON-like object describes.

        Raises `RequestError` if the object breaks a rule, and the errors of its documents' readers.
        """
        if not isinstance(data, dict):
            names = ", ".join(f'"{name}": ...' for name in cls.model_fields)
            raise RequestError(f"the body must be an object: {{{names}}}")
        kind = str(data.get("format", "")).removeprefix("optpipe/").removesuffix("/v1")
        if kind in cls.readers and kind not in data:
            raise RequestError(f'the {kind} is not wrapped; wrap it: {{"{kind}": {{...}}}}')
        documents = {}
        for name in cls.readers.keys() & data.keys():
            try:
                documents[name] = cls.readers[name](data[name])
            except InputError as error:
                raise error.inside(pointer(name)) from None
        with faults_of(cls, RequestError):
            return cls.model_validate({**data, **documents})


def _schema(*examples: dict[str, Any], one_of: tuple[str, ...] = ()) -> ConfigDict:
    """Return the published examples of a request, and fields of which it must have exactly one."""
    extra: dict[str, Any] = {"examples": list(examples)}
    if one_of:
        extra["oneOf"] = [{"required": [name]} for name in one_of]
    return ConfigDict(json_schema_extra=extra)


def _field_error(text: str, value: object = None) -> FieldError:
    """Return the error of a sentence with its fields in backticks; ``value`` is the first one's."""
    first, name, *rest = text.split("`")
    others = [FieldRef(part) if index % 2 else part for index, part in enumerate(rest)]
    return FieldError(*([first] if first else []), FieldRef(name, value), *others)


def _drop_default(schema: dict[str, Any]) -> None:
    schema.pop("default", None)


# --- Types of fields.

T = TypeVar("T")
NotNull = Annotated[T | SkipJsonSchema[None], Field(json_schema_extra=_drop_default)]
"""A field that may be left out and may not be null in the published schema."""

Degree = Annotated[int, Field(ge=1, le=4096, strict=True)]
Size = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]
Many = Annotated[int, Field(ge=1, le=2**17, strict=True)]
AtLeastOne = Annotated[int, Field(ge=1, strict=True)]
NotNegative = Annotated[int, Field(ge=0, strict=True)]
Zero = Literal[0, 1, 2, 3]
Chunks = Annotated[int, Field(ge=1, le=64, strict=True)]
Layers = Annotated[int, Field(ge=1, le=1024, strict=True)]
NumModes = Annotated[int, Field(ge=0, le=64, strict=True)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
Load = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Seconds = Annotated[float, Field(gt=0, lt=1e6, allow_inf_nan=False, strict=True)]
Noise = Annotated[float, Field(ge=0, lt=1, strict=True)]
Gap = Annotated[float, Field(ge=0, lt=1, strict=True)]
Switch = Annotated[bool, Field(strict=True)]
ShortName = Annotated[str, Field(max_length=80)]
LongName = Annotated[str, Field(max_length=200)]
Modules = Annotated[frozenset[ShortName], Field(max_length=16)]
Targets = Annotated[
    tuple[ShortName, ...],
    Field(min_length=1, max_length=16),
    AfterValidator(lambda names: tuple(sorted(set(names)))),
]

Tag = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/=+-]{1,64}$")]
Tags = Annotated[
    tuple[Tag, ...],
    Field(max_length=16, description="Labels of the job; `?tag=` finds jobs by label."),
    AfterValidator(lambda tags: tuple(sorted(set(tags)))),
    Option(flag="--tag", metavar="TAG", repeated=True),
]
Priority = Annotated[
    int,
    Field(
        ge=-100,
        le=100,
        strict=True,
        description="Priority of the job among the jobs of its owner; the highest runs first. "
        "Owners take turns, except for priorities above 10, which need an admin key.",
    ),
]

_PERCENTILE = r"^P[1-9][0-9]?(\.[0-9]{1,3})?$"


def _check_percentile(text: str) -> str:
    if not re.fullmatch(_PERCENTILE, text):
        raise rule_broken("must be a percentile from P1 to P99.999", "write P90")
    return text


Percentile = Annotated[
    str,
    AfterValidator(_check_percentile),
    WithJsonSchema({"type": "string", "pattern": _PERCENTILE}),
]

_SIZE_UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def _parse_size(value: Any) -> Any:
    """Return the bytes of a text such as ``9.5GiB``; other values are returned as they are."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?) ?([a-zA-Z]*)", value.strip())
    if found is None or found[2].lower() not in _SIZE_UNITS:
        units = "KB, MB, GB, KiB, MiB, GiB"
        raise rule_broken("must be a size", f"write bytes, or a number and one of {units}")
    num_bytes = float(found[1]) * _SIZE_UNITS[found[2].lower()]
    if num_bytes == math.inf:
        raise rule_broken("is no finite size", "correct it")
    return round(num_bytes)


ByteSize = Annotated[Bytes, BeforeValidator(_parse_size)]
SizeOption = Annotated[ByteSize | None, Option(metavar="SIZE", is_text=True)]

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


# --- Options of searches, by kind of job.

TimeLimit = Annotated[Positive | None, Option(flag="--time-limit", metavar="S")]
WorkLimit = Annotated[
    Positive | None,
    Field(
        description="Limit of the search in units of work. A unit is counted in iterations and "
        "takes about one second of one core. The result is then the same on every machine, unless "
        "the time limit ends the search first."
    ),
    Option(metavar="N"),
]
Cache = Annotated[
    CacheUse, Field(description="`use` accepts an earlier result; `refresh` solves again.")
]
Method = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.+-]{1,60}$"), Option(metavar="NAME")]
StageCounts = Annotated[
    tuple[Annotated[int, Field(ge=1, le=8, strict=True)], ...], Field(min_length=1, max_length=8)
]
Placements = Annotated[tuple[PlacementKind, ...], Field(min_length=1, max_length=4)]


class SearchOptions(Request):
    """Options of every search."""

    time_limit_s: TimeLimit = Field(None, description="Time limit of the search in seconds.")
    threads: AtLeastOne = Field(
        1, description="CPU threads. With two or more, search and lower bounds run in parallel."
    )
    seed: Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)] = Field(
        0, description="Seed of all random numbers."
    )


class SolveOptions(SearchOptions):
    """Options to solve a problem."""

    method: Method = Field(
        "auto",
        description="`auto` (optimises), `milp`, or a published method that `optpipe compare` and "
        "`/v1/methods` list.",
    )
    gap: Gap = Field(
        OPTIMAL_GAP,
        description="Gap at which the search stops: (objective - bound) / objective, e.g. 0.01.",
    )
    work_limit: WorkLimit = None
    cache: Cache = "use"


class PlanOptions(SearchOptions):
    """Options to plan a model: cut, placement and schedule."""

    work_limit: WorkLimit = None
    chunks: StageCounts | None = Field(
        None, description="Numbers of stages per device to try, each 1-8. By default 1,2,4."
    )
    placements: Placements | None = Field(
        None,
        description="Placements to try: linear, loop, v, and free (other orders of the devices). "
        "By default all.",
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
    """Options to solve a problem or to plan a model; chunks and placements are for plans."""

    objective: Objective | None = Field(
        None, description="Objective to minimise, instead of that of the problem or model."
    )
    robust: Annotated[Percentile, Option(metavar="P90")] | None = Field(
        None,
        description="Percentile of the objective under noise that ranks schedules, such as P90. "
        "Bound and gap are those without noise.",
    )
    jitter: Noise = Field(
        DEFAULT_NOISE,
        description="With robust: share (0-1) by which the duration of each action varies.",
    )
    stragglers: Noise = Field(
        DEFAULT_NOISE,
        description="With robust: share (0-1) by which all compute durations of a device vary "
        "together.",
    )

    @model_validator(mode="after")
    def _check_noise_has_percentile(self) -> Self:
        noise = sorted(self.model_fields_set & {"jitter", "stragglers"})
        if noise and self.robust is None:
            raise _field_error(
                f"`{noise[0]}`: is noise, which only `robust` uses; add `robust` P90, or leave it "
                "out"
            )
        return self

    def check_kind(self, kind: JobKind) -> None:
        """Refuse options that a kind of job does not have. Raises `InputError`."""
        foreign = sorted(self.model_fields_set & _NOT_OF[kind].keys())
        if foreign:
            reason = _NOT_OF[kind][foreign[0]]
            message = f"options.{foreign[0]}: {reason}; leave it out"
            raise InputError(message).at(f"/options/{foreign[0]}")


class WorkloadFacts(Request):
    """Tokens and FLOPs of a problem, from which tokens/s and MFU are computed."""

    tokens_per_microbatch: Annotated[Positive | None, Option(metavar="N")] = Field(
        None, description="Tokens per micro-batch; adds tokens/s."
    )
    flops_per_microbatch: Annotated[
        Positive | None, Option(flag="--tflop-per-microbatch", metavar="TFLOP", scale=1e12)
    ] = Field(
        None,
        description="Model FLOPs per micro-batch, forward and backward, without recomputation; "
        "adds MFU, together with the peak rate.",
    )
    peak_flops_per_s: Annotated[
        Positive | None, Option(flag="--peak-tflops", metavar="TFLOP/s", scale=1e12)
    ] = Field(None, description="Peak rate of all devices together.")

    @model_validator(mode="after")
    def _check_mfu_has_both(self) -> Self:
        if (self.flops_per_microbatch is None) != (self.peak_flops_per_s is None):
            raise _field_error(
                "`flops_per_microbatch` and `peak_flops_per_s` make MFU only together; give both "
                "or none"
            )
        return self


class CompareOptions(SearchOptions):
    """Options to compare methods; the time limit is that of the optimiser, by default 20 s."""

    workload: WorkloadFacts = WorkloadFacts()


class TuneOptions(SearchOptions):
    """Options to tune; the time limit is 120 s by default."""

    time_limit_s: TimeLimit = Field(
        None,
        description="Time limit of the search in seconds. Bounds and first schedules are never cut "
        "short, so a short limit may be exceeded by some seconds.",
    )
    gap: Gap = Field(
        0.002,
        description="Share (0-1) at which the search stops: no configuration is faster than the "
        "best by more.",
    )
    work_limit: WorkLimit = None
    cache: Cache = "use"


# --- Jobs: solve, plan, compare.


class SolveRequest(Request):
    """A problem to schedule, or a model to cut, place and schedule."""

    model_config = _schema(
        {"problem": PROBLEM_EXAMPLE, "options": {"time_limit_s": 10}}, one_of=("problem", "model")
    )

    problem: NotNull[Problem] = None
    model: NotNull[Model] = None
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
    def _check_one_document(self) -> Self:
        if self.problem is None and self.model is None:
            raise rule_broken("problem: is missing", "give it, or a model to plan")
        if self.problem is not None and self.model is not None:
            raise rule_broken("a problem and a model are two jobs", "submit one after the other")
        return self

    @property
    def kind(self) -> JobKind:
        """The kind of the job: solve a problem, or plan a model."""
        return JobKind.SOLVE if self.model is None else JobKind.PLAN


class CompareRequest(Request):
    """A problem on which every method runs."""

    model_config = _schema(
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
    )

    kind: ClassVar[JobKind] = JobKind.COMPARE
    readers: ClassVar[Readers] = {"problem": Problem.parse}

    problem: Problem
    options: CompareOptions = CompareOptions()
    tags: Tags = ()
    priority: Priority = 0


class ResumeRequest(Request):
    """More time for a job that has ended."""

    model_config = _schema({"time_limit_s": 60})

    time_limit_s: Annotated[Positive, Option(flag="--time-limit", metavar="S")] = Field(
        description="Seconds to add to the job's time limit."
    )


# --- A model on accelerators: the common part of estimates and tunes.


def _refuse_null(value: Any) -> Any:
    if value is None:
        raise RequestError("model or config = null: is neither; leave it out")
    return value


_CONSTANTS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _with_constants(value: Any) -> Any:
    """Return a JSON value with the numbers for which `optpipe.formats.json.parse_json` has words.

    Published configs have such numbers, e.g. as the upper limit of a Mamba-2 time step.
    """
    if isinstance(value, dict):
        return {name: _with_constants(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_with_constants(one) for one in value]
    return _CONSTANTS.get(value, value) if isinstance(value, str) else value


class ModelOnGpus(Request):
    """A model, accelerators, and training settings other than degrees of parallelism."""

    model: Annotated[NotNull[ShortName], Option(metavar="NAME")] = Field(
        None, description="Model of the catalogue (`optpipe estimate --list`, `/v1/presets`)."
    )
    config: Annotated[NotNull[dict[str, Any]], Option(metavar="FILE")] = Field(
        None, description="Hugging Face config.json, instead of a model of the catalogue."
    )
    trace: Annotated[NotNull[TracedModel], Option(metavar="FILE")] = Field(
        None,
        description="Traced model (optpipe/trace/v1), instead of a config. "
        "`python -m optpipe.runtime.measuring.trace_model` writes one.",
    )
    costs_from: Annotated[CostSource | None, Option(flag="--from")] = Field(
        None,
        description="Costs of the layers of config: formula (Megatron's kernels), or trace (the "
        "model's own code in transformers). By default formula if its model_type has one.",
    )
    name: ShortName = Field("", description="Display name of the model in config or trace.")
    gpu: Annotated[ShortName, Option(metavar="NAME[:N]", repeated=True)] = Field(
        description="Accelerator of the catalogue, and how many, such as h100:64. Of several kinds "
        "(h100:32,a100:32) each is a part of the pipeline."
    )
    sequence: Size = Field(4096, description="Tokens per sequence.")
    packed_lengths: Annotated[tuple[Size, ...], Field(max_length=4096), Option(metavar="LIST")] = (
        Field(
            (),
            description="Lengths in tokens of the sequences that are packed into one, everywhere "
            "the same. None attends to another. Their sum replaces sequence.",
        )
    )
    precision: Annotated[Precision, Option(metavar="NAME")] = Field(
        "bf16",
        description=f"Precision of the layers' matrix products: {', '.join(get_args(Precision))}.",
    )
    flash: Switch = Field(
        True, description="Flash attention; without it, attention scores are stored."
    )
    cuda_graphs: Switch = Field(False, description="CUDA graphs: kernel launches take no time.")
    ep_overlap: Switch = Field(
        False,
        description="Overlap of the experts' all-to-all with the compute of other micro-batches.",
    )
    dispatcher: Annotated[Dispatcher, Option(metavar="NAME")] = Field(
        "alltoall",
        description="Dispatcher of tokens: alltoall sends a copy per expert, deduplicated sends "
        "one per rank (DeepEP, HybridEP), allgather sends every token to all ranks of the experts.",
    )
    dispatch: Dispatch = Field("bf16", description="Precision of tokens sent to their experts.")
    expert_imbalance: Annotated[list[Load], Option(metavar="LIST")] = Field(
        [1.0],
        description="Load of the busiest expert-parallel rank relative to the mean, or how often "
        "each expert is chosen.",
        min_length=1,
        max_length=1024,
    )
    expert_capacity: Positive | None = Field(
        None,
        description="Tokens per expert relative to the mean above which tokens are dropped "
        "(Megatron-Core's moe_expert_capacity_factor).",
    )
    pad_experts: Switch = Field(
        False,
        description="Experts compute as many tokens as expert_capacity allows "
        "(moe_pad_expert_input_to_capacity).",
    )
    expert_rank_capacity: Positive | None = Field(
        None,
        description="Load for which a rank's buffers are allocated "
        "(moe_expert_rank_capacity_factor).",
    )
    paged_stash: Switch = Field(
        False, description="Paged activations of experts (moe_paged_stash)."
    )
    overlap: Switch = Field(True, description="Overlap of collectives with compute.")
    optimizer: OptimizerName = Field(
        "adam", description="Optimizer: adam (two moments), sgd (momentum) or muon."
    )
    precision_aware_optimizer: Switch = Field(
        False,
        description="Adam with moments narrower than fp32 and master weights of 2 bytes "
        "(Megatron-Core's flag of this name).",
    )
    exp_avg_dtype: StateType = Field(
        "fp32",
        description="Type of Adam's first moment; other types than fp32 need the precision-aware "
        "optimizer.",
    )
    exp_avg_sq_dtype: StateType = Field("fp32", description="Type of Adam's second moment.")
    gradient_dtype: GradientType = Field(
        "fp32", description="Type in which gradients are accumulated and reduced."
    )
    kernels: Annotated[Kernels | None, Option(metavar="NAME")] = Field(
        None,
        description="Kernels and weights: megatron (fused kernels, bf16 and master weights) or "
        "torch (PyTorch operators, FSDP2's fp32 shards). By default the framework's.",
    )
    compiled: Switch = Field(
        False,
        description="With kernels torch: torch.compile fuses the operators of layers and loss.",
    )
    optimizer_offload: Annotated[float, Field(ge=0, le=1, strict=True)] = Field(
        0.0,
        description="Share (0-1) of the optimizer's states and step on the CPU (Megatron-Core's "
        "optimizer_offload_fraction).",
    )
    lora_rank: Annotated[int, Field(ge=1, le=4096, strict=True)] | None = Field(
        None,
        description="LoRA: rank of the adapters, which are trained while the model is frozen. By "
        "default all weights are trained.",
    )
    lora_targets: Annotated[Targets, Option(metavar="LIST")] = Field(
        tuple(sorted(Lora().targets)),
        description="LoRA: matrices that have an adapter, by Megatron-Bridge's names: "
        f"{', '.join(LORA_TARGETS)}.",
    )
    network: Annotated[ShortName, Option(metavar="KIND[:GBIT]")] | None = Field(
        None, description="Network between nodes: infiniband, ethernet or tcp, and Gbit/s per GPU."
    )
    oversubscription: Annotated[float, Field(ge=1, le=64, strict=True)] = Field(
        1.0, description="Divisor of the bandwidth between nodes."
    )
    memory_bytes: Annotated[
        Annotated[int, Field(ge=1, le=10**13, strict=True)] | None,
        Option(flag="--memory-gb", metavar="GB", scale=1e9),
    ] = Field(None, description="Memory per device, instead of the data sheet's.")
    measured_step_s: Annotated[Seconds | None, Option(metavar="S")] = Field(
        None, description="Measured duration of a step in seconds; calibrates every duration."
    )
    measured_peak_gib: Annotated[
        Annotated[float, Field(gt=0, le=1e6, strict=True)] | None, Option(metavar="GIB")
    ] = Field(
        None,
        description="Measured peak of the framework's allocator in GiB, the largest of all ranks; "
        "calibrates activations and buffers.",
    )

    readers: ClassVar[Readers] = {
        "model": _refuse_null, "config": _refuse_null, "trace": TracedModel.parse
    }  # fmt: skip

    @model_validator(mode="after")
    def _check_one_model(self) -> Self:
        has_script = getattr(self, "current_file", None) is not None
        given = sum(getattr(self, name) is not None for name in _MODEL_SOURCES)
        if given > 1 or (given == 0 and not has_script):
            raise _field_error(
                "give one of `model`, `config` and `trace`: a model of the catalogue, its "
                "config.json, or its traced costs"
            )
        has_code = self.model is None and (self.config or {}).get("model_type") != MEGATRON
        if not has_code and self.costs_from == "trace":
            raise _field_error(
                "`costs_from`: a model of the catalogue, or one with Megatron-Core's fields, has "
                "formulas and no code; give `config`, the model's config.json",
                value="trace",
            )
        if self.trace is not None and self.costs_from == "formula":
            raise _field_error(
                "`costs_from`: `trace` has traced costs; leave one of them out", value="formula"
            )
        return self

    @model_validator(mode="after")
    def _check_lengths_and_targets(self) -> Self:
        total = sum(self.packed_lengths)
        if total and "sequence" in self.model_fields_set and self.sequence != total:
            raise _field_error(
                f"`packed_lengths`: add up to {total:,} tokens, not the {self.sequence:,} of "
                "`sequence`; leave one of them out"
            )
        if "lora_targets" in self.model_fields_set and self.lora_rank is None:
            raise _field_error("`lora_targets`: are matrices with adapters; add `lora_rank`")
        return self

    @cached_property
    def shape(self) -> ModelShape:
        """The model's sizes. Raises `InputError` if model or config is unknown or not traced."""
        if self.model is not None:
            return find_model(self.model)
        if self.trace is not None:
            return shape_of_trace(self.trace, self.name)
        kind = (self.config or {}).get("model_type")
        if self.needs_trace:
            reason = "" if self.costs_from else f": no formula covers model_type {kind!r}"
            raise _field_error(
                f"`config`: is not traced yet{reason}; send `trace`, which optpipe estimate and "
                "tune make of a config where transformers and torch are installed"
            )
        try:
            return shape_from_config(json.dumps(self.config), self.name or "config")
        except InputError as error:
            if self.costs_from == "formula" or kind == MEGATRON or kind not in MODEL_TYPES:
                raise error.inside("/config") from None
            fix = FieldRef("costs_from", "trace")
            message = FieldError(f"{error}; or take the model's own code: ", fix)
            raise message.at(*error.inside("/config").pointers) from None

    @property
    def needs_trace(self) -> bool:
        """Whether `trace_question` must be answered before `shape` is known."""
        if self.config is None or self.costs_from == "formula":
            return False
        return self.costs_from == "trace" or self.config.get("model_type") not in MODEL_TYPES

    def trace_question(self) -> dict[str, Any]:
        """Return what `optpipe.runtime.measuring.trace_model` traces for this request.

        Raises `FieldError` before a trace if a GPU is not known, or the config names no model type.
        """
        _ = self.gpus
        if not {"model_type", "architectures", "text_config"} & set(self.config or ()):
            raise _field_error("`config` has no model_type; give the model's whole config.json")
        kernels = self.kernels or "torch"
        choice = (kernels, self.compiled)
        traced = next((name for name, one in TRAINING_KERNELS.items() if one == choice), "torch")
        lora = self.lora_settings
        return {
            "config": _with_constants(self.config),
            "sequence": self.sequence,
            "tps": list(self.traced_degrees),
            "kernels": traced,
            "lora": lora and {"rank": lora.rank, "targets": sorted(lora.targets)},
        }

    @property
    def traced_degrees(self) -> tuple[int, ...]:
        """The degrees of tensor parallelism with which the model is traced."""
        return (1,)

    def with_trace(self, trace: TracedModel) -> Self:
        """Return the request with a trace instead of its config."""
        return self.model_copy(update={"trace": trace, "config": None, "costs_from": None})

    def settings_of_trace(self, tp: int) -> dict[str, Any]:
        """Return settings of a training that follow from a trace, unless the caller gave them.

        Its kernels are those with which it was traced. torch has no tensor parallelism that
        overlaps with products. Raises `FieldError` if the trace does not have the degree.
        """
        if self.trace is None:
            return {}
        kernels, compiled = TRAINING_KERNELS[self.trace.kernels]
        found = self.shape.split_settings(tp) | {
            "kernels": kernels, "compiled": compiled, "overlap": False
        }  # fmt: skip
        return {name: value for name, value in found.items() if name not in self.model_fields_set}

    @property
    def routing(self) -> Routing:
        """The routing of tokens to experts; raises `FieldError` if its settings conflict."""
        return Routing(
            imbalance=tuple(self.expert_imbalance),
            capacity=self.expert_capacity,
            is_padded=self.pad_experts,
            rank_capacity=self.expert_rank_capacity,
            is_stashed=self.paged_stash,
        )

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

    @property
    def packed_settings(self) -> dict[str, Any]:
        """The fields ``sequence`` and ``lengths`` of a training."""
        total = sum(self.packed_lengths) or self.sequence
        if self.trace is not None and "sequence" not in self.model_fields_set:
            total = self.trace.sequence
        return {"sequence": total, "lengths": self.packed_lengths}

    @property
    def lora_settings(self) -> Lora | None:
        """The adapters, or None without LoRA; raises `FieldError` if a target is unknown."""
        if self.lora_rank is None:
            return None
        return Lora(rank=self.lora_rank, targets=frozenset(self.lora_targets))

    @cached_property
    def gpus(self) -> list[Accelerators]:
        """Each kind of accelerator with its number and its network."""
        return find_gpus(self.gpu.split(","), self.network, self.oversubscription)


_MODEL_SOURCES = ("model", "config", "trace")
_TRAINING = set(Training.__dataclass_fields__)
_FROM_LENGTHS = ("sequence", "micro_batch", "num_microbatches")
Values = Annotated[
    dict[LongName, Any],
    Field(
        max_length=16,
        description=f"Axis -> value. Axes: {', '.join(AXES)}, or the path of a field; as in "
        "`/v1/batches`.",
    ),
]
Lengths = Annotated[list[Annotated[list[Size], Field(min_length=1)]], Option(metavar="FILE")]
Pp = Annotated[Degree, Field(description="Devices of the pipeline.")]
Tp = Annotated[Degree, Field(description="Tensor-parallel degree.")]
Cp = Annotated[Degree, Field(description="Context-parallel degree.")]
Ep = Annotated[Degree, Field(description="Expert-parallel degree; ep x etp divides tp x cp x dp.")]
Etp = Annotated[Degree, Field(description="Tensor-parallel degree of the experts.")]
StagesPerDevice = Annotated[Chunks, Field(description="Stages per device.")]
ZeroStage = Annotated[
    Zero,
    Field(
        description="Sharding over dp: 0 nothing, 1 optimizer states, 2 also gradients, 3 also "
        "weights (FSDP)."
    ),
]


class EstimateRequest(ModelOnGpus):
    """A model on accelerators with degrees of parallelism, and values to vary the problem by."""

    model_config = _schema(
        {
            "model": "llama3-8b",
            "gpu": "h100",
            "pp": 4,
            "num_microbatches": 16,
            "values": {"memory_scale": 0.5},
        },
        one_of=_MODEL_SOURCES,
    )

    pp: Pp = 4
    tp: Tp = 1
    cp: Cp = 1
    ep: Ep = 1
    etp: Etp = 1
    dp: Degree | None = Field(
        None, description="Data-parallel degree. By default 1, or the number of GPUs determines it."
    )
    micro_batch: Size = Field(1, description="Sequences per micro-batch.")
    num_microbatches: Annotated[Size, Option(flag="--microbatches")] = Field(
        16, description="Micro-batches per step."
    )
    chunks: StagesPerDevice = 1
    placement: Annotated[Literal["linear", "loop", "v"] | None, Option(metavar="NAME")] = Field(
        None,
        description="Placement: linear, loop or v. By default linear, or loop with several chunks.",
    )
    layout: Literal["balanced", "even"] = Field(
        "balanced",
        description="Cut: balanced makes the slowest stage as fast as possible, even cuts as "
        "frameworks do.",
    )
    zero: ZeroStage = 1
    sequence_parallel: Switch = Field(
        True, description="Tensor parallelism also of norms and residual stream."
    )
    lean: Switch = Field(
        False, description="Recomputation of norms and activation functions in the backward I."
    )
    recompute: Annotated[Modules, Option(metavar="LIST")] = Field(
        frozenset(),
        description=f"Modules that the backward recomputes, of {', '.join(RECOMPUTABLE)}.",
    )
    offloaded_layers: Annotated[int, Field(ge=0, le=4096, strict=True)] = Field(
        0, description="Layers whose activations stay in host memory."
    )
    time_factor: Seconds | None = Field(
        None, description="Factor of every duration, e.g. from another configuration's calibration."
    )
    byte_factor: Annotated[float, Field(gt=0, le=10, strict=True)] = Field(
        1.0,
        description="Factor of activations and buffers, e.g. from another configuration's "
        "measured peak.",
    )
    mfu: Share | None = Field(
        None, description="Share (0-1) of peak FLOP/s that F, I and W reach together."
    )
    pcie_efficiency: Share | None = Field(
        None, description="Share (0-1) of the PCIe bandwidth that copies reach."
    )
    modes: NumModes = Field(
        0,
        description="Maximum number of modes per stage, e.g. 8. With 0: keep, offload and "
        "recompute whole micro-batches.",
    )
    pairs: Switch = Field(
        False, description="Pairs of a forward and a backward that hide the experts' all-to-all."
    )
    slices: Annotated[int, Field(ge=1, le=256, strict=True)] = Field(
        1, description="Slices per sequence; each is a micro-batch of the problem."
    )
    lengths: Lengths = Field(
        [],
        description="Unequal micro-batches: for each one, the lengths in tokens of the sequences "
        "packed into it.",
    )
    costs: Annotated[int, Field(ge=1, le=MOST_COSTS, strict=True)] = Field(
        8, description="With lengths: maximum number of kinds of micro-batches, rounded up."
    )
    values: Values = {}

    @model_validator(mode="after")
    def _check_lengths_replace_sizes(self) -> Self:
        also = [name for name in _FROM_LENGTHS if name in self.model_fields_set]
        if self.lengths and also:
            raise _field_error(
                f"`{also[0]}` and `lengths`: the lengths give it; leave one of them out"
            )
        if self.packed_lengths and (self.lengths or self.slices > 1):
            other = "lengths" if self.lengths else "slices"
            raise _field_error(
                f"`packed_lengths` and `{other}`: packed sequences are the same in all "
                "micro-batches, and are not cut; leave one of them out"
            )
        if "costs" in self.model_fields_set and not self.lengths:
            raise _field_error("`costs`: groups lengths; add `lengths` FILE")
        return self

    @property
    def traced_degrees(self) -> tuple[int, ...]:
        """The degrees of tensor parallelism with which the model is traced."""
        return (self.tp,)

    def estimate(self) -> Estimate:
        """Return the estimate of the request. Raises as `optpipe.planning.estimate`."""
        kept = _TRAINING - {"dp", "sequence", "slices", "lengths", "optimizer", "routing"}
        fields = self.model_dump(include=kept) | self.packed_settings
        fields["kernels"] = self.kernels or "megatron"
        fields |= self.settings_of_trace(self.tp)
        dp = self._find_dp(self.tp * self.cp * self.pp)
        training = Training(
            **fields,
            dp=dp,
            optimizer=self.optimizer_settings,
            routing=self.routing,
            lora=self.lora_settings,
        )
        return estimate(
            self.shape,
            self._place_hardware(training.ranks),
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
            measured_peak_gib=self.measured_peak_gib,
            byte_factor=self.byte_factor,
            memory_bytes=self.memory_bytes,
            modes=self.modes,
            pairs=self.pairs,
            slices=self.slices,
            lengths=self.lengths,
            costs=self.costs,
        )

    def _find_dp(self, gpus_per_replica: int) -> int:
        """Return the data-parallel degree. Raises `FieldError` if it contradicts the GPUs."""
        counts = [kind.number for kind in self.gpus if kind.number is not None]
        if not counts:
            return self.dp or 1
        total = sum(counts)
        if self.dp is None and total % gpus_per_replica == 0:
            return total // gpus_per_replica
        if self.dp is None or self.dp * gpus_per_replica != total:
            replicas = f" x dp = {self.dp} replicas" if self.dp else ", nor a multiple"
            raise _field_error(
                f"{total} GPUs are not tp x cp x pp = {gpus_per_replica}{replicas}; change `gpu` "
                "or the degrees"
            )
        return self.dp

    def _place_hardware(self, gpus_per_stage: int) -> Hardware | list[Hardware]:
        """Return the accelerator; of several kinds, that of each pipeline rank."""
        if len(self.gpus) == 1:
            return self.gpus[0].hardware
        ranks: list[Hardware] = []
        for kind in self.gpus:
            count = kind.number or 0
            if count % gpus_per_stage:
                raise _field_error(
                    f"`gpu`: is no multiple of the {gpus_per_stage} GPUs that share a stage "
                    "(tp x cp x dp), so a stage would be on two kinds; change it",
                    value=f"{kind.hardware.name}:{count}",
                )
            ranks += [kind.hardware] * (count // gpus_per_stage)
        return ranks


CHOSEN_BY_PLAN = ("chunks", "placement", "layout", "slices", "lengths", "costs")
"""Fields of an estimate that a plan does not take."""


class EstimateAndPlan(EstimateRequest):
    """A model on accelerators, and the options to plan its cut, placement and schedule."""

    options: PlanOptions = Field(default_factory=PlanOptions)


class VariantRequest(Request):
    """A problem, and one value for each axis that changes."""

    model_config = _schema({"problem": PROBLEM_EXAMPLE, "values": {"memory_scale": 0.75}})

    readers: ClassVar[Readers] = {"problem": Problem.parse}

    problem: Problem
    values: Values = {}


# --- Charts of files.


class OpenedFile(Request):
    """A schedule (JSON or CSV) or a Chrome trace (JSON), with its name."""

    name: str = Field(min_length=1, max_length=200)
    text: str


class ChartRequest(Request):
    """Schedules and traces to draw on one time axis, and the problem that they are for."""

    model_config = _schema(
        {"files": [{"name": "schedule.csv", "text": "0F0,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1\n"}]}
    )

    readers: ClassVar[Readers] = {"problem": Problem.parse}

    files: tuple[OpenedFile, ...] = Field(
        min_length=1,
        max_length=1024,
        description="Schedules, and the traces of the ranks of one run.",
    )
    problem: Problem | None = Field(
        None, description="Without a problem, F, I and W of a schedule take 1 ms each."
    )


# --- Tune.


class FixedDegrees(Request):
    """Degrees that the search keeps fixed."""

    tp: Tp | None = None
    cp: Cp | None = None
    ep: Ep | None = None
    etp: Etp | None = None
    dp: Many | None = None
    pp: Pp | None = None
    chunks: StagesPerDevice | None = None
    micro_batch: Many | None = None
    zero: ZeroStage | None = None
    pairs: Literal[0, 1] | None = None
    slices: Literal[1, 2, 4, 8, 16] | None = None


class CurrentRun(Request):
    """The current configuration: 1F1B, or interleaved 1F1B with several chunks."""

    tp: Tp = 1
    cp: Cp = 1
    dp: Many | None = Field(
        None, description="Data-parallel degree. By default the number of GPUs determines it."
    )
    ep: Ep = 1
    etp: Etp = 1
    pp: Pp = 1
    chunks: StagesPerDevice = 1
    micro_batch: Many = Field(1, description="Sequences per micro-batch.")
    zero: ZeroStage = 1
    recompute: Modules = Field(frozenset(), description="Modules that the backward recomputes.")
    layers: Annotated[tuple[Layers, ...], Field(min_length=1, max_length=512)] | None = Field(
        None,
        description="Layers of each stage in model order, including embedding and head. By default "
        "an even cut.",
    )


_OF_SCRIPTS = ("sequence", "precision", "flash", "cuda_graphs", "dispatcher", "overlap")
_OF_TORCHTITAN = ("precision", "cuda_graphs", "dispatcher", "compiled")


MAX_AUTO_GPUS = 1024
"""The largest number of GPUs that ``gpu_counts = "auto"`` tries."""
_SWITCHES = ("cuda_graphs", "ep_overlap", "dispatcher")


class TuneRequest(ModelOnGpus):
    """A model, GPUs and a batch, for which the fastest training configuration is searched."""

    kind: ClassVar[JobKind] = JobKind.TUNE

    model_config = _schema(
        {
            "model": "llama3-8b",
            "gpu": "h100",
            "num_gpus": 8,
            "global_batch": 16,
            "framework": "megatron",
            "current": {"tp": 2, "pp": 4},
            "fixed": {"tp": 4, "pp": 2, "chunks": 1, "micro_batch": 1},
            "options": {"time_limit_s": 10},
        },
        one_of=_MODEL_SOURCES,
    )

    num_gpus: Annotated[
        Many | None, Option(flag="--gpus", metavar="N|N,N,...|auto", is_text=True)
    ] = Field(
        None,
        description="Number of GPUs. By default the sum of the numbers in gpu, else what torchrun "
        "starts in current_file, else 8.",
    )
    gpu_counts: Annotated[
        Annotated[tuple[Many, ...], Field(min_length=1, max_length=32)] | Literal["auto"] | None,
        Option(flag="--gpus"),
    ] = Field(
        None,
        description="Numbers of GPUs to tune for, instead of num_gpus. auto tries powers of two "
        f"and numbers halfway between them, up to {MAX_AUTO_GPUS}. Rows are of the smallest number "
        "that fits.",
    )
    global_batch: Annotated[int, Field(ge=1, le=2**20, strict=True)] = Field(
        128, description="Sequences per step, over all replicas."
    )
    framework: Annotated[Framework, Option(metavar="NAME")] = Field(
        "any",
        description="Framework that runs the schedule: megatron, torchtitan, huggingface "
        "(transformers in the optpipe runtime), or any (the optpipe runtime). By default that of "
        "current_file; without one, any.",
    )
    current: Annotated[CurrentRun, Option(metavar="FILE|FLAGS")] | None = Field(
        None,
        description="Current configuration, e.g. tp=4,pp=8,chunks=5,micro_batch=1. The gain is "
        "relative to it.",
    )
    current_file: (
        Annotated[str, Field(min_length=1, max_length=100_000), Option(flag="--current")] | None
    ) = Field(
        None,
        description="Current configuration as the text of Megatron arguments or YAML, or of a "
        "torchtitan config; instead of current.",
    )
    vocab_size: Annotated[int, Field(ge=1, le=10**7, strict=True)] | None = Field(
        None,
        description="Vocabulary of the model that current_file describes, if the script leaves it "
        "to the tokenizer.",
    )
    current_format: Literal["megatron", "torchtitan"] | None = Field(
        None, description="Format of current_file. By default it follows from framework and text."
    )
    fixed: Annotated[FixedDegrees, Option(flag="--fix", metavar="NAME=N", repeated=True)] = Field(
        FixedDegrees(), description="Degrees that are not searched."
    )
    price_per_gpu_hour: Annotated[Positive | None, Option(metavar="PRICE")] = Field(
        None, description="Price of a GPU-hour in any currency; adds the cost of a million tokens."
    )
    headroom: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False, strict=True)] = Field(
        0.05, description="Share (0-1) of the memory that stays free, as bytes are estimates."
    )
    options: TuneOptions = TuneOptions()
    tags: Tags = ()
    priority: Priority = 0

    @model_validator(mode="before")
    @classmethod
    def _take_framework_of_script(cls, data: Any) -> Any:
        """Set framework and format, if they are not given, to those of ``current_file``."""
        if not isinstance(data, dict) or not isinstance(text := data.get("current_file"), str):
            return data
        form, framework = data.get("current_format"), data.get("framework")
        if form is None:
            can_be_titan = framework in (None, "any", "torchtitan")
            is_titan = framework == "torchtitan" or (can_be_titan and is_torchtitan_text(text))
            form = "torchtitan" if is_titan else "megatron"
        return {**data, "current_format": form, "framework": framework or form}

    @model_validator(mode="after")
    def _check_script_has_formula(self) -> Self:
        if self.current_file is not None and (self.trace is not None or self.needs_trace):
            raise _field_error(
                "`current_file`: is of Megatron or torchtitan, which train no model that only a "
                "trace describes; give `current`"
            )
        is_in_script = self.current_file is not None and not (self.model or self.config)
        if self.vocab_size is not None and not is_in_script:
            raise _field_error(
                "`vocab_size` completes the model that `current_file` describes; leave it out, or "
                "leave `model` and `config` out"
            )
        return self

    @model_validator(mode="after")
    def _check_current_and_gpus(self) -> Self:
        if self.current is not None and self.current_file is not None:
            raise rule_broken("current and current_file say the same", "give one of them")
        has_current = self.current is not None or self.current_file is not None
        if self.measured_step_s is not None and not has_current:
            raise _field_error(
                "`measured_step_s` is the duration of a step of `current`; give both or none"
            )
        if self.measured_peak_gib is not None and not has_current:
            raise _field_error("`measured_peak_gib` is the peak of `current`; give both or none")
        if self.gpu_counts is not None:
            for name in ("num_gpus", "current", "current_file"):
                if getattr(self, name) is not None:
                    raise _field_error(
                        f"`gpu_counts` and `{name}` exclude each other; give one of them"
                    )
            if len(self.gpus) > 1 or self.gpus[0].number is not None:
                raise _field_error(
                    "`gpu_counts` needs one kind of GPU without a number in `gpu`; correct one"
                )
        if self.packed_lengths and (self.fixed.slices or 1) > 1:
            raise _field_error(
                "`packed_lengths` and slices: packed sequences are not cut; leave one of them out"
            )
        in_gpu = sum(kind.number or 0 for kind in self.gpus)
        if in_gpu and self.num_gpus not in (None, in_gpu):
            raise _field_error(
                f"`num_gpus`: `gpu` has {in_gpu} GPUs; give one of them", value=self.num_gpus
            )
        return self

    def complete(self) -> Self:
        """Return the request with what its script says and the caller did not give.

        From a text for Megatron these are model, batch, sequence, precision, optimizer and the
        switches, from one for torchtitan model, batch, sequence, and in torchtitan precision and
        switches. Switches of the text are not among
        `chosen_switches`. Raises `InputError` if the text does not say which model it trains.
        """
        text = self.current_file
        is_titan = self.current_format == "torchtitan"
        if text is not None and is_titan:
            return self._complete_from_torchtitan(text)
        if text is None:
            return self
        request, num_gpus = self, self.total_gpus
        try:
            if self.model is None and self.config is None:
                model, config = find_model_of(text, self.vocab_size)
                request = self.model_copy(update={"model": model, "config": config})
            today = read_megatron(
                text,
                request.shape,
                self.gpus[0].hardware,
                num_gpus,
                global_batch=self.global_batch,
                sequence=self.packed_settings["sequence"],
            )
        except InputError as error:
            raise FieldError(FieldRef("current_file"), f": {error}") from None
        training = today.training
        optimizer, routing = training.optimizer, training.routing
        script = {
            **{name: getattr(training, name) for name in _OF_SCRIPTS},
            "global_batch": today.global_batch,
            "optimizer": optimizer.name,
            "precision_aware_optimizer": optimizer.precision_aware,
            "exp_avg_dtype": optimizer.exp_avg,
            "exp_avg_sq_dtype": optimizer.exp_avg_sq,
            "gradient_dtype": optimizer.gradients,
            "optimizer_offload": optimizer.offload,
            "expert_capacity": routing.capacity,
            "pad_experts": routing.is_padded,
            "expert_rank_capacity": routing.rank_capacity,
            "paged_stash": routing.is_stashed,
        }
        given = self.model_fields_set
        update = {
            name: value
            for name, value in script.items()
            if name not in given and value != getattr(self, name)
        }
        found = request.model_copy(update=update)
        found.model_fields_set.difference_update(set(_SWITCHES) - given)
        return found

    def _complete_from_torchtitan(self, text: str) -> Self:
        """Return the request with what a torchtitan config says and the caller did not give."""
        given, request = self.model_fields_set, self
        try:
            if self.model is None and self.config is None:
                request = self.model_copy(update={"model": find_titan_model(text)})
            today = read_torchtitan(
                text,
                request.shape,
                self.gpus[0].hardware,
                self.total_gpus,
                global_batch=self.global_batch if "global_batch" in given else None,
                sequence=self.packed_settings["sequence"],
            )
        except InputError as error:
            raise FieldError(FieldRef("current_file"), f": {error}") from None
        names = ("sequence", *_OF_TORCHTITAN * (self.framework == "torchtitan"))
        said = {name: getattr(today.training, name) for name in names}
        said["global_batch"] = today.global_batch
        update = {
            name: value
            for name, value in said.items()
            if name not in given and value != getattr(self, name)
        }
        found = request.model_copy(update=update)
        found.model_fields_set.difference_update(set(_SWITCHES) - given)
        return found

    @property
    def traced_degrees(self) -> tuple[int, ...]:
        """The degrees of tensor parallelism with which the model is traced.

        Powers of two up to 8 and to the number of GPUs, or the one given; and today's.
        """
        own = (
            {self.fixed.tp} if self.fixed.tp else {n for n in (1, 2, 4, 8) if n <= self.total_gpus}
        )
        return tuple(sorted(own if self.current is None else own | {self.current.tp}))

    @property
    def total_gpus(self) -> int:
        """The number of GPUs, of all kinds together; of several numbers the largest.

        Raises `InputError` if the request has no number and its script starts an unknown one.
        """
        if self.gpu_counts is not None:
            return MAX_AUTO_GPUS if self.gpu_counts == "auto" else max(self.gpu_counts)
        given = self.num_gpus or sum(kind.number or 0 for kind in self.gpus)
        try:
            return given or count_launched_gpus(self.current_file or "") or 8
        except InputError as error:
            raise _field_error(
                f"`num_gpus`: is missing, and `current_file` does not say it ({error}); give it"
            ) from None

    @property
    def chosen_switches(self) -> frozenset[str]:
        """The switches that the caller set."""
        return frozenset(_SWITCHES) & self.model_fields_set

    def question(self) -> dict[str, Any]:
        """Return all fields that the result depends on, except the options, as JSON values.

        Switches that the caller did not set are left out.
        """
        left_out = frozenset(_SWITCHES) - self.chosen_switches
        values = self.model_dump(mode="json", exclude={"options", "tags", "priority"} | left_out)
        if self.gpu_counts is None:
            values["num_gpus"] = self.total_gpus
        values["fixed"] = self.fixed.model_dump(exclude_none=True)
        if self.lora_rank is None:
            del values["lora_targets"]
        if not self.packed_lengths:
            del values["packed_lengths"]
        if self.current is not None:
            values["current"]["recompute"] = sorted(self.current.recompute)
            if self.current.layers is None:
                del values["current"]["layers"]
        return {name: value for name, value in values.items() if value not in (None, "")}


# --- Profile and import, which only the command line has.


class ProfileRequest(Request):
    """Stages or a model to measure here, or to trace for a GPU, and how to measure them."""

    stages: Annotated[str | None, Option(metavar="MODULE:FUNCTION")] = Field(
        None,
        description="Function that returns (stages, sample) or (stages, sample, loss_fn, target).",
    )
    model: Annotated[str | None, Option(metavar="MODULE:FUNCTION")] = Field(
        None,
        description="Function that returns (model, sample) or (model, sample, loss_fn, target): "
        "its distinct layers are measured for a model file.",
    )
    sequence: Size | None = Field(
        None, description="Tokens per sample, passed to the function of `model`."
    )
    num_devices: Annotated[int, Field(ge=1, le=4096, strict=True)] | None = Field(
        None, description="Devices of the model file."
    )
    blocks: Annotated[str | None, Option(metavar="NAME")] = Field(
        None, description="List of the layers of `model`. By default the longest list of modules."
    )
    microbatch: Size | None = Field(
        None, description="Samples per micro-batch, passed to the function."
    )
    num_microbatches: Annotated[int, Field(ge=1, le=2_000_000, strict=True)] | None = Field(
        None, description="Micro-batches per step. By default 4 per device."
    )
    placement: Annotated[tuple[NotNegative, ...] | None, Option(metavar="N,N")] = Field(
        None,
        description="Device of each stage. By default one device per stage, or a loop over ranks.",
    )
    device: Annotated[str | None, Option(metavar="NAME")] = Field(
        None,
        description="Device: cuda or cpu, by default cuda if there is one; or a GPU that need not "
        "be here, such as h100 or b200, for which the stages are traced.",
    )
    ranks: AtLeastOne = Field(
        1,
        description="Ranks that share each traced stage, as tensor-parallel or FSDP; the function "
        "finds that many in torch.distributed. The first one is traced.",
    )
    memory_bytes: Annotated[
        Annotated[int, Field(ge=1, le=2**53, strict=True)] | None, Option(metavar="BYTES")
    ] = Field(None, description="Memory of each device. By default the measured device's.")
    state_copies: Annotated[float, Field(ge=0, le=100, strict=True)] = Field(
        2.0, description="Size of the optimizer states in copies of the weights; 2 for Adam."
    )
    recompute: Switch = Field(True, description="Recomputation of whole micro-batches.")
    modes: NumModes = Field(
        8,
        description="Maximum number of modes per stage. With 0: keep, offload and recompute whole "
        "micro-batches.",
    )
    overlap: Annotated[str | None, Option(metavar="MODULE:FUNCTION")] = Field(
        None,
        description="Function that runs pairs, e.g. optpipe.runtime.overlap:interleave; the time "
        "that pairs hide is then measured.",
    )
    link_latency_ms: Annotated[Milliseconds | None, Option(metavar="MS")] = Field(
        None, description="Latency of links that were not measured."
    )
    link_gb_per_s: Annotated[
        Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] | None, Option(metavar="GB/s")
    ] = Field(None, description="Bandwidth of links that were not measured; 0 is unlimited.")
    threads: AtLeastOne = Field(1, description="CPU threads, as many as a rank will have.")
    repeats: AtLeastOne = Field(20, description="Samples per pass.")
    warmups: NotNegative = Field(5, description="Rounds of warm-up before the samples.")

    @model_validator(mode="after")
    def _check_stages_or_model(self) -> Self:
        if (self.stages is None) == (self.model is None):
            raise _field_error("give either `stages` or `model`: what to measure")
        of_model = ("sequence", "num_devices", "blocks")
        of_stages = ("placement", "overlap")
        foreign = of_model if self.model is None else of_stages
        for name in foreign:
            if name in self.model_fields_set:
                owner = "model" if self.model is None else "stages"
                raise _field_error(f"`{name}`: belongs to `{owner}`; leave it out")
        if self.model is not None and self.num_devices is None:
            raise _field_error("`num_devices`: is missing; give the devices of the model file")
        return self


class ImportRequest(Request):
    """Facts that traces, logs or tables lack, and how to read them."""

    name: Name | None = Field(None, description="Name of the problem.")
    num_microbatches: Count | None = Field(None, description="Micro-batches per step.")
    activation_bytes: SizeOption = Field(None, description="Activations per stage, e.g. 9.5GiB.")
    weight_context_bytes: SizeOption = Field(
        None, description="Bytes per stage that are kept from I to W."
    )
    offload_bytes: SizeOption = Field(None, description="Bytes per stage that may be offloaded.")
    checkpoint_bytes: SizeOption = Field(
        None, description="Bytes per stage that recomputation starts from; allows recomputation."
    )
    static_bytes: SizeOption = Field(None, description="Weights and optimizer states per stage.")
    output_bytes: SizeOption = Field(None, description="Message from each stage to the next.")
    memory_bytes: SizeOption = Field(None, description="Whole memory of each device.")
    reserved_bytes: SizeOption = Field(
        None, description="Reserved memory of each device, such as context and NCCL."
    )
    d2h_gb_per_s: Bandwidth | None = Field(
        None, description="Bandwidth from device to host in GB/s."
    )
    h2d_gb_per_s: Bandwidth | None = Field(
        None, description="Bandwidth from host to device in GB/s."
    )
    link_latency_ms: Milliseconds | None = Field(
        None, description="Latency in ms of links that were not measured."
    )
    link_gb_per_s: Bandwidth | None = Field(
        None, description="Bandwidth in GB/s of links that were not measured."
    )
    weight_share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = Field(
        None, description="Share of B that W takes, where only B was measured."
    )
    warmup_steps: NotNegative | None = Field(
        None, description="First steps to leave out. By default 1 of several, and 0 for tables."
    )
    range_pattern: Annotated[
        tuple[str, ...], Option(flag="--range", metavar="PATTERN", repeated=True)
    ] = Field(
        (),
        description="kineto: names of your ranges, ACTION=REGEX or a REGEX with the groups stage, "
        "action, microbatch; repeatable. By default those of torch's schedules.",
    )
    process: str = Field("", description="kineto: text in the name of the processes to read.")
    gpu_time: Annotated[Literal["span", "busy"], Option(metavar="NAME")] = Field(
        "span", description="kineto: span (first kernel to last) or busy (kernels only)."
    )
    pairs: Flag = Field(
        False,
        description="kineto: pairs of a forward and a backward, as far as the exchange with "
        "experts (all-to-all) of one hides in the other.",
    )
    num_stages: AtLeastOne | None = Field(
        None, description="megatron: number of stages, if the log lacks it."
    )
    equal_stages: Flag = Field(
        False, description="megatron: use the times of all ranks for each stage."
    )


# --- Sweeps: many problems that are solved together, as a batch.

_JOB_ID = "0f6b7e4a3c1d4e5f8a9b0c1d2e3f4a5b"
Axes = Annotated[
    dict[LongName, Annotated[list[Any], Field(min_length=1)]],
    Field(max_length=8),
    Option(flag="--axis", metavar="NAME=V1,V2,...", repeated=True),
]


def _parse_problems(listed: Any) -> list[Problem]:
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
    """A problem and axes to vary it along, a list of problems, or a job whose problem to vary.

    Each item becomes a job.
    """

    model_config = _schema(
        {
            "problem": PROBLEM_EXAMPLE,
            "axes": {"memory_scale": [1, 0.5]},
            "options": {"time_limit_s": 10},
        },
        {"what_if": _JOB_ID, "options": {"time_limit_s": 20}},
        one_of=("problem", "problems", "what_if"),
    )

    problem: NotNull[Problem] = None
    axes: Axes = Field(
        {},
        description="Axis -> values. Every combination is an item; the last axis varies fastest. "
        f"Axes: {', '.join(AXES)}, or the path of a field: devices[*].memory_bytes, "
        "stages[3].forward_ms.",
    )
    problems: NotNull[tuple[Problem, ...]] = Field(None, min_length=1)
    what_if: str = Field(
        "",
        min_length=1,
        max_length=200,
        description="Id of an ended job. Each item changes its problem a little: more memory, a "
        "faster bus, more micro-batches.",
        json_schema_extra=_drop_default,
    )
    name: LongName = Field("", description="Name of the batch. By default the problem's.")
    options: SolveOptions = Field(SolveOptions(), description="Options of every item.")
    tags: Tags = ()
    priority: Priority = 0

    readers: ClassVar[Readers] = {"problem": Problem.parse, "problems": _parse_problems}

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        if [self.problem is None, self.problems is None, not self.what_if].count(False) != 1:
            raise rule_broken(
                "a batch has a problem (with axes), a list of problems, or what_if, a job's id",
                "give one of them",
            )
        if self.axes and self.problem is None:
            raise rule_broken("axes vary one problem", "give problem instead of problems")
        return self


# --- Training runs that switch to better schedules.

_SCHEDULE_EXAMPLE: dict[str, Any] = {
    "format": "optpipe/schedule/v1",
    "problem_hash": "sha256:0cba4775ead9dd89f84fe7350bd7d34e2440dc6f17d646dd362982818d9fc302",
    "placement": [0, 1],
    "programs": [
        ["0F0", "0F1", "0B0", "0F2", "0B1", "0F3", "0B2", "0B3"],
        ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "1F3", "1B3"],
    ],
    "objective": "makespan",
    "makespan_ms": 140.0,
    "span_ms": 140.0,
    "peak_bytes": [2000, 1000],
    "host_peak_bytes": {"host0": 0},
    "status": "feasible",
    "stopped_by": "work_limit",
    "provenance": {"method": "1f1b"},
}


class FollowRequest(Request):
    """Measured times of a training run, and the schedule that runs.

    The job solves the problem again if the measured times make a better schedule possible. Only
    durations count, those of copies and messages included; sizes stay those of the problem.
    """

    model_config = _schema(
        {
            "problem": PROBLEM_EXAMPLE,
            "schedule": _SCHEDULE_EXAMPLE,
            "measurements": {
                "source": "training, 8 sampled steps up to step 400",
                "samples": [
                    {"stage": 0, "action": "F", "time_ms": 10.2},
                    {"stage": 0, "action": "B", "time_ms": 18.4},
                ],
            },
            "threshold": 0.02,
            "step": 400,
            "step_ms": 127.9,
            "options": {"time_limit_s": 10},
            "tags": ["run-7"],
        }
    )

    kind: ClassVar[JobKind] = JobKind.FOLLOW
    readers: ClassVar[Readers] = {"problem": Problem.parse, "schedule": Schedule.parse}

    problem: Problem = Field(description="Problem that the running schedule was made for.")
    schedule: Schedule = Field(description="The running schedule.")
    measurements: Measurements = Field(
        description="Measured times, such as those of `ActionTimer.measurements`."
    )
    threshold: Noise = Field(
        DEFAULT_THRESHOLD,
        description="Minimum gain of another schedule, as a share (0-1) of the step. The problem "
        "is solved again only where drift costs more.",
    )
    step: Index | None = Field(None, description="Number of the measured step.")
    step_ms: Milliseconds | None = Field(None, description="Duration of a step in milliseconds.")
    options: SolveOptions = SolveOptions()
    tags: Tags = ()
    priority: Priority = 0

    @model_validator(mode="after")
    def _check_measurements_fit(self) -> Self:
        if self.problem.num_costs > 1:
            raise rule_broken(
                f"problem: has micro-batches of {self.problem.num_costs} costs, and measurements "
                "do not name the micro-batch of a time",
                "give equal micro-batches, or plan each batch (optpipe_solver.replan)",
            )
        if not self.problem.is_even:
            raise rule_broken(
                "problem: has samples or a given order of micro-batches, for which no bound says "
                "what measured times cost",
                "leave sample and order out",
            )
        stages = {sample.stage for sample in self.measurements.samples}
        if not stages:
            raise rule_broken(
                "measurements.samples is empty", "measure the times of at least one action"
            )
        num_stages = len(self.problem.stages)
        if max(stages) >= num_stages:
            raise rule_broken(
                f"measurements.samples name stage {max(stages)}, but the problem has {num_stages} "
                "stages, numbered from 0",
                "send the problem of the measured run",
            )
        return self
