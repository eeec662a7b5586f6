"""Cut, placement and schedule chosen together: layers in, a problem and its schedule out."""

from optpipe_solver.plan.hand import HandPlan, hand_cuts, hand_plans
from optpipe_solver.plan.lines import PLACEMENTS, PlacementKind
from optpipe_solver.plan.plan import DEFAULT_CHUNKS, PlanResult, plan
from optpipe_solver.plan.search import Fate, PlanRow

__all__ = [
    "DEFAULT_CHUNKS",
    "PLACEMENTS",
    "Fate",
    "HandPlan",
    "PlacementKind",
    "PlanResult",
    "PlanRow",
    "hand_cuts",
    "hand_plans",
    "plan",
]
