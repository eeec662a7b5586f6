"""The plan MILP: cut, placement's modes and a schedule's pattern, decided together."""

from optpipe_solver.milp.plan.model import PatternPlan, plan_pattern
from optpipe_solver.milp.plan.pattern import (
    PAIRED_PATTERNS,
    PATTERNS,
    Pattern,
    boundaries,
    patterns_of,
)
from optpipe_solver.milp.plan.variables import layer_kinds

__all__ = [
    "PAIRED_PATTERNS",
    "PATTERNS",
    "Pattern",
    "PatternPlan",
    "boundaries",
    "layer_kinds",
    "patterns_of",
    "plan_pattern",
]
