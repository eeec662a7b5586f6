"""Four ranks for the tests of a module: a fork each, as a process with torch stands by."""

from collections.abc import Iterator

import pytest

from tests.runtime.ranks import Ranks, start_ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with start_ranks(4) as started:
        yield started
