"""Where jobs are kept: the contract, and its one implementation over SQLite and PostgreSQL."""

from optpipe_api.store.contract import JobStore, Outcome
from optpipe_api.store.sql import SqlJobStore, open_store

__all__ = ["JobStore", "Outcome", "SqlJobStore", "open_store"]
