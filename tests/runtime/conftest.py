"""The four ranks are started once: importing torch four times costs more than all the tests."""

from collections.abc import Iterator

import pytest

from tests.runtime.ranks import Ranks, start_ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    with start_ranks(4) as started:
        yield started
