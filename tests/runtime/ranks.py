"""Four processes over gloo that stay alive while a module's tests hand them functions to run."""

import contextlib
import faulthandler
import multiprocessing as mp
import os
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

_AFTER_A_FAILURE_S = 5.0
_STUCK_S = 50.0


class Ranks:
    """Runs a function on all ranks at once; it must be importable, its result picklable.

    Ranks of which one failed or did not answer are ended, and started anew by the next test.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Return every rank's result; fail with the tracebacks of the ranks that raised."""
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes:
                pipe.send((function, args))
        except OSError:
            self.end(grace_s=0)
            raise
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
                    answers[rank] = _answer(pipe)
        raised = {rank: text for rank, (succeeded, text) in answers.items() if not succeeded}
        silent = sorted(set(range(len(self._pipes))) - set(answers))
        if raised or silent:
            self.end(grace_s=0)
            words = "".join(f"rank {rank} raised:\n{raised[rank]}" for rank in sorted(raised))
            raise AssertionError(f"{words}ranks {silent} did not answer: a hang")
        return [answers[rank][1] for rank in range(len(self._pipes))]

    def _start(self) -> None:
        context, port = _context(), free_port()
        for rank in range(self._num_ranks):
            ours, theirs = context.Pipe()
            given = (rank, self._num_ranks, port, theirs)
            self._processes.append(context.Process(target=_serve, args=given, daemon=True))
            self._processes[-1].start()
            # So that a rank that dies is heard of.
            theirs.close()
            self._pipes.append(ours)

    def end(self, grace_s: float = 10) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(grace_s)
            process.kill()
            process.join()
        self._processes, self._pipes = [], []


def _answer(pipe: Connection) -> tuple[bool, Any]:
    try:
        answer: tuple[bool, Any] = pipe.recv()
    except EOFError:
        return False, "its process died\n"
    return answer


def _context() -> mp.context.ForkServerContext:
    """One clean process imports torch and is forked, instead of four that import it each."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["optpipe.runtime.runner", "torch._inductor.compile_fx"])
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

    from optpipe.runtime.launch import RENDEZVOUS_VARIABLE

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
    ranks = Ranks(num_ranks)
    try:
        yield ranks
    finally:
        ranks.end()


def free_port() -> int:
    """A port that no connection of another process takes meanwhile: theirs are from 32768 on."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port


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
