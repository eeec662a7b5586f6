"""Every answer of the service as a pydantic model: the service sends it, the client reads it.

`optpipe.requests` has the requests, ``answer_examples.json`` the examples that OpenAPI shows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from optpipe.errors import InputError
from optpipe.formats.tables import SweepRow
from optpipe.planning import GPUS, MODELS, total_parameters
from optpipe.planning.shape import CostSource
from optpipe.problem import Problem
from optpipe.requests import (
    DEFAULT_NOISE,
    CacheUse,
    CurrentRun,
    EstimateRequest,
    JobKind,
    Request,
    SearchOptions,
    SubmitOptions,
    TuneRequest,
)
from optpipe.schedule import OPTIMAL_GAP
from optpipe.sweep import sweep, useful_axes
from optpipe.units import ShortRepr

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optpipe.planning import Estimate

__all__ = [
    "Answer",
    "AuditList",
    "AuditView",
    "BatchList",
    "BatchView",
    "Cache",
    "CancelledJobs",
    "Catalogue",
    "Drift",
    "EstimateView",
    "Event",
    "EventKind",
    "Failure",
    "Fault",
    "FrontierLineView",
    "FrontierPointView",
    "FrontierView",
    "GpuEntry",
    "Health",
    "Improvement",
    "Item",
    "Job",
    "JobList",
    "JobOptions",
    "JobState",
    "MethodList",
    "MethodRow",
    "MethodRowList",
    "MethodView",
    "ModelEntry",
    "PasteForm",
    "Readiness",
    "RequestField",
    "ScoreboardError",
    "SweepRowList",
    "Tuned",
    "TunedCounts",
    "TunedMemory",
    "TunedRow",
    "VariantView",
]


@cache
def _load_examples() -> dict[str, dict[str, Any]]:
    """Return an example of each answer that has one, by class name."""
    text = resources.files("optpipe").joinpath("answer_examples.json").read_text("utf-8")
    examples: dict[str, dict[str, Any]] = json.loads(text)
    row = examples["TunedRow"] | {"memory": [examples["TunedMemory"]] * 2}
    tuned = {"counts": examples["TunedCounts"], "rows": [row], "pareto": [row]}
    return examples | {
        "TunedRow": row,
        "Tuned": examples["Tuned"] | tuned,
        "BatchView": examples["BatchView"] | {"items": [examples["Item"]]},
    }


def _add_example(schema: dict[str, Any], model: type[BaseModel]) -> None:
    example = _load_examples().get(model.__name__)
    if example is not None:
        schema["examples"] = [example]


def _require_all_fields(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Describe what a service of this version sends: every field, always."""
    for field in schema["properties"].values():
        field.pop("default", None)
    schema["required"] = list(schema["properties"])
    _add_example(schema, model)


