"""Every answer of the service, once: the service sends it, the client reads it.

Jobs and their events, batches and their items, deployments and their versions, methods, rows of
comparisons and of tunes, estimated problems. `optpipe.requests` holds what callers ask for.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from optpipe.formats.tables import SweepRow
from optpipe.presets import GPUS, MODELS, total_parameters
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

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema

    from optpipe.presets import Hardware, ModelShape
    from optpipe.sweep import FrontierLine

__all__ = [
    "Answer",
    "BatchList",
    "BatchView",
    "Cache",
    "Catalogue",
    "DeploymentList",
    "DeploymentState",
    "DeploymentView",
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
    "Version",
    "VersionList",
]


class Answer(BaseModel):
    """What a service answers; a newer one may say more than this, an older one less."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    @classmethod
    def of(cls, record: object, /, **others: Any) -> Self:
        """Return an answer whose fields are the record's of the same names, except the others.

        Times of the record, in seconds since the epoch, become UTC times.
        """
        names = cls.model_fields.keys() - others
        values = {name: getattr(record, name) for name in names if hasattr(record, name)}
        return cls.model_validate(values | others, from_attributes=True)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Show what a service of this version answers: every field, always."""
        schema = handler(core_schema)
        shown = handler.resolve_ref_schema(schema)
        for field in shown["properties"].values():
            field.pop("default", None)
        shown["required"] = list(shown["properties"])
        return schema


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The options of a job, defaults filled in; a job has those of its kind.

    They are the arguments of `optpipe_solver.solve`, `plan`, `compare` and `tune` of the same
    names, except ``cache``, which concerns other jobs. ``chunks`` and ``placements`` are of a plan
    (None: the solver chooses), ``workload`` of a comparison. ``robust`` is a percentile such as
    P90, None for the shortest schedule; ``jitter`` and ``stragglers`` are its noise.
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
        # JSON gives lists back, and options are compared.
        for name in ("chunks", "placements"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else tuple(value))

    @classmethod
    def of(cls, options: SearchOptions, time_limit_s: float) -> JobOptions:
        """Return the options of a job that a request gives; ``time_limit_s`` is filled in."""
        fields = set(cls.__dataclass_fields__) & set(type(options).model_fields)
        given = options.model_dump(include=fields)
        return cls(**given | {"time_limit_s": time_limit_s})

    def has_same_task(self, other: JobOptions) -> bool:
        """Return whether both want the same done, apart from budgets and the gap to reach."""
        return self._task == other._task

    @property
    def _task(self) -> tuple[object, ...]:
        noise = (self.robust, self.jitter, self.stragglers) if self.robust else None
        return self.method, self.chunks, self.placements, noise

    def covers(self, other: JobOptions) -> bool:
        """Return whether a solve with these options finds what one with the others would.

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

_JOB_ID = "0f6b7e4a3c1d4e5f8a9b0c1d2e3f4a5b"
_JOB_EXAMPLE: dict[str, Any] = {
    "id": _JOB_ID,
    "kind": "solve",
    "state": "running",
    "has_schedule": True,
    "cache": "miss",
    "name": "two-stages",
    "problem_hash": "sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae",
    "objective": "makespan",
    "objective_ms": 118.0,
    "bound_ms": 112.5,
    "gap": 0.0466,
    "options": {"time_limit_s": 60.0, "threads": 1, "seed": 0, "method": "auto"},
    "tags": ["nightly", "team=llm"],
    "priority": 0,
    "cancel_requested": False,
    "attempt": 1,
    "error": None,
    "created_at": "2026-01-31T12:00:00Z",
    "started_at": "2026-01-31T12:00:00.120000Z",
    "finished_at": None,
    "place": None,
    "expected_start_at": None,
    "trace": [{"seconds": 0.01, "method": "1f1b", "objective_ms": 130.0, "bound_ms": 112.5}],
}


class JobState(StrEnum):
    """Where a job stands; the picture is in ``optpipe_api.jobs``."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    INFEASIBLE = "infeasible"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing will happen to the job any more."""
        return self not in (JobState.QUEUED, JobState.RUNNING)


class Cache(StrEnum):
    """What was known when a job came: the answer, a schedule of a near problem, or nothing."""

    HIT = "hit"
    NEAR = "near"
    MISS = "miss"


class EventKind(StrEnum):
    """What an event of a job tells."""

    STATE = "state"
    INCUMBENT = "incumbent"
    BOUND = "bound"
    LOG = "log"


class Failure(Answer):
    """Why a job ended without success; ``needs`` maps what is too small to what would do."""

    code: str
    message: str
    needs: dict[str, int] = Field(default_factory=dict)


