"""A solver whose every step a test decides: the problem's name is its script.

``improve:3:0.1`` finds a first schedule, improves it 3 times with pauses of 0.1 s, and ends;
with another word behind it (``improve:3:0.1:x``) it tells a better bound each time, too.
Anything else is solved at once. Schedules of this fake are serial: all of one micro-batch, then
all of the next; an improvement swaps one micro-batch's split backwards for fused ones.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from optpipe.evaluate import evaluate
from optpipe.memory import device_peak_bytes
from optpipe.problem import Problem
from optpipe.schedule import Programs, Provenance
from tests.api.outcomes import Progress, Result, SolveStatus
from tests.api.serial import serial

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe_solver import Robust


def solve(
    problem: Problem,
    *,
    time_limit_s: float,
    work_limit: float | None,
    threads: int,
    seed: int,
    gap: float,
    method: str,
    start: Programs | None = None,
    start_method: str = "given start",
    robust: Robust | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Result:
    word, *arguments = problem.name.split(":")
    if word == "told":
        given = f"gap={gap:g} work={work_limit} threads={threads} seed={seed} {method}"
        if robust is not None:
            given = f"P{robust.percent:g} of {robust.noise}"
        noted: Result = _finish(problem, serial(problem, 0), method=given)
        return noted
    tell = on_progress or (lambda progress: None)
    stop = should_stop or (lambda: False)
    behaviour = _BEHAVIOURS.get(word, _at_once)
    result: Result = behaviour(problem, start, tell, stop, arguments)
    return result


def _finish(problem, programs, status=SolveStatus.FEASIBLE, stopped_by="work_limit", method="fake"):
    schedule = evaluate(
        problem, programs, Provenance(method=method), bound_ms=1.0, stopped_by=stopped_by
    )
    return Result(status, schedule, 1.0)


def _at_once(problem, start, tell, stop, arguments):
    return fitting(problem, problem.num_microbatches)


def fitting(problem: Problem, num_fused: int) -> Result:
    """Return the serial schedule, or that a device has too little for it."""
    programs = serial(problem, num_fused)
    needs = {
        f"devices[{device}].memory_bytes": device_peak_bytes(problem, device, program)
        for device, program in enumerate(programs)
    }
    short = {
        path: least
        for (path, least), device in zip(needs.items(), problem.devices, strict=True)
        if least > device.memory_bytes
    }
    if short:
        return Result(SolveStatus.INFEASIBLE, None, None, f"no schedule fits: {short}", short)
    fits: Result = _finish(problem, programs)
    return fits


def _improve(problem, start, tell, stop, arguments):
    """Improve again and again; a start tells how far an earlier attempt came."""
    rounds, pause_s = int(arguments[0]), float(arguments[1])
    began = time.monotonic()
    done = 0
    if start is not None:
        done = next(n for n in range(len(start[0])) if serial(problem, n) == start)
    programs = serial(problem, done)
    for fused in range(done, rounds + 1):
        programs = serial(problem, fused)
        method, spent_s = f"fake-{fused}", time.monotonic() - began
        if fused > done or start is None:
            length = _finish(problem, programs).schedule.objective_ms
            tell(Progress(spent_s, method, length, 1.0, programs))
        if arguments[2:]:
            tell(Progress(spent_s, method, None, 2.0 + fused, None))
        until = time.monotonic() + pause_s
        while time.monotonic() < until:
            if stop():
                return _finish(problem, programs, stopped_by="cancelled")
            time.sleep(0.01)
    return _finish(problem, programs)


def _stubborn(problem, start, tell, stop, arguments):
    """Find one schedule, then listen to nobody, SIGTERM included."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    programs = serial(problem, 0)
    length = _finish(problem, programs).schedule.objective_ms
    tell(Progress(0.0, "fake", length, 1.0, programs))
    while True:
        time.sleep(1.0)


def _dies_until(problem, start, tell, stop, arguments):
    """Note each attempt in a file, find a schedule, and die by SIGKILL but for the n-th attempt.

    A thread merely ends.
    """
    last, log = int(arguments[0]), Path(":".join(arguments[1:]))
    with log.open("a", encoding="utf-8") as file:
        file.write("with start\n" if start is not None else "from nothing\n")
    if len(log.read_text(encoding="utf-8").splitlines()) >= last:
        return _finish(problem, start or serial(problem, 1))
    programs = serial(problem, 1)
    length = _finish(problem, programs).schedule.objective_ms
    tell(Progress(0.1, "fake", length, 1.0, programs))
    if threading.current_thread() is threading.main_thread():
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit()


def _noted(problem, start, tell, stop, arguments):
    """Write the process id into a file, then do as the rest of the name says."""
    path, word, *rest = arguments
    Path(path).write_text(str(os.getpid()), encoding="utf-8")
    return _BEHAVIOURS.get(word, _at_once)(problem, start, tell, stop, rest)


def _nothing(problem, start, tell, stop, arguments):
    return Result(SolveStatus.UNKNOWN, None, 1.0, "")


def _never(problem, start, tell, stop, arguments):
    return Result(SolveStatus.INFEASIBLE, None, None, "no schedule fits", {"memory_bytes": 1})


def _fails(problem, start, tell, stop, arguments):
    raise ZeroDivisionError("secret detail of a stack trace")


def _eats_memory(problem, start, tell, stop, arguments):
    return bytearray(64 * 1024**3)


_BEHAVIOURS = {
    "improve": _improve,
    "stubborn": _stubborn,
    "dies": _dies_until,
    "noted": _noted,
    "nothing": _nothing,
    "never": _never,
    "fails": _fails,
    "eats": _eats_memory,
}
