"""The owner's formulation alone: ``optpipe solve --method milp``."""

from __future__ import annotations

from benchmarks.jobs import Answer, Job
from benchmarks.peers.ours import answer_of_solve
from optpipe_solver.milp.horizon.items import MOST_PAIRS, num_order_pairs

__all__ = ["answer"]


def answer(job: Job) -> Answer:
    """Let the full-horizon model improve on the families, where its size allows."""
    pairs = num_order_pairs(job.problem, fifo=True)
    if pairs > MOST_PAIRS:
        return Answer(programs=None, status=f"too large: {pairs} pairs")
    return answer_of_solve(job, method="milp")
