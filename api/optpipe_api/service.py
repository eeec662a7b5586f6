"""What the service does, without HTTP: routes call it, it calls the stores and the engine."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from optpipe_api.desk.batches import BatchDesk
from optpipe_api.desk.cache import Recall
from optpipe_api.desk.charts import Charts
from optpipe_api.desk.deployments import DeploymentDesk
from optpipe_api.desk.forms import Forms
from optpipe_api.desk.jobs import JobDesk, check_size
from optpipe_api.desk.readers import Readers
from optpipe_api.desk.what_ifs import WhatIfDesk
from optpipe_api.engine.comparison import Comparisons
from optpipe_api.engine.observer import SILENT
from optpipe_api.engine.slots import SlotEngine
from optpipe_api.engine.solvers import open_solvers
from optpipe_api.errors import StoreUnavailableError
from optpipe_api.methods import load_methods
from optpipe_api.places import Places
from optpipe_api.retention import Retention
from optpipe_api.store import open_stores

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from optpipe_api.changes import Changes
    from optpipe_api.desk.intake import Intake
    from optpipe_api.engine.comparison import CompareOptions
    from optpipe_api.engine.observer import Observer
    from optpipe_api.jobs import JobState
    from optpipe_api.settings import Settings
    from optpipe_api.store import Stores

__all__ = ["Service"]

_IS_GONE_EVERY_S = 0.1
_COUNTS_FRESH_S = 1.0


class Service:
    """One server's stores and engine. Coroutines are for the event loop, all else for threads.

    Attributes
    ----------
    methods
        Those that jobs may ask for, with a line about each.
    keys
        The store of API keys.
    readers
        Read request bodies beside the event loop.
    places
        For those who follow or wait.
    jobs
        What it does about jobs.
    batches
        What it does about many problems handed in at once.
    what_ifs
        What it does about questions what more would buy a job.
    forms
        Other forms of schedules and frontiers than JSON.
    charts
        Those that a browser shows and zooms.
    deployments
        What it does about training runs that follow a schedule.
    """

    def __init__(
        self,
        settings: Settings,
        stores: Stores,
        changes: Changes,
        methods: Mapping[str, str],
        observer: Observer = SILENT,
    ) -> None:
        self.settings = settings
        self.methods = methods
        self.keys = stores.keys
        self.readers = Readers()
        self.places = Places(settings.max_followers, settings.max_followers_per_key)
        self._stores = stores
        self._changes = changes
        self._counting = threading.Lock()
        self._counts: dict[JobState, int] | None = None
        self._counted_at = 0.0
        self._solvers = open_solvers(settings)
        self._engine = SlotEngine(
            stores.jobs, settings, self._publish, self._solvers.start, observer
        )
        self._comparisons = Comparisons(settings, self._solvers.start)
        recall = Recall(settings, stores.jobs, self.readers)
        self.jobs = JobDesk(
            settings, stores.jobs, self._engine, changes, recall=recall, observer=observer
        )
        self.batches = BatchDesk(settings, stores, self.jobs, changes)
        self.what_ifs = WhatIfDesk(settings, stores, self.jobs, self.batches, self.readers)
        self.deployments = DeploymentDesk(settings, stores, self.jobs, changes)
        self.forms = Forms(self.readers)
        self.charts = Charts()
        days = settings.retention_days
        self._retention = None if days is None else Retention(stores, days)

    @classmethod
    def open(cls, settings: Settings, changes: Changes, observer: Observer = SILENT) -> Service:
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
        self.readers.close()
        self._comparisons.close()
        self._engine.close()
        self._solvers.close()
        self._stores.close()

    async def compare(
        self,
        intake: Intake,
        options: CompareOptions,
        is_gone: Callable[[], Awaitable[bool]],
    ) -> str:
        """Compare every method and return the rows as a text of the form asked for.

        Parameters
        ----------
        is_gone
            Whether the client is; asked often. Its comparison is then stopped.

        Raises
        ------
        ProblemError
            If the problem is larger than this service takes.
        WorldError
            If too many are under way, or the solver fails, or the server is stopping.
        """
        check_size(self.settings, intake.num_cells, intake.num_microbatches)
        gone = threading.Event()
        work = asyncio.wrap_future(self._comparisons.begin(intake.document, options, gone))
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=_IS_GONE_EVERY_S)
                if self._changes.is_closed or await is_gone():
                    gone.set()
            return await work
        finally:
            gone.set()

    def _publish(self, job_id: str) -> None:
        """Say that a job has changed, and with it those that share its solve; for threads."""
        self._changes.publish(job_id)
        # Should the store not answer now, they are looked at again in a second.
        with suppress(StoreUnavailableError):
            for other in self._stores.jobs.sharing(job_id):
                self._changes.publish(other)

    def counts(self) -> dict[JobState, int]:
        """Return the number of jobs in each state."""
        return self._stores.jobs.counts()

    def recent_counts(self) -> dict[JobState, int]:
        """Return the same, a second old at most.

        To count them takes as long as there are jobs, and whoever asks whether the service is ready
        needs no key.
        """
        with self._counting:
            if self._counts is None or time.monotonic() > self._counted_at + _COUNTS_FRESH_S:
                self._counts = None
                self._counts = self.counts()
                self._counted_at = time.monotonic()
            return dict(self._counts)

    @property
    def is_solving(self) -> bool:
        """Whether the engine takes jobs, and can solve them."""
        return self._engine.is_able
