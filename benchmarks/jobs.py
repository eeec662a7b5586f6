"""Contestants in processes of their own: jobs in, answers out, a line of JSON each.

``python -m benchmarks.jobs NAME`` is one of `CONTESTANTS`; only the named one is imported. Apart,
because memory is measured per run, a crash ends one run, and OR-tools and highspy, which each
carry another build of HiGHS under one name, cannot be loaded into the same process.
"""

from __future__ import annotations

import importlib
import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optpipe import Problem, find_violations, parse_action, simulate
from optpipe.schedule import TraceEntry

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe import Programs

__all__ = ["CONTESTANTS", "ROOT", "BestLegal", "PeerAnswer", "PeerJob", "judge", "run_apart"]

CONTESTANTS = {
    "families": ("benchmarks.peers.ours", "families"),
    "ours": ("benchmarks.peers.ours", "ours"),
    "milp": ("benchmarks.peers.ours", "milp"),
    "cp-sat": ("benchmarks.peers.cp_sat", "cp_sat"),
}
"""Contestants, each a function of a job, and the modules they are in."""

ROOT = Path(__file__).resolve().parent.parent
_GRACE_S = 120.0
"""What a contestant may take beyond its seconds before it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerJob:
    """One run.

    ``start`` are legal programs to start from, None for none; ``floor_ms`` is a proven lower bound
    of the objective; ``seconds`` include building models, not the start of the process.
    """

    problem: Problem
    start: Programs | None = None
    floor_ms: float = 0.0
    seconds: float = 20.0
    threads: int = 2
    seed: int = 0

    def to_line(self) -> str:
        """Return the job as one line."""
        limits = {name: getattr(self, name) for name in ("floor_ms", "seconds", "threads", "seed")}
        document = self.problem.model_dump(mode="json", by_alias=True)
        return json.dumps({"problem": document, "start": _texts(self.start), **limits})

    @classmethod
    def from_line(cls, line: str) -> PeerJob:
        """Read `to_line`'s text."""
        data = json.loads(line)
        problem, start = Problem.parse(data.pop("problem")), _programs(data.pop("start"))
        return cls(problem=problem, start=start, **data)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAnswer:
    """What a contestant says; nothing of it is believed but the programs (see `judge`).

    ``bound_ms`` is None where nothing is proven, ``status`` the contestant's own word, ``method``
    who found the programs, ``bound_method`` who proved the bound, ``cpu_seconds`` what each part
    took, ``peak_bytes`` the largest resident size of the process.
    """

    programs: Programs | None
    bound_ms: float | None = None
    status: str = ""
    method: str = ""
    bound_method: str = ""
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    trace: tuple[TraceEntry, ...] = ()
    seconds: float = 0.0
    peak_bytes: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def to_line(self) -> str:
        """Return the answer as one line."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        fields["programs"] = _texts(self.programs)
        fields["trace"] = [entry.model_dump() for entry in self.trace]
        return json.dumps(fields)

    @classmethod
    def from_line(cls, line: str) -> PeerAnswer:
        """Read `to_line`'s text."""
        data = json.loads(line)
        trace = tuple(TraceEntry(**entry) for entry in data.pop("trace"))
        return cls(programs=_programs(data.pop("programs")), trace=trace, **data)


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


def _texts(programs: Programs | None) -> list[list[str]] | None:
    return None if programs is None else [[str(action) for action in row] for row in programs]


def _programs(rows: list[list[str]] | None) -> Programs | None:
    if rows is None:
        return None
    return tuple(tuple(parse_action(cell) for cell in row) for row in rows)


def run_apart(name: str, job: PeerJob) -> PeerAnswer:
    """Run a contestant in a process of its own, at low priority; what fails is its status.

    Families have no time limit of their own: they get ten minutes.
    """
    limit = 600.0 if name == "families" else job.seconds + _GRACE_S
    command = ["nice", "-n", "5", sys.executable, "-m", "benchmarks.jobs", name]
    try:
        done = subprocess.run(
            command, cwd=ROOT, input=job.to_line() + "\n", capture_output=True, text=True,
            timeout=limit, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return PeerAnswer(programs=None, status=f"killed after {limit:.0f} s", seconds=limit)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return PeerAnswer(programs=None, status=f"failed ({done.returncode}): {last[:200]}")
    return PeerAnswer.from_line(done.stdout.splitlines()[-1])


def main() -> None:
    """Answer every job on standard input."""
    module, name = CONTESTANTS[sys.argv[1]]
    contestant: Callable[[PeerJob], PeerAnswer] = getattr(importlib.import_module(module), name)
    for line in sys.stdin:
        job = PeerJob.from_line(line)
        began = time.perf_counter()
        answer = contestant(job)
        seconds = round(time.perf_counter() - began, 3)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(replace(answer, seconds=seconds, peak_bytes=peak).to_line(), flush=True)


if __name__ == "__main__":
    main()
