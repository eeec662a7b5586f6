"""The bytes of a solver process on this machine: it is started, written to, read from, stopped."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optpipe_api.settings import Settings

__all__ = ["Pipes", "worker_arguments"]

_TERMINATE_S = 0.15


def worker_arguments(settings: Settings) -> str:
    """Return what a solver process is told on its command line, as JSON."""
    return json.dumps(
        {
            "solve_path": settings.solve_path,
            "compare_path": settings.compare_path,
            "plan_path": settings.plan_path,
            "memory_bytes": settings.solver_memory_bytes,
            "overtime_s": settings.overtime_s,
        }
    )


class Pipes:
    """A solver process and the bytes that go in and come out of it.

    A new interpreter rather than a fork: forked threads and database connections are broken, and
    nothing of the server's memory is of use there.

    Raises
    ------
    OSError
        If it cannot be started.
    """

    def __init__(self, arguments: str) -> None:
        # -P: a file called json.py in the current folder must not become our json. A process
        # group of its own: Ctrl-C in a terminal is the server's to handle.
        self._process = subprocess.Popen(  # noqa: S603 - all of it is ours
            [sys.executable, "-P", "-m", "optpipe_api.engine.worker", arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            process_group=0,
        )
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

    def write(self, frame: bytes) -> None:
        """Put bytes in; a process that is gone takes none."""
        data = memoryview(frame)
        pipe = self._process.stdin
        if pipe is None:
            return
        try:
            while data:
                data = data[os.write(pipe.fileno(), data) :]
        except BrokenPipeError:
            return

    def read(self, timeout_s: float) -> bytes | None:
        """Return the bytes that came within the time; None when no more will."""
        pipe = self._process.stdout
        if pipe is None:
            return None
        if not self._poll.poll(timeout_s * 1000):
            return b""
        return os.read(pipe.fileno(), 1 << 20) or None

    def end(self) -> None:
        """End the process: SIGTERM, then SIGKILL; it is gone when this returns."""
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(_TERMINATE_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """Close the pipes of a process that has ended; nobody may be reading them."""
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
