"""Rules of the client that need no network: request bodies, retries, errors, events.

A fault in the caller's own problem or model raises the same error as a local check of it, such as
`optpipe.errors.ProblemError`. Every other refusal raises a `ServiceError` or one of the subclasses
below, with ``.status`` and ``.problem_code``.
"""

from __future__ import annotations

import ipaddress
import json
import random
import re
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import httpx
from pydantic import ValidationError

from optpipe.answers import Event, EventKind, Job
from optpipe.client.endpoints import Repeat
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
from optpipe.formats.json import load_schedule
from optpipe.model import Model
from optpipe.problem import Problem
from optpipe.requests import TuneOptions, TuneRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from httpx_sse import ServerSentEvent

    from optpipe.requests import Request
    from optpipe.schedule import Schedule

__all__ = [
    "ERRORS",
    "PING_INTERVAL_S",
    "Address",
    "BusyError",
    "ConflictError",
    "EventCursor",
    "KeyRefusedError",
    "NoScheduleError",
    "NoStreamError",
    "NotFoundError",
    "RequestRefusedError",
    "ServiceError",
    "ServiceUnreachableError",
    "SolveFailedError",
    "drop_none",
    "if_none_match",
    "make_body",
    "make_error",
    "read_error",
    "read_newer_schedule",
    "to_document",
]


class KeyRefusedError(ServiceError):
    """The API key is missing or unknown, or its role does not permit the request."""


class NotFoundError(ServiceError):
    """There is no such job or batch, or it belongs to another owner."""


class NoScheduleError(ServiceError):
    """The job has no schedule, or none yet; the message says which."""


class ConflictError(ServiceError):
    """The job or batch is in a state that does not allow the request."""


class RequestRefusedError(ServiceError):
    """The request breaks a rule or a limit of the service; the message says which."""


class BusyError(ServiceError):
    """The service is overloaded or stopping, and every retry failed."""


class SolveFailedError(ServiceError):
    """A solver process died, or exceeded its memory or time limit."""


_OWN_FAULTS = (
    ProblemError,
    ModelError,
    InfeasibleProblemError,
    MeasurementError,
    ActionSyntaxError,
    ScheduleFormatError,
    ScheduleMismatchError,
)
# Only failed jobs have solver.nothing_found, solver.memory, solver.overtime and job.died.
_REFUSALS: dict[type[ServiceError], str] = {
    KeyRefusedError: "key.required key.forbidden request.other_site",
    NotFoundError: "not_found job.not_found model.none batch.not_found",
    NoScheduleError: "schedule.none solver.nothing_found",
    ConflictError: "state.conflict idempotency.reused key.too_many_kept",
    RequestRefusedError: "schedule.illegal input.invalid request.invalid request.media_type "
    "request.not_acceptable request.form_unavailable request.too_large request.too_heavy "
    "request.headers_too_large chart.beside schedule.too_large",
    BusyError: "busy queue.full key.too_many_jobs key.too_many_requests key.too_many_followers "
    "followers.full request.busy request.pipelined trace.busy forms.busy store.unavailable "
    "solver.unavailable",
    SolveFailedError: "solver.failed solver.memory solver.overtime job.died",
}
ERRORS: dict[str, type[OptPipeError]] = {
    **{kind.code: kind for kind in _OWN_FAULTS},
    **{code: kind for kind, codes in _REFUSALS.items() for code in codes.split()},
}
"""Maps the ``code`` of a problem detail or failed job to its error; others: `ServiceError`."""


def read_error(answer: httpx.Response) -> OptPipeError:
    """Return the error that a failed answer reports."""
    detail = _read_problem_detail(answer)
    code, needs = detail.get("code"), detail.get("needs")
    message = detail.get("detail")
    if not message:
        # The URL in a message must not show a password.
        message = f"{answer.url.copy_with(userinfo=b'')} answered {answer.status_code}"
        if answer.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            message += " without a reason: the service, or what stands before it, is in trouble"
        else:
            message += (
                ", and not with a reason as the service gives one; is it the address of an "
                "OptPipe service, with no more and no less of its path?"
            )
    return make_error(
        code if isinstance(code, str) else None,
        str(message),
        needs if isinstance(needs, dict) else {},
        answer.status_code,
    )


