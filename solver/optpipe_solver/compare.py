"""Every method on one problem, judged by the same simulator."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optpipe.memory import device_peak_bytes, host_peak_bytes
from optpipe.simulate import simulate
from optpipe_solver.solve import solve
from optpipe_solver.starts import all_starts

if TYPE_CHECKING:
    from optpipe.action import Programs
    from optpipe.problem import Problem

__all__ = ["Row", "compare"]


@dataclass(frozen=True, slots=True)
class Row:
    """One method's schedule; times in ms, bytes as the largest over devices or hosts.

    ``programs`` is None where the method has none; ``reason`` then says why.
    """

    method: str
    programs: Programs | None
    makespan_ms: float
    span_ms: float
    peak_bytes: int
    host_peak_bytes: int
    over_limit: bool
    seconds: float
    reason: str = ""


def compare(
    problem: Problem, *, time_limit_s: float = 20.0, threads: int = 1, seed: int = 0
) -> list[Row]:
    """Return a row per method, best first among those within the limits, then the others."""
    rows = []
    for start in all_starts(problem):
        if start.programs is None:
            rows.append(Row(start.method, None, 0.0, 0.0, 0, 0, False, start.seconds, start.reason))
        else:
            rows.append(
                _row(problem, start.method, start.programs, start.seconds, legal=start.legal)
            )
    began = time.perf_counter()
    result = solve(problem, time_limit_s=time_limit_s, threads=threads, seed=seed)
    seconds = time.perf_counter() - began
    if result.schedule is not None:
        rows.append(_row(problem, "optpipe", result.schedule.programs, seconds, legal=True))
    return sorted(rows, key=lambda row: _rank(problem, row))


def _row(problem: Problem, method: str, programs: Programs, seconds: float, *, legal: bool) -> Row:
    run = simulate(problem, programs)
    peaks = [device_peak_bytes(problem, d, program) for d, program in enumerate(programs)]
    hosts = host_peak_bytes(problem, programs)
    return Row(
        method=method,
        programs=programs,
        makespan_ms=run.makespan_ms,
        span_ms=run.span_ms,
        peak_bytes=max(peaks),
        host_peak_bytes=max(hosts.values()),
        over_limit=not legal,
        seconds=seconds,
    )


def _rank(problem: Problem, row: Row) -> tuple[bool, bool, float]:
    length = row.makespan_ms if problem.objective == "makespan" else row.span_ms
    return (row.programs is None, row.over_limit, length)
