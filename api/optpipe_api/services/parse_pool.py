"""Parsing of request bodies outside the event loop: in a thread, or in a process if they are large.

To parse and check JSON holds the interpreter's lock, in any thread. Ten megabytes of JSON would
delay every other request, so processes parse them. A process is kept for the next body, unless a
body exceeded its limits.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import resource
import signal
import threading
from collections import Counter
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from anyio import CapacityLimiter, to_thread

from optpipe.errors import InputError, OptPipeError
from optpipe_api.errors import BodyTooHeavyError, TooManyBodiesError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from multiprocessing.connection import Connection

    from optpipe_api.access import Principal

__all__ = ["ParsePool", "Turns"]


_IN_THREAD_BYTES, _IN_THREAD_VALUES = 256 * 1024, 10_000
_MAX_RUNNING, _MAX_WAITING = 2, 64
_TIMEOUT_S = 60.0
_MAX_KEPT_BYTES = 400_000_000
_STATM = Path("/proc/self/statm")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class ParsePool:
    """Calls functions on bodies; large bodies in processes. For one event loop.

    A function for a process must belong to a module, because it is pickled together with its
    arguments and its result. An `OptPipeError` whose constructor takes more than a message arrives
    as an `InputError` with the same message.

    ``cpu_s``, ``memory_bytes``: the processor time and the address space of one call in a process.
    """

    def __init__(self, cpu_s: float = 5.0, memory_bytes: int = 2 * 1024**3) -> None:
        self._limits = (cpu_s, memory_bytes)
        # Few, because each holds the interpreter's lock while it parses.
        self._limiter = CapacityLimiter(_MAX_RUNNING)
        self._turns = Turns(_MAX_RUNNING, _MAX_WAITING, TooManyBodiesError)
        self._threads = CapacityLimiter(_MAX_RUNNING)
        self._workers: set[_ParseWorker] = set()
        self._idle: list[_ParseWorker] = []
        self._is_closed = False
        self._lock = threading.Lock()

    async def run(
        self,
        function: Callable[[*Ts], T],
        *args: *Ts,
        caller: Principal,
        is_heavy: bool = False,
        is_read: bool = True,
    ) -> T:
        """Return the result of a function, called in a thread or in a process.

        ``caller``: has a share of the calls that wait for a process. ``is_read``: whether the call
        submits nothing; submissions run first. ``is_heavy``: use a process even if the arguments
        are small. Raises `BodyTooHeavyError` if the call exceeds its time or memory,
        `TooManyBodiesError` if too many calls wait for a process, and the errors of the function.
        """
        num_bytes, is_light = _measure(args)
        if is_light and not is_heavy:
            return await to_thread.run_sync(partial(function, *args), limiter=self._limiter)
        call = partial(self._call, function, args)
        weight = 1 + num_bytes // 1024**2
        async with self._turns.turn(caller.name, is_read=is_read, weight=weight):
            # A caller that gives up leaves; the call ends alone.
            return await to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._threads)

    @property
    def num_waiting(self) -> int:
        """The number of calls that wait for a process."""
        return self._turns.num_waiting

    def close(self) -> None:
        """End the processes and their calls."""
        with self._lock:
            self._is_closed = True
            workers = list(self._workers)
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.close()

    def _call(self, function: Callable[..., T], args: Sequence[Any]) -> T:
        """Call a function in an idle or new process; keep the process if it is small enough."""
        with self._lock:
            worker = self._idle.pop() if self._idle else _ParseWorker(*self._limits)
            self._workers.add(worker)
            if self._is_closed:
                worker.kill()
        is_spent = True
        try:
            result, is_spent = worker.call(function, args)
        except (BrokenExecutor, TimeoutError, MemoryError):
            cpu_s, memory_bytes = self._limits
            raise BodyTooHeavyError(f"{cpu_s:g} s or {memory_bytes} bytes of memory") from None
        except Exception:
            is_spent = False
            raise
        finally:
            if is_spent:
                worker.close()
                self._workers.discard(worker)
            else:
                self._idle.append(worker)
        return result


def _measure(args: Sequence[Any]) -> tuple[int, bool]:
    """Return the bytes of the texts, and whether parsing them takes only milliseconds.

    Ten thousand invalid values take 20 ms.
    """
    texts = [arg.encode() if isinstance(arg, str) else arg for arg in args]
    bodies = [text for text in texts if isinstance(text, bytes)]
    num_bytes = sum(map(len, bodies))
    num_values = sum(body.count(b",") for body in bodies)
    return num_bytes, num_bytes <= _IN_THREAD_BYTES and num_values <= _IN_THREAD_VALUES


class _ParseWorker:
    """An executor of one process, so that a call that kills its process ends no other call."""

    def __init__(self, cpu_s: float, memory_bytes: int) -> None:
        self._cpu_s = cpu_s
        self._closing = threading.Lock()
        context = multiprocessing.get_context("spawn")
        # The process ends when this end of the pipe is closed, or is gone with the server.
        self._their_end, self._our_end = context.Pipe(duplex=False)
        self._executor = ProcessPoolExecutor(
            1, context, initializer=_start_process, initargs=(memory_bytes, self._their_end)
        )

    def call(self, function: Callable[..., T], args: Sequence[Any]) -> tuple[T, bool]:
        """Return the result, and whether the process has grown too large to be kept."""
        # Ctrl-C in a terminal is for the server: a new process inherits what this thread blocks.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            call = self._executor.submit(_call_limited, self._cpu_s, function, args)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # The process's own limit does not count time without computation.
        return call.result(_TIMEOUT_S)

    def kill(self) -> None:
        """End the process; its call raises `BrokenExecutor`."""
        self._our_end.close()

    def close(self) -> None:
        """End the process without a call, and wait until it is gone; from any thread."""
        with self._closing:
            self.kill()
            self._executor.shutdown()
            self._their_end.close()


# --- Functions in the process.


def _start_process(memory_bytes: int, their_end: Connection) -> None:
    """Limit this process, and end it when the other end of a pipe is closed."""
    os.dup2(2, 1)  # printed text must not reach the standard output
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))

    def wait_for_end() -> None:
        their_end.poll(None)
        os._exit(1)

    threading.Thread(target=wait_for_end, daemon=True).start()


def _call_limited(cpu_s: float, function: Callable[..., T], args: Sequence[Any]) -> tuple[T, bool]:
    """Return the result of a call, and whether this process is too large to be kept.

    The system ends the process if the call takes too much processor time.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit_s = math.ceil(used.ru_utime + used.ru_stime + cpu_s)
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))
    try:
        result = function(*args)
    except OptPipeError as error:
        if type(error).__init__ in (OptPipeError.__init__, InputError.__init__):
            raise
        places = error.pointers if isinstance(error, InputError) else ()
        raise InputError(str(error)).at(*places) from None
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    # Memory that was freed inside the process may still belong to the process.
    return result, _memory_bytes() > _MAX_KEPT_BYTES


