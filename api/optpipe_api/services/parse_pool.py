"""Request bodies are read beside the event loop: small ones in a thread, large ones in a process.

Reading JSON and checking what it says holds the interpreter's lock for as long as it takes, in
whatever thread it happens; ten megabytes of it would hold up every other request. So they are read
by processes of their own, which are kept, and which end when a body asks for too much.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import resource
import signal
import threading
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from anyio import CapacityLimiter, to_thread

from optpipe.errors import InputError, OptPipeError
from optpipe_api.errors import BodyTooHeavyError, TooManyBodiesError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

__all__ = ["ParsePool"]


_IN_THREAD_BYTES, _IN_THREAD_VALUES = 256 * 1024, 10_000
_AT_ONCE, _WAITING = 2, 16
_PATIENCE_S = 60.0
_KEPT_BYTES = 400_000_000
_STATM = Path("/proc/self/statm")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class ParsePool:
    """Calls functions on bodies, a few large ones at once.

    A function that gets a process must be one of a module, and its arguments and its result are
    pickled between two processes of ours. Of our errors it may raise those that are made of a
    message alone; another one arrives as an `InputError` of its message.

    ``cpu_s``, ``memory_bytes``: what one call in a process may take of processor time and address
    space.
    """

    def __init__(self, cpu_s: float = 5.0, memory_bytes: int = 2 * 1024**3) -> None:
        self._limits = (cpu_s, memory_bytes)
        self._threads = ThreadPoolExecutor(_AT_ONCE, "parse")
        # Each holds the interpreter's lock for as long as it reads.
        self._few = CapacityLimiter(_AT_ONCE)
        self._workers: set[_ParseWorker] = set()
        self._idle: list[_ParseWorker] = []
        self._num_waiting = 0
        self._is_closed = False
        self._lock = threading.Lock()

    async def run(self, function: Callable[[*Ts], T], *args: *Ts, is_heavy: bool = False) -> T:
        """Return what a function makes of its arguments.

        ``is_heavy``: whether it makes much of little: it then gets a process as if they were large.
        Raises `BodyTooHeavyError` if that takes too much time or memory; `TooManyBodiesError` if
        too many large ones wait; what the function raises.
        """
        if not is_heavy and _is_light(args):
            return await to_thread.run_sync(partial(function, *args), limiter=self._few)
        return await asyncio.wrap_future(self._begin(function, args))

    def run_from_thread(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Return the same to a thread that waits for it."""
        return function(*args) if _is_light(args) else self._begin(function, args).result()

    @property
    def num_waiting(self) -> int:
        """How many calls wait for a process."""
        return self._num_waiting

    def close(self) -> None:
        """End the processes, and with them whatever they are reading."""
        with self._lock:
            self._is_closed = True
            workers = list(self._workers)
        for worker in workers:
            worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in workers:
            worker.close()

    def _begin(self, function: Callable[..., T], args: Sequence[Any]) -> Future[T]:
        with self._lock:
            if self._num_waiting >= _WAITING:
                raise TooManyBodiesError(self._num_waiting)
            self._num_waiting += 1
        call = self._threads.submit(self._call, function, args)
        call.add_done_callback(self._leave)
        return call

    def _leave(self, call: Future[Any]) -> None:
        """Count a call no more that its caller gave up, and that has not begun."""
        if call.cancelled():
            with self._lock:
                self._num_waiting -= 1

    def _call(self, function: Callable[..., T], args: Sequence[Any]) -> T:
        """Call in a process that has nothing to do, or in a new one; keep it unless it is spent."""
        worker = self._take()
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

    def _take(self) -> _ParseWorker:
        with self._lock:
            self._num_waiting -= 1
            if self._idle:
                return self._idle.pop()
            worker = _ParseWorker(*self._limits)
            self._workers.add(worker)
            if self._is_closed:
                worker.kill()
        return worker


def _is_light(args: Sequence[Any]) -> bool:
    """Whether to read them takes some milliseconds; ten thousand faults in a body take 20."""
    texts = [arg.encode() if isinstance(arg, str) else arg for arg in args]
    bodies = [text for text in texts if isinstance(text, bytes)]
    num_values = sum(body.count(b",") for body in bodies)
    return sum(map(len, bodies)) <= _IN_THREAD_BYTES and num_values <= _IN_THREAD_VALUES


class _ParseWorker:
    """An executor of one process: a call that ends its process takes no other one with it."""

    def __init__(self, cpu_s: float, memory_bytes: int) -> None:
        self._cpu_s = cpu_s
        context = multiprocessing.get_context("spawn")
        # The process ends when this end is closed, or gone with the server.
        theirs, self._life = context.Pipe(duplex=False)
        self._theirs = theirs
        self._executor = ProcessPoolExecutor(
            1, context, initializer=_begin_process, initargs=(memory_bytes, theirs)
        )

    def call(self, function: Callable[..., T], args: Sequence[Any]) -> tuple[T, bool]:
        """Return the result, and whether the process has grown so much that it should end."""
        # A limit of patience, too: the process's own counts only what it computes.
        call = self._executor.submit(_call_within, self._cpu_s, function, args)
        return call.result(_PATIENCE_S)

    def kill(self) -> None:
        """End the process; whoever waits for it hears of that."""
        self._life.close()

    def close(self) -> None:
        """End the process, when nobody waits for it any more; it is gone when this returns."""
        self.kill()
        self._executor.shutdown()
        self._theirs.close()


# --- In the process.


def _begin_process(memory_bytes: int, life: Connection) -> None:
    """Limit this process; let it end when the other end of a connection is closed."""
    # Ctrl-C in a terminal is the server's to handle, and what is printed is no answer to anybody.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    threading.Thread(target=_end_with, args=(life,), daemon=True).start()


def _end_with(life: Connection) -> None:
    life.poll(None)
    os._exit(1)


def _call_within(cpu_s: float, function: Callable[..., T], args: Sequence[Any]) -> tuple[T, bool]:
    """Return the result of a call, and whether this process holds too much memory to be kept.

    One that takes too long is ended by the system, and the process with it.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit_cpu_time(math.ceil(used.ru_utime + used.ru_stime + cpu_s))
    try:
        result = function(*args)
    except OptPipeError as error:
        if type(error).__init__ in (OptPipeError.__init__, InputError.__init__):
            raise
        places = error.pointers if isinstance(error, InputError) else ()
        raise InputError(str(error)).at(*places) from None
    finally:
        _limit_cpu_time(resource.RLIM_INFINITY)
    # What was freed inside of the process would stay its own.
    return result, _memory_bytes() > _KEPT_BYTES


def _limit_cpu_time(seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))


def _memory_bytes() -> int:
    """Return how much memory the process has now; where no /proc says, how much it ever had.

    Linux begins the latter with what the parent had: every child of a large server would be large.
    """
    if _STATM.exists():
        return int(_STATM.read_text("ascii").split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
