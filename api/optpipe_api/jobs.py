"""The states of a job, the one function that changes them, the records of jobs and batches.

::

    submit --> queued --CLAIM--> running --SUCCEED-----------> succeeded --.
                ^ ^ |              |  |----PROVE_INFEASIBLE--> infeasible  |
                | | |              |  |----FAIL--------------> failed    --|
                | | `---CANCEL-----+--+----CANCEL------------> cancelled --|
                | `----REQUEUE-----'                                       |
                `------------------RESUME----------------------------------'

A job has a schedule (``has_schedule``) from its first incumbent on, in every state: a cancelled or
failed job keeps its best one. The four states on the right are final. Nothing is written to such a
job except by RESUME, for which its owner gives it more time. It is then queued, and continues from
its best schedule. An infeasible job cannot be resumed. A job whose problem was solved before can be
created in a final state (``cache`` is ``hit``).

REQUEUE follows when a solver process or a whole server died, or shut down. The job starts again
from its last incumbent. Each death counts, and after ``max_attempts`` deaths REQUEUE becomes FAIL.
A job whose cancellation was requested is cancelled instead.

In a batch, a schedule of one item also serves the items whose problems are relaxations of it. The
jobs know nothing of each other: readers of the batch carry schedules over (`BatchItem`).

Every event of a job is an entry of its history (`HistoryEntry`), with increasing numbers. The last
entry of a finished job is its state.

A running job belongs to the holder of its `Lease`. Every write of a worker names the lease, and
returns None without an effect if the job no longer runs under it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

from optpipe.answers import Cache, EventKind, JobOptions, JobState
from optpipe.requests import JobKind
from optpipe.schedule import OPTIMAL_GAP, gap_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "KINDS",
    "MAX_SHARED_PRIORITY",
    "AttemptOutcome",
    "AuditAction",
    "AuditEntry",
    "BatchItem",
    "BatchPlan",
    "BatchRecord",
    "BatchStanding",
    "Claim",
    "DocumentKind",
    "Documents",
    "HistoryEntry",
    "ItemPlan",
    "JobError",
    "JobEvent",
    "JobRecord",
    "JobStart",
    "Kind",
    "Lease",
    "NewBatch",
    "NewJob",
    "Standing",
    "StoredSchedule",
    "TracePoint",
    "transition",
]


MAX_SHARED_PRIORITY = 10
"""Up to it a priority orders the jobs of one owner; above it, a job precedes all other owners'."""


class JobEvent(StrEnum):
    """An event that changes the state of a job."""

    CLAIM = "claim"
    REQUEUE = "requeue"
    CANCEL = "cancel"
    SUCCEED = "succeed"
    PROVE_INFEASIBLE = "prove_infeasible"
    FAIL = "fail"
    RESUME = "resume"


_TRANSITIONS = {
    (JobState.QUEUED, JobEvent.CLAIM): JobState.RUNNING,
    (JobState.QUEUED, JobEvent.CANCEL): JobState.CANCELLED,
    (JobState.RUNNING, JobEvent.REQUEUE): JobState.QUEUED,
    (JobState.RUNNING, JobEvent.CANCEL): JobState.CANCELLED,
    (JobState.RUNNING, JobEvent.SUCCEED): JobState.SUCCEEDED,
    (JobState.RUNNING, JobEvent.PROVE_INFEASIBLE): JobState.INFEASIBLE,
    (JobState.RUNNING, JobEvent.FAIL): JobState.FAILED,
    (JobState.SUCCEEDED, JobEvent.RESUME): JobState.QUEUED,
    (JobState.FAILED, JobEvent.RESUME): JobState.QUEUED,
    (JobState.CANCELLED, JobEvent.RESUME): JobState.QUEUED,
}


def transition(state: JobState, event: JobEvent) -> JobState | None:
    """Return the state after an event; None if the event is impossible in this state."""
    return _TRANSITIONS.get((state, event))


class DocumentKind(StrEnum):
    """The kinds of documents of a job: JSON texts, which the store keeps apart from its record."""

    PROBLEM = "problem"
    MODEL = "model"
    QUESTION = "question"
    SCHEDULE = "schedule"
    COMPARISON = "comparison"
    TUNED = "tuned"
    CHECKPOINT = "checkpoint"
    MEASURED = "measured"
    DRIFT = "drift"


