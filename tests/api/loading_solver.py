"""A comparison that counts the kernels that the real solver loads or compiles during its job."""

import sys
from typing import Any

from numba.core.registry import CPUDispatcher

from optpipe.problem import Problem
from optpipe_solver import solve
from optpipe_solver.compare import AS_GIVEN, ComparisonRow

__all__ = ["compare", "num_loads"]


def num_loads() -> int:
    """Return how many kernels this process has loaded or compiled because they were called."""
    modules = [module for name, module in sys.modules.items() if name.startswith("optpipe_solver.")]
    found = {id(item): item for module in modules for item in vars(module).values()}
    stats: list[Any] = [one.stats for one in found.values() if isinstance(one, CPUDispatcher)]
    return sum(sum(each.values()) for one in stats for each in (one.cache_hits, one.cache_misses))


def compare(problem: Problem, *, time_limit_s: float, **_: Any) -> list[ComparisonRow]:
    before = num_loads()
    solve(problem, time_limit_s=time_limit_s, threads=1)
    return [
        ComparisonRow(
            method="auto",
            placement=AS_GIVEN,
            problem=problem,
            programs=None,
            seconds=0.0,
            reason=f"{num_loads() - before} kernels loaded",
        )
    ]
