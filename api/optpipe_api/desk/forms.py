"""Schedules in other forms than JSON: CSV, a trace, a picture.

Texts are made where request bodies are read (`optpipe_api.desk.readers`). Every picture is drawn in
a process of its own, which ends when nobody waits or it takes too long: matplotlib is neither quick
nor made for several threads.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool

from optpipe_api.desk.draw import pack, pack_frontier
from optpipe_api.errors import FormUnavailableError, TooLargeToDrawError, TooManyFormsError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optpipe.frontier import Line
    from optpipe_api.access import Principal
    from optpipe_api.desk.jobs import JobDesk
    from optpipe_api.desk.readers import Readers
    from optpipe_api.jobs import StoredSchedule

__all__ = ["Forms", "solution"]

_READ = "optpipe_api.desk.draw:read"
_AT_ONCE, _WAITING = 2, 16
_LIMIT_S = 30.0


def solution(desk: JobDesk, job_id: str, who: Principal) -> tuple[str, StoredSchedule]:
    """Return a job's best schedule so far and the problem it solves, as JSON texts.

    A plan replaces both, in one go, whenever it finds a better one; so this looks again until
    nothing was replaced between its looks.

    Raises
    ------
    InfeasibleProblemError, NoScheduleError
        As `JobDesk.schedule`.
    """
    while True:
        stored = desk.schedule(job_id, who)
        problem = desk.problem(job_id, who)
        if desk.find(job_id, who).num_schedules == stored.number:
            return problem, stored


class Forms:
    """Makes forms of schedules, a few at once; in the event loop."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self._free = asyncio.Semaphore(_AT_ONCE)
        self._num_waiting = 0

    async def text(self, form: str, schedule: str, problem: str = "") -> str:
        """Return a schedule as `csv`, or as `trace`, which takes its problem.

        Raises
        ------
        OptPipeError
            As `Readers.read`.
        """
        body = await run_in_threadpool(pack, form, schedule, problem)
        return (await self._readers.read(_READ, body)).documents[0]

    async def picture(self, schedule: str, problem: str) -> bytes:
        """Return a schedule as an SVG file.

        Raises
        ------
        TooLargeToDrawError
            If it is too large for a picture.
        FormUnavailableError
            If this server cannot draw.
        TooManyFormsError
            If too many wait for theirs.
        """
        return await self._picture(partial(pack, "svg", schedule, problem))

    async def frontier(self, lines: Sequence[Line], title: str) -> bytes:
        """Return the frontier of a sweep as an SVG file; raises as `picture`."""
        return await self._picture(partial(pack_frontier, lines, title))

    async def _picture(self, make_request: Callable[[], bytes]) -> bytes:
        if self._num_waiting >= _WAITING:
            raise TooManyFormsError(self._num_waiting)
        self._num_waiting += 1
        try:
            async with self._free:
                return await _drawn(await run_in_threadpool(make_request))
        finally:
            self._num_waiting -= 1


async def _drawn(request: bytes) -> bytes:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "optpipe_api.desk.draw",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        answer, _ = await asyncio.wait_for(process.communicate(request), _LIMIT_S)
    except TimeoutError:
        raise TooLargeToDrawError(f"drawing it takes more than {_LIMIT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == -signal.SIGXCPU:
        raise TooLargeToDrawError("drawing it takes too long")
    return _opened(answer)


def _opened(answer: bytes) -> bytes:
    """Return what the process made; it answers with a word in the first line."""
    word, _, rest = answer.partition(b"\n")
    match word:
        case b"done":
            return rest
        case b"large":
            raise TooLargeToDrawError(rest.decode())
        case b"missing":
            raise FormUnavailableError(rest.decode())
        case _:
            raise RuntimeError("the process that draws schedules failed; the log says why")
