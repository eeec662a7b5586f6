"""What the service tells: jobs, events, deployments and their versions, batches, what-ifs."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from optpipe.client.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx

__all__ = [
    "Answer",
    "BatchView",
    "DeploymentView",
    "Event",
    "EventKind",
    "Failure",
    "HasId",
    "Improvement",
    "Item",
    "Job",
    "JobState",
    "Received",
    "Unasked",
    "Version",
    "WhatIfs",
    "as_model",
]

JobState = Literal["queued", "running", "succeeded", "infeasible", "failed", "cancelled"]
EventKind = Literal["state", "incumbent", "bound", "log"]


class Received(BaseModel):
    """What came from a service; a newer one may say more, an older one less."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class HasId(Received):
    """Something that the service keeps under an id."""

    id: str


class Failure(Received):
    """Why a job ended without success; ``needs`` maps what is too small to what would do."""

    code: str
    message: str
    needs: dict[str, int] = Field(default_factory=dict)


class Improvement(Received):
    """One step of a job's progress, ``seconds`` of solving after its start."""

    seconds: float
    method: str
    objective_ms: float | None = None
    bound_ms: float | None = None


class Job(HasId):
    """A job as the service last told it; ask again for news.

    ``has_schedule`` is true from the first schedule on, whatever the state; ``num_schedules``
    counts them. ``cache`` says what the service knew before: ``hit`` the answer, ``near`` a
    schedule of a similar problem to start from, ``miss`` neither; ``source_id`` is the job that
    knew it.
    """

    kind: Literal["solve", "plan"] = "solve"
    state: JobState
    has_schedule: bool
    num_schedules: int = 0
    cache: Literal["miss", "near", "hit"] = "miss"
    source_id: str | None = None
    name: str = ""
    owner: str | None = None
    problem_hash: str
    objective: str
    objective_ms: float | None = None
    bound_ms: float | None = None
    gap: float | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    tags: tuple[str, ...] = ()
    priority: int = 0
    batch_id: str | None = None
    batch_index: int | None = None
    deployment_id: str | None = None
    cancel_requested: bool = False
    error: Failure | None = None
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    trace: tuple[Improvement, ...] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether nothing will happen to the job any more."""
        return self.state not in ("queued", "running")


class Event(Received):
    """One thing that happened to a job; numbers grow, with holes.

    ``text`` is the new state of a ``state`` and the sentence of a ``log``. The other kinds are a
    better schedule (``incumbent``) and a better ``bound``, with the numbers known then, ``seconds``
    of solving after the start.
    """

    number: int
    kind: EventKind
    at: datetime
    seconds: float | None = None
    method: str | None = None
    objective_ms: float | None = None
    bound_ms: float | None = None
    gap: float | None = None
    text: str | None = None


class DeploymentView(HasId):
    """A deployment as the service last told it.

    ``version`` is the newest one, 0 = there is none yet. ``drift`` is by how much ``current_ms``,
    what the schedule in use takes under the measured times, exceeds ``expected_ms``; see the
    service's documentation.
    """

    state: Literal["waiting", "solving", "following", "failed", "ended"]
    name: str = ""
    version: int
    reason: str | None = None
    job_id: str | None = None
    error: Failure | None = None
    threshold: float
    num_reports: int = 0
    num_judged: int = 0
    current_ms: float | None = None
    expected_ms: float | None = None
    drift: float | None = None
    created_at: datetime
    ended_at: datetime | None = None


class Version(Received):
    """One published schedule of a deployment: why, what was predicted, what was measured under it.

    ``measured_ms`` is the mean of the ``num_measured`` step times reported.
    """

    version: int
    created_at: datetime
    reason: str
    job_id: str
    predicted_ms: float
    measured_ms: float | None = None
    num_measured: int = 0


class Item(Received):
    """One item of a batch: its values on the axes, and what its job has reached."""

    index: int
    job_id: str
    name: str = ""
    values: dict[str, Any] = Field(default_factory=dict)
    state: JobState
    cache: Literal["miss", "near", "hit"] = "miss"
    objective_ms: float | None = None
    bound_ms: float | None = None
    gap: float | None = None
    error: Failure | None = None


class BatchView(HasId):
    """A batch as the service last told it; ``items`` are in order, and left out of lists."""

    name: str = ""
    is_finished: bool
    progress: float
    num_items: int
    counts: dict[JobState, int] = Field(default_factory=dict)
    created_at: datetime
    finished_at: datetime | None = None
    items: tuple[Item, ...] | None = None


class Answer(Received):
    """One question what more would buy, and what its job has found; gains are shares of the time.

    ``sentence`` says it in words once that job has ended. Until then the numbers are those of its
    best schedule so far. ``most_gain`` is what no schedule can exceed, and ``is_never_worse``
    whether a loss is impossible: both are proven.
    """

    name: str
    question: str
    job_id: str
    state: JobState
    sentence: str | None = None
    before_ms: float
    microbatches_before: int
    after_ms: float | None = None
    microbatches_after: int
    bound_ms: float | None = None
    gain: float | None = None
    most_gain: float | None = None
    buys_nothing: bool | None = None
    is_never_worse: bool
    error: Failure | None = None


class Unasked(Received):
    """A question that has no meaning for a problem, and why."""

    name: str
    question: str
    reason: str
    sentence: str


class WhatIfs(Received):
    """What was asked last about a job: what more memory, bandwidth, micro-batches would buy.

    The answers are measured against the schedule of ``schedule_number``; ``is_current`` says
    whether the job still has none better. ``batch_id`` is the batch whose items the questions are.
    """

    job_id: str
    batch_id: str
    is_finished: bool
    created_at: datetime
    schedule_number: int
    is_current: bool
    before_ms: float
    microbatches_before: int
    answers: tuple[Answer, ...]
    unasked: tuple[Unasked, ...] = ()


M = TypeVar("M", bound=Received)


def as_model(model: type[M]) -> Callable[[httpx.Response], M]:
    """Return what reads an answer as a model.

    Raises
    ------
    ServiceError
        By the function returned, if the answer is something else.
    """

    def read(answer: httpx.Response) -> M:
        try:
            return model.model_validate_json(answer.content)
        except ValidationError as error:
            raise ServiceError(
                f"{answer.url} does not answer as expected ({error.error_count()} faults, the "
                f"first: {error.errors()[0]['msg']}); is it an OptPipe service of this version?",
                answer.status_code,
            ) from error

    return read
