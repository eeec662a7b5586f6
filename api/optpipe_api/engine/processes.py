"""Solver processes: their messages, how to start and stop them, and their resource limits."""

from __future__ import annotations

import json
import math
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Protocol

from optpipe.requests import JobKind
from optpipe_api.errors import SolverFailedError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from optpipe_api.settings import Settings

__all__ = [
    "Channel",
    "LocalSolvers",
    "MachineState",
    "Message",
    "SolverChild",
    "SolverProcess",
    "Solvers",
    "decode",
    "encode",
    "limit_cpu",
    "limit_process",
    "worker_arguments",
]


# --- Messages between server and solver process: JSON texts over a `Connection`.
# `Connection.send_bytes` sends each text with its length. Nothing is unpickled.
#
# ==========  =========  ===========================================  ==========================
# to          kind       header                                       documents
# ==========  =========  ===========================================  ==========================
# process     job        kind (of the job), options,                  those of the job, and
#                        near (ids of jobs to start from)             problem and schedule of each
# process     stop       (finish now, keep the best)
# server      ready      (imports are done)
# server      near       job_id (the search starts from its schedule)
# server      progress   seconds, method, objective_ms, bound_ms      those that improved
# server      log        text (a sentence for the history)
# server      result     status, objective_ms, bound_ms, method,      the answer
#                        message, needs
# server      retired    (the process takes no more jobs, and ends)
# server      error      code, message
# ==========  =========  ===========================================  ==========================


@dataclass(frozen=True, slots=True)
class Message:
    """A message between server and solver process.

    ``documents``: JSON texts by their `optpipe_api.jobs.DocumentKind`. The server stores them
    without parsing.
    """

    kind: str
    header: dict[str, Any] = field(default_factory=dict)
    documents: dict[str, str] = field(default_factory=dict)


def encode(message: Message) -> bytes:
    """Return a message as JSON text."""
    return json.dumps(asdict(message)).encode()


def decode(data: bytes) -> Message:
    """Return the message of a JSON text."""
    return Message(**json.loads(data))