def make_error(
    code: str | None, message: str, needs: dict[str, int], status: int = 200
) -> OptPipeError:
    """Return the error for a code of `ERRORS`; ``status`` is the HTTP status of the answer."""
    kind = ERRORS.get(code or "", ServiceError)
    if issubclass(kind, InfeasibleProblemError):
        return kind(message, needs)
    return kind(message, status, code) if issubclass(kind, ServiceError) else kind(message)


def _read_problem_detail(answer: httpx.Response) -> dict[str, Any]:
    """Return the problem detail (RFC 9457) of an answer; an empty dict if it has none."""
    kind = answer.headers.get("Content-Type", "").partition(";")[0]
    if kind != "application/problem+json":
        return {}
    try:
        detail = answer.json()
    except ValueError:
        return {}
    return detail if isinstance(detail, dict) else {}


_FIRST_DELAY_S = 0.2
_MAX_DELAY_S = 10.0
_RETRY_STATUSES = frozenset({429, 502, 503, 504})
"""The statuses after which the same request may succeed."""
# The service received nothing that it could act on.
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_ETAG = re.compile(r'(?:W/)?"[^"]*\.([0-9]{1,15})"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A service's address, API key, timeout and number of retries."""

    url: httpx.URL
    api_key: str | None
    timeout_s: float
    num_retries: int

    @classmethod
    def parse(
        cls, base_url: str, api_key: str | None, timeout_s: float, num_retries: int
    ) -> Address:
        """Return the address.

        Raises `InputError` if ``base_url`` is not an HTTP address or the key has invalid letters.
        """
        try:
            url = httpx.URL(base_url)
        except (httpx.InvalidURL, TypeError):
            url = httpx.URL()
        if url.scheme not in ("http", "https") or not url.host:
            raise InputError(
                f"{base_url!r} is not the address of a service; write it like http://127.0.0.1:8000"
            )
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            # The message leaves the key out: it may be close to a valid key.
            raise InputError("the API key has letters that no key has; copy it again")
        return cls(url=url, api_key=api_key, timeout_s=timeout_s, num_retries=num_retries)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `httpx.Client` and `httpx.AsyncClient`."""
        return {
            "base_url": self.url,
            "headers": {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"},
            "timeout": self.timeout_s,
            # A proxy from the environment cannot reach this machine's loopback address.
            "trust_env": not _is_loopback(self.url.host),
        }

    def timeout(self, wait_s: float) -> httpx.Timeout:
        """Return the timeouts of a request whose answer may take ``wait_s`` seconds longer."""
        return httpx.Timeout(self.timeout_s, read=self.timeout_s + wait_s)

    def delay_after_error_s(
        self, attempt: int, repeat: Repeat, error: httpx.TransportError
    ) -> float:
        """Return the seconds to wait before the client repeats a request that got no answer.

        ``attempt`` is 0 for the first attempt. Raises `ServiceUnreachableError` if it was the last
        attempt, or if the service may have acted on a request that must not be repeated.
        """
        may_repeat = (
            isinstance(error, _NOT_SENT)
            if repeat is Repeat.NEVER
            else not isinstance(error, httpx.UnsupportedProtocol)
        )
        if attempt < self.num_retries and may_repeat:
            return _backoff_s(attempt, {})
        reason = str(error) or type(error).__name__
        raise ServiceUnreachableError(
            f"nobody answers at {self} ({reason}); is the service running there? "
            "Start it with: optpipe serve"
        ) from error

    def delay_after_refusal_s(self, attempt: int, repeat: Repeat, answer: httpx.Response) -> float:
        """Return the seconds to wait before the client repeats a refused request.

        Raises the error of `read_error` if the client does not repeat it.
        """
        # Without a problem detail the answer is a gateway's: the service may have acted.
        is_known = repeat is not Repeat.NEVER or bool(_read_problem_detail(answer))
        if attempt < self.num_retries and answer.status_code in _RETRY_STATUSES and is_known:
            return _backoff_s(attempt, answer.headers)
        raise read_error(answer)

    def __str__(self) -> str:
        # Messages show the address, so it must not show a password.
        return str(self.url.copy_with(userinfo=b""))


def _backoff_s(attempt: int, headers: Mapping[str, str]) -> float:
    """Return ``Retry-After`` if the service sent it, else a random, exponentially growing delay."""
    retry_after = headers.get("Retry-After", "")
    if retry_after.isascii() and retry_after.isdecimal():
        return min(float(retry_after), _MAX_DELAY_S)
    longest = min(_FIRST_DELAY_S * 2.0 ** min(attempt, 30), _MAX_DELAY_S)
    return random.uniform(longest / 2, longest)  # noqa: S311 - spreads clients, hides nothing


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# --- Parts of requests.


def to_document(problem: Problem | Model) -> dict[str, Any]:
    """Return the JSON document of a problem or model.

    Raises `InputError` if it is neither, such as the name of a file.
    """
    if not isinstance(problem, Problem | Model):
        raise InputError(
            f"problem = {problem!r:.60}: must be a Problem or a Model; read it with "
            "optpipe.load_problem or load_model"
        )
    return problem.model_dump(mode="json", by_alias=True)


def drop_none(**values: Any) -> dict[str, Any]:
    """Return the values that are not None; tuples become lists, for JSON."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value is not None
    }


def make_body(fields: Mapping[str, Any], request: type[Request] | None = None) -> dict[str, Any]:
    """Return the body of a request: the fields that are not None, options of a search together.

    A name that is no field of ``request`` is an option, so that the service can say what it knows.
    The fields of a tune are keywords like its options: there only known options are such.
    """
    body = drop_none(**fields)
    if "config" in body:
        # Python writes Infinity into a config.json and reads it, but JSON does not have it.
        body["config"] = json.loads(json.dumps(body["config"]), parse_constant=str)
    if request is None:
        return body
    options = body.keys() - request.model_fields.keys()
    if request is TuneRequest:
        options &= TuneOptions.model_fields.keys()
    if chosen := {name: body.pop(name) for name in fields if name in options}:
        body["options"] = chosen
    return body


def if_none_match(resource_id: str, number: int) -> dict[str, str]:
    """Return the header that requests only a schedule newer than ``number``; 0 = any."""
    return {"If-None-Match": f'"{resource_id}.{number}"'} if number > 0 else {}


# --- Schedules with their number.


def read_newer_schedule(answer: httpx.Response) -> tuple[int, Schedule] | None:
    """Return the number and the schedule of an answer; None if the answer is 304.

    Raises `ServiceError` if the ETag has no number.
    """
    if answer.status_code == HTTPStatus.NOT_MODIFIED:
        return None
    etag = _ETAG.fullmatch(answer.headers.get("ETag", ""))
    if etag is None:
        raise ServiceError(
            f"{answer.url} does not say which schedule it is (ETag "
            f"{answer.headers.get('ETag')!r}); does something in between take ETags away?",
            answer.status_code,
        )
    return int(etag[1]), load_schedule(answer.text)


# --- Events of a job, over one or more streams.
# After a broken stream the client opens the next one with the number of the last event that it
# received. So the caller receives each event exactly once.

PING_INTERVAL_S = 15.0
"""The service sends a ping after so many seconds without an event."""
_MAX_FAILURES = 3


class NoStreamError(Exception):
    """The service sends no events, or a proxy holds them back; poll the job instead."""


class EventCursor:
    """The position of one reader in the events of a job, over all streams that it opens.

    * ``after``: the cursor returns only events with higher numbers.

    * ``is_over``: the service has sent every event, and the job has ended.
    """

    def __init__(self, after: int = 0) -> None:
        self.is_over = False
        self._last_number = self._first_number = after
        self._num_improvements = 0
        self._num_failures = 0
        self._opened_at: float | None = None

    @property
    def is_failing(self) -> bool:
        """Whether at least two streams have ended or failed since the last event."""
        return self._num_failures > 1

    def backoff_s(self) -> float:
        """Return the seconds to wait before the client opens the next stream."""
        return _backoff_s(self._num_failures, {})

    def headers(self) -> dict[str, str]:
        """Return the headers of the request for the next stream."""
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        number = self._last_number
        return headers | ({"Last-Event-ID": str(number)} if number > 0 else {})

    def begin_stream(self, answer: httpx.Response) -> bool:
        """Return whether an answer is a stream of events; record the time if it is."""
        kind = answer.headers.get("Content-Type", "").partition(";")[0]
        is_stream = answer.status_code == HTTPStatus.OK and kind == "text/event-stream"
        self._opened_at = time.monotonic() if is_stream else None
        return is_stream

    def delay_after_s(self, answer: httpx.Response) -> float:
        """Record an answer that is not a stream; return the seconds to wait.

        Raises `NoStreamError` if the service has no streams, or after too many failures. Raises the
        error of `read_error` for other refusals.
        """
        if answer.status_code == HTTPStatus.NO_CONTENT:
            self.is_over = True
            return 0.0
        if answer.status_code in _RETRY_STATUSES:
            self.end_stream(None)
            return _backoff_s(self._num_failures, answer.headers)
        has_no_streams = answer.is_success or answer.status_code in (
            HTTPStatus.NOT_FOUND,
            HTTPStatus.METHOD_NOT_ALLOWED,
            HTTPStatus.NOT_ACCEPTABLE,
            HTTPStatus.NOT_IMPLEMENTED,
        )
        code = str(_read_problem_detail(answer).get("code", ""))
        if has_no_streams and code in ("", f"http.{answer.status_code}"):
            raise NoStreamError
        raise read_error(answer)

    def end_stream(self, error: httpx.TransportError | None) -> None:
        """Record that a stream did not begin, ended (None) or broke.

        Raises `NoStreamError` if a proxy holds events back, or after too many failures in a row.
        """
        is_silent = isinstance(error, httpx.ReadTimeout)
        opened_at, self._opened_at = self._opened_at, None
        has_lasted = opened_at is not None and time.monotonic() - opened_at > PING_INTERVAL_S
        if has_lasted and not is_silent:
            # The stream carried pings before a proxy cut it, so it was no failure.
            self._num_failures = 0
        self._num_failures += 1
        is_blocked = is_silent and self._last_number == self._first_number
        if is_blocked or self._num_failures > _MAX_FAILURES:
            raise NoStreamError

    def read_event(self, message: ServerSentEvent) -> Event | None:
        """Return a new event; None for a ping and for an event that was received before.

        Raises `ServiceError` if the message is not an event of a job.
        """
        # A ping has the id of the event before it.
        if not message.id.isdecimal() or int(message.id) <= self._last_number:
            return None
        self._last_number, self._num_failures = int(message.id), 0
        try:
            return Event.model_validate_json(message.data)
        except ValidationError as error:
            raise ServiceError(
                f"event {message.id} is not as expected ({error.errors()[0]['msg']}); is it an "
                "OptPipe service of this version?",
                HTTPStatus.OK,
            ) from error

    def is_new_to(self, job: Job, event: Event) -> bool:
        """Return whether an event changes what ``job`` shows; call it once for each event."""
        if event.kind is EventKind.STATE:
            return event.text != job.state
        if event.kind is EventKind.LOG:
            return False
        self._num_improvements += 1
        return self._num_improvements > len(job.trace or ())
