"""A solver that fuses its backwards only where the second stage is slower than it was registered.

So the first schedule is good enough until somebody measures that stage 1's forward takes over 2 ms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.evaluate import evaluate
from optpipe.memory import device_peak_bytes
from optpipe.schedule import Provenance
from tests.api.outcomes import Result, SolveStatus
from tests.api.serial import serial

if TYPE_CHECKING:
    from optpipe.problem import Problem

DRIFT = f"{__name__}:solve"


def solve(problem: Problem, **_: object) -> Result:
    programs = serial(problem, problem.num_microbatches if problem.stages[1].forward_ms > 2 else 0)
    needs = {
        f"devices[{device}].memory_bytes": device_peak_bytes(problem, device, program)
        for device, program in enumerate(programs)
    }
    memory = [device.memory_bytes for device in problem.devices]
    if any(least > given for least, given in zip(needs.values(), memory, strict=True)):
        return Result(SolveStatus.INFEASIBLE, None, None, "no schedule fits", needs)
    made = evaluate(problem, programs, Provenance(method="fake drift"), bound_ms=1.0)
    return Result(SolveStatus.FEASIBLE, made, 1.0)
