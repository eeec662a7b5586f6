"""The store contract over SQLite, and over a real PostgreSQL."""

from __future__ import annotations

import pytest

from optpipe_api.store import open_store as open_sql_store
from tests.api.store_contract import StoreContract


class TestSqliteStore(StoreContract):
    @pytest.fixture
    def open_store(self, tmp_path, clock):
        return lambda: open_sql_store(f"sqlite:///{tmp_path}/jobs.db", clock)


@pytest.mark.postgres
class TestPostgresStore(StoreContract):
    @pytest.fixture
    def open_store(self, postgres_url, clock):
        return lambda: open_sql_store(postgres_url, clock)