class Answer(ShortRepr, BaseModel):
    """Base class of the answers.

    A client ignores fields that only a newer service sends. It fills in the defaults of fields that
    an older service does not send.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", json_schema_extra=_require_all_fields)

    @classmethod
    def of(cls, record: object, /, **others: Any) -> Self:
        """Return an answer with the fields of a record that have the same names.

        Times of the record are seconds since the epoch. They become UTC times.

        Parameters
        ----------
        others
            Fields that the record does not have, or that replace those of the record.
        """
        names = cls.model_fields.keys() - others
        values = {name: getattr(record, name) for name in names if hasattr(record, name)}
        return cls.model_validate(values | others, from_attributes=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The options of a job, defaults filled in. A job uses those of its kind.

    They are the arguments of `optpipe_solver.solve`, `plan`, `compare` and `tune` with the same
    names. These differ:

    * ``cache``: whether the answers of earlier jobs are used.
    * ``chunks``, ``placements``: of a plan; null: the solver chooses.
    * ``workload``: of a comparison.
    * ``robust``: a percentile such as P90, null for the shortest schedule; ``jitter`` and
      ``stragglers`` are the noise that it is computed with.
    """

    time_limit_s: float
    work_limit: float | None = None
    threads: int = 1
    seed: int = 0
    gap: float = OPTIMAL_GAP
    method: str = "auto"
    cache: CacheUse = "use"
    robust: str | None = None
    jitter: float = DEFAULT_NOISE
    stragglers: float = DEFAULT_NOISE
    chunks: tuple[int, ...] | None = None
    placements: tuple[str, ...] | None = None
    workload: dict[str, float | None] | None = None

    def __post_init__(self) -> None:
        # JSON has lists where equal options have tuples.
        for name in ("chunks", "placements"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else tuple(value))

    @classmethod
    def of(cls, options: SearchOptions, time_limit_s: float) -> JobOptions:
        """Return the options of a job from those of its request and a time limit."""
        fields = set(cls.__dataclass_fields__) & set(type(options).model_fields)
        given = options.model_dump(include=fields)
        return cls(**given | {"time_limit_s": time_limit_s})

    def has_same_task(self, other: JobOptions) -> bool:
        """Return whether both search for the same, apart from budgets and the gap to reach."""

        def task(options: JobOptions) -> tuple[object, ...]:
            noise = (options.robust, options.jitter, options.stragglers) if options.robust else None
            return options.method, options.chunks, options.placements, noise

        return task(self) == task(other)

    def covers(self, other: JobOptions) -> bool:
        """Return whether a search with these options finds what one with the others would find.

        It has the same task and seed, and at least the same budget.
        """
        return (
            self.has_same_task(other)
            and self.seed == other.seed
            and self.gap <= other.gap
            and self.threads >= other.threads
            and self.time_limit_s >= other.time_limit_s
            and (
                self.work_limit is None
                or (other.work_limit is not None and self.work_limit >= other.work_limit)
            )
        )


# --- Jobs.


class JobState(StrEnum):
    """The state of a job; `optpipe_api.jobs` draws the transitions."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    INFEASIBLE = "infeasible"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether the job has ended. Only a resume changes it after that."""
        return self not in (JobState.QUEUED, JobState.RUNNING)


class Cache(StrEnum):
    """The result of the lookup at submission: the answer, a schedule to start from, or nothing."""

    HIT = "hit"
    NEAR = "near"
    MISS = "miss"


class EventKind(StrEnum):
    """The kind of an event of a job."""

    STATE = "state"
    INCUMBENT = "incumbent"
    BOUND = "bound"
    LOG = "log"


class Failure(Answer):
    """The reason why a job ended without success.

    ``needs`` maps each quantity that is too small to a value that is large enough.
    """

    code: str
    message: str
    needs: dict[str, int] = Field(default_factory=dict)


class Improvement(Answer):
    """A better schedule or bound, and the seconds of solving until it was found."""

    seconds: float
    method: str
    objective_ms: float | None = None
    bound_ms: float | None = None


class Job(Answer):
    """A job at the time of the answer.

    * ``has_schedule``: true from the first schedule on, in every state.
    * ``cache``: what the service knew at submission. `hit`: the answer. `near`: a schedule of a
      similar problem, which the job starts from. `miss`: neither.
    * ``source_id``: the job that this answer or start is from.
    * ``owner``: only admins see it.
    """

    id: str
    kind: JobKind = JobKind.SOLVE
    state: JobState
    has_schedule: bool
    cache: Cache = Cache.MISS
    source_id: str | None = None
    name: str = ""
    owner: str | None = None
    problem_hash: str
    objective: str
    objective_ms: float | None = None
    bound_ms: float | None = None
    gap: float | None = None
    options: JobOptions
    tags: tuple[str, ...] = ()
    priority: int = 0
    batch_id: str | None = None
    batch_index: int | None = None
    cancel_requested: bool = False
    attempt: int = Field(default=0, description="Number of times that solving started.")
    spent_s: float = Field(default=0.0, description="Seconds of solving in earlier attempts.")
    num_schedules: int = Field(
        default=0, description="Number of schedules so far, each better than the one before."
    )
    error: Failure | None = None
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    place: int | None = Field(
        default=None,
        description="Place among the queued jobs of its owner, 1 = next. Owners take turns. Null "
        "for a moment after submission, and for jobs that are not queued.",
    )
    trace: tuple[Improvement, ...] | None = Field(default=None, description="Null in lists.")

    @property
    def is_finished(self) -> bool:
        """Whether the job has ended. Only a resume changes it after that."""
        return self.state.is_final


