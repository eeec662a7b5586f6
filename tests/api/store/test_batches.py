"""The batch store's contract over SQLite, and over a real PostgreSQL."""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest

from optpipe_api.store import open_stores
from tests.api.store.batch_store_contract import BatchStoreContract


class TestSqliteBatches(BatchStoreContract):
    @pytest.fixture
    def open_all(self, tmp_path, clock):
        with ExitStack() as stack:
            url = f"sqlite:///{tmp_path}/jobs.db"
            yield lambda: stack.enter_context(closing(open_stores(url, clock)))


@pytest.mark.postgres
class TestPostgresBatches(BatchStoreContract):
    @pytest.fixture
    def open_all(self, postgres_url, clock):
        with ExitStack() as stack:
            yield lambda: stack.enter_context(closing(open_stores(postgres_url, clock)))
