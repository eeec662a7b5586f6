"""What the service does, without HTTP: routes call it, it calls the stores and the engine."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import structlog

from optpipe_api.engine.engine import NO_OBSERVER, SlotEngine, open_solvers
from optpipe_api.services.batches import BatchService
from optpipe_api.services.deployments import DeploymentService, Rounds
from optpipe_api.services.events import ConnectionLimit, SharedCalls
from optpipe_api.services.jobs import JobCache, JobService
from optpipe_api.services.parse_pool import ParsePool
from optpipe_api.services.render import Charts
from optpipe_api.store import open_stores

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from optpipe.answers import JobState
    from optpipe_api.engine.engine import EngineObserver
    from optpipe_api.services.events import Changes
    from optpipe_api.settings import Settings
    from optpipe_api.store import Stores

__all__ = ["Retention", "Service", "load_methods"]


_COUNTS_FRESH_S = 1.0


class Service:
    """One server's stores and engine. Coroutines are for the event loop, all else for threads.

    ``methods``: those that jobs may ask for, with a line about each. ``keys``: the store of API
    keys. ``pool``: reads request bodies beside the event loop. ``connections``: how many follow or
    wait, and may. ``shared``: reads once what many ask for at the same time. ``jobs``: what it does
    about jobs. ``batches``: what it does about many problems handed in at once. ``charts``: of
    schedules and frontiers, for a browser to zoom or as pictures. ``deployments``: what it does
    about training runs that follow a schedule.
    """

    def __init__(
        self,
        settings: Settings,
        stores: Stores,
        changes: Changes,
        methods: Mapping[str, str],
        observer: EngineObserver = NO_OBSERVER,
    ) -> None:
        self.settings = settings
        self.methods = methods
        self.keys = stores.keys
        self.pool = ParsePool()
        self.connections = ConnectionLimit(settings.max_followers, settings.max_followers_per_key)
        self.shared = SharedCalls()
        self._stores = stores
        self._changes = changes
        self._counting = threading.Lock()
        self._counts: dict[JobState, int] | None = None
        self._counted_at = 0.0
        self._solvers = open_solvers(settings)
        self._engine = SlotEngine(
            stores.jobs, settings, changes.publish, self._solvers.start, observer
        )
        cache = JobCache(settings, stores.jobs, self.pool)
        self.jobs = JobService(
            settings, stores.jobs, self._engine, changes, cache=cache, observer=observer
        )
        self.batches = BatchService(settings, stores, self.jobs, changes, self.pool)
        self.deployments = DeploymentService(settings, stores, self.jobs, changes)
        self.charts = Charts()
        days = settings.retention_days
        self._retention = Retention(stores, days) if days else None

    @classmethod
    def open(
        cls, settings: Settings, changes: Changes, observer: EngineObserver = NO_OBSERVER
    ) -> Service:
        """Return a service that solves; takes about a second, as it loads the solver's methods."""
        stores = open_stores(settings.database_url)
        service = cls(settings, stores, changes, load_methods(), observer)
        service._engine.start()
        service.deployments.start()
        if service._retention is not None:
            service._retention.start()
        return service

    def close(self) -> None:
        """Give running jobs back and let go of everything."""
        if self._retention is not None:
            self._retention.close()
        self.deployments.close()
        self.charts.close()
        self.pool.close()
        self._engine.close()
        self._solvers.close()
        self._stores.close()

    def counts(self) -> dict[JobState, int]:
        return self._stores.jobs.counts()

    def recent_counts(self) -> dict[JobState, int]:
        """Return the same, a second old at most; raise where the store takes no writes.

        To count them takes as long as there are jobs, and whoever asks whether the service is ready
        needs no key.
        """
        with self._counting:
            if self._counts is None or time.monotonic() > self._counted_at + _COUNTS_FRESH_S:
                self._counts = None
                self._stores.probe()
                self._counts = self.counts()
                self._counted_at = time.monotonic()
            return dict(self._counts)

    @property
    def is_solving(self) -> bool:
        """Whether the engine takes jobs, and can solve them."""
        return self._engine.can_solve


# --- What is old goes: jobs, deployments and batches that ended long ago, looked for once an hour.
# Every server does it; what one has deleted the others do not find. A batch goes whole, when the
# last of its jobs is old; jobs of a deployment stay as long as it goes on.

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


# --- The methods that the solver knows, each with one line about it.

_AUTO = (
    "The optimiser: the best of all methods as a start, improved by local search and "
    "polished building blocks, with a bound proven by exact searches."
)
_MILP = "The full-horizon MILP alone: order and offload together, below the best published method."


def load_methods() -> dict[str, str]:
    """Return every method's name and description.

    The first call imports the solver, half a second: make it in a thread.
    """
    from optpipe_solver import METHODS  # noqa: PLC0415 - heavy; the service needs it, workers too
    from optpipe_solver.families import FAMILIES  # noqa: PLC0415 - likewise

    described = {"auto": _AUTO, "milp": _MILP} | {
        family.name: family.summary for family in FAMILIES
    }
    return {name: described[name] for name in METHODS}
