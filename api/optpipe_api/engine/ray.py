"""Solver processes on a Ray cluster: an actor starts each one and passes its messages on.

The server is a driver of the cluster that ``RAY_ADDRESS`` names. It runs on a node of the cluster,
or on a machine that joined it by ``ray start --address``. An actor runs on any node with free
cores. It starts the same ``python -m optpipe_api.engine.worker`` as `LocalSolvers`, with the same
limits. Every node needs OptPipe in the server's version.

Only bytes cross the cluster between server and actor. They are JSON texts, and are parsed as such
(`optpipe_api.engine.processes`), so nothing that a client sent is ever unpickled. Ray pickles only
the objects that a solver process sends to its own tasks (`RayTasks`).

A dead actor, alone or with its node, is a death of the attempt: the job is queued again and
restarts from its best schedule. An actor ends with its driver, and its solver process with the
actor, so a killed server leaves no solver running. If the head of the cluster ends, Ray ends the
driver after a minute. The next server finds all jobs in the store.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing as mp
import os
import re
import resource
import socket
import time
from collections import deque
from functools import cache
from multiprocessing.connection import wait
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
    from collections.abc import Callable, Sequence
    from multiprocessing.pool import Pool

    from optpipe_api.settings import Settings

__all__ = ["RayProcess", "RaySolvers", "RayTasks", "SolverHost"]

_READ_S = 5.0
_ANSWER_S = 3.0
_FREE_CORE_S = 10.0
_CONNECT_S = 5.0
_KEEP_S = 60.0
"""Jobs of an actor begin within this time. The start of an actor takes seconds."""
_REACHABLE_S = 1.0
_TICK_S = 0.02
"""How long a wait for actors does not notice a request to return."""
_DEATH_CAUSE = re.compile(r"The actor is dead because ([^.\n]+)")


class SolverHost:
    """The actor: one solver process and the connection to it.

    A read waits for a message. Meanwhile writes go on, in the order of the calls.
    """

    def __init__(self, arguments: bytes) -> None:
        # The child's tasks must use this cluster, whatever the node's environment names.
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        self._child = SolverChild(arguments.decode())

    @ray.method(concurrency_group="read")
    def read(self, timeout_s: float) -> bytes | None:
        """Return the next message; empty if none comes within the timeout, None at the end."""
        try:
            return self._child.receive_bytes(timeout_s) or b""
        except EOFError:
            return None

    @ray.method(concurrency_group="write")
    def write(self, data: bytes) -> None:
        self._child.send_bytes(data)

    def end(self) -> None:
        """End the process; the connection stays open for a read that waits."""
        self._child.end()

    def describe_exit(self) -> bytes:
        """Return a clause on how the process ended."""
        return self._child.describe_exit().encode()


class RayProcess:
    """A `SolverProcess` of the cluster.

    One read is always pending: its result carries a message, and its failure reports the death of
    the actor.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.pending = actor.read.remote(_READ_S)
        self._messages: deque[Message] = deque()
        self._machine = MachineState.PENDING
        self._has_ended = False
        self._death = ""
        self._given_at = 0.0

    @property
    def is_reusable(self) -> bool:
        """Whether it may get another job: an actor gives its cores to the next in line in time."""
        return time.monotonic() - self._given_at < _KEEP_S

    @property
    def name(self) -> str:
        """The actor, as Ray's own tools show it."""
        return str(self._actor)

    @property
    def machine(self) -> MachineState:
        """Whether the actor has a node."""
        self._poll(0)
        return self._machine

    @property
    def has_news(self) -> bool:
        """Whether `receive` has a message or the end of the process to tell, without a wait."""
        return bool(self._messages) or self._has_ended

    @property
    def is_alive(self) -> bool:
        """Whether the process runs, or will run."""
        self._poll(0)
        return not self._has_ended

    def send(self, message: Message) -> None:
        self._actor.write.remote(encode(message))

    def receive(self, timeout_s: float) -> Message | None:
        """Return the next message; None if none comes within the timeout."""
        if not self._messages:
            self._poll(timeout_s)
        if self._messages:
            return self._messages.popleft()
        if self._has_ended:
            raise EOFError
        return None

    def stop(self) -> None:
        """End the process, then the actor; do not wait for a node that does not answer."""
        with contextlib.suppress(RayError):
            if self.machine is MachineState.GIVEN:
                ray.wait([self._actor.end.remote()], timeout=_ANSWER_S)
            ray.kill(self._actor)

    def describe_exit(self) -> str:
        """Return a clause on how the process, or its actor, ended."""
        if self._death:
            return self._death
        try:
            clause: bytes = ray.get(self._actor.describe_exit.remote(), timeout=_ANSWER_S)
        except RayError as error:
            return _describe_death(error)
        return clause.decode()

    def _poll(self, timeout_s: float) -> None:
        """Take in the result of the pending read, if it comes within the timeout."""
        if self._has_ended or not ray.wait([self.pending], timeout=timeout_s)[0]:
            return
        try:
            data: bytes | None = ray.get(self.pending)
        except RayError as error:
            self._machine, self._has_ended = MachineState.LOST, True
            self._death = _describe_death(error)
            return
        if self._machine is MachineState.PENDING:
            self._given_at = time.monotonic()
        self._machine = MachineState.GIVEN
        if data is None:
            self._has_ended = True
            return
        if data:
            self._messages.append(decode(data))
        self.pending = self._actor.read.remote(_READ_S)


