"""1F1B-R: 1F1B with full activation recomputation.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", on the schedule of Narayanan et
al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
sections 2.2 and 3.5; 1F1B-R in Qi et al. 2024, "Pipeline Parallelism with
Controllable Memory".

Rule: 1F1B, where every forward keeps only its checkpoint and every backward is preceded by a
recompute, on every stage, the last included (Megatron-LM's ``full`` granularity). The recompute
needs no gradient, so it starts while the device still waits for one. Memory: stage s of S holds
min(m, S - s) checkpoints and one whole activation. Bubble at equal times: at most
(S - 1)(F + R + B) beside the m R of recompute on every device. It ignores memory limits, offload,
and that recomputing on the last stage, or only where memory asks for it, would be cheaper.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.action import Action, ActionType
from optpipe_solver.families.not_applicable import NotApplicable, Reason
from optpipe_solver.families.one_f_one_b import build_one_f_one_b

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.action import Program, Programs
    from optpipe.problem import Problem

__all__ = ["build_recompute_1f1b"]


def build_recompute_1f1b(problem: Problem) -> Programs:
    """Return 1F1B's programs with a RECOMPUTE before every B.

    Raises
    ------
    NotApplicable
        If a device holds several stages, or a stage cannot be recomputed.
    """
    plain = build_one_f_one_b(problem)
    for index, stage in enumerate(problem.stages):
        if not stage.can_recompute:
            raise NotApplicable(
                Reason.NEEDS_RECOMPUTE,
                f"this rule recomputes every stage, but stage {index} has no recompute_ms",
            )
    return tuple(tuple(_with_recompute(program)) for program in plain)


def _with_recompute(program: Program) -> Iterator[Action]:
    for action in program:
        if action.type is ActionType.FULL_BACKWARD:
            yield Action(action.stage, ActionType.RECOMPUTE, action.microbatch)
        yield action