class Improvement(Answer):
    """One improvement; ``seconds`` of solving so far."""

    seconds: float
    method: str
    objective_ms: float | None = None
    bound_ms: float | None = None


class Job(Answer):
    """A job as the service last told it; ask again for news.

    ``has_schedule`` is true from the first schedule on, whatever the state. ``cache`` says what was
    known when the job came: `hit` the answer itself, `near` a schedule of a similar problem, to
    start from; `miss` neither. ``source_id`` is the job that knew it. ``owner`` is for admins.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [_JOB_EXAMPLE]})

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
    deployment_id: str | None = None
    cancel_requested: bool = False
    attempt: int = Field(default=0, description="How often its solving was begun.")
    spent_s: float = Field(default=0.0, description="Seconds of solving in earlier attempts.")
    num_schedules: int = Field(
        default=0, description="Better schedules so far; the newest one's number."
    )
    error: Failure | None = None
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    place: int | None = Field(
        default=None,
        description="In the queue, 1 = next; null for others, and for a moment after it came.",
    )
    expected_start_at: datetime | None = Field(
        default=None,
        description="An estimate: if all that runs and all that is before it in the queue takes "
        "its whole time limit, nothing else comes, and one server solves it all.",
    )
    trace: tuple[Improvement, ...] | None = Field(default=None, description="Null in lists.")

    @property
    def is_finished(self) -> bool:
        """Whether nothing will happen to the job any more."""
        return self.state.is_final


class JobList(Answer):
    """Jobs, newest first; ``next`` is the ``cursor`` of the next page, null on the last one."""

    jobs: tuple[Job, ...]
    next: str | None


class Event(Answer):
    """One thing that happened to a job: the data of a server-sent event.

    ``text`` is the new state of a `state`, the sentence of a `log`. ``seconds`` of solving so far
    and the numbers are those of an `incumbent` (a better schedule) or a `bound`.
    """

    number: int = Field(description="The event's id; it grows, with holes.")
    kind: EventKind
    at: datetime
    seconds: float | None = None
    method: str | None = None
    objective_ms: float | None = None
    bound_ms: float | None = None
    gap: float | None = None
    text: str | None = None


# --- Batches.

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
    "id": "7c9e6679742540de944be07fc1f90ae7",
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


class Item(Answer):
    """One item of a batch: its values on the axes, and what its job has reached.

    ``memory_bytes`` is the budget of the device that has most.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [_ITEM_EXAMPLE]})

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
    error: Failure | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None


class BatchView(Answer):
    """A batch as the service last told it; ``owner`` is for admins.

    All of it is read from the jobs of its items. What lists leave out is null there.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [_BATCH_EXAMPLE]})

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
    """Batches, newest first; ``next`` is the ``cursor`` of the next page, null on the last one."""

    batches: tuple[BatchView, ...]
    next: str | None


class SweepRowList(Answer):
    """The items of a batch as rows of a table, in order; a ``state`` is that of a job."""

    rows: list[SweepRow]


# --- Deployments.

_VERSION_EXAMPLE: dict[str, Any] = {
    "version": 2,
    "created_at": "2026-01-31T12:10:00Z",
    "reason": "drift: forward of stage 2 takes 14% longer than planned; the schedule in use takes "
    "131.2 ms under the measured times, 4.1% more than one as good for them as it was for those it "
    "was made for; this one takes 126.1 ms instead of 131.2 ms under the measured times, 3.9% "
    "shorter",
    "job_id": _JOB_ID,
    "predicted_ms": 126.1,
    "measured_ms": 127.4,
    "num_measured": 12,
}
_DEPLOYMENT_EXAMPLE: dict[str, Any] = {
    "id": "5d1f0c7b2a394e6f8a9b0c1d2e3f4a5b",
    "state": "following",
    "name": "pretraining-7b",
    "owner": None,
    "version": 2,
    "reason": None,
    "job_id": None,
    "error": None,
    "options": {"time_limit_s": 60.0, "threads": 1, "seed": 0, "method": "auto"},
    "threshold": 0.01,
    "num_reports": 12,
    "num_judged": 12,
    "current_ms": 126.3,
    "expected_ms": 126.1,
    "drift": 0.0016,
    "created_at": "2026-01-31T12:00:00Z",
    "ended_at": None,
}


class DeploymentState(StrEnum):
    """What goes on; the picture is in ``optpipe_api.deployments``."""

    WAITING = "waiting"
    SOLVING = "solving"
    FOLLOWING = "following"
    FAILED = "failed"
    ENDED = "ended"


class DeploymentView(Answer):
    """A deployment as the service last told it; ``owner`` is for admins.

    ``reason`` is why the solve under way was begun, ``error`` why the last one gave nothing.
    ``current_ms`` is what the schedule in use takes under the measured times, ``expected_ms`` what
    one would that is as good for them as it was for those it was made for, and ``drift`` by how
    much the first exceeds the second; null until reports were judged under this version.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [_DEPLOYMENT_EXAMPLE]})

    id: str
    state: DeploymentState
    name: str = ""
    owner: str | None = None
    version: int = Field(description="The newest; 0 = there is none yet.")
    reason: str | None = None
    job_id: str | None = None
    error: Failure | None = None
    options: JobOptions
    threshold: float
    num_reports: int = 0
    num_judged: int = Field(default=0, description="Reports that the numbers below know.")
    current_ms: float | None = None
    expected_ms: float | None = None
    drift: float | None = None
    created_at: datetime
    ended_at: datetime | None = None


