"""Why a schedule is as long as it is, and what changed between two: pure, without a solver.

Five files first: `values` (what an explanation holds), `reasons` (why each action starts when it
does), `path` (the critical path), `needs` (why each offload was chosen), `explanation`. Beside them
`difference` compares schedules and `fields` problems.
"""

from optpipe.explain.costs import record_costs, schedule_costs
from optpipe.explain.difference import Cost, ScheduleDifference, compare_programs
from optpipe.explain.difference_words import cost_line, difference_lines
from optpipe.explain.explanation import explain
from optpipe.explain.fields import ProblemDifference, compare_problems, problem_costs
from optpipe.explain.headroom import tightest_device
from optpipe.explain.path import critical_path
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
