"""What is old goes: jobs, deployments and batches that ended long ago, looked for once an hour.

Every server does it; what one has deleted the others do not find. A batch goes whole, when the
last of its jobs is old; jobs of a deployment stay as long as it goes on.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import structlog

from optpipe_api.desk.rounds import Rounds

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_api.store import Stores

__all__ = ["Retention"]

_EVERY_S = 3600.0
_DAY_S = 86_400.0
_AT_ONCE = 200


class Retention:
    """Deletes what ended more than ``days`` ago.

    In small transactions, so that others who write wait only for moments.
    """

    def __init__(self, stores: Stores, days: float, clock: Callable[[], float] = time.time) -> None:
        self._stores = stores
        self._days = days
        self._now = clock
        self._is_closing = False
        self._rounds = Rounds(self.sweep, _EVERY_S, "retention")

    def start(self) -> None:
        """Begin, with a first sweep now."""
        self._rounds.start()

    def close(self) -> None:
        """End after the transaction that is under way."""
        self._is_closing = True
        self._rounds.close()

    def sweep(self) -> None:
        """Delete all that is old now."""
        before = self._now() - self._days * _DAY_S
        # Deployments first: they hold jobs.
        deleted = {
            "deployments": self._delete(self._stores.deployments.delete_ended, before),
            "jobs": self._delete(self._stores.jobs.delete_finished, before),
        }
        if any(deleted.values()):
            structlog.get_logger(__name__).info(
                f"deleted what ended more than {self._days:g} days ago",
                action="retention.deleted",
                **deleted,
            )

    def _delete(self, delete: Callable[[float, int], int], before: float) -> int:
        total, found = 0, _AT_ONCE
        while found == _AT_ONCE and not self._is_closing:
            found = delete(before, _AT_ONCE)
            total += found
        return total