class JobList(Answer):
    """Jobs, newest first; ``next`` is the ``cursor`` of the next page, null on the last page."""

    jobs: tuple[Job, ...]
    next: str | None


class CancelledJobs(Answer):
    """The number of jobs that were queued or running."""

    num_jobs: int


class AuditView(Answer):
    """A change that a caller made: submit, cancel, resume or delete, or a change of a key."""

    at: datetime
    actor: str = Field(description="Name of the key; empty without keys.")
    action: str
    subject: str = Field(description="Id of the job or batch, or name of the key.")


class AuditList(Answer):
    """Changes, newest first; ``next`` is the ``cursor`` of the next page, null on the last page."""

    entries: tuple[AuditView, ...]
    next: str | None


class Event(Answer):
    """An event of a job: the data of a server-sent event.

    * ``text``: the new state of the job (`state`), or a sentence (`log`).
    * ``seconds``: of solving so far (`incumbent` and `bound`, as the numbers are).
    """

    number: int = Field(description="The event's id; it grows, with gaps.")
    kind: EventKind
    at: datetime
    seconds: float | None = None
    method: str | None = None
    objective_ms: float | None = None
    bound_ms: float | None = None
    gap: float | None = None
    text: str | None = None


# --- Batches.


class Item(Answer):
    """An item of a batch: its values on the axes, and the results so far.

    ``memory_bytes`` is the memory limit of the device with the most memory. ``objective_ms`` is of
    the schedule of job ``schedule_job_id``: the item's own job, or the job of an item with a
    tighter problem, whose schedule is legal here too. State and error are those of the own job.
    """

    index: int
    job_id: str
    name: str = ""
    values: dict[str, Any] = Field(default_factory=dict)
    state: JobState
    cache: Cache = Cache.MISS
    memory_bytes: int = 0
    objective_ms: float | None = None
    bound_ms: float | None = None
    gap: float | None = None
    schedule_job_id: str | None = None
    error: Failure | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None


class BatchView(Answer):
    """A batch at the time of the answer, computed from the jobs of its items.

    Only admins see ``owner``.
    """

    id: str
    name: str = ""
    owner: str | None = None
    is_finished: bool
    progress: float = Field(description="Share of the items that have ended, 0 to 1.")
    num_items: int
    counts: dict[JobState, int] = Field(default_factory=dict, description="Items in each state.")
    created_at: datetime
    finished_at: datetime | None = None
    axes: dict[str, list[Any]] | None = Field(default=None, description="Null in lists.")
    options: JobOptions | None = Field(default=None, description="Null in lists.")
    tags: tuple[str, ...] | None = Field(default=None, description="Null in lists.")
    priority: int | None = Field(default=None, description="Null in lists.")
    items: tuple[Item, ...] | None = Field(default=None, description="In order; null in lists.")


class BatchList(Answer):
    """Batches, newest first; ``next`` is the ``cursor`` of the next page, null on the last page."""

    batches: tuple[BatchView, ...]
    next: str | None


class SweepRowList(Answer):
    """The items of a batch as rows of a table, in order; ``state`` is the state of the job."""

    rows: list[SweepRow]


# --- Training runs that switch to better schedules.


class Drift(Answer):
    """How the running schedule does under measured times: the result of a job of kind `follow`.

    * ``planned_ms``, ``current_ms``: its length under the times that it was made for, and under
      the measured times.
    * ``expected_ms``: length under the measured times of a schedule that is as good for them as
      the running one is for the times that it was made for.
    * ``drift``: share by which ``current_ms`` exceeds ``expected_ms``.
    * ``is_solved``: whether ``drift`` exceeds ``threshold``, so that the job solves the measured
      problem; ``reason``: why it does or does not.
    * ``step``, ``step_ms``: of the request.
    """

    planned_ms: float
    current_ms: float
    expected_ms: float
    drift: float
    threshold: float
    is_solved: bool
    reason: str
    step: int | None = None
    step_ms: float | None = None


