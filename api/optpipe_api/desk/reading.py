"""The process that reads large request bodies: ``python -m optpipe_api.desk.reading LIMITS``.

It is asked for one body after the other, a function's path and the bytes in a frame, and answers
each with what the function made of it, or with the error that it raised. A body that asks for more
memory than there may be is refused, or ends the process, as one does that takes more processor
time. ``LIMITS`` are seconds and bytes, as a JSON list.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from optpipe.errors import OptPipeError
from optpipe_api.engine.messages import Message, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_api.desk.readers import Reading

__all__ = ["LENGTH_BYTES", "find"]

LENGTH_BYTES = 8
_KEPT_BYTES = 400_000_000
_STATM = Path("/proc/self/statm")
_FIRST = "optpipe_api.schemas"


def find(path: str) -> Callable[[bytes], Reading]:
    """Return the function that ``module:name`` says."""
    module, _, name = path.partition(":")
    function: Callable[[bytes], Reading] = getattr(importlib.import_module(module), name)
    return function


def _main() -> None:
    cpu_s, memory_bytes = json.loads(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = _take_stdout()
    importlib.import_module(_FIRST)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    while head := sys.stdin.buffer.read(LENGTH_BYTES):
        frame = sys.stdin.buffer.read(int.from_bytes(head, "big"))
        _allow_time(cpu_s)
        path, _, body = frame.partition(b"\n")
        del frame
        answer = _answer(path.decode(), body)
        del body
        is_last = _held_bytes() > _KEPT_BYTES
        answer.header["is_last"] = is_last
        answers.write(encode(answer))
        answers.flush()
        if is_last:
            # What was freed inside of it would stay the process's own.
            return


def _held_bytes() -> int:
    """Return how much memory the process holds now; where no /proc says, how much it ever held.

    Linux begins the latter with what the parent held: every child of a large server would be large.
    """
    if _STATM.exists():
        return int(_STATM.read_text("ascii").split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _take_stdout() -> BinaryIO:
    """Return the standard output, which whatever is printed does not reach."""
    taken = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return taken


def _allow_time(cpu_s: float) -> None:
    """Let the system end the process when this body has taken its time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit_s = math.ceil(used.ru_utime + used.ru_stime + cpu_s)
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))


def _answer(path: str, body: bytes) -> Message:
    try:
        reading = find(path)(body)
    except OptPipeError as error:
        return Message("refused", {"type": type(error).__name__, "message": str(error)})
    except MemoryError:
        return Message("too heavy")
    except Exception:  # noqa: BLE001 - printed, and the server is told
        traceback.print_exc()
        return Message("failed")
    lengths = [len(text) for text in reading.documents]
    return Message(
        "read", {"header": reading.header, "lengths": lengths}, "".join(reading.documents)
    )


if __name__ == "__main__":
    _main()
