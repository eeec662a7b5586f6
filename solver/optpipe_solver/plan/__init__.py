"""Cut, placement and schedule chosen together: layers in, a problem and its schedule out."""

from optpipe_solver.plan.lines import PLACEMENTS
from optpipe_solver.plan.plan import DEFAULT_CHUNKS, PlanResult, plan
from optpipe_solver.plan.search import Fate, HandPlan, PlanRow, hand_cuts, hand_plans

__all__ = [
    "DEFAULT_CHUNKS",
    "PLACEMENTS",
    "Fate",
    "HandPlan",
    "PlanResult",
    "PlanRow",
    "hand_cuts",
    "hand_plans",
    "plan",
]
