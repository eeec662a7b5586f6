"""What is kept: one database, SQLite or PostgreSQL, and a store for each kind of thing in it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optpipe_api.jobs import AttemptOutcome
from optpipe_api.store.batches import BatchStore
from optpipe_api.store.database import connect, probe
from optpipe_api.store.deployments import DeploymentStore
from optpipe_api.store.jobs import JobStore
from optpipe_api.store.keys import KeyStore

if TYPE_CHECKING:
    from collections.abc import Callable

    import sqlalchemy as sa

__all__ = ["AttemptOutcome", "JobStore", "Stores", "open_stores"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """All stores of one database; they share its connections."""

    engine: sa.Engine
    jobs: JobStore
    batches: BatchStore
    deployments: DeploymentStore
    keys: KeyStore

    def probe(self) -> None:
        """Raise StoreUnavailableError unless the database takes what is written."""
        probe(self.engine)

    def close(self) -> None:
        """Let go of all connections."""
        self.engine.dispose()


def open_stores(
    url: str, clock: Callable[[], float] = time.time, *, must_exist: bool = False
) -> Stores:
    """Return the stores of a database, which is created or migrated as needed.

    ``must_exist``: whether to refuse a file that is not there instead of making it. Raises
    `InputError` if the URL names no database that we know; `StoreUnavailableError` if it cannot be
    opened, is not there, or belongs to a newer version.
    """
    engine = connect(url, must_exist=must_exist)
    return Stores(
        engine=engine,
        jobs=JobStore(engine, clock),
        batches=BatchStore(engine, clock),
        deployments=DeploymentStore(engine, clock),
        keys=KeyStore(engine, clock),
    )
