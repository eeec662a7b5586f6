"""The service without HTTP: routes call it, and it calls the stores and the engine."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from optpipe_api.bodies import Cursors
from optpipe_api.engine.engine import NO_OBSERVER, SlotEngine, open_solvers
from optpipe_api.services.batches import BatchService
from optpipe_api.services.events import ConnectionLimit, SharedCalls
from optpipe_api.services.jobs import JobService
from optpipe_api.services.parse_pool import ParsePool
from optpipe_api.services.render import Charts
from optpipe_api.services.tracing import Tracer
from optpipe_api.store import open_stores

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optpipe.answers import JobState
    from optpipe_api.engine.engine import EngineObserver
    from optpipe_api.services.events import Changes
    from optpipe_api.settings import Settings
    from optpipe_api.store import Stores

__all__ = ["Service", "load_methods"]


_COUNTS_FRESH_S = 1.0


class Service:
    """One server's stores and engine. Coroutines are for the event loop, other methods for threads.

    ``methods``: the descriptions of the methods that jobs may name. ``keys``: the store of API
    keys. ``cursors``: encrypts the positions of pages. ``pool``: parses request bodies outside the
    event loop. ``connections``: limits event streams and waiting requests. ``tracer``: traces
    configs without a formula. ``shared``: shares reads of clients at the same time. ``charts``:
    draws schedules and frontiers.
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
        self.tracer = Tracer(settings)
        self.connections = ConnectionLimit(settings.max_followers, settings.max_followers_per_key)
        self.shared = SharedCalls()
        self.cursors = Cursors(stores.secret())
        self._stores = stores
        self._changes = changes
        self._counts_lock = threading.Lock()
        self._counts: dict[JobState, int] | None = None
        self._counted_at = 0.0
        self._solvers = open_solvers(settings)
        self._engine = SlotEngine(stores.jobs, settings, changes.publish, self._solvers, observer)
        self.jobs = JobService(settings, stores.jobs, self._engine, changes, observer)
        self.batches = BatchService(settings, stores, self.jobs, changes, self.pool)
        self.charts = Charts()

    @classmethod
    def open(
        cls, settings: Settings, changes: Changes, observer: EngineObserver = NO_OBSERVER
    ) -> Service:
        """Return a started service, after about a second for the import of the solver."""
        stores = open_stores(settings.database_url)
        service = cls(settings, stores, changes, load_methods(), observer)
        service._engine.start()
        return service

    def close(self) -> None:
        """Queue running jobs again, and release all resources."""
        self.charts.close()
        self.pool.close()
        self._engine.close()
        self._solvers.close()
        self._stores.close()

    def counts(self) -> dict[JobState, int]:
        """Return the number of jobs in each state; the time grows with the number of jobs."""
        return self._stores.jobs.counts()

    def recent_counts(self) -> dict[JobState, int]:
        """Return the counts of at most a second ago, because readiness checks need no API key.

        Counts from before a write failed do not count. Raises `StoreUnavailableError` if the store
        accepts no writes.
        """
        with self._counts_lock:
            is_old = time.monotonic() > self._counted_at + _COUNTS_FRESH_S
            if self._counts is None or is_old or self._stores.is_failing:
                self._counts = None
                self._stores.probe()
                self._counts = self.counts()
                self._counted_at = time.monotonic()
            return dict(self._counts)

    @property
    def is_solving(self) -> bool:
        """Whether the engine claims jobs, and can solve them."""
        return self._engine.can_solve and self._solvers.is_reachable


# --- The methods of the solver, each with one line of description.

_AUTO = (
    "The optimiser: the best of all methods as a start, improved by local search and "
    "polished building blocks, with a bound proven by exact searches."
)
_MILP = "The full-horizon MILP alone: order and offload together, below the best published method."


def load_methods() -> dict[str, str]:
    """Return the description of every method, by name.

    Call it in a thread: the first call imports the solver, which takes half a second.
    """
    from optpipe_solver import METHODS  # noqa: PLC0415 - heavy
    from optpipe_solver.families import FAMILIES  # noqa: PLC0415 - heavy

    described = {"auto": _AUTO, "milp": _MILP} | {
        family.name: family.summary for family in FAMILIES
    }
    return {name: described[name] for name in METHODS}
