"""The solver: published schedules, lower bounds, and the MILP that joins order and offload."""

from optpipe_solver.bounds import Bound, lower_bound
from optpipe_solver.budget import Progress, Result, RobustChoice, SolveStatus
from optpipe_solver.compare import ComparisonRow, compare
from optpipe_solver.feasibility import feasibility, smallest_memory
from optpipe_solver.last_steps import Robust
from optpipe_solver.plan import PlanResult, plan
from optpipe_solver.ranking import Noise
from optpipe_solver.replan import replan
from optpipe_solver.solve import METHODS, solve
from optpipe_solver.warm import warm_up

__all__ = [
    "METHODS",
    "Bound",
    "ComparisonRow",
    "Noise",
    "PlanResult",
    "Progress",
    "Result",
    "Robust",
    "RobustChoice",
    "SolveStatus",
    "compare",
    "feasibility",
    "lower_bound",
    "plan",
    "replan",
    "smallest_memory",
    "solve",
    "warm_up",
]
