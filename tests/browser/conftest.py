"""A visit to the server of a module's ``url``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.browser.visit import Visit, visiting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser


@pytest.fixture
def visit(chromium: Browser, url: str) -> Iterator[Visit]:
    with visiting(chromium, url) as made:
        yield made
