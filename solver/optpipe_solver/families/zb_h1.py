"""ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.1).

Rule: forwards and input gradients stand in 1F1B's order; stage s runs its W as soon as more than s
of them wait, so that in-flight forwards (S - s) and waiting W (s) together never exceed S, and the
rest fills the drain, one W after each I. Memory: S micro-batches on every stage (m when fewer),
as 1F1B's first stage. Bubble at equal times: (S - 1)(F + I - W). It ignores memory limits, offload
and recompute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.action import Action, ActionType
from optpipe_solver.families.shape import one_stage_per_device, programs_by_device

if TYPE_CHECKING:
    from optpipe.action import Programs
    from optpipe.problem import Problem

__all__ = ["build_zb_h1"]


def build_zb_h1(problem: Problem) -> Programs:
    """Return ZB-H1's programs.

    Raises
    ------
    NotApplicable
        If a device holds several stages.
    """
    one_stage_per_device(problem)
    num_stages, m = len(problem.stages), problem.num_microbatches
    by_stage = []
    for stage in range(num_stages):
        warmup = min(m, num_stages - 1 - stage)
        program = [Action(stage, ActionType.FORWARD, j) for j in range(warmup)]
        done_w = 0
        for j in range(m):
            draining = warmup + j >= m
            if not draining:
                program.append(Action(stage, ActionType.FORWARD, warmup + j))
            program.append(Action(stage, ActionType.BACKWARD_INPUT, j))
            if draining or j + 1 - done_w > stage:
                program.append(Action(stage, ActionType.BACKWARD_WEIGHT, done_w))
                done_w += 1
        program += [Action(stage, ActionType.BACKWARD_WEIGHT, j) for j in range(done_w, m)]
        by_stage.append(program)
    return programs_by_device(problem, by_stage)
