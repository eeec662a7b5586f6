"""A fake solver that lives on its start: the problem's name begins with what it does.

Without a start it finds the serial schedule with split backwards. With one:

* ``gains`` fuses every backward where a device has a GB or more, and keeps the start elsewhere,
* ``worse`` finds the first schedule again, which is longer than most starts,
* ``fails`` breaks, ``waits`` goes on until it is told to stop,
* ``proves`` keeps the start and proves that it is the best,
* ``fused:...`` needs no start to fuse every backward, and ``later`` does so once it has one,
* anything else keeps the start.
"""

import time
from collections.abc import Callable

from optpipe.evaluate import evaluate
from optpipe.problem import Problem
from optpipe.schedule import Programs, Provenance
from tests.api.outcomes import Result, SolveStatus
from tests.api.serial import serial

BOUND_MS = 1.0
_GB = 1_000_000_000


def solve(
    problem: Problem, *, start: Programs | None, should_stop: Callable[[], bool], **_: object
) -> Result:
    word = problem.name.partition(":")[0]
    if start is not None and word == "fails":
        raise ZeroDivisionError(problem.name)
    while start is not None and word == "waits" and not should_stop():
        time.sleep(0.01)
    programs = _found(problem, start, word)
    schedule = evaluate(problem, programs, Provenance(method="lives-on"))
    bound_ms = schedule.objective_ms if word == "proves" else BOUND_MS
    schedule = evaluate(problem, programs, Provenance(method="lives-on"), bound_ms=bound_ms)
    return Result(SolveStatus.FEASIBLE, schedule, bound_ms)


def _found(problem: Problem, start: Programs | None, word: str) -> Programs:
    has_gained = word == "gains" and max(device.memory_bytes for device in problem.devices) >= _GB
    if word == "fused" or has_gained or (word == "later" and start is not None):
        return serial(problem, problem.num_microbatches)
    return serial(problem, 0) if start is None or word == "worse" else start
