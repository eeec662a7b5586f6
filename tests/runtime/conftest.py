"""Four ranks for the tests of a module, and one thread for those that measure."""

from collections.abc import Iterator

import pytest

from optpipe.runtime.measuring import use_threads
from tests.runtime.ranks import Ranks, start_ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """A fork each, as a process with torch stands by."""
    with start_ranks(4) as started:
        yield started


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As a rank has; on a busy machine threads that wait for each other take seconds."""
    with use_threads(1):
        yield
