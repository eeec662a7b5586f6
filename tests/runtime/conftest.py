"""The four ranks are started once: importing torch four times costs more than all the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.runtime.ranks import Ranks, start_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    with start_ranks(4) as started:
        yield started
