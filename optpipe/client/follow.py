"""How far a job's events have been heard, over as many streams as it takes; no network here.

A stream that breaks is taken up again with the number of the last event seen, so that nothing is
missed and nothing told twice. Where the service does not speak server-sent events, or something in
between holds them back, `NoStreamError` says so, and the job is looked at instead.
"""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import TYPE_CHECKING

import httpx
from pydantic import ValidationError

from optpipe.client.errors import fault_of, refusal
from optpipe.client.transport import LATER, pause_s
from optpipe.errors import ServiceError
from optpipe.wire import Event, EventKind

if TYPE_CHECKING:
    from httpx_sse import ServerSentEvent

    from optpipe.wire import Job

__all__ = ["SILENCE_S", "EventCursor", "NoStreamError"]

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
        return pause_s(self._num_losses, {})

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
        if answer.status_code in LATER:
            self.lose(None)
            return pause_s(self._num_losses, answer.headers)
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
