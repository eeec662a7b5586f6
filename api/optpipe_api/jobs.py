"""The life of a job: its states, the one function that changes them, and its record.

::

    submit --> queued --CLAIM--> running --SUCCEED-----------> succeeded --.
                ^ ^ |              |  |----PROVE_INFEASIBLE--> infeasible  |
                | | |              |  |----FAIL--------------> failed    --|
                | | `---CANCEL-----+--+----CANCEL------------> cancelled --|
                | `----REQUEUE-----'                                       |
                `------------------RESUME----------------------------------'

A job has a schedule (``has_schedule``) from its first incumbent on, in whatever state it is: a
cancelled or failed job keeps its best one. The four states on the right are final: nothing is
written to such a job again, unless its owner asks for more time, or its batch knows better
(RESUME): it then waits in the queue, and starts from where it stands. An infeasible job stays what
it is.
A problem solved before is answered at once: its job is born finished (``cache`` is ``hit``).

REQUEUE happens when a solver process or a whole server died, or shut down: the job starts again
from its last incumbent. Each death counts; at ``max_attempts`` of them REQUEUE becomes FAIL. A
job whose cancellation was asked for is cancelled instead.

What one item of a batch has found serves the items whose problems are relaxations of its own. A
claim starts from the best of the tighter items; one that would end with worse than a tighter one
has ended with is queued again instead (REQUEUE), and one that has ended so is resumed without more
time (RESUME) in the transaction that ends the tighter one. So the table of an ended batch is
monotone, however many ran at once, and each job holds the schedule that its row speaks of. What was
cancelled stays as it is, and wakes nobody.

Everything that happens to a job is an entry of its history (`HistoryEntry`), numbered upwards; the
last entry of a finished job says its state.

A running job belongs to whoever holds its `Lease`. Every write of a worker names the lease, and is
lost (returns None) when the job is no longer running under it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

from optpipe.answers import Cache, EventKind, JobOptions, JobState
from optpipe.requests import CompareRequest, JobKind, Request, SolveRequest, TuneRequest
from optpipe.schedule import OPTIMAL_GAP, gap_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "KINDS",
    "MAX_SHARED_PRIORITY",
    "AttemptOutcome",
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
    "Waiting",
    "transition",
]


MAX_SHARED_PRIORITY = 10
"""Up to it a priority orders the jobs of one owner; above it, a job goes before everybody's."""


class JobEvent(StrEnum):
    """What can happen to a job."""

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
    """Return the state after an event; None where the event is not possible."""
    return _TRANSITIONS.get((state, event))


class DocumentKind(StrEnum):
    """The kinds of documents of a job: JSON texts that the store keeps apart from its record."""

    PROBLEM = "problem"
    MODEL = "model"
    QUESTION = "question"
    SCHEDULE = "schedule"
    COMPARISON = "comparison"
    TUNED = "tuned"
    CHECKPOINT = "checkpoint"


