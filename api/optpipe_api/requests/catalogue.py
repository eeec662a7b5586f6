"""What comes in to estimate, to tune or to vary a problem; and what `optpipe.presets` offers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.json_schema import SkipJsonSchema  # noqa: TC002 - pydantic reads it

from optpipe.errors import rule_broken
from optpipe.presets import GPUS, MODELS, Hardware, ModelShape, total_parameters
from optpipe.presets.shape import PRECISIONS, Dispatch, Dispatcher, Precision
from optpipe.problem import Problem
from optpipe.stage import MOST_COSTS
from optpipe.sweep import AXES
from optpipe.wire import CacheUse, JobOptions
from optpipe_api.errors import RequestError
from optpipe_api.requests.jobs import (
    PROBLEM_EXAMPLE,
    Priority,
    Readers,
    SearchOptions,
    StrictBody,
    Tags,
    WithProblem,
    WorkLimitUnits,
    no_default,
)

if TYPE_CHECKING:
    from optpipe_api.settings import Settings

__all__ = [
    "Catalogue",
    "CompareOptionsBody",
    "Comparison",
    "CurrentBody",
    "Degree",
    "EstimateBody",
    "EstimateView",
    "FixedBody",
    "Name",
    "Size",
    "TuneBody",
    "TuneOptionsBody",
    "Values",
    "VariantBody",
    "VariantView",
    "not_null",
]


_MOST = 2**31 - 1
_PLACEMENTS = ("linear", "loop", "v")

Values = Annotated[dict[Annotated[str, Field(max_length=200)], Any], Field(max_length=16)]
Name = Annotated[str, Field(max_length=80)]
Degree = Annotated[int, Field(ge=1, le=4096, strict=True)]
Size = Annotated[int, Field(ge=1, le=_MOST, strict=True)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False, strict=True)]

_VALUES = (
    f"Axis -> its value: {', '.join(AXES)}, or the path of a field; as the axes of `/v1/batches`."
)


def not_null(value: Any) -> Any:
    """Return a model or config that is there; raises `RequestError` where it is null."""
    if value is None:
        raise RequestError("model or config = null: is neither; leave it out")
    return value


class ModelEntry(BaseModel):
    """A model of the catalogue."""

    name: str
    parameters: int
    layers: int
    hidden: int
    heads: int
    source: str

    @classmethod
    def of(cls, shape: ModelShape) -> Self:
        return cls(
            name=shape.name,
            parameters=total_parameters(shape),
            layers=shape.num_layers,
            hidden=shape.hidden,
            heads=shape.num_heads,
            source=shape.source,
        )


class GpuEntry(BaseModel):
    """An accelerator of the catalogue; rates per direction, TFLOP/s dense."""

    name: str
    title: str
    memory_bytes: int
    pcie_gb_per_s: float | None
    gpus_per_node: int
    tflops: dict[str, float]
    source: str

    @classmethod
    def of(cls, hardware: Hardware) -> Self:
        pcie = hardware.pcie_gb_per_s
        return cls(
            name=hardware.name,
            title=hardware.title,
            memory_bytes=int(hardware.memory_bytes.value),
            pcie_gb_per_s=None if pcie is None else pcie.value,
            gpus_per_node=hardware.gpus_per_node,
            tflops={name: fact.value for name, fact in hardware.tflops.items()},
            source=hardware.memory_bytes.source,
        )


class Catalogue(BaseModel):
    """What `POST /v1/estimates` knows by name."""

    models: list[ModelEntry]
    gpus: list[GpuEntry]
    placements: list[str]
    precisions: list[str]

    @classmethod
    def make(cls) -> Self:
        return cls(
            models=[ModelEntry.of(shape) for shape in MODELS.values()],
            gpus=[GpuEntry.of(hardware) for hardware in GPUS.values()],
            placements=list(_PLACEMENTS),
            precisions=list(PRECISIONS),
        )


class EstimateBody(StrictBody):
    """A model on an accelerator, as ``optpipe estimate`` takes them, and values to vary it by."""

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

    model: Name | SkipJsonSchema[None] = Field(
        default=None, json_schema_extra=no_default, description="Of the catalogue."
    )
    config: dict[str, Any] | SkipJsonSchema[None] = Field(
        default=None, json_schema_extra=no_default, description="A Hugging Face config.json."
    )
    gpu: Name = Field(description="Of the catalogue.")
    pp: Degree = Field(default=4, description="Devices of the pipeline.")
    tp: Degree = 1
    cp: Degree = 1
    ep: Degree = Field(default=1, description="With etp it divides tp x cp x dp.")
    etp: Degree = Field(default=1, description="Tensor-parallel degree of the experts.")
    dp: Degree = 1
    micro_batch: Size = Field(default=1, description="Sequences per micro-batch.")
    sequence: Size = Field(default=4096, description="Tokens per sequence.")
    num_microbatches: Size = 16
    chunks: Annotated[int, Field(ge=1, le=64, strict=True)] = Field(
        default=1, description="Stages per device."
    )
    placement: Literal["linear", "loop", "v"] | None = Field(
        default=None, description="Null: linear, with several chunks loop."
    )
    layout: Literal["balanced", "even"] = Field(
        default="balanced", description="balanced: the slowest stage fastest; even: as frameworks."
    )
    precision: Precision = "bf16"
    zero: Literal[0, 1, 2, 3] = 1
    flash: bool = Field(default=True, strict=True)
    sequence_parallel: bool = Field(default=True, strict=True)
    lean: bool = Field(default=False, strict=True)
    recompute: Annotated[frozenset[Name], Field(max_length=16)] = Field(
        default=frozenset(), description="Modules that are made again in the backward."
    )
    cuda_graphs: bool = Field(default=False, strict=True)
    ep_overlap: bool = Field(default=False, strict=True)
    dispatcher: Dispatcher = "alltoall"
    dispatch: Dispatch = Field(default="bf16", description="Precision of tokens to experts.")
    overlap: bool = Field(default=True, strict=True)
    offloaded_layers: Annotated[int, Field(ge=0, le=4096, strict=True)] = Field(
        default=0, description="Layers whose activations stay in host memory."
    )
    network: Name | None = Field(
        default=None, description="Between nodes: infiniband, ethernet or tcp, and `:GBIT`."
    )
    oversubscription: Annotated[float, Field(ge=1, le=64, strict=True)] = 1.0
    measured_step_s: (
        Annotated[float, Field(gt=0, lt=1e6, allow_inf_nan=False, strict=True)] | None
    ) = Field(default=None, description="What a step takes: calibrates every time.")
    time_factor: Annotated[float, Field(gt=0, lt=1e6, allow_inf_nan=False, strict=True)] | None = (
        Field(default=None, description="Multiplies every time.")
    )
    mfu: Share | None = Field(
        default=None, description="Share of peak that F, I and W reach together."
    )
    pcie_efficiency: Share | None = None
    memory_bytes: Annotated[int, Field(ge=1, le=10**15, strict=True)] | None = Field(
        default=None, description="Of a device, instead of all it has."
    )
    pairs: bool = Field(
        default=False,
        strict=True,
        description="Forwards and backwards may run together, experts' exchange hidden.",
    )
    modes: Annotated[int, Field(ge=0, le=64, strict=True)] = Field(
        default=0, description="Most modes per stage; 0: keep, offload, recompute as v1 has them."
    )
    slices: Annotated[int, Field(ge=1, le=256, strict=True)] = Field(
        default=1, description="Slices of each sequence, each a micro-batch of the problem."
    )
    lengths: list[Annotated[list[Size], Field(min_length=1)]] = Field(
        default=[],
        description="Unequal micro-batches: of each the lengths of the sequences packed into it.",
    )
    costs: Annotated[int, Field(ge=1, le=MOST_COSTS, strict=True)] = Field(
        default=8, description="With lengths: most kinds of micro-batches, rounded up."
    )
    values: Values = Field(default={}, description=_VALUES)

    readers: ClassVar[Readers] = {"model": not_null, "config": not_null}

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.model is None) == (self.config is None):
            raise rule_broken("an estimate is of a model or of a config", "give one of them")
        return self

    @model_validator(mode="after")
    def _lengths_say_it(self) -> Self:
        said = {"sequence", "micro_batch", "num_microbatches"} & self.model_fields_set
        if self.lengths and said:
            raise rule_broken(f"lengths say {min(said)}, too", "leave one of them out")
        if "costs" in self.model_fields_set and not self.lengths:
            raise rule_broken("costs say how lengths are grouped", "give lengths, or leave it out")
        return self


class VariantBody(WithProblem):
    """A problem, and one value on each axis that is to change."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"problem": PROBLEM_EXAMPLE, "values": {"memory_scale": 0.75}}]
        }
    )

    values: Values = Field(default={}, description=_VALUES)