class RaySolvers:
    """Starts solver processes on the cluster; connects to it unless this process is connected.

    Raises `WorldError` if the cluster does not answer.
    """

    def __init__(self, settings: Settings) -> None:
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            try:
                _check_port(os.environ.get("RAY_ADDRESS", ""))
                ray.init(logging_level=logging.WARNING)
            except (OSError, RuntimeError, ValueError) as error:
                raise WorldError(
                    f"cannot connect to the Ray cluster: {_first_line(error)}; start Ray on this "
                    "machine (ray start --head, or ray start --address=HEAD:6379 to join a "
                    "cluster) and set RAY_ADDRESS to HEAD:6379"
                ) from error
        self._arguments = worker_arguments(settings).encode()
        as_actor: Any = ray.remote
        self._actor_class = as_actor(
            num_cpus=settings.ray_num_cpus,
            max_restarts=0,
            max_task_retries=0,
            concurrency_groups={"read": 1, "write": 1},
        )(SolverHost)

    def start(self) -> RayProcess:
        """Start a process, which waits for free cores of the cluster."""
        try:
            return RayProcess(self._actor_class.remote(self._arguments))
        except (RayError, ConnectionError) as error:
            raise SolverFailedError(
                f"cannot start a solver process on the Ray cluster: {_first_line(error)}; is the "
                "cluster that RAY_ADDRESS names up?"
            ) from error

    def wait(
        self, processes: Sequence[RayProcess], wake: socket.socket, timeout_s: float
    ) -> list[RayProcess]:
        """Return the processes that have a message or have ended; one call waits for all actors."""
        found = [one for one in processes if one.has_news]
        pending = {one.pending: one for one in processes}
        deadline = time.monotonic() + timeout_s
        while not found and not wait([wake], 0 if pending else timeout_s):
            left_s = deadline - time.monotonic()
            if not pending or left_s <= 0:
                break
            if ray.wait(list(pending), timeout=min(left_s, _TICK_S))[0]:
                done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
                found = [pending[one] for one in done]
        return found

    @property
    def is_reachable(self) -> bool:
        """Whether the head of the cluster takes a connection within a second."""
        try:
            _check_port(ray.get_runtime_context().gcs_address, _REACHABLE_S)
        except (OSError, RayError, RuntimeError):
            return False
        return True

    def close(self) -> None:
        """Disconnect from the cluster."""
        if self._is_ours:
            ray.shutdown()


class RayTasks:
    """Runs functions as tasks of one core each, on any node of this solver process's cluster.

    It is an `optpipe_solver.tune.TaskPool`. Tasks wait while the cluster is full, and Ray repeats a
    task whose node dies. Processes of this node run the tasks instead in two cases:

    * No core is free for a first task within seconds. Otherwise jobs could wait forever for cores
      that only those jobs would free.
    * This process may not map as much memory as a driver of the cluster needs.

    ``number``: of tasks at a time. ``log``: called with a sentence on where the tasks run.
    """

    def __init__(self, number: int, log: Callable[[str], None]) -> None:
        self._number = number
        self._log = log
        self._local: Pool | None = None

    def __enter__(self) -> Self:
        obstacle = self._connect()
        if obstacle:
            self._local = mp.get_context("spawn").Pool(self._number)
            self._log(f"candidates: {self._number} processes of one node at a time, as {obstacle}")
        else:
            self._log(f"candidates: {self._number} tasks of the Ray cluster at a time")
        return self

    def __exit__(self, *_: object) -> None:
        if self._local is not None:
            self._local.terminate()
        ray.shutdown()

    def apply_async(self, function: Callable[..., Any], arguments: tuple[Any, ...], /) -> Any:
        """Return the future result: a `multiprocessing.pool.AsyncResult`, or a similar object."""
        if self._local is not None:
            return self._local.apply_async(function, arguments)
        return _RayTask(_as_task(function).remote(*arguments))

    def _connect(self) -> str:
        """Connect to the cluster; return why it cannot run the tasks, or an empty text."""
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            return "OPTPIPE_SOLVER_MEMORY_BYTES leaves no room for what Ray maps"
        try:
            ray.init(logging_level=logging.WARNING, log_to_driver=False)
        except (OSError, RuntimeError, ValueError) as error:
            return f"the cluster does not answer it: {_first_line(error)}"
        first = _as_task(_do_nothing).remote()
        if ray.wait([first], timeout=_FREE_CORE_S)[0]:
            return ""
        ray.cancel(first)
        return "no core of the cluster is free"


class _RayTask:
    """The future result of a task."""

    def __init__(self, pending: Any) -> None:
        self._pending = pending

    def ready(self) -> bool:
        return bool(ray.wait([self._pending], timeout=0)[0])

    def wait(self, timeout: float) -> None:
        ray.wait([self._pending], timeout=timeout)

    def get(self) -> Any:
        """Return the result of the call.

        Raises `SolverFailedError` if the process or node of the task died in every try.
        """
        try:
            return ray.get(self._pending)
        except RayTaskError:
            raise
        except RayError as error:
            raise SolverFailedError(
                f"a candidate was lost on the Ray cluster: {_first_line(error)}; see whether its "
                "nodes are up and have memory, or ask for fewer threads"
            ) from error


@cache
def _as_task(function: Callable[..., Any]) -> Any:
    # Ray sends a function to the cluster each time that it is wrapped.
    as_task: Any = ray.remote
    return as_task(num_cpus=1)(function)


def _do_nothing() -> None:
    return


def _check_port(address: str, timeout_s: float = _CONNECT_S) -> None:
    """Connect to a ``host:port``, because Ray itself tries for two minutes.

    Raises `OSError` if nothing listens there.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal()):
        return
    try:
        socket.create_connection((host, int(port)), timeout=timeout_s).close()
    except OSError as error:
        raise OSError(f"nothing answers at RAY_ADDRESS = {address}: {error}") from error


def _describe_death(error: RayError) -> str:
    found = _DEATH_CAUSE.search(str(error))
    return f"its Ray actor died: {found[1] if found else _first_line(error)}"


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", maxsplit=1)[0] or type(error).__name__