Documents: TypeAlias = "Mapping[str, str]"
"""JSON texts by their `DocumentKind`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobError:
    """The reason why a job ended without success; ``needs`` as in `InfeasibleProblemError`."""

    code: str
    message: str
    needs: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePoint:
    """One improvement, after so many ``seconds`` of solving over all attempts."""

    seconds: float
    method: str
    objective_ms: float | None = None
    bound_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """One event of a job, ``at`` seconds since the epoch.

    ``number`` increases within a job, with gaps. ``text`` is the state of a state entry, and the
    sentence of a log entry. The other fields are those of a `TracePoint`.
    """

    number: int
    kind: EventKind
    at: float
    seconds: float | None = None
    method: str | None = None
    objective_ms: float | None = None
    bound_ms: float | None = None
    text: str | None = None

    @property
    def is_final(self) -> bool:
        """Whether the job ended with this entry; only a resumed job has later entries."""
        return self.kind is EventKind.STATE and JobState(self.text or "").is_final


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptOutcome:
    """The end of an attempt, with its documents.

    ``objective_ms`` and ``method`` are those of its schedule. The documents of a plan or tune with
    a schedule include the problem of the schedule.
    """

    event: JobEvent
    documents: Documents = field(default_factory=dict)
    objective_ms: float | None = None
    bound_ms: float | None = None
    error: JobError | None = None
    method: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStart:
    """The schedule that a new job starts from, and the method that made it."""

    documents: Documents
    objective_ms: float
    method: str
    bound_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSchedule:
    """A job's best schedule so far, as JSON text; ``number`` increases with each one stored.

    ``owner``: of the job. ``problem``: the problem of the schedule as JSON text, if it was read.
    """

    document: str
    number: int
    owner: str = ""
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """The record of a job, without its documents; times in seconds since the epoch, UTC.

    Parameters
    ----------
    problem_hash
        Of the question: a problem, a model, or a configuration to tune.
    id, position, created_at
        Set by the store, as are the state and the counters below.
    owner
        The name of its API key; empty without keys.
    priority
        -100 to 100. The highest priority of an owner is first; see `MAX_SHARED_PRIORITY`.
    tags
        Sorted.
    shape_hash
        Equal for problems that may have the same legal programs; empty = not comparable.
    cache, source_id
        Whether an earlier job gave the answer or the start, and the id of that job.
    attempt, deaths
        The number of claims, and of attempts whose process or server died.
    spent_s
        Solving time of earlier attempts.
    num_schedules
        Schedules stored so far.
    """

    name: str
    problem_hash: str
    objective: str
    options: JobOptions
    id: str = ""
    position: int = 0
    state: JobState = JobState.QUEUED
    created_at: float = 0.0
    kind: JobKind = JobKind.SOLVE
    owner: str = ""
    priority: int = 0
    tags: tuple[str, ...] = ()
    shape_hash: str = ""
    cache: Cache = Cache.MISS
    source_id: str | None = None
    batch_id: str | None = None
    batch_index: int | None = None
    started_at: float | None = None
    finished_at: float | None = None
    cancel_requested: bool = False
    attempt: int = 0
    deaths: int = 0
    spent_s: float = 0.0
    num_schedules: int = 0
    objective_ms: float | None = None
    bound_ms: float | None = None
    error: JobError | None = None

    @property
    def has_schedule(self) -> bool:
        return self.objective_ms is not None

    @property
    def changed_ids(self) -> tuple[str, ...]:
        """The ids to publish after a change of this job: its own, and its batch's if it ended."""
        if self.batch_id is None or not self.state.is_final:
            return (self.id,)
        return (self.id, self.batch_id)

    @property
    def is_untouched(self) -> bool:
        """Whether it waits in the queue and has neither schedule nor bound, so no trace."""
        return self.state is JobState.QUEUED and self.objective_ms is None and self.bound_ms is None

    @property
    def gap(self) -> float | None:
        """The relative gap of the best schedule; None without schedule or bound."""
        return None if self.objective_ms is None else gap_of(self.objective_ms, self.bound_ms)

    @property
    def is_proven(self) -> bool:
        """Whether the job is proven optimal or infeasible, so that nothing better exists."""
        proven_optimal = self.gap is not None and self.gap <= OPTIMAL_GAP
        return self.state is JobState.INFEASIBLE or proven_optimal


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob(JobRecord):
    """A job before it is stored, with its documents and with its known answer or start.

    Parameters
    ----------
    documents
        The question of its kind (see `KINDS`).
    idempotency_key
        Keys of different owners are independent.
    start
        A schedule to start from.
    is_start_required
        Whether the job's schedule may never be longer than its start, not even one of the cache.
    finished
        The known answer; the job is stored in a final state.
    """

    documents: Documents = field(default_factory=dict)
    idempotency_key: str | None = None
    start: JobStart | None = None
    is_start_required: bool = False
    finished: AttemptOutcome | None = None

    def accepts_objective(self, objective_ms: float | None) -> bool:
        """Return whether a schedule of this objective is as good as a required start."""
        if self.start is None or not self.is_start_required:
            return True
        return objective_ms is not None and objective_ms <= self.start.objective_ms


@dataclass(frozen=True, slots=True)
class Standing:
    """The owner and the progress of a job; ``last_entry``: the number of its newest history entry.

    Every event of a job is an entry of its history, so two equal standings mean no change.
    """

    owner: str
    state: JobState
    num_schedules: int
    last_entry: int


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write to a running job; ``attempt`` excludes every earlier holder."""

    job_id: str
    owner: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A job taken from the queue, with its documents; the schedule is its last incumbent."""

    lease: Lease
    job: JobRecord
    documents: Documents


