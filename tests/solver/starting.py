"""Incumbents that hold a schedule to start from."""

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
