"""A visit to the server of a module's ``url``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.visit import Visit, tabs, visiting_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, BrowserContext


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Wait longer than elsewhere: beside all other tests a picture may take minutes."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and not item.get_closest_marker(
            "timeout"
        ):
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="module")
def context(chromium: Browser, url: str) -> Iterator[BrowserContext]:
    """A browser where one page stays open: others of its process open in half of the time."""
    with tabs(chromium) as shared:
        shared.new_page().goto(f"{url}/healthz")
        yield shared


@pytest.fixture
def visit(context: BrowserContext, url: str) -> Iterator[Visit]:
    with visiting_in(context, url) as page:
        yield page
