"""A fake solver whose process starts in a third of the time: it imports no part of the real one.

The problem's name is its script, and ends with what makes it unique:

* ``improve:3:0.02:...`` finds a first schedule and three better ones, each 0.02 s after the one
  before, and a better bound with each; a start says how far an earlier attempt came.
* ``nothing:...`` finds none, ``never:...`` proves that there is none, ``fails:...`` breaks.
* ``dies:FILE:...`` finds a schedule and dies by SIGKILL, but only once; a thread merely ends.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from optpipe import Schedule
from optpipe.evaluate import evaluate
from optpipe.problem import Problem
from optpipe.schedule import Programs, Provenance
from tests.api.outcomes import Progress, Result, SolveStatus
from tests.api.serial import serial


def best(problem: Problem, num_fused: int) -> Schedule:
    """Return the schedule that ``improve`` ends with after so many improvements."""
    return evaluate(
        problem,
        serial(problem, num_fused),
        Provenance(method=f"fused-{num_fused}"),
        bound_ms=1.0,
        stopped_by="work_limit",
    )


def solve(
    problem: Problem,
    *,
    start: Programs | None,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
    **_: object,
) -> Result:
    word, *arguments = problem.name.split(":")
    if word == "nothing":
        return Result(SolveStatus.UNKNOWN, None, 1.0)
    if word == "never":
        return Result(SolveStatus.INFEASIBLE, None, None, "no schedule fits", {"memory_bytes": 1})
    if word == "fails":
        raise ZeroDivisionError(problem.name)
    if word == "dies":
        return _die_once(problem, start, on_progress, Path(arguments[0]))
    return _improve(problem, start, on_progress, should_stop, arguments)


def _improve(
    problem: Problem,
    start: Programs | None,
    tell: Callable[[Progress], None],
    should_stop: Callable[[], bool],
    arguments: list[str],
) -> Result:
    rounds, pause_s = int(arguments[0]), float(arguments[1])
    begin = _num_fused(problem, start)
    for num_fused in range(begin, rounds + 1):
        schedule = best(problem, num_fused)
        method = schedule.provenance.method
        bound_ms = 1.0 + num_fused
        tell(Progress(num_fused, method, schedule.objective_ms, bound_ms, schedule.programs))
        tell(Progress(num_fused + 0.5, method, None, bound_ms + 0.5, None))
        until = time.monotonic() + pause_s
        while time.monotonic() < until and not should_stop():
            time.sleep(0.005)
        if should_stop():
            return Result(SolveStatus.FEASIBLE, schedule, bound_ms)
    return Result(SolveStatus.FEASIBLE, best(problem, max(begin, rounds)), 1.0 + rounds)


def _num_fused(problem: Problem, start: Programs | None) -> int:
    if start is None:
        return 0
    return next(n for n in range(problem.num_microbatches + 1) if serial(problem, n) == start)


def _die_once(
    problem: Problem, start: Programs | None, tell: Callable[[Progress], None], mark: Path
) -> Result:
    if not mark.exists():
        mark.touch()
        first = best(problem, 0)
        tell(Progress(0.0, "first", first.objective_ms, 1.0, first.programs))
        if threading.current_thread() is not threading.main_thread():
            sys.exit()
        os.kill(os.getpid(), signal.SIGKILL)
    return Result(SolveStatus.FEASIBLE, best(problem, max(1, _num_fused(problem, start))), 1.0)
