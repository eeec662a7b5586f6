"""A solver that goes on when a test lets it: the problem's name is ``gated:FOLDER``.

It finds a first schedule, or that none of its kind fits the memory, then a better one for every
file ``1``, ``2``, ... that appears in the folder, and ends when a file ``end`` does.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from optpipe.evaluate import evaluate
from optpipe.schedule import Provenance
from optpipe_solver.feasibility import feasibility
from tests.api.outcomes import Progress, Result, SolveStatus
from tests.api.serial import serial

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.problem import Problem

BOUND_MS = 80.0


def solve(
    problem: Problem,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    **_: object,
) -> Result:
    if min(device.usable_bytes for device in problem.devices) < problem.stages[0].activation_bytes:
        return Result(SolveStatus.INFEASIBLE, None, None, feasibility(problem).message)
    folder = Path(problem.name.partition(":")[2].partition(" ")[0])
    stop = should_stop or (lambda: False)
    fused = 0
    while True:
        programs = serial(problem, fused)
        schedule = evaluate(
            problem,
            programs,
            Provenance(method="gated"),
            bound_ms=BOUND_MS,
            stopped_by="work_limit",
        )
        if on_progress is not None:
            on_progress(
                Progress(1.0 + fused, f"gated-{fused}", schedule.objective_ms, BOUND_MS, programs)
            )
        while not (folder / str(fused + 1)).exists():
            if stop() or (folder / "end").exists():
                return Result(SolveStatus.FEASIBLE, schedule, BOUND_MS)
            time.sleep(0.02)
        fused += 1
