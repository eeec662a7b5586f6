"""A planner whose every step a test decides: the model's name is its script.

``improve:3:0.1`` finds a first cut and schedule, improves them 3 times with pauses of 0.1 s, and
ends; every improvement belongs to another cut than the one before. ``dies:FILE`` finds one and is
killed, but for the second attempt. ``large`` fits nowhere. Anything else is planned at once.
"""

import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

from optpipe.evaluate import evaluate
from optpipe.model import Model
from optpipe.problem import Problem
from optpipe.requests import PlacementKind
from optpipe.schedule import Programs, Provenance
from optpipe_solver import PlanResult, Progress, SolveStatus
from optpipe_solver.plan import DEFAULT_CHUNKS, PLACEMENTS, Fate, PlanRow
from tests.api.serial import serial

BOUND_MS = 1.0


def plan(
    model: Model,
    *,
    time_limit_s: float,
    work_limit: float | None = None,
    threads: int,
    seed: int,
    chunks: Collection[int] = DEFAULT_CHUNKS,
    placements: Collection[PlacementKind] = PLACEMENTS,
    start: tuple[Problem, Programs] | None = None,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
) -> PlanResult:
    word, *arguments = model.name.split(":")
    if word == "told":
        given = "" if work_limit is None else f"work={work_limit:g} "
        given += (
            f"threads={threads} seed={seed} chunks={list(chunks)} placements={list(placements)}"
        )
        return _result(model, _cut(model, 0), 0, given)
    if word == "large":
        return _nothing(model)
    if word == "dies":
        return _dies(model, start, on_progress, Path(":".join(arguments)))
    rounds, pause_s = (int(arguments[0]), float(arguments[1])) if word == "improve" else (0, 0.0)
    done = 0
    if start is not None:
        done = next(n for n in range(99) if serial(start[0], n) == start[1])
    for number in range(done, rounds + 1):
        if number > done or start is None:
            _tell(model, number, on_progress)
        done = number
        until = time.monotonic() + pause_s
        while time.monotonic() < until and not should_stop():
            time.sleep(0.01)
        if should_stop():
            break
    return _result(model, _cut(model, done), done, "fake-plan")


def _cut(model: Model, number: int) -> Problem:
    """The cut of an improvement: no two in a row are the same."""
    first = 1 + number % (model.num_layers - 1)
    return model.problem([0, 1], [first, model.num_layers - first])


def _tell(model: Model, number: int, on_progress: Callable[[Progress], None]) -> None:
    problem = _cut(model, number)
    programs = serial(problem, number)
    length = evaluate(problem, programs, Provenance(method="")).objective_ms
    on_progress(Progress(0.01, f"fake-plan-{number}", length, BOUND_MS, programs, problem))


def _dies(
    model: Model,
    start: tuple[Problem, Programs] | None,
    on_progress: Callable[[Progress], None],
    log: Path,
) -> PlanResult:
    if log.exists():
        log.write_text("nothing" if start is None else start[0].problem_hash, "utf-8")
        return _result(model, _cut(model, 1), 1, "fake-plan")
    log.touch()
    _tell(model, 0, on_progress)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _result(model: Model, problem: Problem, num_fused: int, method: str) -> PlanResult:
    schedule = evaluate(
        problem, serial(problem, num_fused), Provenance(method=method), bound_ms=BOUND_MS
    )
    return PlanResult(
        status=SolveStatus.FEASIBLE,
        problem=problem,
        schedule=schedule,
        rows=(),
        even=_even(model),
        bound_ms=BOUND_MS,
        searched="",
    )


def _nothing(model: Model) -> PlanResult:
    return PlanResult(
        status=SolveStatus.INFEASIBLE,
        problem=None,
        schedule=None,
        rows=(),
        even=_even(model),
        bound_ms=None,
        searched="",
        message="no cut fits",
        needs={"devices[0].memory_bytes": 5000},
    )


def _even(model: Model) -> PlanRow:
    return PlanRow(
        label="linear",
        chunks=1,
        placement=(0, 1),
        sizes=(1, model.num_layers - 1),
        is_even=True,
        bound_ms=None,
        quick_ms=None,
        final_ms=None,
        method="",
        fate=Fate.NOT_TRIED,
    )
