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


ERRORS: dict[str, type[OptPipeError]] = {
    "problem.invalid": ProblemError,
    "model.invalid": ModelError,
    "problem.infeasible": InfeasibleProblemError,
    "measurement.invalid": MeasurementError,
    "action.syntax": ActionSyntaxError,
    "schedule.invalid": ScheduleFormatError,
    "schedule.mismatch": ScheduleMismatchError,
    "schedule.illegal": RequestRefusedError,
    "key.required": KeyRefusedError,
    "key.forbidden": KeyRefusedError,
    "not_found": NotFoundError,
    "job.not_found": NotFoundError,
    "model.none": NotFoundError,
    "batch.not_found": NotFoundError,
    "what_ifs.none": NotFoundError,
    "deployment.not_found": NotFoundError,
    "schedule.none": NoScheduleError,
    "state.conflict": ConflictError,
    "idempotency.reused": ConflictError,
    "input.invalid": RequestRefusedError,
    "request.invalid": RequestRefusedError,
    "request.media_type": RequestRefusedError,
    "request.not_acceptable": RequestRefusedError,
    "request.form_unavailable": RequestRefusedError,
    "request.too_large": RequestRefusedError,
    "request.too_heavy": RequestRefusedError,
    "chart.beside": RequestRefusedError,
    "schedule.too_large": RequestRefusedError,
    "busy": BusyError,
    "queue.full": BusyError,
    "key.too_many_jobs": BusyError,
    "key.too_many_requests": BusyError,
    "key.too_many_followers": BusyError,
    "followers.full": BusyError,
    "request.busy": BusyError,
    "forms.busy": BusyError,
    "compare.busy": BusyError,
    "compare.stopped": BusyError,
    "store.unavailable": BusyError,
    "solver.failed": SolveFailedError,
    "solver.memory": SolveFailedError,
    "solver.overtime": SolveFailedError,
    # Only of jobs that failed, not of answers.
    "solver.nothing_found": NoScheduleError,
    "job.died": SolveFailedError,
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
