"""Request bodies are read beside the event loop: small ones in a thread, large ones in a process.

Reading JSON and checking what it says holds the interpreter's lock for as long as it takes, in
whatever thread it happens; ten megabytes of it would hold up every other request. So they are read
by processes of their own, which are kept, and which end when a body asks for too much. Only JSON
comes back: texts, and a few fields that say what they are.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from anyio import CapacityLimiter, to_thread

from optpipe.errors import InputError, OptPipeError
from optpipe_api.desk.reading import LENGTH_BYTES, find
from optpipe_api.engine.messages import FrameBuffer, Message
from optpipe_api.errors import BodyTooHeavyError, TooManyBodiesError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Readers", "Reading"]

_IN_THREAD_BYTES, _IN_THREAD_VALUES = 256 * 1024, 10_000
_AT_ONCE, _WAITING = 2, 16
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read: some fields that JSON can say, and texts."""

    header: dict[str, Any]
    documents: tuple[str, ...] = field(default=())


class Readers:
    """Reads bodies, a few large ones at once.

    Parameters
    ----------
    cpu_s, memory_bytes
        What reading one large body may take of processor time and address space.
    """

    def __init__(self, cpu_s: float = 5.0, memory_bytes: int = 2 * 1024**3) -> None:
        self._limits = (cpu_s, memory_bytes)
        self._threads = ThreadPoolExecutor(_AT_ONCE, "reader")
        # Each holds the interpreter's lock for as long as it reads.
        self._few = CapacityLimiter(_AT_ONCE)
        self._processes: set[_Process] = set()
        self._idle: list[_Process] = []
        self._num_waiting = 0
        self._lock = threading.Lock()

    async def read(self, function: str, body: bytes, *, is_heavy: bool = False) -> Reading:
        """Return what a function makes of a body.

        Parameters
        ----------
        function
            ``module:name`` of a function from bytes to a `Reading`; it may raise those errors of
            ours that are made of a message alone.
        is_heavy
            Whether it makes much of a small body: it then gets a process as if it were large.

        Raises
        ------
        BodyTooHeavyError
            If that takes too much time or memory.
        TooManyBodiesError
            If too many large ones wait.
        OptPipeError
            What the function raises.
        """
        if _is_light(body) and not is_heavy:
            return await to_thread.run_sync(find(function), body, limiter=self._few)
        return await asyncio.wrap_future(self._begin(function, body))

    def ask(self, function: str, body: bytes) -> Reading:
        """Return the same to a thread that waits for it."""
        if _is_light(body):
            return find(function)(body)
        return self._begin(function, body).result()

    def _begin(self, function: str, body: bytes) -> Future[Reading]:
        with self._lock:
            if self._num_waiting >= _WAITING:
                raise TooManyBodiesError(self._num_waiting)
            self._num_waiting += 1
        return self._threads.submit(self._ask_process, function, body)

    @property
    def num_waiting(self) -> int:
        """How many bodies wait for a process."""
        return self._num_waiting

    def close(self) -> None:
        """End the processes, and with them whatever they are reading."""
        for process in list(self._processes):
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in list(self._processes):
            process.stop()

    def _ask_process(self, function: str, body: bytes) -> Reading:
        """Ask a process that has nothing to do, or a new one; keep it unless it has ended."""
        process = self._take()
        answer = process.ask(function, body)
        if answer is None or answer.header["is_last"]:
            process.stop()
            self._processes.discard(process)
        else:
            self._idle.append(process)
        if answer is None or answer.kind == "too heavy":
            cpu_s, memory_bytes = self._limits
            raise BodyTooHeavyError(f"{cpu_s:g} s or {memory_bytes} bytes of memory")
        return _opened(answer)

    def _take(self) -> _Process:
        with self._lock:
            self._num_waiting -= 1
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:
                    return process
                process.stop()
                self._processes.discard(process)
        process = _Process(*self._limits)
        self._processes.add(process)
        return process


def _is_light(body: bytes) -> bool:
    """Whether to read a body takes some milliseconds; ten thousand faults in it take 20."""
    return len(body) <= _IN_THREAD_BYTES and body.count(b",") <= _IN_THREAD_VALUES


class _Process:
    """A process that reads; used by one thread at a time."""

    def __init__(self, cpu_s: float, memory_bytes: int) -> None:
        # -P: a file called json.py in the current folder must not become our json.
        self._process = subprocess.Popen(  # noqa: S603 - all of it is ours
            [
                sys.executable,
                "-P",
                "-m",
                "optpipe_api.desk.reading",
                json.dumps([cpu_s, memory_bytes]),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"},
            process_group=0,
        )

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def ask(self, function: str, body: bytes) -> Message | None:
        """Return its answer; None where it ended over the question."""
        # Should it hang: the process's own limit counts only what it computes.
        watchdog = threading.Timer(_PATIENCE_S, self._process.kill)
        watchdog.start()
        try:
            line = function.encode() + b"\n"
            self._write((len(line) + len(body)).to_bytes(LENGTH_BYTES, "big") + line)
            self._write(body)
            return self._receive()
        except BrokenPipeError:
            return None
        finally:
            watchdog.cancel()

    def kill(self) -> None:
        """End it; whoever asks it hears of that."""
        self._process.kill()

    def stop(self) -> None:
        """End it, when nobody asks it any more."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left and self._process.stdin is not None:
            left = left[os.write(self._process.stdin.fileno(), left) :]

    def _receive(self) -> Message | None:
        buffer = FrameBuffer()
        while self._process.stdout is not None:
            data = os.read(self._process.stdout.fileno(), 1 << 20)
            if not data:
                return None
            for message in buffer.feed(data):
                return message
        return None


def _opened(answer: Message) -> Reading:
    match answer.kind:
        case "read":
            return Reading(answer.header["header"], tuple(_cut(answer)))
        case "refused":
            kinds = {kind.__name__: kind for kind in _plain_errors(OptPipeError)}
            raise kinds.get(answer.header["type"], InputError)(answer.header["message"])
        case _:
            raise RuntimeError("the process that reads bodies failed; the log says why")


def _cut(answer: Message) -> Iterator[str]:
    start = 0
    for length in answer.header["lengths"]:
        yield answer.document[start : start + length]
        start += length


def _plain_errors(kind: type[OptPipeError]) -> Iterator[type[OptPipeError]]:
    """Give all errors below one that are made of a message alone."""
    if kind.__init__ is OptPipeError.__init__ or kind.__init__ is InputError.__init__:
        yield kind
    for below in kind.__subclasses__():
        yield from _plain_errors(below)
