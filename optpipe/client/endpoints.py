"""Every endpoint of the service that the client calls, as one table.

A test compares the table with the service's OpenAPI document.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from types import NoneType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from pydantic import ValidationError

from optpipe.answers import (
    BatchView,
    Drift,
    EstimateView,
    Event,
    Job,
    JobList,
    MethodList,
    MethodRowList,
    SweepRowList,
    Tuned,
    TunedRow,
)
from optpipe.errors import InputError, ServiceError
from optpipe.formats.json import load_model, load_problem, load_schedule
from optpipe.model import Model
from optpipe.problem import Problem
from optpipe.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx

__all__ = ["Endpoint", "Repeat", "check_id"]

AnswerT = TypeVar("AnswerT")


class Repeat(Enum):
    """When the client repeats a request whose outcome is unknown, such as after a lost connection.

    If the service certainly did not act on a request, the client always repeats it.
    """

    ALWAYS = "always"
    """The request changes nothing, or a second one changes nothing more."""
    WITH_KEY = "with_key"
    """The request has an ``Idempotency-Key``, and the service acts once on each key."""
    NEVER = "never"
    """The client does not repeat the request."""


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[AnswerT]):
    """An endpoint: HTTP method, path with ``{parameters}``, type of the answer, repetition.

    ``answer_type`` is the model of the answer's JSON. It is `str` for text and `NoneType` where the
    client reads only the status. The JSON of an event stream is that of one event.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    answer_type: type[AnswerT]
    repeat: Repeat = Repeat.ALWAYS

    def fill_path(self, *ids: Job | str) -> str:
        """Return the path with ``ids`` in place of its parameters, in their order.

        Raises `InputError` if an id is not safe in a path.
        """
        names = [name.removesuffix("_id") for name in re.findall(r"{(\w+)}", self.path)]
        path = re.sub(r"{\w+}", "{}", self.path)
        return path.format(*map(check_id, ids, names))

    def read(self, answer: httpx.Response) -> AnswerT:
        """Return the body of a successful answer.

        Raises `ServiceError` if the body does not fit the model; for problems, models and schedules
        the errors of `optpipe.formats.json`.
        """
        model: Any = self.answer_type
        if model in _LOADERS:
            result: AnswerT = _LOADERS[model](answer.text)
            return result
        try:
            result = model.model_validate_json(answer.content)
        except ValidationError as error:
            raise ServiceError(
                f"{answer.url} does not answer as expected ({error.error_count()} faults, the "
                f"first: {error.errors()[0]['msg']}); is it an OptPipe service of this version?",
                answer.status_code,
            ) from error
        return result


def check_id(resource: Job | str, kind: str = "job") -> str:
    """Return the id of a job, batch or row.

    Raises `InputError` if the id is not safe in a path.
    """
    resource_id = resource.id if isinstance(resource, Job) else resource
    if not (resource_id.isascii() and resource_id.isalnum()):
        raise InputError(
            f"{resource_id!r} is not the id of a {kind}; the service names it when it is made"
        )
    return resource_id


_LOADERS: dict[type, Callable[[str], Any]] = {
    NoneType: lambda _: None,
    str: str,
    Problem: load_problem,
    Model: load_model,
    Schedule: load_schedule,
}
"""How to read the answers that are not models of `optpipe.requests`."""

READY = Endpoint("GET", "/readyz", NoneType)

SUBMIT_JOB = Endpoint("POST", "/v1/jobs", Job, Repeat.WITH_KEY)
LIST_JOBS = Endpoint("GET", "/v1/jobs", JobList)
GET_JOB = Endpoint("GET", "/v1/jobs/{job_id}", Job)
CANCEL_JOB = Endpoint("POST", "/v1/jobs/{job_id}/cancel", Job)
RESUME_JOB = Endpoint("POST", "/v1/jobs/{job_id}/resume", Job, Repeat.NEVER)
DELETE_JOB = Endpoint("DELETE", "/v1/jobs/{job_id}", NoneType, Repeat.NEVER)
JOB_EVENTS = Endpoint("GET", "/v1/jobs/{job_id}/events", Event)
JOB_PROBLEM = Endpoint("GET", "/v1/jobs/{job_id}/problem", Problem)
JOB_MODEL = Endpoint("GET", "/v1/jobs/{job_id}/model", Model)
JOB_SCHEDULE = Endpoint("GET", "/v1/jobs/{job_id}/schedule", Schedule)

LIST_METHODS = Endpoint("GET", "/v1/methods", MethodList)
SUBMIT_COMPARISON = Endpoint("POST", "/v1/compare", Job, Repeat.WITH_KEY)
COMPARISON_ROWS = Endpoint("GET", "/v1/jobs/{job_id}/comparison", MethodRowList)

ESTIMATE = Endpoint("POST", "/v1/estimates", EstimateView, Repeat.ALWAYS)
SUBMIT_TUNE = Endpoint("POST", "/v1/tunes", Job, Repeat.WITH_KEY)
TUNE_RESULT = Endpoint("GET", "/v1/jobs/{job_id}/configuration", Tuned)
ROW_PROBLEM = Endpoint("GET", "/v1/jobs/{job_id}/rows/{row}/problem", Problem)
ROW_SCHEDULE = Endpoint("GET", "/v1/jobs/{job_id}/rows/{row}/schedule", Schedule)
ROW_RECUT = Endpoint("GET", "/v1/jobs/{job_id}/rows/{row}/recut", TunedRow)
ROW_PASTE = Endpoint("GET", "/v1/jobs/{job_id}/rows/{row}/paste", str)

SUBMIT_FOLLOW = Endpoint("POST", "/v1/follow", Job, Repeat.WITH_KEY)
JOB_DRIFT = Endpoint("GET", "/v1/jobs/{job_id}/drift", Drift)

SUBMIT_BATCH = Endpoint("POST", "/v1/batches", BatchView, Repeat.WITH_KEY)
GET_BATCH = Endpoint("GET", "/v1/batches/{batch_id}", BatchView)
BATCH_TABLE = Endpoint("GET", "/v1/batches/{batch_id}/table", SweepRowList)
BATCH_FRONTIER = Endpoint("GET", "/v1/batches/{batch_id}/frontier", str)
RETRY_BATCH = Endpoint("POST", "/v1/batches/{batch_id}/retry", BatchView)
CANCEL_BATCH = Endpoint("POST", "/v1/batches/{batch_id}/cancel", BatchView)
DELETE_BATCH = Endpoint("DELETE", "/v1/batches/{batch_id}", NoneType, Repeat.NEVER)
