"""Contestants in processes of their own, jobs in and answers out; only the named one is imported.

Apart, because memory is measured per run, a crash ends one run, and OR-tools and highspy, which
each carry another build of HiGHS under one name, cannot be loaded into the same process.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import resource
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from optpipe import Problem, find_violations, simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from optpipe import Programs
    from optpipe.schedule import TraceEntry

__all__ = ["CONTESTANTS", "BestLegal", "PeerAnswer", "PeerJob", "apart", "judge", "run_apart"]

CONTESTANTS = {
    "families": ("benchmarks.peers.ours", "families"),
    "ours": ("benchmarks.peers.ours", "ours"),
    "1f1b": ("benchmarks.peers.ours", "one_f_one_b"),
    "milp": ("benchmarks.peers.ours", "milp"),
    "cp-sat": ("benchmarks.peers.cp_sat", "cp_sat"),
}
"""Contestants, each a function of a job, and the modules they are in."""

_GRACE_S = 120.0
"""What a contestant may take beyond its seconds before it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerJob:
    """One run.

    ``start`` are legal programs to start from, None for none; ``floor_ms`` is a proven lower bound
    of the objective; ``seconds`` include building models, not the start of the process. With
    ``work`` units of work, which only ``ours`` knows, the answer is the same on a busy machine, and
    the seconds are there to end what never ends. With ``cpu`` the seconds are those of the CPU in
    the contestant's process; HiGHS alone, which has a clock of its own, may then be given less.
    """

    problem: Problem
    start: Programs | None = None
    floor_ms: float = 0.0
    seconds: float = 20.0
    threads: int = 2
    seed: int = 0
    work: float | None = None
    cpu: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAnswer:
    """What a contestant says; nothing of it is believed but the programs (see `judge`).

    ``bound_ms`` is None where nothing is proven, ``status`` the contestant's own word, ``method``
    who found the programs, ``bound_method`` who proved the bound, ``cpu_seconds`` what each part
    took, ``process_cpu_s`` what the whole answer did, ``peak_bytes`` the largest resident size of
    the process.
    """

    programs: Programs | None
    bound_ms: float | None = None
    status: str = ""
    method: str = ""
    bound_method: str = ""
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    trace: tuple[TraceEntry, ...] = ()
    seconds: float = 0.0
    process_cpu_s: float = 0.0
    peak_bytes: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class BestLegal:
    """The best legal programs offered so far."""

    problem: Problem
    programs: Programs | None = None
    objective_ms: float = float("inf")
    method: str = ""
    num_refused: int = 0

    def offer(self, programs: Programs, method: str = "") -> bool:
        """Keep programs if they are legal and better; count those that are not legal."""
        objective = judge(self.problem, programs)
        if objective is None:
            self.num_refused += 1
            return False
        if objective >= self.objective_ms:
            return False
        self.programs, self.objective_ms, self.method = programs, objective, method
        return True

    def answer(self, **fields: Any) -> PeerAnswer:
        """Return the answer that offers them."""
        fields = {"method": self.method, "extra": {"refused": self.num_refused}, **fields}
        return PeerAnswer(programs=self.programs, **fields)


def judge(problem: Problem, programs: Programs | None) -> float | None:
    """Return the simulated objective in ms of legal programs, None of all others."""
    if programs is None or find_violations(problem, programs):
        return None
    return simulate(problem, programs).objective_ms(problem.objective)


@contextmanager
def apart(name: str) -> Iterator[Callable[[PeerJob, float], PeerAnswer]]:
    """Start a contestant at low priority; yields who answers a job within some seconds.

    What fails is the answer's status; after that there are no more answers.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_answer_all, args=(name, theirs))
    process.start()
    theirs.close()

    def ask(job: PeerJob, limit_s: float) -> PeerAnswer:
        try:
            ours.send(job)
            if ours.poll(limit_s):
                answer: PeerAnswer = ours.recv()
                return answer
        except (EOFError, OSError):
            process.join()
            return PeerAnswer(programs=None, status=f"failed ({process.exitcode})")
        return PeerAnswer(programs=None, status=f"killed after {limit_s:.0f} s", seconds=limit_s)

    try:
        yield ask
    finally:
        process.kill()
        process.join()
        ours.close()


def run_apart(name: str, job: PeerJob) -> PeerAnswer:
    """Run a contestant once; families have no limit of their own and get ten minutes."""
    with apart(name) as ask:
        return ask(job, 600.0 if name == "families" else job.seconds + _GRACE_S)


def _answer_all(name: str, pipe: Connection) -> None:
    os.nice(5)
    module, function = CONTESTANTS[name]
    wall = time.perf_counter
    contestant: Callable[[PeerJob], PeerAnswer] = getattr(importlib.import_module(module), function)
    while True:
        job = pipe.recv()
        time.perf_counter = time.process_time if job.cpu else wall
        began, cpu_began = time.perf_counter(), time.process_time()
        try:
            answer = contestant(job)
        except ValueError as error:
            answer = PeerAnswer(programs=None, status=f"failed: {error}")
        seconds = round(time.perf_counter() - began, 3)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        cpu_s = round(time.process_time() - cpu_began, 3)
        pipe.send(replace(answer, seconds=seconds, process_cpu_s=cpu_s, peak_bytes=peak))
