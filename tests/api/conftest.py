"""Servers and problems that several tests of the service use."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from optpipe_api.store import Stores, open_stores
from optpipe_api.store.tables import metadata
from tests.api.live import Clock, connected, database_in, make_settings, two_stages
from tests.conftest import postgres_database

LIMITS = {"max_body_bytes": 100_000, "max_cells": 1000, "max_time_limit_s": 100.0}


@pytest.fixture(scope="module")
def http(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """Share one server among the tests of a module, with the module's `SETTINGS` if it has any."""
    settings = getattr(request.module, "SETTINGS", LIMITS)
    with connected(make_settings(tmp_path_factory.mktemp("server"), **settings)) as client:
        yield client


@pytest.fixture(scope="module")
def ended(http: httpx.Client) -> dict[str, Any]:
    """An ended job of that server, with three schedules behind it."""
    body = {"problem": two_stages("improve:2:0")}
    job: dict[str, Any] = http.post("/v1/jobs", params={"wait": 60}, json=body).json()
    assert job["state"] == "succeeded"
    return job


@pytest.fixture
def anyio_backend() -> str:
    """What tests marked ``anyio`` run in."""
    return "asyncio"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def postgres_tables() -> Iterator[str]:
    """The URL of one database on PostgreSQL, migrated: to make one for each test takes longer."""
    with postgres_database() as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh database of each kind: what a store promises it promises on both."""
    if request.param == "sqlite":
        return database_in(tmp_path)
    url: str = request.getfixturevalue("postgres_tables")
    with closing(open_stores(url)) as stores, stores.engine.begin() as connection:
        for table in reversed(metadata.sorted_tables):
            connection.execute(table.delete())
    return url


@pytest.fixture
def open_all(database_url: str, clock: Clock) -> Iterator[Callable[[], Stores]]:
    """Opens the stores of one database; two calls open them twice, as two servers do."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(closing(open_stores(database_url, clock)))


@pytest.fixture
def stores(open_all: Callable[[], Stores]) -> Stores:
    return open_all()