class VariantView(BaseModel):
    """The problem, varied; ``axes`` are the named ones that can change it.

    ``usable_bytes`` and ``static_bytes`` have a number per device: what its memory leaves, reserved
    bytes taken off, and what its stages hold all the time.
    """

    problem: Problem
    problem_hash: str
    axes: list[str]
    usable_bytes: list[int]
    static_bytes: list[int]


class EstimateView(VariantView):
    """The estimated problem; ``sizes`` are the layers of each stage, embedding and head counted.

    ``step_ms`` is of 1F1B, interleaved with several chunks, all that follows it included;
    ``median_error`` how far such estimates were from published runs, null where none were compared.
    """

    parameters: int
    mfu: float
    step_ms: float
    tokens_per_s_per_gpu: float
    time_factor: float
    median_error: float | None
    sizes: list[int]
    notes: list[str]


# --- What travels over HTTP about methods: their list, requests to compare them, rows.

# --- What comes in to tune.


_DEFAULT_TIME_LIMIT_S = 20.0


class WorkloadBody(StrictBody):
    """What the times alone do not tell; tokens/s and MFU come from it."""

    tokens_per_microbatch: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    flops_per_microbatch: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Model FLOPs, forward and backward, without recomputation.",
    )
    peak_flops_per_s: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="The sum over all devices."
    )

    @model_validator(mode="after")
    def _mfu_takes_both(self) -> Self:
        if (self.flops_per_microbatch is None) != (self.peak_flops_per_s is None):
            raise rule_broken(
                "flops_per_microbatch and peak_flops_per_s make MFU only together",
                "give both or none",
            )
        return self


