"""What every test may use: Hypothesis profiles, and the servers of the marked tests."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.vendor.pretty import for_type_by_name
from pydantic import BaseModel

from optpipe.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser

# dev: new examples at each run. ci: always the same, because a red run must be repeatable. long: a
# thousand at random, and what ever failed, which stays in .hypothesis, again first. No deadlines: a
# machine may be busy. HYPOTHESIS_PROFILE chooses.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("dev", PATIENT, max_examples=40)
settings.register_profile("ci", PATIENT, max_examples=40, derandomize=True, print_blob=True)
settings.register_profile(
    "long",
    PATIENT,
    max_examples=1000,
    print_blob=True,
    database=DirectoryBasedExampleDatabase(Path(__file__).parents[1] / ".hypothesis" / "examples"),
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
# A failing example shows the whole problem, as source; its repr is short.
for_type_by_name(
    "optpipe.problem", "Problem", lambda one, printer, _: printer.text(BaseModel.__repr__(one))
)

# Playwright's own browser is never downloaded, and Chromium's background requests would only
# wait for a network that tests must not need.
CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def pytest_configure() -> None:
    """Let Ctrl-C mean what it means to a program in a terminal, in what tests start too.

    A shell starts what it puts into the background with SIGINT ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files marked ``long`` come first; pytest-xdist begins files in this order."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@contextmanager
def postgres_database() -> Iterator[str]:
    """Make a fresh, empty database on the server that OPTPIPE_TEST_POSTGRES_URL names.

    Without a server the test fails: it was asked for by marker.
    """
    url = os.environ.get("OPTPIPE_TEST_POSTGRES_URL")
    if url is None:
        pytest.fail(
            "OPTPIPE_TEST_POSTGRES_URL is not set, and tests marked postgres need a server: set it "
            "to one where databases may be created, or run .ci/run, which starts its own"
        )
    import psycopg

    name = f"optpipe_test_{uuid.uuid4().hex}"
    server = url.replace("postgresql+psycopg://", "postgresql://")
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
        try:
            yield f"{url.rpartition('/')[0]}/{name}"
        finally:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


def pytest_collection_finish() -> None:
    """Let garbage be looked for among what tests make, not in all that was imported for them.

    Each worker holds three million objects of torch and others; to measure a stage collects often.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def few_objects() -> None:
    """Let what earlier files have made be left alone, too, by a file that measures stages.

    Each measurement collects: with what a hundred files leave, a test took 17 s instead of one.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """At the end all may go."""
    gc.unfreeze()


class Yardstick:
    """Processor time, told as a multiple of what a known piece of work takes at the same moment.

    On shared or hyperthreaded cores the same work takes more processor time while others run, and
    on an old machine always: so a bound in seconds fails where nothing is wrong. The known work is
    to parse a million zeros, 0.04 s alone on a core of 2023. It is done before and after, and the
    slower of the two counts, for others may have come or gone in between.
    """

    _TEXT = "[" + "0," * 1_000_000 + "0]"

    def times(self, spend_s: Callable[[], float]) -> float:
        """Return how many times the known work ``spend_s`` took, which returns its own seconds."""
        before_s, spent_s, after_s = self._known_s(), spend_s(), self._known_s()
        return spent_s / max(before_s, after_s)

    def _known_s(self) -> float:
        began = time.thread_time()
        json.loads(self._TEXT)
        return time.thread_time() - began


@pytest.fixture
def yardstick() -> Yardstick:
    """Measure processor time against the machine as it is now."""
    return Yardstick()


@pytest.fixture
def postgres_url() -> Iterator[str]:
    """A fresh database for each test, so that tests need not clean up."""
    with postgres_database() as url:
        yield url


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """Start Debian's Chromium once for all browser tests, headless."""
    path = Path(os.environ.get("OPTPIPE_TEST_CHROMIUM", "/usr/bin/chromium"))
    if not path.exists():
        pytest.fail(
            f"there is no Chromium at {path}, and tests marked browser need one: install Debian's "
            "package chromium, or set OPTPIPE_TEST_CHROMIUM"
        )
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM_ARGS)
        yield browser
        browser.close()


class Ran(NamedTuple):
    """What one run of the command line left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def optpipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Ran]:
    """Run the command line in this process, on a terminal of 120 columns without colour."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*arguments: object) -> Ran:
        with pytest.raises(SystemExit) as leave:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert isinstance(leave.value.code, int)
        return Ran(leave.value.code, captured.out, captured.err)

    return run
