"""The full-horizon big-M model with every trick off: no start, no windows, no known bound.

Every order of micro-batches is free, and the horizon is that of the slowest sensible schedule (one
micro-batch after the other).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.jobs import Answer, Job, Judged, answer_of, judge
from optpipe_solver.families.serial import build_serial
from optpipe_solver.milp.horizon.model import Search, num_order_pairs, solve_horizon
from optpipe_solver.milp.horizon.tricks import PLAIN

if TYPE_CHECKING:
    from optpipe import Programs

__all__ = ["answer"]

_MOST_PAIRS = 400_000
"""Above this many pairs writing the model alone takes longer than any run here."""


def answer(job: Job) -> Answer:
    """Write and solve the model within the time; lower every solution it finds."""
    best = Judged(job.problem)
    serial = build_serial(job.problem)
    slowest = judge(job.problem, serial)
    pairs = num_order_pairs(job.problem, fifo=False)
    if pairs > _MOST_PAIRS or slowest is None:
        return answer_of(best, status=f"too large: {pairs} pairs")

    search = Search(
        time_limit_s=job.seconds,
        threads=job.threads,
        seed=job.seed,
        on_programs=lambda programs: _offer(best, programs),
    )
    outcome = solve_horizon(job.problem, serial, slowest, search, fifo=False, tricks=PLAIN)
    return answer_of(best, bound_ms=outcome.bound_ms, status=outcome.status.value)


def _offer(best: Judged, programs: Programs) -> None:
    best.offer(programs, "plain-milp")
