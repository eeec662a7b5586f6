"""The store contract over SQLite, and over a real PostgreSQL."""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest

from optpipe_api.store import open_stores
from tests.api.store.history_contract import HistoryContract
from tests.api.store.store_contract import StoreBench, StoreContract


class OnSqlite(StoreBench):
    @pytest.fixture
    def open_store(self, tmp_path, clock):
        with ExitStack() as stack:
            url = f"sqlite:///{tmp_path}/jobs.db"
            yield lambda: stack.enter_context(closing(open_stores(url, clock))).jobs


class OnPostgres(StoreBench):
    @pytest.fixture
    def open_store(self, postgres_url, clock):
        with ExitStack() as stack:
            yield lambda: stack.enter_context(closing(open_stores(postgres_url, clock))).jobs


class TestSqliteStore(OnSqlite, StoreContract):
    """A file of one machine."""


class TestSqliteHistory(OnSqlite, HistoryContract):
    """A file of one machine."""


@pytest.mark.postgres
class TestPostgresStore(OnPostgres, StoreContract):
    """A server that several share."""


@pytest.mark.postgres
class TestPostgresHistory(OnPostgres, HistoryContract):
    """A server that several share."""
