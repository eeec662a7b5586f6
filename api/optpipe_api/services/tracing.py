"""Traces of configs without a formula, each in a child process with limits of time and memory.

The child is ``python -m optpipe.runtime.measuring.trace_model``. It runs only classes of the
installed transformers, on tensors without data, and no code that comes with a config. The service
itself needs neither torch nor transformers: without them a request may send its trace.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
import tempfile
from collections import OrderedDict
from typing import TYPE_CHECKING

from optpipe.errors import FieldError, FieldRef
from optpipe_api.bodies import decode_json
from optpipe_api.errors import TooManyTracesError
from optpipe_api.services.parse_pool import Turns

if TYPE_CHECKING:
    from optpipe.requests import ModelOnGpus
    from optpipe_api.access import Principal
    from optpipe_api.services.parse_pool import ParsePool
    from optpipe_api.settings import Settings

__all__ = ["Tracer", "read_trace_question"]


_MODULE = "optpipe.runtime.measuring.trace_model"
_NEEDED = ("torch", "transformers")
_REFUSED = 2
_NO_MEMORY = ("MemoryError", "allocate", "failed to map segment")
"""Words in the last line of a process whose address space is full."""
_MAX_RUNNING, _MAX_WAITING = 1, 8
_MAX_KEPT = 32


def read_trace_question(body: bytes, request: type[ModelOnGpus]) -> str | None:
    """Return the question of a body whose config must be traced, as JSON text; None for others.

    Raises the errors of `decode_json` and of the request's ``parse``.
    """
    wanted = request.parse(decode_json(body, takes_constants=True))
    return json.dumps(wanted.trace_question(), sort_keys=True) if wanted.needs_trace else None


class Tracer:
    """Traces models in child processes, one at a time, and keeps the newest answers.

    A form asks again with each change of a degree, and a trace takes seconds: most of it is the
    import of torch. So the answers of the last questions are kept. Callers take turns.
    """

    def __init__(self, settings: Settings) -> None:
        self._seconds = settings.trace_time_limit_s
        self._memory_bytes = settings.trace_memory_bytes
        self._turns = Turns(_MAX_RUNNING, _MAX_WAITING, TooManyTracesError)
        self._kept: OrderedDict[str, str] = OrderedDict()

    async def trace_body(
        self,
        body: bytes,
        request: type[ModelOnGpus],
        pool: ParsePool,
        caller: Principal,
        *,
        is_read: bool,
    ) -> str | None:
        """Return the trace that a body's request needs, as JSON text; None if it needs none.

        Raises as `read_trace_question` and `trace`.
        """
        if b'"config"' not in body:
            return None
        question = await pool.run(
            read_trace_question, body, request, caller=caller, is_read=is_read
        )
        if question is None:
            return None
        return await self.trace(question, caller.name, is_read=is_read)

    async def trace(self, question: str, owner: str, *, is_read: bool) -> str:
        """Return the traced model of a question, as JSON text.

        Raises `FieldError` if the model cannot be traced within the limits, or not at all here, and
        `TooManyTracesError` if too many questions wait.
        """
        if question in self._kept:
            self._kept.move_to_end(question)
            return self._kept[question]
        missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            raise FieldError(
                FieldRef("config"),
                f": has no formula, and this service cannot trace it: {' and '.join(missing)} "
                "are not installed where it runs. Run pip install '.[runtime]' transformers there, "
                "in a clone of OptPipe, or send ",
                FieldRef("trace"),
                ", which optpipe estimate and tune make on your machine",
            )
        async with self._turns.turn(owner, is_read=is_read):
            if question in self._kept:  # another request has traced it meanwhile
                return self._kept[question]
            answer = await self._run_child(question)
        self._kept[question] = answer
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return answer

    async def _run_child(self, question: str) -> str:
        limits = {"seconds": self._seconds, "memory_bytes": self._memory_bytes}
        question_text = json.dumps({**json.loads(question), **limits}).encode()
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryDirectory() as folder:  # so that no module is found by accident
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", _MODULE),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=folder,
                env=environment,
                start_new_session=True,
            )
            try:
                # Waiting for a core costs no processor time, so that this limit is longer.
                output, said = await asyncio.wait_for(
                    child.communicate(question_text), 2 * self._seconds + 10
                )
            except TimeoutError:
                raise self._over_limits() from None
            finally:
                if child.returncode is None:
                    child.kill()
                    await child.wait()
        lines = said.decode(errors="replace").strip().splitlines() or [""]
        if child.returncode == 0:
            return output.decode()
        is_killed = child.returncode is not None and child.returncode < 0
        if is_killed or any(words in lines[-1] for words in _NO_MEMORY):
            raise self._over_limits()
        if child.returncode == _REFUSED:
            raise FieldError(FieldRef("config"), f": {lines[-1].removeprefix('config: ')}")
        raise FieldError(
            FieldRef("config"), f": could not be traced: {lines[-1][:300]}; send a trace"
        )

    def _over_limits(self) -> FieldError:
        return FieldError(
            FieldRef("config"),
            f": its trace takes more than {self._seconds} s or {self._memory_bytes} bytes of "
            "memory, the limits of this service (OPTPIPE_TRACE_TIME_LIMIT_S, "
            "OPTPIPE_TRACE_MEMORY_BYTES); send ",
            FieldRef("trace"),
            ", which optpipe estimate and tune make on your machine",
        )