Documents: TypeAlias = "Mapping[str, str]"
"""JSON texts by their `DocumentKind`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobError:
    """Why a job ended without success; ``needs`` as in `InfeasibleProblemError`."""

    code: str
    message: str
    needs: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePoint:
    """One improvement; ``seconds`` of solving so far, over all attempts."""

    seconds: float
    method: str
    objective_ms: float | None = None
    bound_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """One thing that happened to a job, ``at`` seconds since the epoch.

    ``number`` grows within a job, with holes. ``text`` is the state of a state entry and the
    sentence of a log entry; the other fields are those of a `TracePoint`.
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
        """Whether the job has ended by this; only a resumed job has entries after it."""
        return self.kind is EventKind.STATE and JobState(self.text or "").is_final


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptOutcome:
    """How an attempt ended, with the documents that it made; ``objective_ms`` is the schedule's.

    ``method`` made the schedule. A schedule of a plan or tune comes with the problem it solves.
    """

    event: JobEvent
    documents: Documents = field(default_factory=dict)
    objective_ms: float | None = None
    bound_ms: float | None = None
    error: JobError | None = None
    method: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStart:
    """A schedule (JSON text) that a job has from its birth; ``method`` made it."""

    schedule: str
    objective_ms: float
    method: str
    bound_ms: float | None = None

    @property
    def documents(self) -> Documents:
        """The schedule by its kind."""
        return {DocumentKind.SCHEDULE: self.schedule}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSchedule:
    """A job's best schedule so far, as JSON text; ``number`` grows with each one stored.

    ``owner`` is the job's. ``problem`` is the problem that it solves, as JSON text, if it was read.
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
        Of the problem to solve, of the model to plan, or of the question to tune.
    id, position, created_at
        Given by the store, with most of what follows.
    owner
        Whose it is.
    priority
        -100..100; of one owner's jobs higher ones are taken first, see `MAX_SHARED_PRIORITY`.
    tags
        Sorted.
    shape_hash
        Equal for problems whose programs may suit each other; empty = never near to another.
    cache, source_id
        What was known when it came, and from which job.
    attempt, deaths
        How often it was claimed, and how many attempts ended with a dead process or server.
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
    deployment_id: str | None = None
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
        """The ids of what has changed with this job: the job, and its batch when the job ends."""
        if self.batch_id is None or not self.state.is_final:
            return (self.id,)
        return (self.id, self.batch_id)

    @property
    def is_untouched(self) -> bool:
        """Whether it only waits, and nothing was found for it yet: there is no trace."""
        return self.state is JobState.QUEUED and self.objective_ms is None and self.bound_ms is None

    @property
    def gap(self) -> float | None:
        """Relative gap of the best schedule; None without schedule or bound."""
        return None if self.objective_ms is None else gap_of(self.objective_ms, self.bound_ms)

    @property
    def is_proven(self) -> bool:
        """Whether nothing better can be found: proven optimal, or proven infeasible."""
        proven_optimal = self.gap is not None and self.gap <= OPTIMAL_GAP
        return self.state is JobState.INFEASIBLE or proven_optimal


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob(JobRecord):
    """A job that is not kept yet, with its documents and with what is known about it already.

    Parameters
    ----------
    documents
        What it is asked (see `optpipe_api.kinds`), and what is known from its birth. The problem of
        a plan or tune comes with its first schedule.
    num_cells
        Stages x micro-batches; layers x micro-batches of a model.
    idempotency_key
        Keys of different owners never meet.
    start
        A schedule to begin with.
    is_start_promised
        Whether it may never have a worse schedule than its start, wherever its answer comes from.
    finished
        How a job that is answered at once ended; it is born so.
    """

    documents: Documents = field(default_factory=dict)
    num_cells: int = 0
    idempotency_key: str | None = None
    start: JobStart | None = None
    is_start_promised: bool = False
    finished: AttemptOutcome | None = None

    def is_content_with(self, objective_ms: float | None) -> bool:
        """Whether a schedule of this length, None = none yet, keeps what its start promised."""
        if self.start is None or not self.is_start_promised:
            return True
        return objective_ms is not None and objective_ms <= self.start.objective_ms


@dataclass(frozen=True, slots=True)
class Standing:
    """Whose a job is and how far it has come; ``last_entry`` numbers its newest history entry.

    Whatever happens to a job is an entry of its history: while this is equal, all of it is.
    """

    owner: str
    state: JobState
    num_schedules: int
    last_entry: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """The place of a queued job, 1 = next, and when it begins if none before it ends early."""

    place: int
    starts_at: float


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write to a running job; ``attempt`` fences off every earlier holder."""

    job_id: str
    owner: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A job taken from the queue, with its documents; the schedule is its last incumbent.

    ``is_carried``: the schedule is a better one, of another item of its batch whose problem is
    tighter.
    """

    lease: Lease
    job: JobRecord
    documents: Documents
    is_carried: bool = False


# --- The kinds of jobs. A kind is a row of `KINDS`, a reader of its request in
# `optpipe_api.services.submission`, and a task in `optpipe_api.engine.tasks`.


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of job.

    Parameters
    ----------
    request
        What its HTTP body must be.
    question
        The document that its task reads.
    answers
        The documents that the job gets. An equal job is answered with them.
    default_time_limit_s
        Seconds if the request gives none; None: the default of the service.
    """

    request: type[Request]
    question: DocumentKind
    answers: tuple[DocumentKind, ...]
    default_time_limit_s: float | None = None

    def has(self, kind: DocumentKind) -> bool:
        """Return whether jobs of this kind have, or will have, documents of that kind."""
        return kind is self.question or kind in self.answers


KINDS = {
    JobKind.SOLVE: Kind(
        request=SolveRequest,
        question=DocumentKind.PROBLEM,
        answers=(DocumentKind.SCHEDULE,),
    ),
    JobKind.PLAN: Kind(
        request=SolveRequest,
        question=DocumentKind.MODEL,
        answers=(DocumentKind.SCHEDULE, DocumentKind.PROBLEM),
    ),
    JobKind.COMPARE: Kind(
        request=CompareRequest,
        question=DocumentKind.PROBLEM,
        answers=(DocumentKind.COMPARISON,),
        default_time_limit_s=20.0,
    ),
    JobKind.TUNE: Kind(
        request=TuneRequest,
        question=DocumentKind.QUESTION,
        answers=(
            *(DocumentKind.SCHEDULE, DocumentKind.PROBLEM),
            *(DocumentKind.TUNED, DocumentKind.CHECKPOINT),
        ),
        default_time_limit_s=120.0,
    ),
}


# --- A batch: many problems handed in at once, and what its jobs say about it.
# It has no state of its own. Each of its items is a job, which names the batch and the item's place
# in it; progress, results and the end of the batch are read from those jobs, so there is nothing
# that could disagree with them. Only what the jobs do not know is kept: the axes of a sweep, and
# for each item its values on them.


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemPlan:
    """What is known of an item before it is solved.

    ``values``: on the axes of the sweep; empty where problems were listed. Of a what-if: the name
    of the question, and the number of micro-batches of its problem. ``memory_bytes``: the budget of
    each device. ``family``: equal for items that differ in nothing but names and the memory of
    devices. ``tighter``: items whose problems this one's is a relaxation of, see `tighter_ones`.
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
    """What a batch is about: the axes, how each item is solved, and the items in order."""

    axes: dict[str, list[Any]]
    options: JobOptions
    tags: tuple[str, ...]
    priority: int
    items: tuple[ItemPlan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBatch:
    """What a batch is made of; keys of different owners never meet."""

    name: str
    owner: str
    plan: BatchPlan
    request_hash: str
    idempotency_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchItem:
    """One item of a batch: what was planned, and its job as it is now."""

    index: int
    plan: ItemPlan
    job: JobRecord


@dataclass(frozen=True, slots=True)
class BatchStanding:
    """Whose a batch is, and whether every job of it has ended."""

    owner: str
    is_finished: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """The record of a batch with what its jobs say; times in seconds since the epoch, UTC.

    ``counts`` has only states in which there are jobs, ``finished_at`` is when the last of them
    ended: None while one goes on.
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
        """Share of its jobs that have ended, 0 to 1."""
        return self.num_finished / self.num_items if self.num_items else 1.0

    @property
    def is_finished(self) -> bool:
        return self.num_finished == self.num_items