class CompareOptionsBody(SearchOptions):
    """How to compare; what is left out takes the service's default (20 s for the optimiser)."""

    workload: WorkloadBody = WorkloadBody()

    def within(self, settings: Settings) -> JobOptions:
        """Return the options, defaults filled in.

        Raises `InputError` if they go beyond what this service allows.
        """
        default_s = min(_DEFAULT_TIME_LIMIT_S, settings.default_time_limit_s)
        return JobOptions(
            time_limit_s=self.checked_time_limit_s(settings, default_s),
            threads=self.threads,
            seed=self.seed,
            workload=self.workload.model_dump(),
        )


class Comparison(WithProblem):
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

    options: CompareOptionsBody = CompareOptionsBody()
    tags: Tags = ()
    priority: Priority = 0


_TUNE_TIME_LIMIT_S = 120.0
_GAP = 0.002

Many = Annotated[int, Field(ge=1, le=2**17, strict=True)]
Zero = Literal[0, 1, 2, 3]
Chunks = Annotated[int, Field(ge=1, le=64, strict=True)]
Layers = Annotated[int, Field(ge=1, le=1024, strict=True)]


class TuneOptionsBody(SearchOptions):
    """How to tune; what is left out takes the service's default (120 s)."""

    gap: float = Field(
        default=_GAP,
        ge=0,
        lt=1,
        strict=True,
        description="Stop where no configuration is faster than the best by more than this share.",
    )
    work_limit: WorkLimitUnits = None
    cache: CacheUse = Field(
        default="use", description="`use` answers at once what was tuned before; `refresh` again."
    )

    def within(self, settings: Settings) -> JobOptions:
        """Return the options, defaults filled in.

        Raises `InputError` if they go beyond what this service allows.
        """
        return JobOptions(
            time_limit_s=self.checked_time_limit_s(settings, _TUNE_TIME_LIMIT_S),
            work_limit=self.work_limit,
            threads=self.threads,
            seed=self.seed,
            gap=self.gap,
            cache=self.cache,
        )


class FixedBody(StrictBody):
    """Degrees that are not searched; null: searched."""

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


