"""Compile the search once, so that no solve pays for it: ``python -m optpipe_solver.improve.warm``.

numba keeps what it compiled in ``NUMBA_CACHE_DIR``, else beside the sources, else in the user's
cache folder; a later process loads it from there in well under a second.
"""

from __future__ import annotations

from optpipe.problem import Problem
from optpipe_solver.improve.local_search import improve_by_local_search
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.starts import all_starts

__all__ = ["warm_up"]


def warm_up() -> None:
    """Run the search on the smallest problem that uses all of it."""
    stage = {
        "forward_ms": 1.0,
        "backward_input_ms": 1.0,
        "backward_weight_ms": 1.0,
        "activation_bytes": 1,
    }
    problem = Problem.parse(
        {
            "num_microbatches": 2,
            "devices": [{"memory_bytes": 8}, {"memory_bytes": 8}],
            "stages": [{"device": 0, **stage}, {"device": 1, **stage}],
        }
    )
    best = Incumbent(problem)
    for start in all_starts(problem, "serial"):
        if start.programs is not None:
            best.offer(start.programs, start.method)
    improve_by_local_search(best, time_limit_s=1e-3, seed=0)


if __name__ == "__main__":
    warm_up()
