"""Schedules that every test can name: one micro-batch after the other."""

from optpipe.problem import Problem
from optpipe.schedule import Action, ActionType, Programs


def serial(problem: Problem, num_fused: int) -> Programs:
    """One micro-batch after the other, the first ``num_fused`` with fused backwards."""
    programs: list[list[Action]] = [[] for _ in problem.devices]
    for microbatch in range(problem.num_microbatches):
        for index, stage in enumerate(problem.stages):
            programs[stage.device].append(Action(index, ActionType.FORWARD, microbatch))
        for index in reversed(range(len(problem.stages))):
            kinds = [ActionType.BACKWARD_INPUT, ActionType.BACKWARD_WEIGHT]
            if microbatch < num_fused:
                kinds = [ActionType.FULL_BACKWARD]
            device = problem.stages[index].device
            programs[device] += [Action(index, kind, microbatch) for kind in kinds]
    return tuple(tuple(program) for program in programs)
