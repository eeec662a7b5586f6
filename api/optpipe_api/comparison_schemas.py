"""What travels over HTTP about methods: their list, requests to compare them, rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from optpipe.plot.methods import title_of
from optpipe.validation import rule_broken
from optpipe_api.engine.comparison import CompareOptions
from optpipe_api.schemas import PROBLEM_EXAMPLE, SearchOptions, StrictBody, WithProblem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optpipe_api.settings import Settings

__all__ = ["CompareOptionsBody", "Comparison", "MethodList", "MethodView", "RowList", "RowView"]

_DEFAULT_TIME_LIMIT_S = 20.0
_ROW_EXAMPLE: dict[str, Any] = {
    "method": "1f1b",
    "placement": "as given",
    "problem_hash": "sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae",
    "programs": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]],
    "seconds": 0.001,
    "makespan_ms": 84.0,
    "span_ms": 84.0,
    "makespan_bubble": 0.3333,
    "span_bubble": 0.3333,
    "p50_ms": 84.3,
    "p95_ms": 86.9,
    "peak_bytes": 2000,
    "host_peak_bytes": 0,
    "over_limit": False,
    "tokens_per_s": 97523.8,
    "mfu": 0.41,
    "reason": "",
}


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

    def within(self, settings: Settings, form: str) -> CompareOptions:
        """Return the options, defaults filled in; ``form`` is that of the answer.

        Raises
        ------
        InputError
            If they go beyond what this service allows.
        """
        default_s = min(_DEFAULT_TIME_LIMIT_S, settings.default_time_limit_s)
        return CompareOptions(
            form=form,
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


class RowView(BaseModel):
    """One method's schedule; bytes are those of the fullest device or host.

    ``programs`` is null where the method has none; then ``reason`` says why, and numbers are 0.
    ``placement`` is `as given`, or names the re-placed copy of the problem that ``problem_hash``
    and ``programs`` belong to, such as `v x2`.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [_ROW_EXAMPLE]})

    method: str
    placement: str
    problem_hash: str
    programs: list[list[str]] | None
    seconds: float
    makespan_ms: float
    span_ms: float
    makespan_bubble: float
    span_bubble: float
    p50_ms: float = Field(description="Median step time under +-10 % noise on every duration.")
    p95_ms: float
    peak_bytes: int
    host_peak_bytes: int
    over_limit: bool
    tokens_per_s: float | None
    mfu: float | None
    reason: str


class RowList(BaseModel):
    """A row per method: best first under the memory limit, then over it, then the absent."""

    rows: list[RowView]


class MethodView(BaseModel):
    """What `method` of a job may be."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "1f1b",
                    "title": "1F1B",
                    "description": "1F1B, also called PipeDream-Flush.",
                }
            ]
        }
    )

    name: str
    title: str
    description: str


class MethodList(BaseModel):
    """Every method that this service knows."""

    methods: list[MethodView]

    @classmethod
    def of(cls, described: Mapping[str, str]) -> Self:
        """Return the list of methods."""
        views = [
            MethodView(name=name, title=title_of(name), description=text)
            for name, text in described.items()
        ]
        return cls(methods=views)
