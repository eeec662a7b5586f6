"""Servers for tests: in a thread of the test, where its state can be looked into."""

import functools
import shutil
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from optpipe_api import Settings, create_app
from optpipe_api.access import Role
from optpipe_api.main import server_config
from optpipe_api.services.parse_pool import ParsePool
from optpipe_api.services.render import Charts
from optpipe_api.store import open_stores
from tests.api.instant import InstantSolvers

T = TypeVar("T")
FAKE = "tests.api.fake_solver:solve"
FAKE_COMPARE = "tests.api.fake_compare:compare"
FAKE_PLAN = "tests.api.fake_plan:plan"
FAKE_TUNE = "tests.api.fake_tune:tune"


class Clock:
    """A clock that only tests move."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def two_stages(name: str = "", **changes: Any) -> dict[str, Any]:
    """A problem of two devices whose serial schedules get shorter with each fused backward."""
    stage = {
        "forward_ms": 10,
        "backward_input_ms": 10,
        "backward_weight_ms": 8,
        "backward_ms": 9,
        "activation_bytes": 1000,
    }
    return {
        "name": name,
        "num_microbatches": 4,
        "devices": [{"memory_bytes": 4000}, {"memory_bytes": 4000}],
        "stages": [{**stage, "device": 0}, {**stage, "device": 1}],
        **changes,
    }


def until(look: Callable[[], T], wanted: Callable[[T], object] = bool) -> T:
    """Look again and again, for two minutes, until what is found is wanted; return it."""
    deadline = time.monotonic() + 120.0
    while not wanted(found := look()):
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


@functools.cache
def _template() -> Path:
    """An empty SQLite database of the newest tables: to copy one is ten times as fast."""
    path = Path(tempfile.mkdtemp(), "template.db")
    open_stores(f"sqlite:///{path}").close()
    return path


def database_in(folder: Path) -> str:
    """Return the URL of the database of a folder, made where there is none."""
    path = Path(folder, "jobs.db")
    if not path.exists():
        shutil.copy(_template(), path)
    return f"sqlite:///{path}"


def make_settings(folder: Path, **overrides: object) -> Settings:
    """Settings for quick tests: a fresh database, the fake solvers, short leases.

    No cache: the fake's problems differ in nothing but their names, which the cache ignores.
    """
    values: dict[str, Any] = {
        "database_url": database_in(folder),
        "solve_path": FAKE,
        "compare_path": FAKE_COMPARE,
        "plan_path": FAKE_PLAN,
        "tune_path": FAKE_TUNE,
        "follow_path": FAKE,
        "cache": False,
        "solver_processes": 2,
        "max_threads": 2,
        "lease_s": 1.5,
        "heartbeat_s": 0.2,
        "poll_s": 0.1,
    }
    return Settings(**(values | overrides))


class _LastingPool(ParsePool):
    def close(self) -> None:
        """Go on: the next server need not start its processes anew, which takes seconds."""


class _LastingCharts(Charts):
    def close(self) -> None:
        """Go on, too."""


_lasting_pool, _lasting_charts = functools.cache(_LastingPool), functools.cache(_LastingCharts)


@functools.cache
def _encryption() -> ssl.SSLContext:
    """What each client would make anew, in a tenth of a second."""
    return ssl.create_default_context()


def client(url: str, **options: Any) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=90, verify=_encryption(), **options)


@contextmanager
def running(settings: Settings, *, processes: bool = False) -> Iterator[tuple[str, FastAPI]]:
    """Run a server in a thread; yields its address and application.

    Its solvers are threads too where they are fakes, and large bodies are read by processes that
    all servers share, unless the test is about processes.
    """
    app = create_app(settings)
    config = server_config(app, settings)
    config.port = 0
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    with pytest.MonkeyPatch.context() as patch:
        is_fake = settings.engine == "local" and settings.solve_path.startswith("tests.")
        if is_fake and not processes:
            patch.setattr("optpipe_api.service.open_solvers", InstantSolvers)
        if not processes:
            patch.setattr("optpipe_api.service.ParsePool", _lasting_pool)
            patch.setattr("optpipe_api.service.Charts", _lasting_charts)
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
    try:
        assert thread.is_alive(), "the server did not start"
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", app
    finally:
        app.state.changes.close()
        server.should_exit = True
        thread.join()


@contextmanager
def connected(settings: Settings, *, processes: bool = False) -> Iterator[httpx.Client]:
    with running(settings, processes=processes) as (url, _), client(url) as http:
        yield http


@contextmanager
def keyed(settings: Settings, **roles: Role) -> Iterator[dict[str, httpx.Client]]:
    """Run a server that wants keys; yields a client for each name, with a key of its role."""
    with closing(open_stores(settings.database_url)) as stores:
        keys = {name: stores.keys.create(name, role)[1] for name, role in roles.items()}
    with running(settings) as (url, _), ExitStack() as stack:
        yield {
            name: stack.enter_context(client(url, headers={"X-API-Key": key}))
            for name, key in keys.items()
        }
