"""Solver processes that are threads: no second of imports for each job, and nothing to kill.

What a process alone can do - die, eat memory, turn a deaf ear to SIGTERM - needs `LocalSolvers`.
"""

from __future__ import annotations

import importlib
import queue
import threading
from types import SimpleNamespace
from typing import Any

from optpipe.requests import JobKind
from optpipe_api.engine import worker
from optpipe_api.engine.processes import MachineState, Message
from optpipe_api.engine.tasks import TASKS
from optpipe_api.settings import Settings


class InstantSolvers:
    """Starts threads that call the fakes which the settings name."""

    is_reachable = True

    def __init__(self, settings: Settings) -> None:
        self._paths = {kind.value: getattr(settings, f"{kind}_path") for kind in JobKind}

    def start(self) -> InstantProcess:
        return InstantProcess(self._paths)

    def close(self) -> None:
        return


class InstantProcess:
    """A `SolverProcess` that is ready when it is asked, and solves in a thread."""

    name = "thread"
    machine = MachineState.GIVEN
    is_alive = True
    is_reusable = True

    def __init__(self, paths: dict[str, str]) -> None:
        self._paths = paths
        self._said: queue.Queue[Message | None] = queue.Queue()
        self._stop = threading.Event()
        self._said.put(Message("ready"))

    def send(self, message: Message) -> None:
        if message.kind == "stop":
            self._stop.set()
        else:
            self._stop.clear()
            threading.Thread(target=self._solve, args=(message,), daemon=True).start()

    def receive(self, timeout_s: float) -> Message | None:
        try:
            message = self._said.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if message is None:
            raise EOFError
        return message

    def stop(self) -> None:
        self._stop.set()

    def describe_exit(self) -> str:
        return "its solver ended"

    def _solve(self, task: Message) -> None:
        channel: Any = SimpleNamespace(send=self._said.put, stop=self._stop, open_pool=None)
        kind = task.header["kind"]
        module, _, name = self._paths[kind].partition(":")
        try:
            fake = getattr(importlib.import_module(module), name)
            self._said.put(TASKS[kind](channel, task, fake))
            self._said.put(Message("ready"))
        except SystemExit:
            self._said.put(None)
        except Exception as error:  # noqa: BLE001 - as in a process
            self._said.put(worker.error_message(error))
