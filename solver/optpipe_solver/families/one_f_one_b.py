"""1F1B, also called PipeDream-Flush.

Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", section 2.2.

Rule: stage s of S runs S - 1 - s forwards, then alternates one forward and one backward, then
drains. The backward is fused. Memory: stage s holds min(m, S - s) micro-batches. Bubble at equal
times: (S - 1)(F + B), i.e. a makespan of (m + S - 1)(F + B). It ignores memory limits, offload and
recompute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.action import Action, ActionType
from optpipe_solver.families.shape import one_stage_per_device, programs_by_device

if TYPE_CHECKING:
    from optpipe.action import Programs
    from optpipe.problem import Problem

__all__ = ["build_one_f_one_b"]


def build_one_f_one_b(problem: Problem) -> Programs:
    """Return 1F1B's programs.

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
        for j in range(m):
            if warmup + j < m:
                program.append(Action(stage, ActionType.FORWARD, warmup + j))
            program.append(Action(stage, ActionType.FULL_BACKWARD, j))
        by_stage.append(program)
    return programs_by_device(problem, by_stage)
