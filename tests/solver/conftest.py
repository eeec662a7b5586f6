"""What all tests of the solver share."""

import pytest

from optpipe_solver.warm import ensure_warm


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """Compile before the first test, whose time limit would else be spent on it."""
    ensure_warm()