class DeploymentList(Answer):
    """Deployments, newest first; ``next`` is the ``cursor`` of the next page, null on the last."""

    deployments: tuple[DeploymentView, ...]
    next: str | None


class Version(Answer):
    """One published schedule: why, what was predicted, and what was measured under it.

    ``predicted_ms`` is under the truest times known when it was published, ``measured_ms`` the mean
    of the ``num_measured`` step times reported.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [_VERSION_EXAMPLE]})

    version: int
    created_at: datetime
    reason: str
    job_id: str
    predicted_ms: float
    measured_ms: float | None = None
    num_measured: int = 0


class VersionList(Answer):
    """The versions of a deployment, oldest first."""

    versions: tuple[Version, ...]


# --- Methods, and what they reach on one problem.

_METHOD_EXAMPLE: dict[str, Any] = {
    "name": "1f1b",
    "title": "1F1B",
    "description": "1F1B, also called PipeDream-Flush.",
}
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


class MethodView(Answer):
    """What `method` of a job may be."""

    model_config = ConfigDict(json_schema_extra={"examples": [_METHOD_EXAMPLE]})

    name: str
    title: str = ""
    description: str


class MethodList(Answer):
    """Every method that this service knows."""

    methods: tuple[MethodView, ...]


class MethodRow(Answer):
    """One method's schedule; bytes are those of the fullest device or host.

    ``programs`` is null where the method has none; then ``reason`` says why, and numbers are 0.
    ``placement`` is `as given`, or names the re-placed copy of the problem that ``problem_hash``
    and ``programs`` belong to, such as `v x2`, or `v x2, guess` where stages were halved that do
    not say their layers.
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


class MethodRowList(Answer):
    """A row per method: best first under the memory limit, then over it, then the absent."""

    rows: list[MethodRow]


# --- Tunes.


PasteForm = Literal["arguments", "yaml", "python", "csv"]
"""How a row is fetched for its framework."""

_MEMORY_EXAMPLE: dict[str, Any] = {
    "weights_bytes": 2_000_000_000,
    "gradients_bytes": 4_000_000_000,
    "optimizer_bytes": 12_000_000_000,
    "activations_bytes": 6_000_000_000,
    "buffers_bytes": 86_085_997,
    "reserved_bytes": 600_000_000,
}
_TUNED_ROW_EXAMPLE: dict[str, Any] = {
    "id": "0123456789ab",
    "tp": 4,
    "cp": 1,
    "dp": 1,
    "ep": 1,
    "etp": 1,
    "zero": 1,
    "pp": 2,
    "chunks": 1,
    "placement": [0, 1],
    "layers": [18, 16],
    "micro_batch": 1,
    "num_microbatches": 16,
    "recompute": [],
    "method": "1f1b",
    "step_ms": 959.2,
    "makespan_ms": 943.5,
    "tokens_per_s_per_gpu": 8540.8,
    "mfu": 0.444,
    "peak_bytes": [24686085997, 24686085997],
    "memory": [_MEMORY_EXAMPLE, _MEMORY_EXAMPLE],
    "command": "CUDA_DEVICE_MAX_CONNECTIONS=1 xargs -a arguments.sh torchrun --nproc-per-node 8 "
    "pretrain_gpt.py $DATA_ARGS",
}
_COUNTS_EXAMPLE: dict[str, Any] = {
    "total": 4,
    "do_not_fit": 0,
    "excluded": 2,
    "solved": 2,
    "open": 0,
}
_TUNED_EXAMPLE: dict[str, Any] = {
    "verdict": "16.0 % less time per step than what you run, which the worst error would undo. "
    "Measure before you change",
    "certificate": "of 4 configurations 0 do not fit, 2 are excluded by their bounds, 2 were "
    "solved; within this model none of them, whatever its cut into stages, is more than 0.1% "
    "faster",
    "bound_ms": 958.4,
    "gap": 0.0008,
    "gain": 0.16,
    "error": {"median": 0.06, "worst": 0.195, "num_rows": 17},
    "counts": _COUNTS_EXAMPLE,
    "memory_bytes": 85520809984,
    "usable_bytes": 81244769484,
    "current": None,
    "rows": [_TUNED_ROW_EXAMPLE],
    "pareto": [_TUNED_ROW_EXAMPLE],
    "stopped_by": "optimal",
    "seconds": 2.4,
}


