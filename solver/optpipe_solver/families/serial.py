"""Serial execution: one micro-batch after the other, no overlap at all.

Not a published schedule but the floor under all of them: it fits wherever anything fits (the proof
is in `optpipe_solver.smallest_memory`), so that every feasible problem has a schedule.
Memory: one micro-batch. Makespan: m times the critical path; the bubble is all of the rest.
What it ignores: everything but memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.action import Action, ActionType
from optpipe_solver.families.not_applicable import NotApplicable, Reason
from optpipe_solver.smallest_memory import Mode, feasibility

if TYPE_CHECKING:
    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe_solver.smallest_memory import SerialPlan

__all__ = ["build_serial"]


def build_serial(problem: Problem) -> Programs:
    """Return serial programs that fit the problem's memory limits.

    Raises
    ------
    NotApplicable
        If no schedule at all fits.
    """
    feasible = feasibility(problem)
    if feasible.plan is None:
        raise NotApplicable(Reason.INFEASIBLE, feasible.message)
    programs: list[list[Action]] = [[] for _ in problem.devices]
    for j in range(problem.num_microbatches):
        for index, stage in enumerate(problem.stages):
            programs[stage.device] += _forward(feasible.plan, index, j)
        for index in reversed(range(len(problem.stages))):
            programs[problem.stages[index].device] += _backward(feasible.plan, index, j)
    return tuple(map(tuple, programs))


def _forward(plan: SerialPlan, stage: int, j: int) -> list[Action]:
    actions = [Action(stage, ActionType.FORWARD, j)]
    if plan.mode[stage] is Mode.OFFLOAD:
        actions += [Action(stage, ActionType.OFFLOAD, j), Action(stage, ActionType.RELEASE, j)]
    return actions


def _backward(plan: SerialPlan, stage: int, j: int) -> list[Action]:
    back = {Mode.OFFLOAD: ActionType.RELOAD, Mode.RECOMPUTE: ActionType.RECOMPUTE}
    mode = plan.mode[stage]
    actions = [Action(stage, back[mode], j)] if mode in back else []
    if plan.split[stage]:
        actions += [
            Action(stage, ActionType.BACKWARD_INPUT, j),
            Action(stage, ActionType.BACKWARD_WEIGHT, j),
        ]
    else:
        actions.append(Action(stage, ActionType.FULL_BACKWARD, j))
    return actions
