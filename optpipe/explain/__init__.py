"""Why a schedule is as long as it is, and the changes between two: pure, without a solver.

* `values`: the data of an explanation.
* `reasons`: why each action starts when it does, the critical path, and slack of lanes.
* `memory`: why each offload was chosen.
* `explanation`: makes an explanation of these.
* `diff`: the changes between two schedules or problems.
"""

from optpipe.explain.diff import (
    Cost,
    ProblemDifference,
    ScheduleDifference,
    compare_problems,
    compare_programs,
    cost_line,
    difference_lines,
    problem_costs,
    record_costs,
    schedule_costs,
)
from optpipe.explain.explanation import explain
from optpipe.explain.memory import tightest_device
from optpipe.explain.reasons import critical_path
from optpipe.explain.values import Explanation

__all__ = [
    "Cost",
    "Explanation",
    "ProblemDifference",
    "ScheduleDifference",
    "compare_problems",
    "compare_programs",
    "cost_line",
    "critical_path",
    "difference_lines",
    "explain",
    "problem_costs",
    "record_costs",
    "schedule_costs",
    "tightest_device",
]
