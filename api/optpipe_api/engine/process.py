"""A solver process seen from the server: started, told, heard, stopped."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from optpipe_api.engine.messages import FrameBuffer, Message, encode

if TYPE_CHECKING:
    from optpipe_api.settings import Settings

__all__ = ["SolverProcess"]

_TERMINATE_S = 0.15


class SolverProcess:
    """One process, for one job or one comparison.

    A new interpreter rather than a fork: forked threads and database connections are broken, and
    nothing of the server's memory is of use there. Used by one thread at a time.
    """

    def __init__(self, settings: Settings) -> None:
        arguments = {
            "solve_path": settings.solve_path,
            "compare_path": settings.compare_path,
            "memory_bytes": settings.solver_memory_bytes,
        }
        # -P: a file called json.py in the current folder must not become our json. A process
        # group of its own: Ctrl-C in a terminal is the server's to handle.
        self._process = subprocess.Popen(  # noqa: S603 - all of it is ours
            [sys.executable, "-P", "-m", "optpipe_api.engine.worker", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            process_group=0,
        )
        self._buffer = FrameBuffer()
        self._poll = select.poll()
        if self._process.stdout is not None:
            self._poll.register(self._process.stdout, select.POLLIN)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def send(self, message: Message) -> None:
        """Say something; a process that is gone hears nothing, and `receive` will tell."""
        data = memoryview(encode(message))
        pipe = self._process.stdin
        if pipe is None:
            return
        try:
            while data:
                data = data[os.write(pipe.fileno(), data) :]
        except BrokenPipeError:
            return

    def receive(self, timeout_s: float) -> list[Message] | None:
        """Return what has come within the time, often nothing; None when the process has ended."""
        pipe = self._process.stdout
        if pipe is None:
            return None
        if not self._poll.poll(timeout_s * 1000):
            return []
        data = os.read(pipe.fileno(), 1 << 20)
        return self._buffer.feed(data) if data else None

    def stop(self) -> None:
        """End the process: SIGTERM, then SIGKILL; it is gone when this returns."""
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(_TERMINATE_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def how_it_died(self, patience_s: float = 1.0) -> str:
        """Return a clause that says how the process ended."""
        deadline = time.monotonic() + patience_s
        while self.is_alive and time.monotonic() < deadline:
            time.sleep(0.01)
        code = self._process.poll()
        if code is None:
            return "its solver process closed its output"
        if code < 0:
            return f"its solver process was ended by {signal.Signals(-code).name}"
        return f"its solver process ended with exit code {code}"

    def _signal(self, number: signal.Signals) -> None:
        if self.is_alive:
            os.killpg(self._process.pid, number)