# --- Methods, and their results on one problem.


class MethodView(Answer):
    """A value of the option `method` of a job."""

    name: str
    title: str = ""
    description: str


class MethodList(Answer):
    """Every method of this service."""

    methods: tuple[MethodView, ...]


class MethodRow(Answer):
    """The schedule of one method; bytes are the maximum over devices or hosts.

    * ``programs``: null if the method has no schedule; ``reason`` says why, and numbers are 0.
    * ``placement``: `as given`, or the name of a re-placed copy of the problem such as `v x2`.
      ``problem_hash`` and ``programs`` are of this copy. `v x2, guess` means that stages without
      numbers of layers were halved.
    """

    method: str
    placement: str
    problem_hash: str
    programs: list[list[str]] | None
    seconds: float
    makespan_ms: float
    span_ms: float
    makespan_bubble: float
    span_bubble: float
    p50_ms: float = Field(description="Median step time under +-10% noise on every duration.")
    p95_ms: float
    peak_bytes: int
    host_peak_bytes: int
    over_limit: bool
    tokens_per_s: float | None
    mfu: float | None
    reason: str


class MethodRowList(Answer):
    """A row per method, best first.

    Schedules over the memory limit follow those within it. Methods without a schedule are last.
    """

    rows: list[MethodRow]


# --- Tunes.


PasteForm = Literal["arguments", "yaml", "python", "csv"]
"""The formats of a configuration for its training framework."""


