"""The life of a job: its states, the one function that changes them, and its record.

::

    submit --> queued --CLAIM--> running --SUCCEED-----------> succeeded --.
                ^ ^ |              |  |----PROVE_INFEASIBLE--> infeasible  |
                | | |              |  |----FAIL--------------> failed    --|
                | | |---CANCEL-----+--+----CANCEL------------> cancelled --|
                | | |---SUCCEED--------------------(shared)--> succeeded --|
                | | `---PROVE_INFEASIBLE-----------(shared)--> infeasible  |
                | `----REQUEUE-----'                                       |
                `------------------RESUME----------------------------------'

A job has a schedule (``has_schedule``) from its first incumbent on, in whatever state it is: a
cancelled or failed job keeps its best one. The four states on the right are final: nothing is
written to such a job again, unless its owner asks for more time (RESUME): it then waits in the
queue with a longer time limit, and starts from where it stands. An infeasible job stays what it is.
A problem solved before is answered at once: its job is born finished (``cache`` is ``hit``). One
that is being solved at the moment is not solved again: its job waits in the queue, has whatever the
other one finds, and ends with it (`optpipe_api.store.jobs_sharing`); ``cache`` is ``hit`` from the
beginning, and becomes ``miss`` or ``near`` should it have to be solved by itself after all.

REQUEUE happens when a solver process or a whole server died, or shut down: the job starts again
from its last incumbent. Each death counts; at ``max_attempts`` of them REQUEUE becomes FAIL. A
job whose cancellation was asked for is cancelled instead.

Everything that happens to a job is an entry of its history (`HistoryEntry`), numbered upwards; the
last entry of a finished job says its state.

A running job belongs to whoever holds its `Lease`. Every write of a worker names the lease, and is
lost (returns None) when the job is no longer running under it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from optpipe.schedule import OPTIMAL_GAP, gap_of

__all__ = [
    "Cache",
    "CacheUse",
    "Claim",
    "EntryKind",
    "HistoryEntry",
    "Job",
    "JobError",
    "JobEvent",
    "JobKind",
    "JobOptions",
    "JobState",
    "Lease",
    "NewJob",
    "Outcome",
    "Standing",
    "Start",
    "StoredSchedule",
    "TracePoint",
    "transition",
]

CacheUse = Literal["use", "refresh"]
"""Whether an answer found before may be given; with "refresh" it is found again."""


class JobState(StrEnum):
    """Where a job stands; the picture is in the module's docstring."""

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
    (JobState.QUEUED, JobEvent.SUCCEED): JobState.SUCCEEDED,
    (JobState.QUEUED, JobEvent.PROVE_INFEASIBLE): JobState.INFEASIBLE,
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


class JobKind(StrEnum):
    """What is done: a problem is solved, or a model is cut, placed and scheduled."""

    SOLVE = "solve"
    PLAN = "plan"


class Cache(StrEnum):
    """What was known when a job came: the answer, a schedule of a near problem, or nothing."""

    HIT = "hit"
    NEAR = "near"
    MISS = "miss"


class EntryKind(StrEnum):
    """What an entry of a job's history tells."""

    STATE = "state"
    INCUMBENT = "incumbent"
    BOUND = "bound"
    LOG = "log"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """How a job is solved: the arguments of `optpipe_solver.solve` and `plan` of the same names.

    ``cache`` aside, which is about what other jobs have found; ``chunks`` and ``placements`` are
    of a plan, and None where the solver chooses.
    """

    time_limit_s: float
    work_limit: float | None = None
    threads: int = 1
    seed: int = 0
    gap: float = OPTIMAL_GAP
    method: str = "auto"
    cache: CacheUse = "use"
    chunks: tuple[int, ...] | None = None
    placements: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        # JSON gives lists back, and options are compared.
        for name in ("chunks", "placements"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else tuple(value))

    def asks_the_same(self, other: JobOptions) -> bool:
        """Whether both want the same done; how long and how well aside."""
        return (self.method, self.chunks, self.placements) == (
            other.method,
            other.chunks,
            other.placements,
        )

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


