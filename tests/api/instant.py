"""Solver processes that are threads: no second of imports for each job, and nothing to kill.

What a process alone can do - die, eat memory, turn a deaf ear to SIGTERM - needs `LocalSolvers`.
"""

from __future__ import annotations

import importlib
import threading
from contextlib import suppress
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

from optpipe.requests import JobKind
from optpipe_api.engine import worker
from optpipe_api.engine.processes import LocalSolvers, MachineState, Message, decode, encode
from optpipe_api.engine.tasks import TASKS
from optpipe_api.settings import Settings


class InstantSolvers(LocalSolvers):
    """Starts threads that call the fakes which the settings name."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._paths = {kind.value: getattr(settings, f"{kind}_path") for kind in JobKind}

    def start(self) -> Any:
        return InstantProcess(self._paths)


class InstantProcess:
    """A `SolverProcess` that is ready when it is asked, and solves in a thread."""

    name = "thread"
    machine = MachineState.GIVEN
    is_alive = True
    is_reusable = True

    def __init__(self, paths: dict[str, str]) -> None:
        self._paths = paths
        self.connection, self._theirs = Pipe()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._say(Message("ready"))

    def _say(self, message: Message) -> None:
        # The engine may have stopped the process meanwhile.
        with self._lock, suppress(OSError):
            self._theirs.send_bytes(encode(message))

    def send(self, message: Message) -> None:
        if message.kind == "stop":
            self._stop.set()
        else:
            self._stop.clear()
            threading.Thread(target=self._solve, args=(message,), daemon=True).start()

    def receive(self, timeout_s: float) -> Message | None:
        if not self.connection.poll(timeout_s):
            return None
        return decode(self.connection.recv_bytes())

    def stop(self) -> None:
        self._stop.set()
        self.connection.close()

    def describe_exit(self) -> str:
        return "its solver ended"

    def _solve(self, task: Message) -> None:
        channel: Any = SimpleNamespace(send=self._say, stop=self._stop, open_pool=None)
        kind = task.header["kind"]
        module, _, name = self._paths[kind].partition(":")
        try:
            fake = getattr(importlib.import_module(module), name)
            self._say(TASKS[kind](channel, task, fake))
            self._say(Message("ready"))
        except SystemExit:
            self._theirs.close()
        except Exception as error:  # noqa: BLE001 - as in a process
            self._say(worker.error_message(error))
