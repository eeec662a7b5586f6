"""What a body may do to whoever reads it: functions for a `ParsePool`."""

import os

from optpipe.errors import InfeasibleProblemError, ProblemError

_HOARD: list[bytearray] = []


def measure(body: bytes) -> tuple[int, int]:
    """Return whose process it is, and how long the body."""
    return os.getpid(), len(body)


def refuse(body: bytes) -> None:
    raise ProblemError(f"{len(body)} bytes: one too many")


def refuse_with_more(body: bytes) -> None:
    raise InfeasibleProblemError("two", {"bytes": len(body)})


def fail(body: bytes) -> None:
    raise ZeroDivisionError


def spin(body: bytes) -> None:
    while body:
        pass


def eat(body: bytes) -> int:
    return len(bytearray(3 * 1024**3))


def hoard(body: bytes) -> tuple[int, int]:
    """Take much, and keep it."""
    _HOARD.append(bytearray(b"x") * (400 * 1024**2))
    return os.getpid(), len(_HOARD[0])


def die(body: bytes) -> None:
    os._exit(3)


def talk(body: bytes) -> str:
    print("this is not an answer", flush=True)
    os.write(1, b"nor is this")
    return "said"
