"""The explanation of a schedule as JSON; made where large request bodies are read.

To simulate and to walk a large schedule holds the interpreter's lock for a second or more, so it
happens in a process (`optpipe_api.desk.readers`), for small ones too: their answer takes as long as
a message there and back.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool

from optpipe.errors import InputError
from optpipe.explain import explain
from optpipe.formats.json_text import load_problem, load_schedule
from optpipe_api.desk.readers import Reading
from optpipe_api.errors import BodyTooHeavyError, TooLargeToDrawError

if TYPE_CHECKING:
    from optpipe_api.desk.readers import Readers

__all__ = ["TooLargeToExplainError", "explanation", "pack", "read"]

_READ = "optpipe_api.desk.explain:read"


class TooLargeToExplainError(TooLargeToDrawError):
    """The schedule is too large to be explained here."""

    def __init__(self) -> None:
        InputError.__init__(
            self,
            "the schedule is too large: explaining it takes more time or memory than this service "
            "spends on that; fetch problem and schedule, and run optpipe explain",
        )


async def explanation(readers: Readers, schedule: str, problem: str) -> str:
    """Return the explanation of a schedule, as JSON text of `optpipe.explain.Explanation`.

    Raises
    ------
    TooLargeToExplainError
        If that takes more time or memory than the service spends on it.
    TooManyBodiesError
        As `Readers.read`.
    """
    body = await run_in_threadpool(pack, schedule, problem)
    try:
        return (await readers.read(_READ, body, is_heavy=True)).documents[0]
    except BodyTooHeavyError:
        raise TooLargeToExplainError from None


def pack(schedule: str, problem: str) -> bytes:
    """Return what `read` reads."""
    return json.dumps([schedule, problem]).encode()


def read(body: bytes) -> Reading:
    """Return the explanation of a schedule and its problem."""
    schedule, problem = json.loads(body)
    held = load_schedule(schedule)
    told = explain(load_problem(problem), held.programs, bound_ms=held.bound_ms)
    return Reading({}, (told.model_dump_json(),))
