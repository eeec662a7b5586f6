"""The stores of the service, all in one database: SQLite or PostgreSQL.

Each aggregate has one class in one module, whose docstring is its contract: jobs, batches
and API keys. `statements` has every SQL statement, `tables` the tables.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optpipe_api.jobs import AttemptOutcome
from optpipe_api.store.batches import BatchStore
from optpipe_api.store.database import connect, is_failing, load_secret, probe
from optpipe_api.store.jobs import JobStore
from optpipe_api.store.keys import KeyStore

if TYPE_CHECKING:
    from collections.abc import Callable

    import sqlalchemy as sa

__all__ = ["AttemptOutcome", "JobStore", "KeyStore", "Stores", "open_stores"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """All stores of one database; they share its connections."""

    engine: sa.Engine
    jobs: JobStore
    batches: BatchStore
    keys: KeyStore

    @property
    def is_failing(self) -> bool:
        """Whether a write has failed since the last probe."""
        return is_failing(self.engine)

    def secret(self) -> str:
        """Return a random text that all servers of the database share."""
        return load_secret(self.engine)

    def probe(self) -> None:
        """Raise `StoreUnavailableError` unless the database accepts a write."""
        probe(self.engine)

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


def open_stores(
    url: str, clock: Callable[[], float] = time.time, *, must_exist: bool = False
) -> Stores:
    """Return the stores of a database, which is created or upgraded as needed.

    ``must_exist`` and errors: as `optpipe_api.store.database.connect`.
    """
    engine = connect(url, must_exist=must_exist)
    return Stores(
        engine=engine,
        jobs=JobStore(engine, clock),
        batches=BatchStore(engine, clock),
        keys=KeyStore(engine, clock),
    )