class TunedMemory(Answer):
    """The memory of a pipeline rank at its peak, by use."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    buffers_bytes: int
    reserved_bytes: int


class TunedRow(Answer):
    """A configuration with its best schedule: degrees, layers of each stage, time and memory.

    * ``id``: unique in its tune; ``label``: the settings in one line, ``TP 4 PP 8 DP 2 MBS 1``.
    * ``step_ms``: duration of the whole step; ``makespan_ms``: duration of its pipeline part.
    * ``peak_bytes``: per pipeline rank, reserved memory included; ``memory``: the same by use.
    * ``method``: the method that found the schedule.
    * ``gpus``: the accelerator of each pipeline rank; empty if there is only one kind.
    * ``pairs``: whether forwards and backwards run together; ``slices``: of each sequence.
    * ``command``: bash command that trains with this configuration. Run it on each host, in the
      folder with the file from `paste`.
    """

    id: str
    label: str = ""
    tp: int
    cp: int
    dp: int
    ep: int
    etp: int
    zero: int
    pp: int
    chunks: int
    placement: tuple[int, ...]
    layers: tuple[int, ...]
    micro_batch: int
    num_microbatches: int
    recompute: tuple[str, ...]
    method: str
    step_ms: float
    makespan_ms: float
    tokens_per_s_per_gpu: float
    mfu: float
    tflops_per_gpu: float = Field(
        default=0.0, description="The model's TFLOP/s on each GPU, as in logs of Megatron."
    )
    cost_per_million_tokens: float | None = Field(
        default=None, description="In the currency of the request's price; null without a price."
    )
    peak_bytes: tuple[int, ...]
    memory: tuple[TunedMemory, ...]
    gpus: tuple[str, ...] = ()
    pairs: bool = False
    slices: int = 1
    command: str = ""


class TunedCounts(Answer):
    """Numbers of configurations by result. An open one may be as fast as its lower bound."""

    total: int
    do_not_fit: int
    excluded: int
    solved: int
    open: int


Interval = Annotated[tuple[float, ...], Field(min_length=2, max_length=2)]
"""The two ends of an interval."""


class ScoreboardError(Answer):
    """The errors of a class of estimates against published runs, as shares of the measured step.

    * ``error_class``: the narrowest class of the configuration that has at least ten runs.
    * ``low``, ``high``: 80% of measured steps are between these multiples of the estimated step.
    * ``text``: the interval in words, with the class and its number of runs.
    """

    median: float
    worst: float
    num_rows: int
    error_class: str
    low: float
    high: float
    text: str


class ScalingView(Answer):
    """The fastest configuration on a number of GPUs; its numbers are null if none is known.

    * ``tokens_per_gpu_hour``: tokens that a GPU trains in an hour.
    * ``gap``: share by which another configuration may still be faster.
    * ``missing_bytes``: per GPU, what the nearest configuration lacks at least.
    * ``reason``: why no configuration is known: none fits, or the number was not tried.
    """

    num_gpus: int
    label: str
    step_ms: float | None
    tokens_per_s_per_gpu: float | None
    tokens_per_gpu_hour: float | None
    cost_per_million_tokens: float | None
    gap: float | None
    missing_bytes: int | None
    reason: str


class SwitchView(Answer):
    """A configuration with one switch on, compared with the same configuration without it.

    * ``row``: ``best``, the fastest configuration, or ``current``.
    * ``field``, ``value``: of the request, to search with the switch on.
    * ``flag``: Megatron-LM's arguments that switch it on; empty with other frameworks.
    * ``step_ms``, ``base_ms``: simulated step with and without the switch.
    * ``gain``: share of ``base_ms`` that the switch saves.
    * ``missing_bytes``: what the fullest pipeline rank lacks with the switch on; 0 if it fits.
    """

    row: Literal["best", "current"]
    field: str
    value: str | bool
    flag: str
    step_ms: float
    base_ms: float
    gain: float
    missing_bytes: int


class Tuned(Answer):
    """The result of a tune; a running tune answers its results so far.

    * ``rows``: fastest first; ``pareto``: less memory for more time.
    * ``bound_ms``: lower bound of the step time of every configuration.
    * ``gap``: share by which a configuration may still be faster; ``certificate``: why, in words.
    * ``gain``: share of the step time that the fastest row saves compared with ``current``. Null if
      ``current`` does not fit in this model, or if nothing faster was found yet.
    * ``verdict``: the gain in words, or why there is none.
    * ``changes``: from ``current`` to the fastest row, such as ``TP 8 → 4``; empty without
      ``current``, or if that row is not faster.
    * ``gain_probability``: that the fastest row is faster than ``current`` if both are measured.
      Null without a gain, or without ``error``.
    * ``gain_interval``: 80% interval of the measured gain; null where ``gain_probability`` is.
    * ``error``: null if no such estimate was compared with published runs.
    * ``costs_from``: source of what the layers cost: formulas, or a trace of the model's own code.
    * ``interval_ms``: 80% interval of the measured step of the fastest row; null without ``error``.
    * ``memory_bytes``: of a device; configurations use at most ``usable_bytes`` of it. With several
      kinds of devices, of the smallest.
    * ``stopped_by``: null while the tune runs; else `optimal`, `gap`, `time_limit`, `work_limit`,
      `cancelled` or `looked_at`. `gap`: the requested gap is reached. `looked_at`: configurations
      are still open, but the search cannot evaluate them more closely.
    * ``notes``: options that were not searched although they may be faster, and assumptions of the
      best row.
    * ``switches``: the gain of each switch that the request did not set and that is off, largest
      first; empty while the tune runs.
    * ``scaling``: with ``gpu_counts`` a row for each number of GPUs; all other fields are of the
      smallest number that fits.
    """

    verdict: str = ""
    changes: tuple[str, ...] = ()
    certificate: str
    bound_ms: float | None
    gap: float | None
    gain: float | None
    gain_probability: float | None = None
    gain_interval: Interval | None = None
    error: ScoreboardError | None
    interval_ms: Interval | None = None
    costs_from: CostSource = "formula"
    counts: TunedCounts
    memory_bytes: int
    usable_bytes: int
    current: TunedRow | None
    rows: tuple[TunedRow, ...]
    pareto: tuple[TunedRow, ...]
    stopped_by: str | None = None
    seconds: float
    notes: tuple[str, ...] = ()
    switches: tuple[SwitchView, ...] = ()
    scaling: tuple[ScalingView, ...] = ()


# --- The catalogue of models and accelerators, and estimated problems.


class ModelEntry(BaseModel):
    """A model of the catalogue."""

    name: str
    parameters: int
    layers: int
    hidden: int
    heads: int
    source: str


class GpuEntry(BaseModel):
    """An accelerator of the catalogue; rates per direction, dense TFLOP/s."""

    name: str
    title: str
    memory_bytes: int
    pcie_gb_per_s: float | None
    gpus_per_node: int
    tflops: dict[str, float]
    source: str


FieldKind = Literal["integer", "number", "boolean", "text"]
_KINDS: dict[str, FieldKind] = {
    "integer": "integer",
    "number": "number",
    "boolean": "boolean",
    "string": "text",
}


class RequestField(BaseModel):
    """A field of a request, as a form needs it; null where the request's model sets nothing."""

    kind: FieldKind
    minimum: int | float | None
    maximum: int | float | None
    exclusive_minimum: int | float | None
    exclusive_maximum: int | float | None
    choices: list[int | str] | None
    default: bool | int | float | str | None
    description: str