def _memory_bytes() -> int:
    """Return the current memory of this process; without /proc, its peak.

    On Linux the peak starts with the parent's, so every child of a large server would seem large.
    """
    if _STATM.exists():
        return int(_STATM.read_text("ascii").split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# --- Turns of callers at a few places: a share for each caller, and submissions before reads.


@dataclass(eq=False, slots=True)
class _Call:
    owner: str
    is_read: bool
    weight: int
    place: asyncio.Future[None]


class Turns:
    """Lets ``max_running`` calls run at a time, and others wait; for one event loop.

    Submissions run before reads. Within both, the next call belongs to the caller with the fewest
    running calls, and then to the call that came first. Submissions and reads have a line each. A
    full line still takes a caller with less than its share of it. The share is ``max_waiting``
    divided by the number of callers in the line.

    ``max_waiting``: the weight of all calls of one line. ``refuse``: returns the error for a call
    that finds no place, from the number of calls that wait.
    """

    def __init__(
        self, max_running: int, max_waiting: int, refuse: Callable[[int], Exception]
    ) -> None:
        self._num_free = max_running
        self._max_waiting = max_waiting
        self._refuse = refuse
        self._waiting: list[_Call] = []
        self._running: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        """The number of calls that wait."""
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, owner: str, *, is_read: bool, weight: int = 1) -> AsyncIterator[None]:
        """Wait for a place, and hold it until the block ends; raise the error of ``refuse``."""
        if self._num_free == 0:
            await self._wait(owner, is_read, weight)
        else:
            self._num_free -= 1
        self._running[owner] += 1
        try:
            yield
        finally:
            self._running[owner] -= 1
            self._running += Counter()  # without callers that run nothing
            self._leave()

    async def _wait(self, owner: str, is_read: bool, weight: int) -> None:
        line = Counter({owner: weight})
        for other in self._waiting:
            if other.is_read is is_read:
                line[other.owner] += other.weight
        limit = self._max_waiting
        if line.total() > limit and line[owner] > limit // len(line):
            raise self._refuse(self.num_waiting)
        call = _Call(owner, is_read, weight, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        try:
            await call.place
        except asyncio.CancelledError:
            if call in self._waiting:
                self._waiting.remove(call)
            else:
                self._leave()
            raise

    def _leave(self) -> None:
        """Give a place to the next call."""
        # A cancelled call removes itself when it runs next.
        waiting = [call for call in self._waiting if not call.place.cancelled()]
        if not waiting:
            self._num_free += 1
            return
        call = min(waiting, key=lambda one: (one.is_read, self._running[one.owner]))
        self._waiting.remove(call)
        call.place.set_result(None)
