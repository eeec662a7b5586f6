"""Incumbents that hold a schedule to start from, and a clock that no result may follow."""

import random
import threading
import time
from collections.abc import Callable

from optpipe import Problem
from optpipe_solver.families.classic import build_serial
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.portfolio import all_starts


def serially(given: Problem) -> Incumbent:
    """One micro-batch after the other: legal, and long."""
    best = Incumbent(given)
    best.offer(build_serial(given), "serial")
    return best


def started(given: Problem) -> Incumbent:
    """The best legal start."""
    best = Incumbent(given)
    for start in all_starts(given):
        if start.programs is not None and start.legal:
            best.offer(start.programs, start.method)
    return best


def erratic_clock(jump_s: float) -> Callable[[], float]:
    """Return a clock in the place of ``time.perf_counter``: at each look some time has passed.

    A microsecond, and now and then up to ``jump_s``.
    """
    draw, lock, seconds = random.Random(3), threading.Lock(), time.perf_counter()

    def look() -> float:
        nonlocal seconds
        with lock:
            seconds += 1e-6 + jump_s * draw.random() ** 3
            return seconds

    return look
