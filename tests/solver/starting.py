"""What to start from: other limits, incumbents with a schedule, solves that find one, a clock."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from optpipe import Problem, Schedule
from optpipe_solver import solve
from optpipe_solver.families.classic import build_serial
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.portfolio import all_starts


def with_memory(given: Problem, memory: Sequence[int]) -> Problem:
    """The same problem with other limits, one for each device."""
    devices = [
        device.model_copy(update={"memory_bytes": limit})
        for device, limit in zip(given.devices, memory, strict=True)
    ]
    return given.model_copy(update={"devices": devices})


def renumbered(given: Problem, order: Sequence[int]) -> Problem:
    """The same problem, its devices in another order."""
    data = given.model_dump(by_alias=True)
    place = {old: new for new, old in enumerate(order)}
    data["devices"] = [data["devices"][old] for old in order]
    for one_stage in data["stages"]:
        one_stage["device"] = place[one_stage["device"]]
    for link in data["links"]:
        link |= {"from": place[link["from"]], "to": place[link["to"]]}
    return Problem.parse(data)


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


def schedule_of(given: Problem, **options: Any) -> Schedule:
    """Return what a solve with these options finds, which must be something."""
    schedule = solve(given, **options).schedule
    assert schedule is not None
    return schedule


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