def fields_of(request: type[Request]) -> dict[str, RequestField]:
    """Return the fields of a request by name, from its JSON schema; lists and objects excepted."""
    fields = {}
    for name, published in request.model_json_schema()["properties"].items():
        # A field that may be null has its type and range in the first alternative.
        schema = published | published.get("anyOf", [{}])[0]
        if kind := _KINDS.get(schema.get("type", "")):
            fields[name] = RequestField(
                kind=kind,
                minimum=schema.get("minimum"),
                maximum=schema.get("maximum"),
                exclusive_minimum=schema.get("exclusiveMinimum"),
                exclusive_maximum=schema.get("exclusiveMaximum"),
                choices=schema.get("enum"),
                default=schema.get("default"),
                description=schema.get("description", ""),
            )
    return fields


_REQUESTS_WITH_FORMS: dict[str, type[Request]] = {
    "estimate": EstimateRequest,
    "tune": TuneRequest,
    "current": CurrentRun,
    "solve": SubmitOptions,
}


class Catalogue(BaseModel):
    """The names that `POST /v1/estimates` knows, and the fields of requests that have a form."""

    models: list[ModelEntry]
    gpus: list[GpuEntry]
    fields: dict[str, dict[str, RequestField]] = Field(
        description="By request: estimate, tune, current (of tune) and solve (options of a job)."
    )

    @classmethod
    def make(cls) -> Self:
        """Return all models and accelerators of the catalogue, and all fields."""
        models = [
            ModelEntry(
                name=shape.name,
                parameters=total_parameters(shape),
                layers=shape.num_layers,
                hidden=shape.hidden,
                heads=shape.num_heads,
                source=shape.source,
            )
            for shape in MODELS.values()
        ]
        gpus = [
            GpuEntry(
                name=hardware.name,
                title=hardware.title,
                memory_bytes=int(hardware.memory_bytes.value),
                pcie_gb_per_s=hardware.pcie_gb_per_s and hardware.pcie_gb_per_s.value,
                gpus_per_node=hardware.gpus_per_node,
                tflops={name: fact.value for name, fact in hardware.tflops.items()},
                source=hardware.memory_bytes.source,
            )
            for hardware in GPUS.values()
        ]
        fields = {name: fields_of(request) for name, request in _REQUESTS_WITH_FORMS.items()}
        return cls(models=models, gpus=gpus, fields=fields)


