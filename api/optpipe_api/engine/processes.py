"""Solver processes: how they are started, spoken to and stopped, and what they may use."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any, Protocol

from optpipe_api.errors import SolverFailedError

if TYPE_CHECKING:
    from optpipe_api.settings import Settings

__all__ = [
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
# A text is sent as bytes of a known length (`Connection.send_bytes`); nothing is ever unpickled.
#
# ==========  =========  ===========================================  ==========================
# to          kind       header                                       documents
# ==========  =========  ===========================================  ==========================
# process     job        kind (of the job), options, is_carried       those of the job
# process     stop       (finish now, keep the best)
# server      ready      (imports are done)
# server      progress   seconds, method, objective_ms, bound_ms      what is better now
# server      said       text (a sentence for the history)
# server      result     status, objective_ms, bound_ms, method,      the answer
#                        message, needs
# server      retired    (it takes no more jobs, and ends)
# server      error      code, message
# ==========  =========  ===========================================  ==========================


@dataclass(frozen=True, slots=True)
class Message:
    """A message between server and solver process.

    ``documents``: kind of document (`optpipe_api.jobs.DocumentKind`) -> JSON text, which the server
    stores without reading it.
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


# --- What the service asks of a solver process, wherever it runs: here, or on a Ray cluster.
# A process takes one job or comparison after the other (`optpipe_api.engine.worker`).


class MachineState(Enum):
    """Whether a process has a machine to run on."""

    PENDING = auto()
    """Not yet: a cluster has no room for it at the moment."""
    GIVEN = auto()
    """It has, and may have ended there."""
    LOST = auto()
    """It had, or will never have: its machine is gone."""


class SolverProcess(Protocol):
    """One process, for one job or comparison at a time; used by one thread at a time."""

    @property
    def name(self) -> str:
        """What people find it by: a process id, and where."""

    @property
    def is_kept(self) -> bool:
        """Whether it may get another job; on a cluster its place is for whoever waits longest."""

    @property
    def place(self) -> MachineState:
        """Whether it has a machine; asks nobody who could make us wait."""

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs, or will once it has a place."""

    def send(self, message: Message) -> None:
        """Say something; a process that is gone hears nothing, and `receive` will tell."""

    def receive(self, timeout_s: float) -> Message | None:
        """Return the next message; None where none has come within the time.

        Raises `EOFError` if the process has ended, and has said nothing more.
        """

    def stop(self) -> None:
        """End the process, kindly first; it is gone, or out of reach, when this returns."""

    def how_it_died(self) -> str:
        """Return a clause that says how the process ended."""


class Solvers(Protocol):
    """Where solver processes come from; safe to use from several threads."""

    def start(self) -> SolverProcess:
        """Start one.

        Raises `SolverFailedError` if none can be started.
        """

    def close(self) -> None:
        """Let go of what the processes run on; all are stopped by then."""


# --- Solver processes on this machine.

_TERMINATE_S = 0.15


def worker_arguments(settings: Settings) -> str:
    """Return what a solver process is told on its command line, as JSON."""
    return json.dumps(
        {
            "solve_path": settings.solve_path,
            "compare_path": settings.compare_path,
            "plan_path": settings.plan_path,
            "tune_path": settings.tune_path,
            "memory_bytes": settings.solver_memory_bytes,
            "overtime_s": settings.overtime_s,
            "engine": settings.engine,
        }
    )


class SolverChild:
    """A `SolverProcess` that is a child of this one.

    A new interpreter rather than a fork: forked threads and database connections are broken, and
    nothing of the server's memory is of use there.

    Raises `OSError` if it cannot be started.
    """

    def __init__(self, arguments: str) -> None:
        self._connection, theirs = Pipe()
        try:
            # -P: a file called json.py in the current folder must not become our json. A process
            # group of its own: Ctrl-C in a terminal is the server's to handle. Native code prints
            # to standard output, where it may please: to our standard error.
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
            self._connection.close()
            raise
        finally:
            theirs.close()

    is_kept = True

    @property
    def name(self) -> str:
        """The process id."""
        return str(self._process.pid)

    @property
    def place(self) -> MachineState:
        """On the machine of the server, always."""
        return MachineState.GIVEN

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, message: Message) -> None:
        self.send_bytes(encode(message))

    def receive(self, timeout_s: float) -> Message | None:
        """Return the next message; None where none has come within the time."""
        data = self.receive_bytes(timeout_s)
        return None if data is None else decode(data)

    def send_bytes(self, data: bytes) -> None:
        """Say something that is encoded already; a process that is gone hears nothing."""
        try:
            self._connection.send_bytes(data)
        except OSError:
            return

    def receive_bytes(self, timeout_s: float) -> bytes | None:
        """Return the next message as it came; raises as `receive`."""
        try:
            return self._connection.recv_bytes() if self._connection.poll(timeout_s) else None
        except OSError as error:
            raise EOFError from error

    def end(self) -> None:
        """End the process, SIGTERM, then SIGKILL, leaving the connection to who reads it still."""
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(_TERMINATE_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def stop(self) -> None:
        """End the process; it is gone when this returns."""
        self.end()
        self._connection.close()

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


class LocalSolvers:
    """Starts solver processes as children of this server."""

    def __init__(self, settings: Settings) -> None:
        self._arguments = worker_arguments(settings)

    def start(self) -> SolverChild:
        """Start one.

        Raises `SolverFailedError` if it cannot be started.
        """
        try:
            return SolverChild(self._arguments)
        except OSError as error:
            raise SolverFailedError(
                f"cannot start a solver process: {error}; does this machine have memory and room "
                "for another process? Lower OPTPIPE_SOLVER_PROCESSES or try again later"
            ) from error

    def close(self) -> None:
        """Nothing to let go of: processes are stopped by whoever started them."""


# --- What a solver process may use of its machine; it limits itself, before it reads a job.
# The server watches the clock; these limits hold even where the server hangs, or a solver starts
# more threads than it was told to. Ended by one, the attempt has died, and the server's log says by
# which.

_NICENESS = 5
_MAX_FILES = 256


def limit_process(memory_bytes: int | None) -> None:
    """Be nice, leave no core file, open few files; and take no more address space than this."""
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _lower(resource.RLIMIT_NOFILE, _MAX_FILES)
    if memory_bytes is not None:
        _lower(resource.RLIMIT_AS, memory_bytes)


def limit_cpu(options: dict[str, Any], overtime_s: float) -> None:
    """Take no more processor time for a job than its threads can until the server stops it.

    That is ``threads x (time_limit_s + overtime_s)``, on top of what was taken before.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    allowed_s = options["threads"] * (options["time_limit_s"] + overtime_s)
    # The soft limit, which brings SIGXCPU: the next job has one of its own.
    limit_s = math.ceil(usage.ru_utime + usage.ru_stime + allowed_s) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard == resource.RLIM_INFINITY or limit_s < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, hard))


def _lower(kind: int, limit: int) -> None:
    """Set a limit, or leave one that is lower already."""
    _, given = resource.getrlimit(kind)
    if given == resource.RLIM_INFINITY or limit < given:
        resource.setrlimit(kind, (limit, limit))
