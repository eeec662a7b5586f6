"""Every value that crosses HTTP, once: the service sends it, the client reads it.

Jobs and their events, batches and their items, deployments and their versions, methods and rows
of comparisons; what a tune is asked, and what it answers. Request bodies are checked by
``optpipe_api.requests``; the client has plain keyword arguments for them, whose names and types
`SolveArguments`, `SubmissionArguments` and `TuneArguments` give.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field

from optpipe.formats.tables import SweepRow
from optpipe.schedule import OPTIMAL_GAP

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema

    from optpipe.problem import Objective

__all__ = [
    "DEFAULT_NOISE",
    "BatchList",
    "BatchView",
    "Cache",
    "CacheUse",
    "CurrentDegrees",
    "DeploymentList",
    "DeploymentState",
    "DeploymentView",
    "Event",
    "EventKind",
    "Failure",
    "Improvement",
    "Item",
    "Job",
    "JobKind",
    "JobList",
    "JobOptions",
    "JobState",
    "MethodList",
    "MethodRow",
    "MethodRowList",
    "MethodView",
    "PasteForm",
    "ScoreboardError",
    "SearchArguments",
    "SolveArguments",
    "SubmissionArguments",
    "SweepRowList",
    "TuneArguments",
    "Tuned",
    "TunedCounts",
    "TunedMemory",
    "TunedRow",
    "Version",
    "VersionList",
    "WireModel",
]


DEFAULT_NOISE = 0.1
"""By which share times vary, up and down, where nobody says."""

CacheUse = Literal["use", "refresh"]
"""Whether an answer found before may be given; with "refresh" it is found again."""


class WireModel(BaseModel):
    """What a service answers; a newer one may say more than this, an older one less."""

    model_config = ConfigDict(frozen=True, extra="ignore")

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


# --- Options: what a request may give, and what a job then has.


class SearchArguments(TypedDict, total=False):
    """What every search takes; what is left out, or None, takes the service's default.

    ``time_limit_s`` seconds (> 0), ``threads`` (>= 1), ``seed`` (0 .. 2**31 - 1).
    """

    time_limit_s: float | None
    threads: int | None
    seed: int | None


class SolveArguments(SearchArguments, total=False):
    """How to solve.

    ``method`` is one that the service lists, ``auto`` by default. The search stops where
    (objective - bound)/objective is at most ``gap`` (0 <= gap < 1), or after ``work_limit`` units
    of work (> 0, about a second of one core each, the same result on every machine). ``cache``
    "use" (the default) may answer with what was solved before, "refresh" solves it again.
    """

    method: str | None
    gap: float | None
    work_limit: float | None
    cache: CacheUse | None


class SubmissionArguments(SolveArguments, total=False):
    """How to solve a problem or to plan a model.

    ``objective`` replaces the one that the problem or model names. Of a problem: ``robust`` "P90"
    ranks schedules by that percentile of the objective under noise, of which every action's time
    varies by a share of ``jitter`` (0 <= jitter < 1) and every device's by one of ``stragglers``.
    Of a model: ``chunks``, the numbers of stages per device (1 .. 8) that are tried, and
    ``placements``, their kinds.
    """

    objective: Objective | None
    robust: str | None
    jitter: float | None
    stragglers: float | None
    chunks: list[int] | tuple[int, ...] | None
    placements: list[str] | tuple[str, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """How a job is solved: the arguments of `optpipe_solver.solve` and `plan` of the same names.

    ``cache`` aside, which is about what other jobs have found; ``chunks`` and ``placements`` are
    of a plan, and None where the solver chooses; ``workload`` is of a comparison. ``robust`` is a
    percentile in words (``P90``), None for the shortest schedule; ``jitter`` and ``stragglers`` are
    its noise.
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

    def asks_the_same(self, other: JobOptions) -> bool:
        """Whether both want the same done; how long and how well aside."""
        return self._task == other._task

    @property
    def _task(self) -> tuple[object, ...]:
        noise = (self.robust, self.jitter, self.stragglers) if self.robust else None
        return self.method, self.chunks, self.placements, noise

    def covers(self, other: JobOptions) -> bool:
        """Whether a solve with these options finds what one with the others would, or better.

        At least the same budget, from the same seed.
        """
        return (
            self.asks_the_same(other)
            and self.seed == other.seed
            and self.gap <= other.gap
            and self.threads >= other.threads
            and self.time_limit_s >= other.time_limit_s
            and _allows(self.work_limit, other.work_limit)
        )


def _allows(had: float | None, wanted: float | None) -> bool:
    """Whether one limit of work allows what another does; None is no limit."""
    return had is None or (wanted is not None and had >= wanted)


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