class VariantView(BaseModel):
    """A varied problem; ``axes`` are the named axes that can change it.

    ``usable_bytes`` is the memory of each device without the reserved bytes. ``static_bytes`` is
    the memory that the stages of each device hold during the whole step.
    """

    problem: Problem
    problem_hash: str
    axes: list[str]
    usable_bytes: list[int]
    static_bytes: list[int]

    @classmethod
    def of_problem(cls, problem: Problem, values: Mapping[str, Any], **more: Any) -> Self:
        """Return the view of a problem with other values on some axes.

        Raises `InputError` with the place of a value that cannot be set.
        """
        if values:
            try:
                (variation,) = sweep(problem, {name: [value] for name, value in values.items()})
            except InputError as error:
                raise error.at("/values") from None
            problem = variation.problem
        devices = range(len(problem.devices))
        return cls(
            problem=problem,
            problem_hash=problem.problem_hash,
            axes=useful_axes(problem),
            usable_bytes=[device.usable_bytes for device in problem.devices],
            static_bytes=[problem.static_bytes_of(index) for index in devices],
            **more,
        )


class EstimateView(VariantView):
    """An estimated problem.

    * ``sizes``: layers of each stage; embedding and head count as layers.
    * ``step_ms``: of 1F1B (interleaved 1F1B with several chunks), with the work after the pipeline.
    * ``byte_factor``: multiplies activations, workspaces and buffers; 1 without a measured peak.
    * ``error``: null if no such estimate was compared with published runs, or if a measured step
      or a utilisation was given.
    * ``interval_ms``: 80% interval of the measured step; null without ``error``.
    * ``costs_from``: source of what the layers cost: formulas, or a trace of the model's own code.
    """

    parameters: int
    mfu: float
    step_ms: float
    tokens_per_s_per_gpu: float
    time_factor: float
    byte_factor: float
    error: ScoreboardError | None
    interval_ms: Interval | None
    costs_from: CostSource
    sizes: list[int]
    notes: list[str]

    @classmethod
    def of(cls, request: EstimateRequest, found: Estimate) -> Self:
        """Return the view of an estimate; raises as `of_problem`."""
        error, step_ms = found.error, found.step.step_ms
        return cls.of_problem(
            found.problem,
            request.values,
            parameters=total_parameters(request.shape),
            mfu=found.mfu,
            step_ms=step_ms,
            tokens_per_s_per_gpu=found.step.tokens_per_s_per_gpu,
            time_factor=found.factor,
            byte_factor=found.byte_factor,
            error=None if error is None else error.as_json(step_ms),
            interval_ms=None if error is None else error.interval_ms(step_ms),
            costs_from=found.costs_from,
            sizes=list(found.sizes),
            notes=list(map(str, found.notes)),
        )


# --- The frontier of a batch: step time over memory limit.


class FrontierPointView(Answer):
    """An item on a line.

    ``objective_ms`` is the best objective found under this or a smaller memory limit. ``bound_ms``
    is the highest bound proven for this or a larger one.
    """

    index: int
    memory_bytes: int = Field(description="Memory limit of the device with the most memory.")
    objective_ms: float | None
    bound_ms: float | None
    is_infeasible: bool


class FrontierLineView(Answer):
    """Items that differ only in the memory of devices, smallest memory first."""

    label: str
    points: list[FrontierPointView]


class FrontierView(Answer):
    """The objective over the memory limit, a line per combination of the other values."""

    lines: list[FrontierLineView]


# --- Faults and health.


class Health(BaseModel):
    """The process answers."""

    status: str = "ok"


class Readiness(BaseModel):
    """The store takes writes and the engine solves."""

    status: str = "ready"
    jobs: dict[JobState, int]


class Fault(BaseModel):
    """A problem detail (RFC 9457) with a stable ``code``.

    ``errors`` has a line per fault, and ``pointers`` the place of each. A place in the body is a
    JSON pointer (RFC 6901; empty = the whole body). A place of a parameter is `/query/limit`,
    `/path/name` or `/header/name`.
    """

    model_config = ConfigDict(json_schema_extra=_add_example)

    type: str
    title: str
    status: int
    detail: str
    code: str
    instance: str
    errors: list[str] | None = None
    pointers: list[str] | None = None
    needs: dict[str, int] | None = None
    id: str | None = Field(default=None, description="The id of the entry in the server's log.")
