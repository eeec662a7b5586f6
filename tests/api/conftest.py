"""Servers and problems that several tests of the service use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.api.live import connected, make_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Share one server among the tests of a module that only need it to answer."""
    settings = make_settings(
        tmp_path_factory.mktemp("server"),
        max_body_bytes=100_000,
        max_cells=1000,
        max_time_limit_s=100.0,
    )
    with connected(settings) as client:
        yield client
