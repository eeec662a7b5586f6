"""When a request is made again, and after how long a pause."""

from __future__ import annotations

import random
from http import HTTPStatus
from typing import TYPE_CHECKING

import httpx

from optpipe.client.call import Call, Pause, Repeat, Send, T
from optpipe.client.errors import ServiceUnreachableError, fault_of, refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optpipe.client.call import Conversation

__all__ = ["LATER", "is_told", "patient", "pause_s"]

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0
LATER = frozenset({429, 502, 503, 504})
# Before these nothing was sent that the service could have acted upon.
_UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


def patient(call: Call[T], num_retries: int, address: str) -> Conversation[T]:
    """Make a call, again and again where that may help and does no harm, and read its answer.

    Parameters
    ----------
    num_retries
        How often it may be made again.
    address
        Of the service, for messages.

    Raises
    ------
    ServiceUnreachableError
        If nobody answered to the end.
    OptPipeError
        What the service's refusal means; see `optpipe.client.errors`.
    """
    attempt = -1
    while True:
        attempt += 1
        is_last = attempt >= num_retries
        try:
            answer: httpx.Response = yield Send(call)
        except httpx.TransportError as error:
            if is_last or not _may_follow_loss(call.repeat, error):
                raise _unreachable(error, address) from error
            yield Pause(pause_s(attempt, {}))
            continue
        if is_told(answer):
            return call.read(answer)
        if is_last or not _may_follow(call.repeat, answer):
            raise refusal(answer)
        yield Pause(pause_s(attempt, answer.headers))


def is_told(answer: httpx.Response) -> bool:
    """Whether an answer says what was asked for: also that it is not newer than what is known."""
    return answer.is_success or answer.status_code == HTTPStatus.NOT_MODIFIED


def pause_s(attempt: int, headers: Mapping[str, str]) -> float:
    """Return how long to wait: what the service asks for, else ever longer, never all at once."""
    asked = headers.get("Retry-After", "")
    if asked.isascii() and asked.isdecimal():
        return min(float(asked), _LONGEST_PAUSE_S)
    longest = min(_FIRST_PAUSE_S * 2.0 ** min(attempt, 30), _LONGEST_PAUSE_S)
    return random.uniform(longest / 2, longest)  # noqa: S311 - spreads clients, hides nothing


def _may_follow_loss(repeat: Repeat, error: httpx.TransportError) -> bool:
    if isinstance(error, httpx.UnsupportedProtocol):
        return False
    if repeat is Repeat.UNSENT:
        return isinstance(error, _UNSENT)
    return repeat is Repeat.ALWAYS or not isinstance(error, httpx.ReadTimeout)


def _may_follow(repeat: Repeat, answer: httpx.Response) -> bool:
    if answer.status_code not in LATER:
        return False
    # A gateway that lost its patience says nothing about what the service behind it did.
    return repeat is not Repeat.UNSENT or bool(fault_of(answer))


def _unreachable(error: httpx.TransportError, address: str) -> ServiceUnreachableError:
    reason = str(error) or type(error).__name__
    return ServiceUnreachableError(
        f"nobody answers at {address} ({reason}); is the service running there? "
        "Start it with: optpipe serve"
    )
