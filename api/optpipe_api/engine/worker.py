"""The solver process: ``python -m optpipe_api.engine.worker DESCRIPTOR SETTINGS``.

It runs one job after the other (`optpipe_api.engine.tasks`), because the start of a process takes a
second. It ends after an error, when it has grown large, or when a search has left a thread running.
It also ends with the server, which closes the connection of file ``DESCRIPTOR``.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import threading
import time
import traceback
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from optpipe.errors import OptPipeError
from optpipe_api.engine.processes import Channel, Message, limit_cpu, limit_process
from optpipe_api.engine.tasks import TASKS

__all__ = ["error_message", "main"]

_MAX_BYTES = 1024**3
_STATUS = Path("/proc/self/status")
_THREADS_END_S = 2.0
_OUT_OF_MEMORY = 3
"""The exit code of a used process without enough memory; a new process may have enough."""
_CLUSTER_POOL = "optpipe_api.engine.ray:RayTasks"


def main() -> None:
    """Run one job after the other, over the inherited connection."""
    settings = json.loads(sys.argv[2])
    memory_bytes = settings["solver_memory_bytes"]
    open_pool = resolve_name(_CLUSTER_POOL) if settings["engine"] == "ray" else None
    channel = Channel(int(sys.argv[1]), open_pool)
    limit_process(memory_bytes)
    try:
        resolve_name(settings["solve_path"])
        _warm_up(settings)
        channel.send(Message("ready"))
        while _run_job(channel, settings):
            channel.is_used = True
            channel.send(Message("ready"))
        channel.send(Message("retired"))
    except Exception as error:  # noqa: BLE001 - reported to the server
        if isinstance(error, MemoryError) and channel.is_used:
            # Earlier jobs may have left too much memory in use: the job starts again elsewhere.
            os._exit(_OUT_OF_MEMORY)
        channel.send(error_message(error, memory_bytes))
    # Threads of native solvers must not delay the exit.
    os._exit(0)


def _run_job(channel: Channel, settings: dict[str, Any]) -> bool:
    """Run the next job; return whether the process is fit for another."""
    job = channel.receive_job()
    limit_cpu(job.header["options"], settings["overtime_s"])
    kind = job.header["kind"]
    channel.send(TASKS[kind](channel, job, resolve_name(settings[f"{kind}_path"])))
    allowed = settings["solver_memory_bytes"]
    if _peak_bytes() >= (_MAX_BYTES if allowed is None else min(_MAX_BYTES, allowed // 2)):
        return False
    deadline = time.monotonic() + _THREADS_END_S
    of_search = set(threading.enumerate()) - {threading.main_thread(), channel.listener}
    for thread in of_search:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in of_search)


def _peak_bytes() -> int:
    """Return the peak memory of this program.

    Linux's ``ru_maxrss`` starts with the peak of the parent process.
    """
    try:
        lines = _STATUS.read_text("utf-8").splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _warm_up(settings: dict[str, Any]) -> None:
    """Import the solver, compile its kernels and load them, before the first job.

    Otherwise the first job would load them within its time limit.
    """
    if not settings["solve_path"].startswith("optpipe_solver"):
        return
    for kind in TASKS:
        if settings[f"{kind}_path"].startswith("optpipe_solver"):
            resolve_name(settings[f"{kind}_path"])
    warm = importlib.import_module("optpipe_solver.warm")
    warm.warm_up()
    warm.load_kernels()


def error_message(error: Exception, memory_bytes: int | None = None) -> Message:
    """Return the message that reports an error to the server; print the traceback of a bug.

    ``memory_bytes``: the address space of this process; None = no limit.
    """
    if isinstance(error, OptPipeError):
        code, text = error.code, str(error)
    elif isinstance(error, MemoryError):
        limit = "the machine's memory" if memory_bytes is None else f"its {memory_bytes} bytes"
        code = "solver.memory"
        text = (
            f"the solver needs more than {limit}; lower num_microbatches or threads, choose "
            "another method, or raise OPTPIPE_SOLVER_MEMORY_BYTES"
        )
    else:
        traceback.print_exception(error)
        code = "solver.failed"
        text = (
            f"the solver failed with {type(error).__name__}, which is a fault of OptPipe; please "
            "report it with the problem and the traceback in the server's log"
        )
    return Message("error", {"code": code, "message": text})


if __name__ == "__main__":
    main()
