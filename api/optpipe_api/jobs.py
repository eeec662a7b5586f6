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
written to such a job again, unless its owner asks for more time (RESUME): it then waits in the
queue with a longer time limit, and starts from where it stands. An infeasible job stays what it is.
A problem solved before is answered at once: its job is born finished (``cache`` is ``hit``).

REQUEUE happens when a solver process or a whole server died, or shut down: the job starts again
from its last incumbent. Each death counts; at ``max_attempts`` of them REQUEUE becomes FAIL. A
job whose cancellation was asked for is cancelled instead.

A running job belongs to whoever holds its `Lease`. Every write of a worker names the lease, and is
lost (returns None) when the job is no longer running under it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from optpipe.schedule import OPTIMAL_GAP, gap_of

__all__ = [
    "Claim",
    "Job",
    "JobError",
    "JobEvent",
    "JobOptions",
    "JobState",
    "Lease",
    "NewJob",
    "TracePoint",
    "transition",
]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """How a job is solved: the arguments of `optpipe_solver.solve` of the same names."""

    time_limit_s: float
    work_limit: float | None = None
    threads: int = 1
    seed: int = 0
    gap: float = OPTIMAL_GAP
    method: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """What a job is made of; ``problem`` is its canonical JSON text."""

    name: str
    problem_hash: str
    objective: str
    problem: str
    options: JobOptions
    idempotency_key: str | None = None


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
class Job:
    """The record of a job, without its documents; times in seconds since the epoch, UTC.

    ``attempt`` counts claims, ``deaths`` the attempts that ended with a dead process or server,
    ``spent_s`` the solving time of earlier attempts.
    """

    id: str
    position: int
    state: JobState
    name: str
    problem_hash: str
    objective: str
    options: JobOptions
    created_at: float
    started_at: float | None = None
    finished_at: float | None = None
    cancel_requested: bool = False
    attempt: int = 0
    deaths: int = 0
    spent_s: float = 0.0
    objective_ms: float | None = None
    bound_ms: float | None = None
    error: JobError | None = None

    @property
    def has_schedule(self) -> bool:
        """Whether a schedule can be fetched."""
        return self.objective_ms is not None

    @property
    def gap(self) -> float | None:
        """Relative gap of the best schedule; None without schedule or bound."""
        return None if self.objective_ms is None else gap_of(self.objective_ms, self.bound_ms)


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write to a running job; ``attempt`` fences off every earlier holder."""

    job_id: str
    owner: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A job taken from the queue, with its documents; ``start`` is its last incumbent."""

    lease: Lease
    job: Job
    problem: str
    start: str | None
