"""The life of a deployment: a training run that follows the newest schedule of its problem.

::

    registered --> wanted --start--> solving --settle--> idle --end--> ended
                     ^                 |  ^                |
                     |                 |  `-- publish --.  |
                     |                 `----------------'  |
                     `---------------- want (drift) -------'

*wanted*: there is a reason for a solve (``job_reason``) and no job yet. *solving*: there is a job;
each of its schedules that is better by the threshold becomes a version, the first one at once.
*idle*: nothing is under way. The training run may end a deployment in any state.

Every arrow is one compare-and-set on the deployment's row, and what it starts from is in the row:
any server may take the next step, and a killed one leaves nothing behind. The job of a wanted solve
is added under a key made from the deployment and the number of the solve, so that two servers, or
one that was killed before it wrote the job down, add one job.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from optpipe.answers import DeploymentState

if TYPE_CHECKING:
    from optpipe.answers import JobOptions
    from optpipe_api.jobs import JobError

__all__ = [
    "REGISTERED",
    "DeploymentRecord",
    "DeploymentStanding",
    "Documents",
    "Judgement",
    "NewDeployment",
    "NewVersion",
    "Report",
    "VersionRecord",
]

REGISTERED = "registered"
"""The reason of the first solve, and of its first version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewDeployment:
    """What a deployment is made of; ``problem`` is canonical JSON text.

    ``options`` are those of every solve, ``threshold`` is the least relative gain of a new version
    over the one in use.
    """

    name: str
    owner: str = ""
    problem: str
    options: JobOptions
    threshold: float
    request_hash: str
    idempotency_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRecord:
    """The record of a deployment, without its documents; moments in seconds since the epoch, UTC.

    Parameters
    ----------
    version
        The newest; 0 = there is none yet.
    job_reason, job_id, num_solves, num_seen
        Why a solve is wanted, its job, the how manieth solve it is, and how many of the job's
        schedules were looked at.
    error
        Why the last solve gave nothing.
    planned_ms
        How long the schedule in use takes under the times that were solved for last.
    num_reports, num_judged
        Reports that came; how many of them had come when their times were judged last.
    current_ms, expected_ms
        How long the schedule in use takes under the measured times, and how long one would that
        is as good for them as it was for those it was made for. None = not judged yet.
    """

    id: str
    position: int
    name: str
    owner: str
    options: JobOptions
    threshold: float
    created_at: float
    ended_at: float | None
    version: int
    job_reason: str | None
    job_id: str | None
    num_solves: int
    num_seen: int
    error: JobError | None
    planned_ms: float | None
    num_reports: int
    num_judged: int
    current_ms: float | None
    expected_ms: float | None

    @property
    def state(self) -> DeploymentState:
        """What goes on."""
        if self.ended_at is not None:
            return DeploymentState.ENDED
        if self.job_id is not None:
            return DeploymentState.SOLVING
        if self.job_reason is not None:
            return DeploymentState.WAITING
        return DeploymentState.FOLLOWING if self.version else DeploymentState.FAILED

    @property
    def drift(self) -> float | None:
        """What the measured times cost beyond what had to be, relative; None = not judged yet."""
        if self.current_ms is None or self.expected_ms is None or self.expected_ms <= 0:
            return None
        return self.current_ms / self.expected_ms - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Problems as JSON text: as registered, as measured (None = never), as solved last."""

    problem: str
    measured: str | None
    planned: str

    @property
    def newest(self) -> str:
        """The problem whose times are the truest known."""
        return self.problem if self.measured is None else self.measured


@dataclass(frozen=True, slots=True)
class DeploymentStanding:
    """Whose a deployment is, its newest version, whether it has ended, and its last solve failed.

    ``version`` is 0 before the first version.
    """

    owner: str
    version: int
    has_ended: bool
    has_failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """One published schedule: why, what was predicted of it, and what was measured under it.

    ``predicted_ms`` under the truest times known when it was published; ``measured_ms`` the mean
    of the ``num_measured`` step times reported.
    """

    version: int
    created_at: float
    reason: str
    job_id: str
    predicted_ms: float
    measured_ms: float | None
    num_measured: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewVersion:
    """A schedule to publish, the problem its prediction holds for, both as JSON text."""

    reason: str
    schedule: str
    predicted_ms: float
    problem: str
    num_seen: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a training run measured under a version; ``document`` holds the times as JSON."""

    version: int
    document: str
    step: int | None = None
    step_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """How the schedule in use does under the measured times, ``num_reports`` of them.

    ``reason`` is why a solve is wanted, and ``problem`` what it is to solve; both None where the
    schedule is good enough.
    """

    num_reports: int
    current_ms: float
    expected_ms: float
    reason: str | None = None
    problem: str | None = None
