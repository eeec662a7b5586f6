"""A solver that fuses its backwards only where the second stage is slower than it was registered.

So the first schedule is good enough until somebody measures that stage 1's forward takes over 2 ms.
"""

from optpipe.problem import Problem
from tests.api.fake_solver import fitting
from tests.api.outcomes import Result

DRIFT = f"{__name__}:solve"


def solve(problem: Problem, **_: object) -> Result:
    return fitting(problem, problem.num_microbatches if problem.stages[1].forward_ms > 2 else 0)
