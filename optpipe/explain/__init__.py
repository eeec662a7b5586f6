"""Why a schedule is as long as it is, and what changed between two: pure, without a solver.

`values` (what an explanation holds), `reasons` (why each action starts when it does, the critical
path, how much slower each lane may become), `memory` (why each offload was chosen), `explanation`;
beside them `diff`.
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
