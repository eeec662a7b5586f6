"""ZB-H2: the handcrafted zero-bubble schedule.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.2 and figure 3 (bottom).

Rule: as ZB-H1 with everything twice: stage s of S first runs 2(S - 1 - s) + 1 forwards, which fills
the wait for its first input gradient, then alternates I and F; a weight gradient lags 2s
micro-batches behind, so that the tail becomes a parallelogram: the devices end as staggered as they
began. Memory: stage s holds at most 2(S - s) - 1 micro-batches between F and I and 2s between I and
W, never above the 2S - 1 of the first stage (min with m). Bubble at equal times and m >= 2S - 1:
zero (span); the paper states (S - 1)(F + I - 2W) for its profiled times. It ignores memory limits,
unequal stages (the counts do not change with times), offload and recompute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.action import Action, ActionType
from optpipe_solver.families.shape import one_stage_per_device, programs_by_device

if TYPE_CHECKING:
    from optpipe.action import Programs
    from optpipe.problem import Problem

__all__ = ["build_zb_h2"]


def build_zb_h2(problem: Problem) -> Programs:
    """Return ZB-H2's programs.

    Raises
    ------
    NotApplicable
        If a device holds several stages.
    """
    one_stage_per_device(problem)
    num_stages, m = len(problem.stages), problem.num_microbatches
    return programs_by_device(
        problem, [_program(stage, num_stages, m) for stage in range(num_stages)]
    )


def _program(stage: int, num_stages: int, m: int) -> list[Action]:
    ahead = min(m, 2 * (num_stages - 1 - stage))
    lag = 2 * stage
    program = [Action(stage, ActionType.FORWARD, j) for j in range(ahead)]
    done_w = 0
    for j in range(m):
        draining = ahead + j >= m
        if not draining:
            program.append(Action(stage, ActionType.FORWARD, ahead + j))
        program.append(Action(stage, ActionType.BACKWARD_INPUT, j))
        if draining or j + 1 - done_w > lag:
            program.append(Action(stage, ActionType.BACKWARD_WEIGHT, done_w))
            done_w += 1
    return program + [Action(stage, ActionType.BACKWARD_WEIGHT, j) for j in range(done_w, m)]
