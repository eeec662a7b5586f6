"""The explanation of a schedule as JSON; made where large request bodies are read.

To simulate and to walk a large schedule holds the interpreter's lock for a second or more, so it
happens in a process (`optpipe_api.desk.readers`), for small ones too: their answer takes as long as
a message there and back.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from optpipe.explain import explain
from optpipe.formats.json_text import load_problem, load_schedule
from optpipe_api.desk.readers import Reading

if TYPE_CHECKING:
    from optpipe_api.desk.readers import Readers

__all__ = ["explanation", "pack", "read"]

_READ = "optpipe_api.desk.explain:read"


async def explanation(readers: Readers, schedule: str, problem: str) -> str:
    """Return the explanation of a schedule, as JSON text of `optpipe.explain.Explanation`.

    Raises
    ------
    OptPipeError
        As `Readers.read`.
    """
    reading = await readers.read(_READ, pack(schedule, problem), is_heavy=True)
    return reading.documents[0]


def pack(schedule: str, problem: str) -> bytes:
    """Return what `read` reads."""
    return json.dumps([schedule, problem]).encode()


def read(body: bytes) -> Reading:
    """Return the explanation of a schedule and its problem."""
    schedule, problem = json.loads(body)
    held = load_schedule(schedule)
    told = explain(load_problem(problem), held.programs, bound_ms=held.bound_ms)
    return Reading({}, (told.model_dump_json(),))
