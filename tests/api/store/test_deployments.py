"""The deployment store's contract over SQLite, and over a real PostgreSQL."""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest

from optpipe_api.store import open_stores
from tests.api.store.deployment_store_contract import DeploymentStoreContract


class TestSqliteDeployments(DeploymentStoreContract):
    @pytest.fixture
    def open_store(self, tmp_path, clock):
        with ExitStack() as stack:
            url = f"sqlite:///{tmp_path}/jobs.db"
            yield lambda: stack.enter_context(closing(open_stores(url, clock))).deployments


@pytest.mark.postgres
class TestPostgresDeployments(DeploymentStoreContract):
    @pytest.fixture
    def open_store(self, postgres_url, clock):
        with ExitStack() as stack:
            yield lambda: stack.enter_context(closing(open_stores(postgres_url, clock))).deployments
