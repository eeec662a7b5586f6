"""Who wants to know how jobs fare: measured at the service's edge, told from within."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from optpipe_api.jobs import Job

__all__ = ["SILENT", "Observer"]


class Observer(Protocol):
    """Is told by threads of the engine and of requests, and must neither block nor raise."""

    def accepted(self, job: Job) -> None:
        """A job was taken in; it may be finished already."""

    def started(self, job: Job) -> None:
        """An attempt at a job begins."""

    def ended(self, job: Job, seconds: float) -> None:
        """An attempt ended after so long, and left the job in this state."""


class _Silent:
    """Wants to know nothing."""

    def accepted(self, job: Job) -> None:
        """Ignore it."""

    def started(self, job: Job) -> None:
        """Ignore it."""

    def ended(self, job: Job, seconds: float) -> None:
        """Ignore it."""


SILENT: Observer = _Silent()
"""For engines that nobody watches."""