class Channel:
    """The connection of a solver process to its server; any thread may send.

    ``stop``: set when the server wants the running job to end. ``is_used``: whether a job has ended
    in this process. ``open_pool``: opens a pool of processes on the cluster; None without one.
    The process exits when the connection ends.
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

    def receive_job(self) -> Message:
        """Wait for the next job."""
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
            # A late stop of the job before must not stop this job.
            self.stop.clear()
            self._tasks.put(message)


# --- What the engine requires of solver processes, on this machine or on a Ray cluster.


class MachineState(Enum):
    """Whether a process has a machine to run on."""

    PENDING = auto()
    """Not yet: the cluster has no free cores at the moment."""
    GIVEN = auto()
    """The process has a machine, or has ended on it."""
    LOST = auto()
    """The machine is gone, or the process will never get one."""


class SolverProcess(Protocol):
    """One process (`optpipe_api.engine.worker`), which runs one job at a time.

    One thread at a time may use it.
    """

    @property
    def name(self) -> str:
        """A name for logs: a process id, and the place where it runs."""

    @property
    def is_reusable(self) -> bool:
        """Whether it may get another job; a cluster then gives its cores to the next in line."""

    @property
    def machine(self) -> MachineState:
        """Whether it has a machine; never waits for an answer of the cluster."""

    @property
    def is_alive(self) -> bool:
        """Whether the process runs, or will run once it has a machine."""

    def send(self, message: Message) -> None:
        """Send a message; a process that has ended ignores it, and `receive` will raise."""

    def receive(self, timeout_s: float) -> Message | None:
        """Return the next message; None if none comes within the timeout.

        Raises `EOFError` if the process has ended, and all its messages were returned.
        """

    def stop(self) -> None:
        """End the process, first by SIGTERM; wait until it is gone or out of reach."""

    def describe_exit(self) -> str:
        """Return a clause on how the process ended."""


class Solvers(Protocol):
    """A source of solver processes; any thread may use it, but one at a time may wait."""

    @property
    def is_reachable(self) -> bool:
        """Whether the machine or cluster of the processes answers; waits for a second at most."""

    def start(self) -> SolverProcess:
        """Start a process. Raises `SolverFailedError` if that is impossible."""

    def wait(self, processes: Sequence[Any], wake: socket.socket, timeout_s: float) -> list[Any]:
        """Return the processes that have a message or have ended, as soon as there is one.

        It returns early if ``wake`` can be read. Only this thread uses the processes meanwhile.
        """

    def close(self) -> None:
        """Release what the processes ran on, after all of them were stopped."""


# --- Solver processes on this machine.

_TERMINATE_S = 0.15
_OF_WORKER = {"solver_memory_bytes", "overtime_s", "engine"} | {f"{kind}_path" for kind in JobKind}


def worker_arguments(settings: Settings) -> str:
    """Return the settings that a solver process gets on its command line, as JSON text."""
    return settings.model_dump_json(include=_OF_WORKER)


class SolverChild:
    """A `SolverProcess` that is a child of this process.

    It is a new interpreter instead of a fork: forked threads and database connections are broken.

    Raises `OSError` if it cannot be started.
    """

    is_reusable = True
    machine = MachineState.GIVEN

    def __init__(self, arguments: str) -> None:
        self.connection, theirs = Pipe()
        try:
            # -P: a file json.py in the current folder must not replace our json. The process group
            # of its own keeps Ctrl-C in a terminal for the server. Standard output goes to our
            # standard error, because native code may print anything there.
            self._process = subprocess.Popen(  # noqa: S603 - all of it is ours
                [
                    *(sys.executable, "-P", "-m", "optpipe_api.engine.worker"),
                    *(str(theirs.fileno()), arguments),
                ],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                process_group=0,
            )
        except OSError:
            self.connection.close()
            raise
        finally:
            theirs.close()

    @property
    def name(self) -> str:
        """The process id."""
        return str(self._process.pid)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, message: Message) -> None:
        self.send_bytes(encode(message))

    def receive(self, timeout_s: float) -> Message | None:
        """Return the next message; None if none comes within the timeout."""
        data = self.receive_bytes(timeout_s)
        return None if data is None else decode(data)

    def send_bytes(self, data: bytes) -> None:
        """Send an encoded message; a process that has ended ignores it."""
        try:
            self.connection.send_bytes(data)
        except OSError:
            return

    def receive_bytes(self, timeout_s: float) -> bytes | None:
        """Return the next message, encoded; raises as `receive`."""
        try:
            return self.connection.recv_bytes() if self.connection.poll(timeout_s) else None
        except OSError as error:
            raise EOFError from error

    def end(self) -> None:
        """End the process by SIGTERM, then SIGKILL; the connection stays open for reading."""
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(_TERMINATE_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def stop(self) -> None:
        """End the process, and wait until it is gone."""
        self.end()
        self.connection.close()

    def describe_exit(self, patience_s: float = 1.0) -> str:
        """Return a clause on how the process ended."""
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


class LocalSolvers:
    """Starts solver processes as children of this server."""

    is_reachable = True

    def __init__(self, settings: Settings) -> None:
        self._arguments = worker_arguments(settings)

    def start(self) -> SolverChild:
        """Start a process. Raises `SolverFailedError` if that is impossible."""
        try:
            return SolverChild(self._arguments)
        except OSError as error:
            raise SolverFailedError(
                f"cannot start a solver process: {error}; does this machine have memory and room "
                "for another process? Lower OPTPIPE_SOLVER_PROCESSES or try again later"
            ) from error

    def wait(
        self, processes: Sequence[SolverChild], wake: socket.socket, timeout_s: float
    ) -> list[SolverChild]:
        """Return the processes that have a message or have ended."""
        found = set(map(id, wait([*(one.connection for one in processes), wake], timeout_s)))
        return [one for one in processes if id(one.connection) in found]

    def close(self) -> None:
        """Release nothing."""


# --- Resource limits, which a solver process sets for itself before it reads a job.
# The server has a timeout for each attempt. These limits hold even if the server hangs, or a solver
# starts more threads than its options allow. A process that a limit ends is a death of the attempt,
# and the server's log names the signal.

_NICENESS = 5
_MAX_FILES = 256


def limit_process(memory_bytes: int | None) -> None:
    """Lower this process's priority, and limit its core file, open files and address space."""
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for kind, limit in ((resource.RLIMIT_NOFILE, _MAX_FILES), (resource.RLIMIT_AS, memory_bytes)):
        _, hard = resource.getrlimit(kind)
        if limit is not None and (hard == resource.RLIM_INFINITY or limit < hard):
            resource.setrlimit(kind, (limit, limit))


def limit_cpu(options: dict[str, Any], overtime_s: float) -> None:
    """Limit the processor time of the next job to ``threads x (time_limit_s + overtime_s)``.

    After that time the server would stop the job.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    allowed_s = options["threads"] * (options["time_limit_s"] + overtime_s)
    # The soft limit sends SIGXCPU, and the next job can raise it.
    limit_s = math.ceil(usage.ru_utime + usage.ru_stime + allowed_s) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard == resource.RLIM_INFINITY or limit_s < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, hard))
