"""One contestant in a process of its own: jobs in, answers out, a line each.

``python -m benchmarks.entrant NAME`` with NAME one of `ENTRANTS`. Only the named one is imported.
"""

from __future__ import annotations

import importlib
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.jobs import Answer, Job

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ENTRANTS", "ROOT", "run_apart"]

ENTRANTS = {
    "families": "benchmarks.peers.families",
    "ours": "benchmarks.peers.ours",
    "milp": "benchmarks.peers.milp",
    "cp-sat": "benchmarks.peers.cp_sat",
}
"""Contestants and the modules whose ``answer(job)`` runs them."""

ROOT = Path(__file__).resolve().parent.parent
_GRACE_S = 120.0
"""What a contestant may take beyond its seconds before it is killed."""


def run_apart(name: str, job: Job) -> Answer:
    """Run a contestant in a process of its own, at low priority; what fails is its status.

    Families have no time limit of their own: they get ten minutes.
    """
    limit = 600.0 if name == "families" else job.seconds + _GRACE_S
    command = ["nice", "-n", "5", sys.executable, "-m", "benchmarks.entrant", name]
    try:
        done = subprocess.run(
            command, cwd=ROOT, input=job.to_line() + "\n", capture_output=True, text=True,
            timeout=limit, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Answer(programs=None, status=f"killed after {limit:.0f} s", seconds=limit)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Answer(programs=None, status=f"failed ({done.returncode}): {last[:200]}")
    return Answer.from_line(done.stdout.splitlines()[-1])


def main() -> None:
    """Answer every job on standard input."""
    answer: Callable[[Job], Answer] = importlib.import_module(ENTRANTS[sys.argv[1]]).answer
    for line in sys.stdin:
        job = Job.from_line(line)
        began = time.perf_counter()
        said = answer(job)
        seconds = round(time.perf_counter() - began, 3)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(replace(said, seconds=seconds, peak_bytes=peak).to_line(), flush=True)


if __name__ == "__main__":
    main()
