"""What travels over HTTP about deployments: registrations, reports, views."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from optpipe.measurements import Measurements  # noqa: TC001 - pydantic reads it
from optpipe.problem import Count, Index, Milliseconds  # noqa: TC001 - likewise
from optpipe.validation import explain
from optpipe_api.access import Role
from optpipe_api.errors import RequestError
from optpipe_api.job_views import JobFault, moment
from optpipe_api.schemas import PROBLEM_EXAMPLE, OptionsBody, StrictBody, WithProblem

if TYPE_CHECKING:
    from optpipe_api.access import Principal
    from optpipe_api.deployments import Deployment, Version

__all__ = [
    "DeploymentList",
    "DeploymentState",
    "DeploymentView",
    "Registration",
    "ReportBody",
    "VersionList",
    "VersionView",
]

DEFAULT_THRESHOLD = 0.01

_VERSION_EXAMPLE: dict[str, Any] = {
    "version": 2,
    "created_at": "2026-01-31T12:10:00Z",
    "reason": "drift: forward of stage 2 takes 14% longer than planned; the schedule in use takes "
    "131.2 ms under the measured times, 4.1% more than one as good for them as it was for those it "
    "was made for; this one takes 126.1 ms instead of 131.2 ms under the measured times, 3.9% "
    "shorter",
    "job_id": "0f6b7e4a3c1d4e5f8a9b0c1d2e3f4a5b",
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
_REPORT_EXAMPLE: dict[str, Any] = {
    "version": 1,
    "step": 400,
    "step_ms": 127.9,
    "actions": {
        "source": "training, 8 sampled steps up to step 400",
        "samples": [
            {"stage": 0, "action": "F", "time_ms": 10.2},
            {"stage": 0, "action": "B", "time_ms": 18.4},
        ],
    },
}


class DeploymentState(StrEnum):
    """What goes on, as clients see it; the picture is in `optpipe_api.deployments`."""

    WAITING = "waiting"
    SOLVING = "solving"
    FOLLOWING = "following"
    FAILED = "failed"
    ENDED = "ended"


class Registration(WithProblem):
    """A training run that wants to follow the newest schedule of its problem."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"problem": PROBLEM_EXAMPLE, "options": {"time_limit_s": 10}, "threshold": 0.02}
            ]
        }
    )

    name: str = Field(default="", max_length=200, description="For people; else the problem's.")
    options: OptionsBody = Field(default=OptionsBody(), description="Of every solve.")
    threshold: float = Field(
        default=DEFAULT_THRESHOLD,
        ge=0,
        lt=1,
        strict=True,
        description="A new version is published only where it gains at least this share of the "
        "step, and solved for only where drift costs more.",
    )


class ReportBody(StrictBody):
    """What a training run measured: the value of `ActionTimer.measurements`, and the step's time.

    Only times count, those of copies and messages among them; sizes stay as registered.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [_REPORT_EXAMPLE]})

    version: Count = Field(description="Of the schedule that ran.")
    step: Index | None = Field(default=None, description="When it was measured.")
    step_ms: Milliseconds | None = Field(default=None, description="From start to end of a step.")
    actions: Measurements

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Return the report a JSON-like object describes.

        Raises
        ------
        RequestError
            With one line per fault.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise RequestError(explain(error, cls)) from None


class DeploymentView(BaseModel):
    """A deployment as clients see it; ``owner`` is for admins.

    ``reason`` is why the solve under way was begun, ``error`` why the last one gave nothing.
    ``current_ms`` is what the schedule in use takes under the measured times, ``expected_ms`` what
    one would that is as good for them as it was for those it was made for, and ``drift`` by how
    much the first exceeds the second; null until reports were judged under this version.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [_DEPLOYMENT_EXAMPLE]})

    id: str
    state: DeploymentState
    name: str
    owner: str | None
    version: int = Field(description="The newest; 0 = there is none yet.")
    reason: str | None
    job_id: str | None
    error: JobFault | None
    options: dict[str, Any]
    threshold: float
    num_reports: int
    num_judged: int = Field(description="Reports that the numbers below know.")
    current_ms: float | None
    expected_ms: float | None
    drift: float | None
    created_at: datetime
    ended_at: datetime | None

    @classmethod
    def of(cls, deployment: Deployment, who: Principal) -> Self:
        """Return the view of a deployment for somebody."""
        ended_at, error = deployment.ended_at, deployment.error
        return cls(
            id=deployment.id,
            state=_state_of(deployment),
            name=deployment.name,
            owner=deployment.owner if who.role is Role.ADMIN else None,
            version=deployment.version,
            reason=deployment.job_reason,
            job_id=deployment.job_id,
            error=None if error is None else JobFault(**asdict(error)),
            options=asdict(deployment.options.job),
            threshold=deployment.options.threshold,
            num_reports=deployment.num_reports,
            num_judged=deployment.num_judged,
            current_ms=deployment.current_ms,
            expected_ms=deployment.expected_ms,
            drift=deployment.drift,
            created_at=moment(deployment.created_at),
            ended_at=None if ended_at is None else moment(ended_at),
        )


class DeploymentList(BaseModel):
    """Deployments, newest first; ``next`` is the ``cursor`` of the next page, null on the last."""

    deployments: list[DeploymentView]
    next: int | None


class VersionView(BaseModel):
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
    measured_ms: float | None
    num_measured: int

    @classmethod
    def of(cls, version: Version) -> Self:
        """Return the view of a version."""
        return cls(**(asdict(version) | {"created_at": moment(version.created_at)}))


class VersionList(BaseModel):
    """The versions of a deployment, oldest first."""

    versions: list[VersionView]


def _state_of(deployment: Deployment) -> DeploymentState:
    if deployment.ended_at is not None:
        return DeploymentState.ENDED
    if deployment.job_id is not None:
        return DeploymentState.SOLVING
    if deployment.job_reason is not None:
        return DeploymentState.WAITING
    return DeploymentState.FOLLOWING if deployment.version else DeploymentState.FAILED
