"""The solver process: ``python -m optpipe_api.engine.worker DESCRIPTOR SETTINGS``.

It does one job after the other (`optpipe_api.engine.tasks`), because starting a process takes a
second, which each small problem of a sweep would pay. It ends after an error, when it has grown
large, or when a search has left a thread running. It ends immediately when the server does: then
the connection of file ``DESCRIPTOR`` ends.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import resource
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe.errors import OptPipeError
from optpipe_api.engine.processes import Message, decode, encode, limit_cpu, limit_process
from optpipe_api.engine.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["Channel", "find", "main"]

_MOST_BYTES = 1024**3
_STATUS = Path("/proc/self/status")
_LAST_WORDS_S = 2.0
_USED_UP = 3
"""The exit code of a process that had too little memory, which a new one may have."""
_CLUSTER_POOL = "optpipe_api.engine.ray:RayTasks"


def main() -> None:
    """Do one job after the other, over the connection that was passed on."""
    settings = json.loads(sys.argv[2])
    is_on_cluster = settings["engine"] == "ray"
    channel = Channel(int(sys.argv[1]), find(_CLUSTER_POOL) if is_on_cluster else None)
    limit_process(settings["memory_bytes"])
    try:
        find(settings["solve_path"])
        _warm_up(settings)
        channel.send(Message("ready"))
        while _serve(channel, settings):
            channel.is_used = True
            channel.send(Message("ready"))
        channel.send(Message("retired"))
    except OptPipeError as error:
        channel.send(Message("error", {"code": error.code, "message": str(error)}))
    except MemoryError:
        if channel.is_used:
            # What jobs before it have left may be what was too much: the job begins anew elsewhere.
            os._exit(_USED_UP)
        channel.send(_out_of_memory(settings["memory_bytes"]))
    except Exception as error:  # noqa: BLE001 - printed, and the server is told
        traceback.print_exc()
        channel.send(_bug(error))
    # Threads of native solvers must not hold up the end.
    os._exit(0)


def _serve(channel: Channel, settings: dict[str, Any]) -> bool:
    """Do one job; return whether the process is as good as a new one."""
    task = channel.receive()
    limit_cpu(task.header["options"], settings["overtime_s"])
    kind = task.header["kind"]
    answer = TASKS[kind](channel, task, find(settings[f"{kind}_path"]))
    channel.send(answer)
    allowed = settings["memory_bytes"]
    most = _MOST_BYTES if allowed is None else min(_MOST_BYTES, allowed // 2)
    return _most_held_bytes() < most and _is_quiet(channel)


def _most_held_bytes() -> int:
    """Return the most memory that this program has held at a time.

    Linux's ``ru_maxrss`` begins with what the process that started it had held.
    """
    try:
        lines = _STATUS.read_text("utf-8").splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _is_quiet(channel: Channel) -> bool:
    """Whether all threads of a search have ended, a moment after it has."""
    until = time.monotonic() + _LAST_WORDS_S
    others = set(threading.enumerate()) - {threading.main_thread(), channel.listener}
    for thread in others:
        thread.join(max(0.0, until - time.monotonic()))
    return not any(thread.is_alive() for thread in others)


def _warm_up(settings: dict[str, Any]) -> None:
    """Load all code before a job comes; a process waits for one most of its life.

    Compiled or not: up to a minute of compiling must not be taken from a job's time.
    """
    if not settings["solve_path"].startswith("optpipe_solver"):
        return
    for name in ("plan_path", "compare_path", "tune_path"):
        if settings[name].startswith("optpipe_solver"):
            find(settings[name])
    importlib.import_module("optpipe_solver.warm").warm_up()


class Channel:
    """The connection to the server; several threads may send, and one of its own receives.

    ``stop`` is set when the server wants the running job to end; ``is_used`` says whether a job has
    ended here before. ``open_pool`` opens processes on the cluster; None on a single machine.
    """

    def __init__(self, descriptor: int, open_pool: Callable[..., Any] | None) -> None:
        self.open_pool = open_pool
        self._connection = Connection(descriptor)
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.stop = threading.Event()
        self.is_used = False
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def send(self, message: Message) -> None:
        try:
            with self._lock:
                self._connection.send_bytes(encode(message))
        except OSError:
            os._exit(0)

    def receive(self) -> Message:
        return self._tasks.get()

    def _listen(self) -> None:
        while True:
            try:
                message = decode(self._connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)
            if message.kind == "stop":
                self.stop.set()
                continue
            # A stop that came too late for the job before is not meant for this one.
            self.stop.clear()
            self._tasks.put(message)


def find(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _out_of_memory(memory_bytes: int | None) -> Message:
    limit = "the machine's memory" if memory_bytes is None else f"its {memory_bytes} bytes"
    message = (
        f"the solver needs more than {limit}; lower num_microbatches or threads, choose another "
        "method, or raise OPTPIPE_SOLVER_MEMORY_BYTES"
    )
    return Message("error", {"code": "solver.memory", "message": message})


def _bug(error: Exception) -> Message:
    message = (
        f"the solver failed with {type(error).__name__}, which is a fault of OptPipe; its server's "
        "log says where: please report it with the problem"
    )
    return Message("error", {"code": "solver.failed", "message": message})


if __name__ == "__main__":
    main()
