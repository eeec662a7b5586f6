"""Servers for tests: in a thread of the test, where its state can be looked into."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import uvicorn

from optpipe_api import Settings, create_app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fastapi import FastAPI

FAKE = "tests.api.fake_solver:solve"


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


def make_settings(folder: Path, **overrides: object) -> Settings:
    """Settings for quick tests: a fresh database, the fake solver, short leases.

    No cache: the fake's problems differ in nothing but their names, which the cache ignores.
    """
    values: dict[str, Any] = {
        "database_url": f"sqlite:///{folder}/jobs.db",
        "solve_path": FAKE,
        "cache": False,
        "solver_processes": 2,
        "max_threads": 2,
        "lease_s": 1.5,
        "heartbeat_s": 0.2,
        "poll_s": 0.1,
    }
    return Settings(**(values | overrides))


@contextmanager
def running(settings: Settings) -> Iterator[tuple[str, FastAPI]]:
    """Run a server in a thread; yields its address and application."""
    app = create_app(settings)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", app
    finally:
        app.state.changes.close()
        server.should_exit = True
        thread.join()


@contextmanager
def connected(settings: Settings) -> Iterator[httpx.Client]:
    """Run a server and connect to it by plain HTTP."""
    with running(settings) as (url, _), httpx.Client(base_url=url, timeout=90) as http:
        yield http