class TunedMemory(Answer):
    """What a pipeline rank holds at its peak, by what it is for."""

    model_config = ConfigDict(json_schema_extra={"examples": [_MEMORY_EXAMPLE]})

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    buffers_bytes: int
    reserved_bytes: int


class TunedRow(Answer):
    """A configuration with its best schedule: degrees, layers of each stage, time and memory.

    ``id`` tells it from the others of its tune; ``step_ms`` is of the whole step, ``makespan_ms``
    of its pipeline; ``peak_bytes`` of each pipeline rank, everything reserved counted, and
    ``memory`` the same by what it is for; ``method`` made the schedule. ``gpus`` is the accelerator
    of each pipeline rank where there are several kinds, else empty. ``pairs``: forwards and
    backwards run together; ``slices`` of each sequence. ``command`` trains by it, in bash, on each
    host, beside the file that is pasted.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [_TUNED_ROW_EXAMPLE]})

    id: str
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
    peak_bytes: tuple[int, ...]
    memory: tuple[TunedMemory, ...]
    gpus: tuple[str, ...] = ()
    pairs: bool = False
    slices: int = 1
    command: str = ""


class TunedCounts(Answer):
    """What became of the configurations; those that are open may be as fast as their bounds."""

    model_config = ConfigDict(json_schema_extra={"examples": [_COUNTS_EXAMPLE]})

    total: int
    do_not_fit: int
    excluded: int
    solved: int
    open: int


class ScoreboardError(Answer):
    """How far estimates of this kind were from published runs, as shares."""

    median: float
    worst: float
    num_rows: int


class Tuned(Answer):
    """What a tune has found; ``rows`` has the fastest first, ``pareto`` less memory for more time.

    While it goes on it is what is known by now, and so is the certificate. No configuration takes
    less than ``bound_ms`` a step; ``gap`` is how much faster one may be, as a share. ``gain`` is
    how much less time than ``current`` the fastest takes. It is null where ``current`` does not fit
    in this model, and while the search has found nothing faster. ``verdict`` says the gain, or why
    there is none. ``error`` is null where no such estimate was compared with published runs. A
    device has ``memory_bytes``, of which answers fill ``usable_bytes`` at most (of several kinds
    the smallest's). ``stopped_by``, null while it goes on: ``optimal``; ``gap``, as small as was
    asked; ``time_limit``, ``work_limit`` or ``cancelled``; ``looked_at``, where there is no closer
    look at what may be faster. ``notes``
    say what is not searched though it might be faster, and what the best rests on.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [_TUNED_EXAMPLE]})

    verdict: str = ""
    certificate: str
    bound_ms: float | None
    gap: float | None
    gain: float | None
    error: ScoreboardError | None
    counts: TunedCounts
    memory_bytes: int
    usable_bytes: int
    current: TunedRow | None
    rows: tuple[TunedRow, ...]
    pareto: tuple[TunedRow, ...]
    stopped_by: str | None = None
    seconds: float
    notes: tuple[str, ...] = ()


# --- What there is to choose from, and estimated problems.


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
        """Return the entry of a shape."""
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
        """Return the entry of an accelerator."""
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
    """What `POST /v1/estimates` knows by name, and the fields of the requests that have a form."""

    models: list[ModelEntry]
    gpus: list[GpuEntry]
    fields: dict[str, dict[str, RequestField]] = Field(
        description="By request: estimate, tune, current (of tune) and solve (options of a job)."
    )

    @classmethod
    def make(cls) -> Self:
        """Return all models and accelerators of the catalogue, and all fields."""
        return cls(
            models=[ModelEntry.of(shape) for shape in MODELS.values()],
            gpus=[GpuEntry.of(hardware) for hardware in GPUS.values()],
            fields={name: fields_of(request) for name, request in _REQUESTS_WITH_FORMS.items()},
        )


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


# --- The frontier of a batch: what memory buys.


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
        """Return the view of the lines of a frontier."""
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


# --- Faults and health.


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
