"""Which error each refusal of the service is: one table from its codes.

::

    WorldError
    |-- ServiceUnreachableError      nobody answers
    `-- ServiceError                 the service refused or failed; carries .status, .problem_code
        |-- KeyRefusedError          no API key, none that is known, or one of too small a role
        |-- NotFoundError            no such job, batch or deployment, or none of yours
        |-- NoScheduleError          the job or deployment has none (yet)
        |-- ConflictError            not possible in the state the thing is in
        |-- RequestRefusedError      the request breaks a rule of the service
        |-- BusyError                too much is under way, or the service is stopping
        `-- SolveFailedError         the solver died, or needs more than it may have

What is wrong with the caller's own problem or model is told as if it had been found here:
`ProblemError`, `ModelError`, `InfeasibleProblemError`, `MeasurementError` of `optpipe.errors`.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from optpipe.errors import (
    ActionSyntaxError,
    InfeasibleProblemError,
    InputError,
    MeasurementError,
    ModelError,
    OptPipeError,
    ProblemError,
    ScheduleFormatError,
    ScheduleMismatchError,
    ServiceError,
    ServiceUnreachableError,
)

if TYPE_CHECKING:
    import httpx

__all__ = [
    "ERRORS",
    "BusyError",
    "ConflictError",
    "KeyRefusedError",
    "NoScheduleError",
    "NotFoundError",
    "RequestRefusedError",
    "ServiceError",
    "ServiceUnreachableError",
    "SolveFailedError",
    "error_of",
    "fault_of",
    "refusal",
]


class KeyRefusedError(ServiceError):
    """No API key was given, none that the service knows, or one whose role is too small."""


class NotFoundError(ServiceError):
    """There is no such job, batch or deployment, or none of yours."""


class NoScheduleError(ServiceError):
    """The job or deployment has no schedule, or none yet; the message says which."""


class ConflictError(ServiceError):
    """What is asked is not possible in the state that the thing is in."""


class RequestRefusedError(ServiceError):
    """The request breaks a rule or a limit of the service; the message says which."""


class BusyError(ServiceError):
    """Too much is under way, or the service is stopping; it was asked again in vain."""


class SolveFailedError(ServiceError):
    """A solver process died, or needs more memory or time than it may have."""


_OWN_FAULTS = (
    ProblemError,
    ModelError,
    InfeasibleProblemError,
    MeasurementError,
    ActionSyntaxError,
    ScheduleFormatError,
    ScheduleMismatchError,
)
_REFUSALS: dict[type[ServiceError], str] = {
    KeyRefusedError: "key.required key.forbidden request.other_site",
    NotFoundError: "not_found job.not_found model.none batch.not_found deployment.not_found",
    # The last is only of jobs that failed, not of answers; likewise job.died.
    NoScheduleError: "schedule.none solver.nothing_found",
    ConflictError: "state.conflict idempotency.reused key.too_many_kept",
    RequestRefusedError: "schedule.illegal input.invalid request.invalid request.media_type "
    "request.not_acceptable request.form_unavailable request.too_large request.too_heavy "
    "chart.beside schedule.too_large",
    BusyError: "busy queue.full key.too_many_jobs key.too_many_requests key.too_many_followers "
    "followers.full request.busy forms.busy store.unavailable "
    "solver.unavailable",
    SolveFailedError: "solver.failed solver.memory solver.overtime job.died",
}
ERRORS: dict[str, type[OptPipeError]] = {
    **{kind.code: kind for kind in _OWN_FAULTS},
    **{code: kind for kind, codes in _REFUSALS.items() for code in codes.split()},
}
"""By the stable ``code`` of a problem detail or failed job; others are a plain `ServiceError`."""


def refusal(answer: httpx.Response) -> OptPipeError:
    """Return the error that a problem detail, or any other failed answer, stands for."""
    fault = fault_of(answer)
    detail = str(fault.get("detail") or _unexplained(answer))
    code, needs = fault.get("code"), fault.get("needs")
    known = code if isinstance(code, str) else None
    return error_of(known, detail, needs if isinstance(needs, dict) else {}, answer.status_code)


def _unexplained(answer: httpx.Response) -> str:
    # A password in the address is nobody else's business.
    asked = f"{answer.url.copy_with(userinfo=b'')} answered {answer.status_code}"
    if answer.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return f"{asked} without a reason: the service, or what stands before it, is in trouble"
    return (
        f"{asked}, and not with a reason as the service gives one; is it the address of an OptPipe "
        "service, with no more and no less of its path?"
    )


def error_of(
    code: str | None, message: str, needs: dict[str, int], status: int = 200
) -> OptPipeError:
    """Return the error of a code; ``status`` is that of the answer which told it."""
    kind = ERRORS.get(code or "", ServiceError)
    if issubclass(kind, InfeasibleProblemError):
        return kind(message, needs)
    if issubclass(kind, InputError):
        return kind(message)
    return kind(message, status, code) if issubclass(kind, ServiceError) else kind(message)


def fault_of(answer: httpx.Response) -> dict[str, Any]:
    """Return the problem detail of an answer; empty where it is none."""
    kind = answer.headers.get("Content-Type", "").partition(";")[0]
    if kind != "application/problem+json":
        return {}
    try:
        fault = answer.json()
    except ValueError:
        return {}
    return fault if isinstance(fault, dict) else {}
