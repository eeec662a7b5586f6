"""What the service asks of a solver process, wherever it runs: `local` and `ray` give them.

A process takes one job or one comparison (`optpipe_api.engine.worker`) and is used up. Whoever
holds one talks to it by `Message`; what it runs on, and how the frames get there, is its own
affair.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from optpipe_api.engine.messages import Message

__all__ = ["Place", "SolverProcess", "Solvers"]


class Place(Enum):
    """Whether a process has a machine to run on."""

    PENDING = auto()
    """Not yet: a cluster has no room for it at the moment."""
    GIVEN = auto()
    """It has, and may have ended there."""
    LOST = auto()
    """It had, or will never have: its machine is gone."""


class SolverProcess(Protocol):
    """One process, for one job or one comparison; used by one thread at a time."""

    @property
    def name(self) -> str:
        """What people find it by: a process id, and where."""

    @property
    def place(self) -> Place:
        """Whether it has a machine; asks nobody who could make us wait."""

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs, or will once it has a place."""

    def send(self, message: Message) -> None:
        """Say something; a process that is gone hears nothing, and `receive` will tell."""

    def receive(self, timeout_s: float) -> list[Message] | None:
        """Return what has come within the time, often nothing; None when the process has ended."""

    def stop(self) -> None:
        """End the process, kindly first; it is gone, or out of reach, when this returns."""

    def how_it_died(self) -> str:
        """Return a clause that says how the process ended."""


class Solvers(Protocol):
    """Where solver processes come from; safe to use from several threads."""

    def start(self) -> SolverProcess:
        """Start one.

        Raises
        ------
        SolverFailedError
            If none can be started.
        """

    def close(self) -> None:
        """Let go of what the processes run on; all are stopped by then."""
