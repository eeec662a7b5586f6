"""Four processes over gloo that stay alive while a module's tests hand them functions to run."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import socket
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection


class Ranks:
    """Runs a function on all ranks at once; it must be importable, its result picklable."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Return every rank's result; fail with the traceback of the first rank that raised."""
        for pipe in self._pipes:
            pipe.send((function, args))
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(timeout):
                raise TimeoutError(f"rank {rank} did not answer in {timeout} s: a hang")
            succeeded, result = pipe.recv()
            results.append((succeeded, result))
        for rank, (succeeded, result) in enumerate(results):
            if not succeeded:
                raise AssertionError(f"rank {rank} raised:\n{result}")
        return [result for _, result in results]


@contextlib.contextmanager
def start_ranks(num_ranks: int) -> Iterator[Ranks]:
    context = mp.get_context("spawn")
    ends = [context.Pipe() for _ in range(num_ranks)]
    port = _free_port()
    processes = [
        context.Process(target=_serve, args=(rank, num_ranks, port, ends[rank][1]), daemon=True)
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    try:
        yield Ranks([ours for ours, _ in ends])
    finally:
        for ours, _ in ends:
            with contextlib.suppress(OSError):
                ours.send(None)
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _serve(rank: int, num_ranks: int, port: int, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks
    )
    while (job := pipe.recv()) is not None:
        function, args = job
        try:
            pipe.send((True, function(*args)))
        except Exception:  # noqa: BLE001 - its traceback is sent to the test
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()
