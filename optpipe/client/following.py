"""Following a job to its end: by its events, or by looking again and again.

A stream that breaks is taken up again with the number of the last event seen, so that nothing is
missed and nothing told twice. Where the service does not speak server-sent events, or something in
between holds them back, `follow` looks at the job instead: often while there is news, less often
while there is none.
"""

from __future__ import annotations

import time
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING

import httpx
from pydantic import ValidationError

from optpipe.client.call import Call, Hear, Listen, Pause, Tell, ask
from optpipe.client.errors import ServiceError, error_of, fault_of, refusal
from optpipe.client.jobs import job as look
from optpipe.client.jobs import schedule
from optpipe.client.patience import LATER, pause_s
from optpipe.client.requests import checked_id, is_stream
from optpipe.client.values import Event

if TYPE_CHECKING:
    from httpx_sse import ServerSentEvent

    from optpipe.client.call import Conversation
    from optpipe.client.values import Job
    from optpipe.schedule import Schedule

__all__ = ["events", "follow", "result"]

_FIRST_POLL_S = 0.1
_LONGEST_POLL_S = 2.0
# The service pings every 15 s; where nothing is heard for longer, nothing will be.
_SILENCE_S = 15.0
_MOST_LOSSES = 3
_STREAM = "text/event-stream"


def result(job: Job | str) -> Conversation[Schedule]:
    """Wait for a job's end and return its best schedule.

    Raises
    ------
    InfeasibleProblemError
        If it is proven that there is none.
    NoScheduleError
        If the job ended without one: it was cancelled, or nothing was found.
    SolveFailedError
        If the solver failed before it found any.
    """
    last = yield from follow(job)
    if not last.has_schedule and last.error is not None:
        raise error_of(last.error.code, last.error.message, last.error.needs)
    return (yield from ask(schedule(last)))


def follow(job: Job | str) -> Conversation[Job]:
    """Iterate over the news of a job, as they come, to its end.

    The first is the job as it is now, the last one is finished.
    """
    known = yield from ask(look(job))
    yield Tell(known)
    ear = _Ear(known.id)
    with suppress(_NoStreamError):
        while not (known.is_finished or ear.is_over):
            yield from ear.until_news_of(known)
            known = yield from _news(known)
    return (yield from _polled(known))


def events(job: Job | str, *, after: int = 0) -> Conversation[None]:
    """Iterate over everything that happens to a job: states, improvements, bounds, log lines.

    Begins with what has happened already, ends with the job, and gives each event once, however
    often the connection breaks.

    Parameters
    ----------
    after
        Only events of higher numbers.

    Raises
    ------
    ServiceError
        If no events come from there; `follow` does without them.
    """
    ear = _Ear(checked_id(job), after)
    try:
        while not ear.is_over:
            event = yield from ear.hear()
            if event is not None:
                yield Tell(event)
            elif ear.has_trouble:
                # Raises, after some patience, if the whole service is away.
                yield from ask(look(job))
    except _NoStreamError:
        raise ServiceError(
            "the service, or something in between, sends no events; use follow instead",
            HTTPStatus.NOT_IMPLEMENTED,
        ) from None


def _news(known: Job) -> Conversation[Job]:
    """Look at a job again and tell what is new."""
    now = yield from ask(look(known))
    if now != known:
        yield Tell(now)
    return now


def _polled(known: Job) -> Conversation[Job]:
    """Follow a job by looking at it."""
    wait_s = _FIRST_POLL_S
    while not known.is_finished:
        yield Pause(wait_s)
        now = yield from _news(known)
        wait_s = min(wait_s * 1.5, _LONGEST_POLL_S) if now == known else _FIRST_POLL_S
        known = now
    return known


class _NoStreamError(Exception):
    """No events come from there; the job itself may still be looked at."""


class _Ear:
    """Hears the events of a job above a number, each once, over as many streams as it takes."""

    def __init__(self, job_id: str, after: int = 0) -> None:
        self.is_over = False
        self._path = f"v1/jobs/{job_id}/events"
        self._seen = self._first = after
        self._num_improvements = 0
        self._num_losses = 0
        self._is_open = False
        self._opened_at = 0.0

    @property
    def has_trouble(self) -> bool:
        """Whether streams break, or do not begin, and nothing is heard between them."""
        return self._num_losses > 1

    def until_news_of(self, known: Job) -> Conversation[None]:
        """Hear until something happens that a look at the job did not show, or hearing breaks."""
        while True:
            event = yield from self.hear()
            if event is None or self._is_news(event, known):
                return

    def hear(self) -> Conversation[Event | None]:
        """Return the next event; None where the stream ended or broke: then call again.

        Raises
        ------
        _NoStreamError
            If there is no stream, or too many break before anything is heard.
        """
        if not self._is_open:
            yield from self._open()
        if not self._is_open:
            return None
        try:
            heard: ServerSentEvent | None = yield Hear()
            # A ping looks like the event before it, without its data.
            while heard is not None and not self._is_new(heard):
                heard = yield Hear()
        except httpx.TransportError as error:
            self._lose(error)
            return None
        if heard is None:
            self._lose(None)
            return None
        self._num_losses = 0
        return _event(heard)

    def _open(self) -> Conversation[None]:
        if self.has_trouble:
            yield Pause(pause_s(self._num_losses, {}))
        try:
            answer: httpx.Response = yield Listen(self._call())
        except httpx.TransportError as error:
            self._lose(error)
            return
        if answer.status_code == HTTPStatus.NO_CONTENT:
            self.is_over = True
        elif is_stream(answer):
            self._is_open, self._opened_at = True, time.monotonic()
        elif answer.status_code in LATER:
            self._lose(None)
            yield Pause(pause_s(self._num_losses, answer.headers))
        else:
            raise _no_stream(answer)

    def _call(self) -> Call[None]:
        headers = {"Accept": _STREAM, "Cache-Control": "no-store"}
        if self._seen > 0:
            headers["Last-Event-ID"] = str(self._seen)
        return Call(path=self._path, read=lambda _: None, headers=headers, wait_s=_SILENCE_S)

    def _lose(self, error: httpx.TransportError | None) -> None:
        was_silent = isinstance(error, httpx.ReadTimeout)
        if self._is_open and not was_silent and time.monotonic() - self._opened_at > _SILENCE_S:
            # It lasted, so there were pings: a proxy cuts what a quiet job keeps open.
            self._num_losses = 0
        self._is_open = False
        self._num_losses += 1
        held_back = was_silent and self._seen == self._first
        if held_back or self._num_losses > _MOST_LOSSES:
            raise _NoStreamError

    def _is_new(self, heard: ServerSentEvent) -> bool:
        if not heard.id.isdecimal() or int(heard.id) <= self._seen:
            return False
        self._seen = int(heard.id)
        return True

    def _is_news(self, event: Event, known: Job) -> bool:
        if event.kind == "state":
            return event.text != known.state
        if event.kind == "log":
            return False
        self._num_improvements += 1
        return self._num_improvements > len(known.trace or ())


def _event(heard: ServerSentEvent) -> Event:
    try:
        return Event.model_validate_json(heard.data)
    except ValidationError as error:
        raise ServiceError(
            f"event {heard.id} is not as expected ({error.errors()[0]['msg']}); is it an OptPipe "
            "service of this version?",
            HTTPStatus.OK,
        ) from error


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
        return _NoStreamError()
    return refusal(answer)
