"""What comes in to tune: a model, GPUs and a batch, and what is run today."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic.json_schema import SkipJsonSchema  # noqa: TC002 - pydantic reads it

from optpipe.errors import rule_broken
from optpipe.presets.shape import Dispatch, Dispatcher, Precision  # noqa: TC001 - likewise
from optpipe.wire import CacheUse, JobOptions
from optpipe_api.requests.catalogue import Degree, Name, Size, not_null
from optpipe_api.requests.jobs import (
    Priority,
    Readers,
    SearchOptions,
    StrictBody,
    Tags,
    WorkLimitUnits,
    no_default,
)

if TYPE_CHECKING:
    from optpipe_api.settings import Settings

__all__ = ["CurrentBody", "FixedBody", "TuneBody", "TuneOptionsBody"]

_DEFAULT_TIME_LIMIT_S = 120.0
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
            time_limit_s=self.checked_time_limit_s(settings, _DEFAULT_TIME_LIMIT_S),
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
        asked = self.model_dump(mode="json", exclude={"options", "tags", "priority"})
        asked["fixed"] = self.fixed.model_dump(exclude_none=True)
        if self.current is not None:
            asked["current"]["recompute"] = sorted(self.current.recompute)
            if self.current.layers is None:
                del asked["current"]["layers"]
        return {name: value for name, value in asked.items() if value is not None}
