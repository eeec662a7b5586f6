"""Solver processes on a Ray cluster: each is started by, and spoken to through, an actor.

The server is a driver of the cluster that ``RAY_ADDRESS`` names, and runs on one of its nodes (or
beside a node that was joined to it by ``ray start --address``). An actor lives on whichever node
has the cores, starts the same ``python -m optpipe_api.engine.worker`` there that `local` starts
here, with the same limits, and hands its messages on. OptPipe must be installed on every node, in
the server's version.

Between server and actor only bytes cross the cluster, which Ray carries as they are; they are JSON
texts, and are read as such (`optpipe_api.engine.processes`). So nothing that a client sent is ever
unpickled. A solver process that tunes lets Ray pickle its own objects for its tasks (`RayTasks`).

An actor that dies, with its node or alone, is a death of the attempt: the job goes back to the
queue and starts again from its best. An actor dies with its driver, and its solver process with
it: a server that is killed leaves no solver behind. Should the head of the cluster go, Ray ends the
driver after a minute; the server that is started in its place finds all jobs in the store.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing as mp
import os
import re
import resource
import socket
from collections import deque
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import ray
from ray.exceptions import RayError, RayTaskError

from optpipe.errors import WorldError
from optpipe_api.engine.processes import (
    MachineState,
    Message,
    SolverChild,
    decode,
    encode,
    worker_arguments,
)
from optpipe_api.errors import SolverFailedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.pool import Pool

    from optpipe_api.settings import Settings

__all__ = ["RayProcess", "RaySolvers", "RayTasks", "SolverHost"]

_READ_S = 5.0
_ANSWER_S = 3.0
_CORE_S = 10.0
_KNOCK_S = 5.0
_WHY_DEAD = re.compile(r"The actor is dead because ([^.\n]+)")


class SolverHost:
    """The actor: one solver process and the connection to it.

    Reading waits for a message to come; writing goes on beside it, in the order of the calls.
    """

    def __init__(self, arguments: bytes) -> None:
        # For the child's tasks: this cluster, whatever else the node's environment names.
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        self._child = SolverChild(arguments.decode())

    @ray.method(concurrency_group="read")
    def read(self, timeout_s: float) -> bytes | None:
        """Return the next message, empty where none came within the time; None at the end."""
        try:
            return self._child.receive_bytes(timeout_s) or b""
        except EOFError:
            return None

    @ray.method(concurrency_group="write")
    def write(self, data: bytes) -> None:
        self._child.send_bytes(data)

    def end(self) -> None:
        """End the process, leaving the connection to whoever reads it still."""
        self._child.end()

    def how_it_died(self) -> bytes:
        """Return a clause that says how the process ended."""
        return self._child.how_it_died().encode()


class RayProcess:
    """A `SolverProcess` of the cluster.

    One read is under way at any time: its answer carries a message, and its failure is how the
    death of the actor is heard of.
    """

    is_kept = False

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._coming = actor.read.remote(_READ_S)
        self._messages: deque[Message] = deque()
        self._place = MachineState.PENDING
        self._has_ended = False
        self._death = ""

    @property
    def name(self) -> str:
        """The actor, as Ray's own tools show it."""
        return str(self._actor)

    @property
    def place(self) -> MachineState:
        """Whether the actor has a node."""
        self._look(0)
        return self._place

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs, or will."""
        self._look(0)
        return not self._has_ended

    def send(self, message: Message) -> None:
        self._actor.write.remote(encode(message))

    def receive(self, timeout_s: float) -> Message | None:
        """Return the next message; None where none has come within the time."""
        if not self._messages:
            self._look(timeout_s)
        if self._messages:
            return self._messages.popleft()
        if self._has_ended:
            raise EOFError
        return None

    def stop(self) -> None:
        """End the process, then the actor; a node that does not answer is not waited for."""
        with contextlib.suppress(RayError):
            if self.place is MachineState.GIVEN:
                ray.wait([self._actor.end.remote()], timeout=_ANSWER_S)
            ray.kill(self._actor)

    def how_it_died(self) -> str:
        """Return a clause that says how the process, or its actor, ended."""
        if self._death:
            return self._death
        try:
            clause: bytes = ray.get(self._actor.how_it_died.remote(), timeout=_ANSWER_S)
        except RayError as error:
            return _death_of(error)
        return clause.decode()

    def _look(self, timeout_s: float) -> None:
        """Take in what has come from the actor."""
        if self._has_ended or not ray.wait([self._coming], timeout=timeout_s)[0]:
            return
        try:
            data: bytes | None = ray.get(self._coming)
        except RayError as error:
            self._place, self._has_ended, self._death = MachineState.LOST, True, _death_of(error)
            return
        self._place = MachineState.GIVEN
        if data is None:
            self._has_ended = True
            return
        if data:
            self._messages.append(decode(data))
        self._coming = self._actor.read.remote(_READ_S)


class RaySolvers:
    """Starts solver processes on the cluster, and connects to it unless that is done already.

    Raises `WorldError` if the cluster cannot be reached.
    """

    def __init__(self, settings: Settings) -> None:
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            _connect()
        self._arguments = worker_arguments(settings).encode()
        as_actor: Any = ray.remote
        self._actor_class = as_actor(
            num_cpus=settings.ray_num_cpus,
            max_restarts=0,
            max_task_retries=0,
            concurrency_groups={"read": 1, "write": 1},
        )(SolverHost)

    def start(self) -> RayProcess:
        """Start one, as soon as the cluster has room for it."""
        try:
            return RayProcess(self._actor_class.remote(self._arguments))
        except (RayError, ConnectionError) as error:
            raise SolverFailedError(
                f"cannot start a solver process on the Ray cluster: {_first_line(error)}; is the "
                "cluster that RAY_ADDRESS names up?"
            ) from error

    def close(self) -> None:
        """Leave the cluster."""
        if self._is_ours:
            ray.shutdown()


class RayTasks:
    """Calls functions as tasks of one core each, anywhere on the cluster of this solver process.

    What `optpipe_solver.tune` asks of a pool. Tasks wait while the cluster is full, and one whose
    node dies is called again, elsewhere. Where there is no core for a first one within seconds,
    or this process may not hold what a driver of the cluster maps, processes of this node take
    the tasks: jobs that wait for cores which only they would free must not wait forever.

    ``number``: of tasks at a time. ``say``: told in a sentence where they run.
    """

    def __init__(self, number: int, say: Callable[[str], None]) -> None:
        self._number = number
        self._say = say
        self._local: Pool | None = None

    def __enter__(self) -> Self:
        why = self._why_not()
        if why:
            self._local = mp.get_context("spawn").Pool(self._number)
            self._say(f"candidates: {self._number} processes of one node at a time, as {why}")
        else:
            self._say(f"candidates: {self._number} tasks of the Ray cluster at a time")
        return self

    def __exit__(self, *_: object) -> None:
        if self._local is not None:
            self._local.terminate()
        ray.shutdown()

    def apply_async(self, function: Callable[..., Any], arguments: tuple[Any, ...], /) -> Any:
        """Return what will be returned, as a `multiprocessing.pool.AsyncResult` or like one."""
        if self._local is not None:
            return self._local.apply_async(function, arguments)
        return _RayTask(_as_task(function).remote(*arguments))

    def _why_not(self) -> str:
        """Return why the cluster cannot take the tasks; empty where it can."""
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            return "OPTPIPE_SOLVER_MEMORY_BYTES leaves no room for what Ray maps"
        try:
            ray.init(logging_level=logging.WARNING, log_to_driver=False)
        except (OSError, RuntimeError, ValueError) as error:
            return f"the cluster does not answer it: {_first_line(error)}"
        first = _as_task(_nothing).remote()
        if ray.wait([first], timeout=_CORE_S)[0]:
            return ""
        ray.cancel(first)
        return "no core of the cluster is free"


class _RayTask:
    """A call that goes on somewhere."""

    def __init__(self, coming: Any) -> None:
        self._coming = coming

    def ready(self) -> bool:
        return bool(ray.wait([self._coming], timeout=0)[0])

    def wait(self, timeout: float) -> None:
        ray.wait([self._coming], timeout=timeout)

    def get(self) -> Any:
        """Return what the call returned.

        Raises `SolverFailedError` if it was lost with its process or node, again and again.
        """
        try:
            return ray.get(self._coming)
        except RayTaskError:
            raise
        except RayError as error:
            raise SolverFailedError(
                f"a candidate was lost on the Ray cluster: {_first_line(error)}; see whether its "
                "nodes are up and have memory, or ask for fewer threads"
            ) from error


@cache
def _as_task(function: Callable[..., Any]) -> Any:
    # Ray sends a function to the cluster once for each time that it is wrapped.
    as_task: Any = ray.remote
    return as_task(num_cpus=1)(function)


def _nothing() -> None:
    """Take a core for a moment."""


def _connect() -> None:
    try:
        _knock(os.environ.get("RAY_ADDRESS", ""))
        ray.init(logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:
        raise WorldError(
            f"cannot connect to the Ray cluster: {_first_line(error)}; start Ray on this machine "
            "(ray start --head, or ray start --address=HEAD:6379 to join a cluster) and set "
            "RAY_ADDRESS to HEAD:6379"
        ) from error


def _knock(address: str) -> None:
    """Find out in a moment that nobody is there: Ray itself tries for two minutes.

    Raises `OSError` if nothing listens at a ``host:port``.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal()):
        return
    try:
        socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()
    except OSError as error:
        raise OSError(f"nothing answers at RAY_ADDRESS = {address}: {error}") from error


def _death_of(error: RayError) -> str:
    found = _WHY_DEAD.search(str(error))
    return f"its Ray actor died: {found[1] if found else _first_line(error)}"


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", maxsplit=1)[0] or type(error).__name__