class CurrentBody(StrictBody):
    """What is run today: 1F1B, or interleaved 1F1B with several chunks."""

    tp: Degree = 1
    cp: Degree = 1
    dp: Many | None = Field(default=None, description="Null: what the number of GPUs leaves.")
    ep: Degree = 1
    etp: Degree = 1
    pp: Degree = 1
    chunks: Chunks = 1
    micro_batch: Many = 1
    zero: Zero = 1
    recompute: Annotated[frozenset[Name], Field(max_length=16)] = frozenset()
    layers: Annotated[tuple[Layers, ...], Field(min_length=1, max_length=512)] | None = Field(
        default=None,
        description="Of each stage in model order, embedding and head counted; null: cut evenly.",
    )


class TuneBody(StrictBody):
    """A model, GPUs and a batch, as ``optpipe tune`` takes them: which configuration is fastest."""

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

    model: Name | SkipJsonSchema[None] = Field(
        default=None, json_schema_extra=no_default, description="Of the catalogue."
    )
    config: dict[str, Any] | SkipJsonSchema[None] = Field(
        default=None, json_schema_extra=no_default, description="A Hugging Face config.json."
    )
    gpu: Name = Field(
        description="Of the catalogue; several as `h100:32,a100:32`: of each a part of the "
        "pipeline, together `num_gpus`."
    )
    num_gpus: Many = 8
    global_batch: Annotated[int, Field(ge=1, le=2**20, strict=True)] = Field(
        default=128, description="Sequences of a step, over all replicas."
    )
    sequence: Size = Field(default=4096, description="Tokens per sequence.")
    framework: Literal["any", "megatron", "torchtitan"] = Field(
        default="any", description="Whose schedules may be answered; any: those of our runtime."
    )
    current: CurrentBody | None = Field(
        default=None, description="What is run today: the gain is over it."
    )
    current_file: Annotated[str, Field(min_length=1, max_length=100_000)] | None = Field(
        default=None,
        description="Instead of it: Megatron arguments or YAML, or a torchtitan config, as text.",
    )
    fixed: FixedBody = FixedBody()
    precision: Precision = "bf16"
    flash: bool = Field(default=True, strict=True)
    cuda_graphs: bool = Field(default=False, strict=True)
    ep_overlap: bool = Field(default=False, strict=True)
    dispatcher: Dispatcher = "alltoall"
    dispatch: Dispatch = "bf16"
    overlap: bool = Field(default=True, strict=True)
    network: Name | None = Field(
        default=None, description="Between nodes: infiniband, ethernet or tcp, and `:GBIT`."
    )
    oversubscription: Annotated[float, Field(ge=1, le=64, strict=True)] = 1.0
    memory_bytes: Annotated[int, Field(ge=1, le=10**15, strict=True)] | None = Field(
        default=None, description="Of a device, instead of all it has."
    )
    headroom: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        allow_inf_nan=False,
        strict=True,
        description="Share of the memory that answers leave free: bytes are estimates too.",
    )
    measured_step_s: (
        Annotated[float, Field(gt=0, lt=1e6, allow_inf_nan=False, strict=True)] | None
    ) = Field(default=None, description="What a step of `current` takes: calibrates every time.")
    options: TuneOptionsBody = TuneOptionsBody()
    tags: Tags = ()
    priority: Priority = 0

    readers: ClassVar[Readers] = {"model": not_null, "config": not_null}

    @model_validator(mode="after")
    def _one_of_two(self) -> TuneBody:
        if (self.model is None) == (self.config is None):
            raise rule_broken("a tune is of a model or of a config", "give one of them")
        if self.current is not None and self.current_file is not None:
            raise rule_broken("current and current_file say the same", "give one of them")
        return self

    def question(self) -> dict[str, Any]:
        """Return what is asked as JSON values: all that the answer depends on but the options."""
        values = self.model_dump(mode="json", exclude={"options", "tags", "priority"})
        values["fixed"] = self.fixed.model_dump(exclude_none=True)
        if self.current is not None:
            values["current"]["recompute"] = sorted(self.current.recompute)
            if self.current.layers is None:
                del values["current"]["layers"]
        return {name: value for name, value in values.items() if value is not None}
