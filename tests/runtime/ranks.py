"""Four processes over gloo that stay alive while a module's tests hand them functions to run."""

import contextlib
import faulthandler
import multiprocessing as mp
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

_AFTER_A_FAILURE_S = 5.0
_STUCK_S = 50.0


class Ranks:
    """Runs a function on all ranks at once; it must be importable, its result picklable."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes
        self._hanging: list[int] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Return every rank's result; fail with the tracebacks of the ranks that raised."""
        assert not self._hanging, f"ranks {self._hanging} still hang in an earlier test: see there"
        for pipe in self._pipes:
            pipe.send((function, args))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(self._pipes):
            failed = any(not succeeded for succeeded, _ in answers.values())
            # Who waits for a rank that has failed will not answer.
            left = min(_AFTER_A_FAILURE_S, timeout) if failed else deadline - time.monotonic()
            open_pipes = {pipe: i for i, pipe in enumerate(self._pipes) if i not in answers}
            ready = connection.wait(list(open_pipes), max(0.0, left))
            if not ready:
                break
            for pipe, rank in open_pipes.items():
                if pipe in ready:
                    answers[rank] = pipe.recv()
        self._expect_all(answers)
        return [answers[rank][1] for rank in range(len(self._pipes))]

    def _expect_all(self, answers: dict[int, tuple[bool, Any]]) -> None:
        raised = {rank: text for rank, (succeeded, text) in answers.items() if not succeeded}
        silent = sorted(set(range(len(self._pipes))) - set(answers))
        self._hanging = silent
        if raised or silent:
            told = "".join(f"rank {rank} raised:\n{text}" for rank, text in sorted(raised.items()))
            raise AssertionError(f"{told}ranks {silent} did not answer: a hang")


def _context() -> mp.context.ForkServerContext:
    """One clean process imports torch and is forked, instead of four that import it each."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["optpipe.runtime.runner", "torch.distributed.pipelining"])
    return context


class Ended(NamedTuple):
    """How a process ended, None if it lived on, and what it wrote to stdout and stderr."""

    code: int | None
    output: str


def fork_ranks(
    main: Callable[[], int], num_ranks: int, folder: Path, *, lives_on: int | None = None
) -> list[Ended]:
    """Let ranks, which meet in a file of the folder, run a program's ``main`` to its end.

    ``lives_on`` is a rank that is not waited for.
    """
    processes = [
        _context().Process(target=_run_main, args=(main, rank, num_ranks, folder), daemon=True)
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    for rank, process in enumerate(processes):
        process.join(0 if rank == lives_on else 120)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return [Ended(code, (folder / f"rank{rank}").read_text()) for rank, code in enumerate(codes)]


def _run_main(main: Callable[[], int], rank: int, num_ranks: int, folder: Path) -> None:
    import torch

    from optpipe.runtime.demo_model import RENDEZVOUS_VARIABLE

    with (folder / f"rank{rank}").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(num_ranks), GLOO_SOCKET_IFNAME="lo",
        **{RENDEZVOUS_VARIABLE: str(folder / "rendezvous")},
    )  # fmt: skip
    torch.set_num_threads(1)
    sys.exit(main())


@contextlib.contextmanager
def start_ranks(num_ranks: int) -> Iterator[Ranks]:
    context = _context()
    ends = [context.Pipe() for _ in range(num_ranks)]
    port = free_port()
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


def free_port() -> int:
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
        faulthandler.dump_traceback_later(_STUCK_S)
        try:
            pipe.send((True, function(*args)))
        except Exception:  # noqa: BLE001 - its traceback is sent to the test
            pipe.send((False, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()
