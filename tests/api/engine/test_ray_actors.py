"""Actors on a cluster of stubs: they are used again, and a dead head is noticed."""

import socket
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from optpipe_api import Settings
from optpipe_api.engine import ray as engine_ray
from optpipe_api.engine.processes import decode, encode
from optpipe_api.engine.ray import RayProcess, RaySolvers
from tests.api.bench import Bench
from tests.api.instant import InstantSolvers
from tests.api.live import make_settings


def remote(call: Callable[..., Any]) -> Any:
    """A method of an actor."""
    return SimpleNamespace(remote=call)


class StubActor:
    """An actor whose solver is a thread of this process; ``read`` returns its pending result."""

    def __init__(self, settings: Settings) -> None:
        self._process = InstantSolvers(settings).start()
        self._result: bytes | None = None
        self.read = remote(lambda _timeout_s: self)
        self.write = remote(lambda data: self._process.send(decode(data)))
        self.end = remote(self._process.stop)

    def is_done(self, timeout_s: float) -> bool:
        message = self._process.receive(timeout_s)
        self._result = None if message is None else encode(message)
        return message is not None

    def result(self) -> bytes | None:
        return self._result


@pytest.fixture
def cluster(monkeypatch) -> None:
    """A cluster of stubs in place of Ray."""
    stub = SimpleNamespace(
        wait=lambda calls, timeout: (
            [call for call in calls if isinstance(call, StubActor) and call.is_done(timeout)],
            [],
        ),
        get=lambda call, **_: call.result(),
        kill=lambda _actor: None,
        get_runtime_context=lambda: SimpleNamespace(gcs_address="127.0.0.1:1"),
    )
    monkeypatch.setattr(engine_ray, "ray", stub)


@pytest.mark.parametrize(("keep_s", "num_actors"), [(60.0, 1), (0.0, 8)])
def test_jobs_share_an_actor_for_a_minute(
    cluster, tmp_path, monkeypatch, keep_s: float, num_actors: int
) -> None:
    """After that its cores go to the next in line; each job then has another actor."""
    monkeypatch.setattr(engine_ray, "_KEEP_S", keep_s)
    settings = make_settings(tmp_path)
    started: list[RayProcess] = []

    class Solvers:
        is_reachable = True

        def start(self) -> RayProcess:
            started.append(RayProcess(StubActor(settings)))
            return started[-1]

        def close(self) -> None:
            return

    with closing(Bench(tmp_path, Solvers())) as bench:
        for number in range(8):
            assert bench.end(bench.submit(f"improve:1:0:{number}")).state == "succeeded"
        assert num_actors <= len(started) <= num_actors + 1


def test_a_cluster_without_a_head_is_not_reachable(cluster, monkeypatch) -> None:
    solvers = RaySolvers.__new__(RaySolvers)
    assert not solvers.is_reachable
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        context = SimpleNamespace(gcs_address=address)
        monkeypatch.setattr(f"{engine_ray.__name__}.ray.get_runtime_context", lambda: context)
        assert solvers.is_reachable
