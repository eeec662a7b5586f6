"""Solver processes on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_api.engine.messages import FrameBuffer, Message, encode
from optpipe_api.engine.pipes import Pipes, worker_arguments
from optpipe_api.engine.process import Place
from optpipe_api.errors import SolverFailedError

if TYPE_CHECKING:
    from optpipe_api.settings import Settings

__all__ = ["LocalProcess", "LocalSolvers"]


class LocalProcess:
    """A `SolverProcess` that is a child of this server.

    Raises
    ------
    SolverFailedError
        If it cannot be started.
    """

    def __init__(self, settings: Settings) -> None:
        try:
            self._pipes = Pipes(worker_arguments(settings))
        except OSError as error:
            raise SolverFailedError(
                f"cannot start a solver process: {error}; does this machine have memory and room "
                "for another process? Lower OPTPIPE_SOLVER_PROCESSES or try again later"
            ) from error
        self._buffer = FrameBuffer()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._pipes.pid

    @property
    def name(self) -> str:
        """The process id."""
        return str(self.pid)

    @property
    def place(self) -> Place:
        """On the machine of the server, always."""
        return Place.GIVEN

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self._pipes.is_alive

    def send(self, message: Message) -> None:
        """Say something."""
        self._pipes.write(encode(message))

    def receive(self, timeout_s: float) -> list[Message] | None:
        """Return what has come within the time; None when the process has ended."""
        data = self._pipes.read(timeout_s)
        return None if data is None else self._buffer.feed(data)

    def stop(self) -> None:
        """End the process; it is gone when this returns."""
        self._pipes.end()
        self._pipes.close()

    def how_it_died(self) -> str:
        """Return a clause that says how the process ended."""
        return self._pipes.how_it_died()


class LocalSolvers:
    """Starts solver processes as children of this server."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def start(self) -> LocalProcess:
        """Start one."""
        return LocalProcess(self._settings)

    def close(self) -> None:
        """Nothing is held: processes are stopped by whoever started them."""