class AuditAction(StrEnum):
    """A change that a caller made; ``submit`` to ``delete`` concern jobs and batches."""

    SUBMIT = "submit"
    CANCEL = "cancel"
    RESUME = "resume"
    DELETE = "delete"
    CREATE_KEY = "create_key"
    ROTATE_KEY = "rotate_key"
    REVOKE_KEY = "revoke_key"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One change, ``at`` seconds since the epoch.

    ``actor``: the key or user; empty without keys. ``subject``: the id of the job or batch, or the
    name of the key.
    """

    position: int
    at: float
    actor: str
    action: AuditAction
    subject: str


# --- The kinds of jobs. A kind is a row of `KINDS`, a reader of its request in
# `optpipe_api.services.submission`, and a task in `optpipe_api.engine.tasks`.


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of job.

    Parameters
    ----------
    question
        The document that its task reads.
    answers
        The documents that its task makes. The cache answers an equal job with them.
    default_time_limit_s
        Seconds if the request gives none; None: the default of the service.
    """

    question: DocumentKind
    answers: tuple[DocumentKind, ...]
    default_time_limit_s: float | None = None

    @property
    def documents(self) -> tuple[DocumentKind, ...]:
        """The kinds of documents that a finished job has."""
        return (self.question, *self.answers)


KINDS = {
    JobKind.SOLVE: Kind(question=DocumentKind.PROBLEM, answers=(DocumentKind.SCHEDULE,)),
    JobKind.PLAN: Kind(
        question=DocumentKind.MODEL,
        answers=(DocumentKind.SCHEDULE, DocumentKind.PROBLEM),
    ),
    JobKind.COMPARE: Kind(
        question=DocumentKind.PROBLEM,
        answers=(DocumentKind.COMPARISON,),
        default_time_limit_s=20.0,
    ),
    JobKind.TUNE: Kind(
        question=DocumentKind.QUESTION,
        answers=(
            *(DocumentKind.SCHEDULE, DocumentKind.PROBLEM),
            *(DocumentKind.TUNED, DocumentKind.CHECKPOINT),
        ),
        default_time_limit_s=120.0,
    ),
    JobKind.FOLLOW: Kind(
        question=DocumentKind.MEASURED,
        answers=(DocumentKind.SCHEDULE, DocumentKind.PROBLEM, DocumentKind.DRIFT),
    ),
}


# --- A batch: many problems submitted together.
# A batch has no state of its own: its progress, results and end are read from its jobs, so they
# cannot disagree. Each item is a job that names the batch and its place in it. The store keeps only
# what the jobs do not have: the axes of a sweep, and the values of each item on them.


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemPlan:
    """An item of a batch before it is solved.

    ``values``: on the axes of the sweep; empty for a list of problems. An item of a what-if has the
    name of the question, and the number of micro-batches. ``memory_bytes``: the budget of each
    device. ``family``: equal for items that differ only in names and in the memory of devices.
    ``tighter``: the items of which this one is a relaxation, see `tighter_ones`.
    """

    values: dict[str, Any]
    memory_bytes: tuple[int, ...]
    family: str
    tighter: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # JSON gives lists back.
        object.__setattr__(self, "memory_bytes", tuple(self.memory_bytes))
        object.__setattr__(self, "tighter", tuple(self.tighter))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The axes of a batch, the options of every item, and the items in order."""

    axes: dict[str, list[Any]]
    options: JobOptions
    tags: tuple[str, ...]
    priority: int
    items: tuple[ItemPlan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBatch:
    """A batch before it is stored; idempotency keys of different owners are independent."""

    name: str
    owner: str
    plan: BatchPlan
    request_hash: str
    idempotency_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchItem:
    """One item of a batch: its plan, its job at the moment, and where its schedule comes from.

    ``source`` is the job of the best schedule that is legal in this item. It is the item's own job,
    or the job of a *tighter* item with a shorter schedule.
    """

    index: int
    plan: ItemPlan
    job: JobRecord
    source: JobRecord

    @property
    def gap(self) -> float | None:
        """The gap of the source's schedule to the bound of the item."""
        objective_ms = self.source.objective_ms
        return None if objective_ms is None else gap_of(objective_ms, self.job.bound_ms)

    @property
    def schedule_job_id(self) -> str | None:
        """The id of the source; None if no job has a schedule for the item."""
        return self.source.id if self.source.has_schedule else None


@dataclass(frozen=True, slots=True)
class BatchStanding:
    """The owner of a batch, and whether all its jobs have ended."""

    owner: str
    is_finished: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """The record of a batch, with counts of its jobs; times in seconds since the epoch, UTC.

    ``counts`` omits states without jobs. ``finished_at`` is the end of the last job; None before.
    """

    id: str
    position: int
    name: str
    owner: str
    created_at: float
    counts: dict[JobState, int] = field(default_factory=dict)
    finished_at: float | None = None

    @property
    def num_items(self) -> int:
        return sum(self.counts.values())

    @property
    def num_finished(self) -> int:
        return sum(number for state, number in self.counts.items() if state.is_final)

    @property
    def progress(self) -> float:
        """The share of its jobs that have ended, 0 to 1."""
        return self.num_finished / self.num_items if self.num_items else 1.0

    @property
    def is_finished(self) -> bool:
        return self.num_finished == self.num_items
