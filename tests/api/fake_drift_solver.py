"""A solver that fuses its backwards only where the second stage is slower than planned.

So the first schedule is good enough until a forward of stage 1 takes over 2 ms, or over 15 ms where
the problem is named ``drift:15``.
"""

from optpipe.problem import Problem
from tests.api.fake_solver import fitting
from tests.api.outcomes import Result

DRIFT = f"{__name__}:solve"


def solve(problem: Problem, **_: object) -> Result:
    limit_ms = float(problem.name.removeprefix("drift:") or 2)
    is_slow = problem.stages[1].forward_ms > limit_ms
    return fitting(problem, problem.num_microbatches if is_slow else 0)