class JobKind(StrEnum):
    """What is done: a problem is solved, a model is cut, placed and scheduled, or methods compared.

    Or a whole training configuration is tuned: its schedule is the winner's, its objective the
    whole step. A comparison has rows, and no schedule.
    """

    SOLVE = "solve"
    PLAN = "plan"
    COMPARE = "compare"
    TUNE = "tune"


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


class Failure(WireModel):
    """Why a job ended without success; ``needs`` maps what is too small to what would do."""

    code: str
    message: str
    needs: dict[str, int] = Field(default_factory=dict)


class Improvement(WireModel):
    """One improvement; ``seconds`` of solving so far."""

    seconds: float
    method: str
    objective_ms: float | None = None
    bound_ms: float | None = None


class Job(WireModel):
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


class JobList(WireModel):
    """Jobs, newest first; ``next`` is the ``cursor`` of the next page, null on the last one."""

    jobs: tuple[Job, ...]
    next: str | None


class Event(WireModel):
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


class Item(WireModel):
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


class BatchView(WireModel):
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


class BatchList(WireModel):
    """Batches, newest first; ``next`` is the ``cursor`` of the next page, null on the last one."""

    batches: tuple[BatchView, ...]
    next: str | None


class SweepRowList(WireModel):
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


class DeploymentView(WireModel):
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


class DeploymentList(WireModel):
    """Deployments, newest first; ``next`` is the ``cursor`` of the next page, null on the last."""

    deployments: tuple[DeploymentView, ...]
    next: str | None


class Version(WireModel):
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


class VersionList(WireModel):
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


class MethodView(WireModel):
    """What `method` of a job may be."""

    model_config = ConfigDict(json_schema_extra={"examples": [_METHOD_EXAMPLE]})

    name: str
    title: str = ""
    description: str


class MethodList(WireModel):
    """Every method that this service knows."""

    methods: tuple[MethodView, ...]


class MethodRow(WireModel):
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


class MethodRowList(WireModel):
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


class CurrentDegrees(TypedDict, total=False):
    """What is run today; ``dp`` is what the number of GPUs leaves, all others 1 by default.

    ``layers`` of each stage in model order, embedding and head counted; by default cut evenly.
    """

    tp: int
    cp: int
    dp: int
    ep: int
    etp: int
    pp: int
    chunks: int
    micro_batch: int
    zero: int
    recompute: Sequence[str]
    layers: Sequence[int]


class TuneArguments(SearchArguments, total=False):
    """A model, GPUs and a batch: which is the fastest way to train it.

    ``model`` of the catalogue, or ``config``, a Hugging Face config.json; ``gpu`` of the catalogue,
    or several with numbers that add up to ``num_gpus``: ``h100:32,a100:32``;
    ``global_batch`` sequences of ``sequence`` tokens a step. ``framework``, whose schedules may be
    answered: megatron, torchtitan or any. ``current``, what is run today, or ``current_file``, the
    text of its Megatron arguments or YAML, or torchtitan config; ``fixed``, degrees that are not
    searched. ``headroom``, share (0 <= x < 1) of the memory that answers leave free. With
    ``work_limit`` units of work (> 0, about a second of one core each) the answer is the same on
    every machine, unless the time limit cuts it short.
    ``measured_step_s``, what a step of ``current`` takes: it calibrates every time. The search
    stops where nothing is faster than the best by more than ``gap``.
    """

    model: str | None
    config: dict[str, Any] | None
    gpu: str
    num_gpus: int | None
    global_batch: int | None
    sequence: int | None
    framework: str | None
    current: CurrentDegrees | None
    current_file: str | None
    fixed: Mapping[str, int] | None
    precision: str | None
    flash: bool | None
    cuda_graphs: bool | None
    ep_overlap: bool | None
    dispatcher: str | None
    dispatch: str | None
    overlap: bool | None
    network: str | None
    oversubscription: float | None
    memory_bytes: int | None
    headroom: float | None
    measured_step_s: float | None
    gap: float | None
    work_limit: float | None
    cache: CacheUse | None


class TunedMemory(WireModel):
    """What a pipeline rank holds at its peak, by what it is for."""

    model_config = ConfigDict(json_schema_extra={"examples": [_MEMORY_EXAMPLE]})

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    buffers_bytes: int
    reserved_bytes: int


class TunedRow(WireModel):
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


class TunedCounts(WireModel):
    """What became of the configurations; those that are open may be as fast as their bounds."""

    model_config = ConfigDict(json_schema_extra={"examples": [_COUNTS_EXAMPLE]})

    total: int
    do_not_fit: int
    excluded: int
    solved: int
    open: int


class ScoreboardError(WireModel):
    """How far estimates of this kind were from published runs, as shares."""

    median: float
    worst: float
    num_rows: int


class Tuned(WireModel):
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
