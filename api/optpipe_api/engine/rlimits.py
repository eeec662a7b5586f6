"""What a solver process may use of its machine; it limits itself, before it reads a job.

The server watches the clock; these limits hold even where the server hangs, or a solver starts more
threads than it was told to. Ended by one, the attempt has died, and the server's log says by which.
"""

from __future__ import annotations

import math
import os
import resource
from typing import Any

__all__ = ["limit_cpu", "limit_process"]

_NICENESS = 5
_MAX_FILES = 256
_MERCY_S = 5


def limit_process(memory_bytes: int | None) -> None:
    """Be nice, leave no core file, open few files; and take no more address space than this."""
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _lower(resource.RLIMIT_NOFILE, _MAX_FILES)
    if memory_bytes is not None:
        _lower(resource.RLIMIT_AS, memory_bytes)


def limit_cpu(options: dict[str, Any], overtime_s: float) -> None:
    """Take no more processor time for a job than its threads can until the server stops it.

    That is ``threads x (time_limit_s + overtime_s)``, on top of what the start has taken.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    allowed_s = options["threads"] * (options["time_limit_s"] + overtime_s)
    # SIGXCPU first, which says what happened; SIGKILL where a library of the solver catches it.
    limit_s = math.ceil(usage.ru_utime + usage.ru_stime + allowed_s) + 1
    _lower(resource.RLIMIT_CPU, limit_s, limit_s + _MERCY_S)


def _lower(kind: int, soft: int, hard: int | None = None) -> None:
    """Set a limit, or leave one that is lower already."""
    wanted = soft if hard is None else hard
    _, given = resource.getrlimit(kind)
    if given == resource.RLIM_INFINITY or wanted < given:
        resource.setrlimit(kind, (soft, wanted))
