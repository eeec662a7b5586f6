"""What is said to the service, as values: nothing here touches the network.

A `Call` is one request and what its answer means. What takes several of them is a conversation: a
generator that gives steps - calls, pauses, looks at a stream - and is given what came of each. Who
holds the connection (`optpipe.client.sync`, `optpipe.client.asynchronous`) only does the steps.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

import httpx

from optpipe.errors import OptPipeError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "FAILURES",
    "Call",
    "Conversation",
    "Hear",
    "Listen",
    "Pause",
    "Repeat",
    "Send",
    "Step",
    "Talk",
    "Tell",
    "ask",
]

T = TypeVar("T")

# What a step may fail with; a conversation is told and may go on.
FAILURES = (httpx.TransportError, OptPipeError)


class Repeat(Enum):
    """When a call may be made again whose fate is not known."""

    ALWAYS = "always"
    """It changes nothing, or carries a key under which the service does it only once."""
    UNLESS_SLOW = "unless slow"
    """Not where the time ran out: it would again, at the service's expense."""
    UNSENT = "unsent"
    """Only where it certainly was not done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One request, and how its answer is read.

    Parameters
    ----------
    method, path, params, json, headers
        As in HTTP; the path counts from the service's address.
    read
        From the answer, which is a success or 304, to what the caller wants.
    wait_s
        How much longer than usual the answer may take.
    repeat
        Whether it may be made again.
    """

    method: Literal["GET", "POST", "DELETE"] = "GET"
    path: str
    read: Callable[[httpx.Response], T]
    params: Mapping[str, str | int | float] = field(default_factory=dict)
    json: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    wait_s: float = 0.0
    repeat: Repeat = Repeat.ALWAYS

    def request(self, timeout_s: float) -> dict[str, Any]:
        """Return the arguments of httpx's ``request`` and ``build_request``."""
        return {
            "method": self.method,
            "url": self.path,
            "params": dict(self.params),
            "json": self.json,
            "headers": dict(self.headers),
            "timeout": httpx.Timeout(timeout_s, read=timeout_s + self.wait_s),
        }


@dataclass(frozen=True, slots=True)
class Send:
    """Send it once; gives the answer, whatever its status."""

    call: Call[Any]


@dataclass(frozen=True, slots=True)
class Pause:
    """Do nothing for a while."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Listen:
    """Open a stream of events and close the one before; gives the answer.

    Only the head of an answer that is a stream is read, all of any other.
    """

    call: Call[Any]


@dataclass(frozen=True, slots=True)
class Hear:
    """Wait for the stream's next event; gives None at its end."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Hand something to who listens to the conversation."""

    news: Any


Step: TypeAlias = Call[Any] | Send | Pause | Listen | Hear | Tell
Conversation: TypeAlias = Generator[Step, Any, T]


def ask(call: Call[T]) -> Conversation[T]:
    """Return what a call gives, as part of a conversation."""
    answer: T = yield call
    return answer


class Talk(Generic[T]):
    """A conversation under way: ``step`` is what is to be done next, None at the end.

    Parameters
    ----------
    conversation
        Is closed with the ``with`` block.
    """

    def __init__(self, conversation: Conversation[T]) -> None:
        self._conversation = conversation
        self._result: list[T] = []
        self.step: Step | None = None
        self._go_on(lambda: next(conversation))

    def __enter__(self) -> Talk[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self._conversation.close()

    @property
    def result(self) -> T:
        """What the conversation came to; only after its end."""
        return self._result[0]

    def answer(self, value: Any) -> None:
        """Say what came of the step."""
        self._go_on(lambda: self._conversation.send(value))

    def fail(self, error: Exception) -> None:
        """Say that the step failed; raises the error if the conversation does not know better."""
        self._go_on(lambda: self._conversation.throw(error))

    def _go_on(self, advance: Callable[[], Step]) -> None:
        try:
            self.step = advance()
        except StopIteration as end:
            self.step = None
            self._result.append(end.value)
