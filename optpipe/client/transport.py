"""What goes into a request, when it is made again, how answers and events are read; no network.

One table makes errors of the codes of the service's refusals::

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

import ipaddress
import json
import random
import re
import time
import uuid
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from optpipe.answers import Event, EventKind, Job
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

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from httpx_sse import ServerSentEvent

    from optpipe.schedule import Schedule

__all__ = [
    "ERRORS",
    "SILENCE_S",
    "Address",
    "BusyError",
    "ConflictError",
    "EventCursor",
    "KeyRefusedError",
    "NoScheduleError",
    "NoStreamError",
    "NotFoundError",
    "Repeat",
    "RequestRefusedError",
    "ServiceError",
    "ServiceUnreachableError",
    "SolveFailedError",
    "as_model",
    "checked_id",
    "document",
    "error_of",
    "fault_of",
    "given",
    "if_newer",
    "is_told",
    "items",
    "newer_schedule",
    "numbered_schedule",
    "once",
    "refusal",
    "tuning",
    "waiting",
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
    "request.headers_too_large chart.beside schedule.too_large",
    BusyError: "busy queue.full key.too_many_jobs key.too_many_requests key.too_many_followers "
    "followers.full request.busy request.pipelined forms.busy store.unavailable "
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
    answered = f"{answer.url.copy_with(userinfo=b'')} answered {answer.status_code}"
    if answer.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return f"{answered} without a reason: the service, or what stands before it, is in trouble"
    return (
        f"{answered}, and not with a reason as the service gives one; is it the address of an "
        "OptPipe service, with no more and no less of its path?"
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


M = TypeVar("M", bound=BaseModel)

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0
_LATER = frozenset({429, 502, 503, 504})
"""The statuses after which the same request may succeed."""
# Before these nothing was sent that the service could have acted upon.
_UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_TAG = re.compile(r'(?:W/)?"[^"]*\.([0-9]{1,15})"')


class Repeat(Enum):
    """When a request may be made again whose fate is not known."""

    ALWAYS = "always"
    """It changes nothing, or carries a key under which the service does it only once."""
    UNSENT = "unsent"
    """Only where it certainly was not done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A service's address and how patiently it is spoken to; parameters as of the clients."""

    url: httpx.URL
    api_key: str | None
    timeout_s: float
    num_retries: int

    @classmethod
    def checked(
        cls, base_url: str, api_key: str | None, timeout_s: float, num_retries: int
    ) -> Address:
        """Return the address.

        Raises `InputError` if it is none, or the key cannot be one.
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
            # Not shown: it may be nearly the true one.
            raise InputError("the API key has letters that no key has; copy it again")
        return cls(url=url, api_key=api_key, timeout_s=timeout_s, num_retries=num_retries)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of httpx's clients."""
        return {
            "base_url": self.url,
            "headers": {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"},
            "timeout": self.timeout_s,
            # A proxy of the environment does not lead to this machine.
            "trust_env": not _is_loopback(self.url.host),
        }

    def timeout(self, wait_s: float) -> httpx.Timeout:
        """Return the timeouts of a request whose answer may take ``wait_s`` longer than usual."""
        return httpx.Timeout(self.timeout_s, read=self.timeout_s + wait_s)

    def pause_after_loss(self, attempt: int, repeat: Repeat, error: httpx.TransportError) -> float:
        """Return how long to wait before a request without an answer is made again, seconds.

        Raises `ServiceUnreachableError` if it is not made again: it was the last of the attempts
        (the first is 0), or may already have been acted upon.
        """
        if attempt < self.num_retries and _may_follow_loss(repeat, error):
            return _pause_s(attempt, {})
        reason = str(error) or type(error).__name__
        raise ServiceUnreachableError(
            f"nobody answers at {self} ({reason}); is the service running there? "
            "Start it with: optpipe serve"
        ) from error

    def pause_after_refusal(self, attempt: int, repeat: Repeat, answer: httpx.Response) -> float:
        """Return how long to wait before a refused request is made again, seconds.

        Raises `OptPipeError`: what the refusal means, if it is not made again; see
        `optpipe.client.transport`.
        """
        if attempt < self.num_retries and _may_follow(repeat, answer):
            return _pause_s(attempt, answer.headers)
        raise refusal(answer)

    def __str__(self) -> str:
        # It stands in messages, where a password has no place.
        return str(self.url.copy_with(userinfo=b""))


def _pause_s(attempt: int, headers: Mapping[str, str]) -> float:
    """Return how long to wait: what the service asks for, else ever longer, never all at once."""
    retry_after = headers.get("Retry-After", "")
    if retry_after.isascii() and retry_after.isdecimal():
        return min(float(retry_after), _LONGEST_PAUSE_S)
    longest = min(_FIRST_PAUSE_S * 2.0 ** min(attempt, 30), _LONGEST_PAUSE_S)
    return random.uniform(longest / 2, longest)  # noqa: S311 - spreads clients, hides nothing


def is_told(answer: httpx.Response) -> bool:
    """Whether an answer says what was asked for: also that it is not newer than what is known."""
    return answer.is_success or answer.status_code == HTTPStatus.NOT_MODIFIED


def _may_follow_loss(repeat: Repeat, error: httpx.TransportError) -> bool:
    if repeat is Repeat.UNSENT:
        return isinstance(error, _UNSENT)
    return not isinstance(error, httpx.UnsupportedProtocol)


def _may_follow(repeat: Repeat, answer: httpx.Response) -> bool:
    if answer.status_code not in _LATER:
        return False
    # A gateway that lost its patience says nothing about what the service behind it did.
    return repeat is not Repeat.UNSENT or bool(fault_of(answer))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# --- Parts of requests.


def checked_id(thing: Job | str, kind: str = "job") -> str:
    """Return an id that is fit for a path.

    Raises `InputError` if it cannot be one.
    """
    thing_id = thing.id if isinstance(thing, Job) else thing
    if not (thing_id.isascii() and thing_id.isalnum()):
        raise InputError(
            f"{thing_id!r} is not the id of a {kind}; the service names it when it is made"
        )
    return thing_id


def document(thing: Problem | Model) -> dict[str, Any]:
    """Return a problem or model as it stands in a request.

    Raises `InputError` if it is neither, such as the name of a file.
    """
    if not isinstance(thing, Problem | Model):
        raise InputError(
            f"problem = {thing!r:.60}: must be a Problem or a Model; read it with "
            "optpipe.load_problem or load_model"
        )
    return thing.model_dump(mode="json", by_alias=True)


def items(
    problem: Problem | Sequence[Problem], axes: Mapping[str, Sequence[Any]] | None
) -> dict[str, Any]:
    """Return what a batch is made of, as it stands in a request.

    Raises `InputError` if there are axes, and several problems.
    """
    if isinstance(problem, Problem):
        varied = {name: list(values) for name, values in (axes or {}).items()}
        return {"problem": document(problem), "axes": varied}
    if axes:
        raise InputError("axes vary one problem, not a list of them; give one of both")
    return {"problems": [document(one) for one in problem]}


def given(**values: Any) -> dict[str, Any]:
    """Return what is not None; sequences as lists, for JSON."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value is not None
    }


_OF_SEARCHES = ("time_limit_s", "work_limit", "threads", "seed", "gap", "cache")


def tuning(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body that asks for a configuration."""
    options = {name: arguments[name] for name in _OF_SEARCHES if name in arguments}
    question = {name: value for name, value in arguments.items() if name not in options}
    if "config" in question:
        # JSON has no Infinity, which Python reads from and writes into a config.json.
        text = json.dumps(question["config"])
        question["config"] = json.loads(text, parse_constant=str)
    return given(**question) | {"options": given(**options)}


def waiting(wait_s: float) -> dict[str, float]:
    """Return the parameter that lets the service wait before it answers."""
    return {"wait": wait_s} if wait_s > 0 else {}


def once(key: str | None) -> dict[str, str]:
    """Return the header under which the service does a request once, however often it comes."""
    return {"Idempotency-Key": uuid.uuid4().hex if key is None else key}


def if_newer(thing_id: str, number: int) -> dict[str, str]:
    """Return the header by which only a newer schedule than this one is sent; 0 = any."""
    return {"If-None-Match": f'"{thing_id}.{number}"'} if number > 0 else {}


# --- Answers.


def as_model(model: type[M], answer: httpx.Response) -> M:
    """Return what an answer says.

    Raises `ServiceError` if it is something else.
    """
    try:
        return model.model_validate_json(answer.content)
    except ValidationError as error:
        raise ServiceError(
            f"{answer.url} does not answer as expected ({error.error_count()} faults, the "
            f"first: {error.errors()[0]['msg']}); is it an OptPipe service of this version?",
            answer.status_code,
        ) from error


def newer_schedule(answer: httpx.Response) -> tuple[int, Schedule] | None:
    """Read an answer that is a schedule and its number; None where there is no newer one."""
    return None if answer.status_code == HTTPStatus.NOT_MODIFIED else numbered_schedule(answer)


def numbered_schedule(answer: httpx.Response) -> tuple[int, Schedule]:
    """Read an answer that is a schedule and its number.

    Raises `ServiceError` if the answer does not say its number.
    """
    tag = _TAG.fullmatch(answer.headers.get("ETag", ""))
    if tag is None:
        raise ServiceError(
            f"{answer.url} does not say which schedule it is (ETag "
            f"{answer.headers.get('ETag')!r}); does something in between take ETags away?",
            answer.status_code,
        )
    return int(tag[1]), load_schedule(answer.text)


# --- How far a job's events have been heard, over as many streams as it takes.
# A stream that breaks is taken up again with the number of the last event seen, so that nothing is
# missed and nothing told twice. Where the service does not speak server-sent events, or something
# in between holds them back, `NoStreamError` says so, and the job is looked at instead.

SILENCE_S = 15.0
"""The service pings as often; where nothing is heard for longer, nothing will be."""
_MOST_LOSSES = 3


class NoStreamError(Exception):
    """No events come from there; the job itself may still be looked at."""


class EventCursor:
    """Where one listener is in the events of a job.

    * ``after``: only events of higher numbers are new.

    * ``is_over``: whether the service has said that there is nothing more to hear.
    """

    def __init__(self, after: int = 0) -> None:
        self.is_over = False
        self._seen = self._first = after
        self._num_improvements = 0
        self._num_losses = 0
        self._opened_at: float | None = None

    @property
    def has_trouble(self) -> bool:
        """Whether streams break, or do not begin, and nothing is heard between them."""
        return self._num_losses > 1

    def pause_s(self) -> float:
        """Return how long to wait before the next stream is opened, in seconds."""
        return _pause_s(self._num_losses, {})

    def headers(self) -> dict[str, str]:
        """Return the headers that ask for a stream of the events that are new."""
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        return headers | ({"Last-Event-ID": str(self._seen)} if self._seen > 0 else {})

    def opens(self, answer: httpx.Response) -> bool:
        """Whether an answer is a stream, which begins now."""
        kind = answer.headers.get("Content-Type", "").partition(";")[0]
        is_stream = answer.status_code == HTTPStatus.OK and kind == "text/event-stream"
        self._opened_at = time.monotonic() if is_stream else None
        return is_stream

    def pause_after(self, answer: httpx.Response) -> float:
        """Take note of an answer that is no stream; return how long to wait, in seconds.

        Raises `NoStreamError` if the service has no streams, or too many did not begin. Raises
        `OptPipeError`: what its refusal means otherwise.
        """
        if answer.status_code == HTTPStatus.NO_CONTENT:
            self.is_over = True
            return 0.0
        if answer.status_code in _LATER:
            self.lose(None)
            return _pause_s(self._num_losses, answer.headers)
        raise _no_stream(answer)

    def lose(self, error: httpx.TransportError | None) -> None:
        """Take note that a stream did not begin, ended (None) or broke.

        Raises `NoStreamError` if something holds events back, or too many streams break before
        anything is heard.
        """
        was_silent = isinstance(error, httpx.ReadTimeout)
        opened_at, self._opened_at = self._opened_at, None
        if opened_at is not None and not was_silent and time.monotonic() - opened_at > SILENCE_S:
            # It lasted, so there were pings: a proxy cuts what a quiet job keeps open.
            self._num_losses = 0
        self._num_losses += 1
        held_back = was_silent and self._seen == self._first
        if held_back or self._num_losses > _MOST_LOSSES:
            raise NoStreamError

    def new(self, heard: ServerSentEvent) -> Event | None:
        """Return an event that was not heard before; None for others and for pings.

        Raises `ServiceError` if it is no event of ours.
        """
        # A ping looks like the event before it, without its data.
        if not heard.id.isdecimal() or int(heard.id) <= self._seen:
            return None
        self._seen, self._num_losses = int(heard.id), 0
        try:
            return Event.model_validate_json(heard.data)
        except ValidationError as error:
            raise ServiceError(
                f"event {heard.id} is not as expected ({error.errors()[0]['msg']}); is it an "
                "OptPipe service of this version?",
                HTTPStatus.OK,
            ) from error

    def is_news(self, event: Event, known: Job) -> bool:
        """Whether an event says what the job as it is known does not show."""
        if event.kind is EventKind.STATE:
            return event.text != known.state
        if event.kind is EventKind.LOG:
            return False
        self._num_improvements += 1
        return self._num_improvements > len(known.trace or ())


def _no_stream(answer: httpx.Response) -> Exception:
    """Return what it means that there is no stream: the service has none, or refuses."""
    code = str(fault_of(answer).get("code", ""))
    has_none = answer.is_success or answer.status_code in (
        HTTPStatus.NOT_FOUND,
        HTTPStatus.METHOD_NOT_ALLOWED,
        HTTPStatus.NOT_ACCEPTABLE,
        HTTPStatus.NOT_IMPLEMENTED,
    )
    if has_none and code in ("", f"http.{answer.status_code}"):
        return NoStreamError()
    return refusal(answer)
