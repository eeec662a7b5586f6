"""A sweep that is solved here, one combination after the other."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import optpipe_solver
from optpipe.cli.console import interruptible, stderr
from optpipe.cli.report import gap_text
from optpipe.frontier import family_of, memory_of
from optpipe.plot.units import format_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from optpipe.action import Programs
    from optpipe.formats.sweep_table import Row
    from optpipe.problem import Problem
    from optpipe.schedule import Schedule
    from optpipe.sweep import Variation
    from optpipe_solver import Result

__all__ = ["sweep_here"]

_DONE = ("succeeded", "infeasible")


def sweep_here(
    variations: Sequence[Variation],
    known: Sequence[Row],
    options: Mapping[str, Any],
    keep: Callable[[list[Row]], None],
) -> tuple[list[Row], bool]:
    """Return a row per variation, and whether Ctrl-C ended it before all had theirs.

    From the least memory to the most: a schedule that fits a limit fits every larger one, so each
    solve starts from the best that smaller limits have given.

    Parameters
    ----------
    known
        Rows of an earlier run; what they say of the same problems is taken over.
    keep
        Called after each one with all rows so far, in the order of the variations.
    """
    rows: dict[int, Row] = {}
    done = {row["problem_hash"]: row for row in known if row["state"] in _DONE}
    starts = _Starts()
    with interruptible() as stop:
        for number, index in enumerate(_by_memory(variations), start=1):
            variation = variations[index]
            row = done.get(variation.problem.problem_hash)
            is_known = row is not None
            if row is None:
                result, seconds = _solve(variation.problem, starts, options, stop.is_set)
                row = _row(variation.problem, result, seconds, was_stopped=stop.is_set())
            rows[index] = {**row, "index": index, "values": variation.values}
            _tell(rows[index], f"[{number}/{len(variations)}]", is_known=is_known)
            keep([rows[at] for at in sorted(rows)])
            if stop.is_set():
                break
    return [rows[at] for at in sorted(rows)], stop.is_set()


class _Starts:
    """Schedules found so far: which of them fit another memory limit."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[tuple[int, ...], Schedule]]] = defaultdict(list)

    def add(self, problem: Problem, schedule: Schedule) -> None:
        """Keep a schedule of a problem."""
        self._found[family_of(problem)].append((memory_of(problem), schedule))

    def best(self, problem: Problem) -> Programs | None:
        """Return the shortest programs that fit: they keep below every limit of this problem."""
        limits = memory_of(problem)
        fitting = [
            schedule
            for memory, schedule in self._found[family_of(problem)]
            if all(held <= limit for held, limit in zip(memory, limits, strict=True))
        ]
        best = min(fitting, key=lambda schedule: schedule.objective_ms, default=None)
        return None if best is None else best.programs


def _by_memory(variations: Sequence[Variation]) -> list[int]:
    """Return the order of solving: family by family as they come, the least memory first."""
    families: dict[str, int] = {}
    keys = []
    for index, variation in enumerate(variations):
        place = families.setdefault(family_of(variation.problem), index)
        keys.append((place, memory_of(variation.problem), index))
    return [index for *_, index in sorted(keys)]


def _solve(
    problem: Problem,
    starts: _Starts,
    options: Mapping[str, Any],
    should_stop: Callable[[], bool],
) -> tuple[Result, float]:
    began = time.monotonic()
    with stderr().status(f"solving {problem.name}"):
        result = optpipe_solver.solve(
            problem,
            start=starts.best(problem),
            start_method="less memory",
            should_stop=should_stop,
            **options,
        )
    if result.schedule is not None:
        starts.add(problem, result.schedule)
    return result, time.monotonic() - began


def _row(problem: Problem, result: Result, seconds: float, *, was_stopped: bool) -> Row:
    state = result.status.value
    if result.schedule is not None:
        state = "cancelled" if was_stopped and result.status != "optimal" else "succeeded"
    elif result.status != "infeasible":
        state = "cancelled" if was_stopped else "failed"
    schedule = result.schedule
    return {
        "index": 0,
        "values": {},
        "name": problem.name,
        "state": state,
        "objective_ms": None if schedule is None else schedule.objective_ms,
        "bound_ms": result.bound_ms,
        "gap": None if schedule is None else schedule.gap,
        "memory_bytes": max(memory_of(problem)),
        "seconds": round(seconds, 3),
        "problem_hash": problem.problem_hash,
        "job_id": None,
        "message": result.message or None,
    }


def _tell(row: Row, place: str, *, is_known: bool) -> None:
    said = row["state"]
    if row["objective_ms"] is not None:
        said = f"{format_ms(row['objective_ms'])} ms, gap {gap_text(row['gap'])}"
    # Options may have changed since: who gave other ones must see that these were not used.
    source = ", from the file, not solved again" if is_known else ""
    stderr().print(f"{place} {row['name']}: {said}{source}", markup=False, soft_wrap=True)