def _allows(had: float | None, asked: float | None) -> bool:
    """Whether one limit of work allows what another does; None is no limit."""
    return had is None or (asked is not None and had >= asked)


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
    kind: EntryKind
    at: float
    seconds: float | None = None
    method: str | None = None
    objective_ms: float | None = None
    bound_ms: float | None = None
    text: str | None = None

    @property
    def is_final(self) -> bool:
        """Whether the job has ended by this; only a resumed job has entries after it."""
        return self.kind is EntryKind.STATE and JobState(self.text or "").is_final


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an attempt ended; ``schedule`` is JSON text and comes with its ``objective_ms``.

    ``method`` made the schedule; ``problem`` is the one that a plan chose, as JSON text.
    """

    event: JobEvent
    schedule: str | None = None
    objective_ms: float | None = None
    bound_ms: float | None = None
    error: JobError | None = None
    method: str = ""
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A schedule (JSON text) that a job has from its birth; ``method`` made it."""

    schedule: str
    objective_ms: float
    method: str
    bound_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSchedule:
    """A job's best schedule so far, as JSON text; ``number`` grows with each one stored.

    ``owner`` is the job's.
    """

    document: str
    number: int
    owner: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """What a job is made of.

    Parameters
    ----------
    problem, model
        Canonical JSON text: the problem to solve, or the model to plan, whose problem is known
        only with its first schedule. ``problem_hash`` is that of the one that is given.
    owner, idempotency_key
        Whose it is; keys of different owners never meet.
    priority
        -100..100; higher ones are taken first.
    shape_hash
        Equal for problems whose programs may suit each other; empty = never near to another.
    cache, source_id
        What was known, and from which job.
    start
        A schedule to begin with.
    finished
        How a job that is answered at once ended; it is born so.
    is_start_promised
        Whether it may never have a worse schedule than its start, wherever its answer comes from.
    may_share
        Whether it may wait for a job that is being solved, instead of being solved itself.
    """

    name: str
    problem_hash: str
    objective: str
    problem: str | None
    options: JobOptions
    kind: JobKind = JobKind.SOLVE
    model: str | None = None
    owner: str = ""
    idempotency_key: str | None = None
    priority: int = 0
    tags: tuple[str, ...] = ()
    shape_hash: str = ""
    cache: Cache = Cache.MISS
    source_id: str | None = None
    batch_id: str | None = None
    batch_index: int | None = None
    deployment_id: str | None = None
    start: Start | None = None
    is_start_promised: bool = False
    finished: Outcome | None = None
    may_share: bool = False

    def is_content_with(self, objective_ms: float | None) -> bool:
        """Whether a schedule of this length, None = none yet, keeps what its start promised."""
        if self.start is None or not self.is_start_promised:
            return True
        return objective_ms is not None and objective_ms <= self.start.objective_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The record of a job, without its documents; times in seconds since the epoch, UTC.

    ``attempt`` counts claims, ``deaths`` the attempts that ended with a dead process or server,
    ``spent_s`` the solving time of earlier attempts, ``num_schedules`` the schedules stored so
    far. ``tags`` are sorted. ``awaits_id`` is the job whose solve it shares, or shared to the end.
    The rest is as in `NewJob`.
    """

    id: str
    position: int
    state: JobState
    name: str
    problem_hash: str
    objective: str
    options: JobOptions
    created_at: float
    kind: JobKind = JobKind.SOLVE
    owner: str = ""
    priority: int = 0
    tags: tuple[str, ...] = ()
    shape_hash: str = ""
    cache: Cache = Cache.MISS
    source_id: str | None = None
    awaits_id: str | None = None
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
        """Whether a schedule can be fetched."""
        return self.objective_ms is not None

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
class Lease:
    """The right to write to a running job; ``attempt`` fences off every earlier holder."""

    job_id: str
    owner: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A job taken from the queue, with its documents; ``start`` is its last incumbent.

    ``problem`` is None for a plan without incumbent, ``model`` for all but plans.
    """

    lease: Lease
    job: Job
    problem: str | None
    model: str | None = None
    start: str | None = None
