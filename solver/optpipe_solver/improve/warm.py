"""Compile everything once, so that no solve pays for it: ``python -m optpipe_solver.improve.warm``.

numba keeps what it compiled in ``NUMBA_CACHE_DIR``, else beside the sources, else in the user's
cache folder; a later process loads it from there in about a second.
"""

from __future__ import annotations

from optpipe.problem import Problem
from optpipe_solver.improve.local_search import improve_by_local_search
from optpipe_solver.incumbent import Incumbent
from optpipe_solver.starts import all_starts

__all__ = ["warm_up"]


def warm_up() -> None:
    """Run all families and the search on the smallest problems that use all of them."""
    for placement in ([0, 1], [0, 1, 1, 0], [0, 1, 0, 1]):
        best = Incumbent(_tight(placement))
        for start in all_starts(best.problem):
            if start.programs is not None and start.legal:
                best.offer(start.programs, start.method)
    improve_by_local_search(best, time_limit_s=1e-3, seed=0)


def _tight(placement: list[int]) -> Problem:
    """Two devices that must offload."""
    stage = {
        "forward_ms": 1.0,
        "backward_input_ms": 1.0,
        "backward_weight_ms": 1.0,
        "activation_bytes": 10,
        "weight_context_bytes": 5,
        "offload_bytes": 10,
    }
    most = 15 * len(placement) // 2
    device = {"memory_bytes": most, "d2h_gb_per_s": 1.0, "h2d_gb_per_s": 1.0}
    return Problem.parse(
        {
            "num_microbatches": 4,
            "devices": [device, device],
            "stages": [{"device": d, **stage} for d in placement],
        }
    )


if __name__ == "__main__":
    warm_up()
