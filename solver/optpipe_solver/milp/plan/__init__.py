"""The plan MILP: cut, placement's modes and a schedule's pattern, decided together."""

from optpipe_solver.milp.plan.model import PatternPlan, plan_pattern
from optpipe_solver.milp.plan.pattern import PATTERNS, Pattern, patterns_of

__all__ = ["PATTERNS", "Pattern", "PatternPlan", "patterns_of", "plan_pattern"]
