"""What a body may do to whoever reads it: functions for `Readers`."""

from __future__ import annotations

import os

from optpipe.errors import ProblemError
from optpipe_api.desk.readers import Reading

_HOARD: list[bytearray] = []


def measure(body: bytes) -> Reading:
    return Reading({"pid": os.getpid(), "bytes": len(body)}, ("", "aä", str(len(body))))


def refuse(body: bytes) -> Reading:
    raise ProblemError(f"{len(body)} bytes: one too many")


def fail(body: bytes) -> Reading:
    raise ZeroDivisionError


def spin(body: bytes) -> Reading:
    while body:
        pass
    return Reading({})


def eat(body: bytes) -> Reading:
    return Reading({"bytes": len(bytearray(3 * 1024**3))})


def hoard(body: bytes) -> Reading:
    """Take much, and keep it."""
    _HOARD.append(bytearray(b"x") * (400 * 1024**2))
    return Reading({"pid": os.getpid(), "bytes": len(_HOARD[0])})


def die(body: bytes) -> Reading:
    os._exit(3)


def talk(body: bytes) -> Reading:
    print("this is not an answer", flush=True)
    os.write(1, b"nor is this")
    return Reading({"said": True})
