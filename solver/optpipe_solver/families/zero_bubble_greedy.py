"""The automatic Zero Bubble scheduler: ZB-1p, ZB-2p, and every memory limit around them.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 3.1.

Rule: a stage warms up with as many forwards as end before its first I arrives and memory admits,
then alternates F and I; W fills gaps it fits into, and is run early where memory asks for it; in
the end all remaining W. Hyper-parameters, all combinations tried, best simulated schedule kept:
one more F in the warm-up although it delays the first I; W into gaps shorter than itself, always,
never, or where the stage would become the one with most idle time; and whether an F goes behind an
I that it would delay. The paper alternates strictly; then, with little memory, a stage waits for an
F that its own I must first make possible. Here an F never makes a stage wait while an I is there:
below p activations (and down to one) the schedule only gets slower.

Memory: at most the limit, in bytes, workspaces included; ZB-1p is the limit of p activations (as
much as 1F1B's first stage, but on every stage), ZB-2p of 2p. Bubble at equal times: that of ZB-H1
at p, and close to zero from 2p - 1 on. It ignores the fused backward, offload and recompute, and
micro-batches go first in, first out.
"""

from __future__ import annotations

from itertools import islice, product
from typing import TYPE_CHECKING

import numpy as np

from optpipe.action import Action, ActionType
from optpipe_solver.families.not_applicable import NotApplicable, Reason
from optpipe_solver.families.shape import one_stage_per_device, programs_by_device
from optpipe_solver.families.zero_bubble_kernel import FORWARD, INPUT, WEIGHT, Line, plan_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.action import Programs
    from optpipe.problem import Problem, Stage
    from optpipe_solver.families.zero_bubble_kernel import Plan

__all__ = ["build_zb_1p", "build_zb_2p", "build_zero_bubble_greedy"]

_TYPES = {
    FORWARD: ActionType.FORWARD,
    INPUT: ActionType.BACKWARD_INPUT,
    WEIGHT: ActionType.BACKWARD_WEIGHT,
}
_WORK = 800_000
_UNLIMITED = 2**60  # sums of it and a few activations (2**53 at most) are still 64-bit integers


def build_zero_bubble_greedy(problem: Problem) -> Programs:
    """Return the best of the greedy's schedules within the memory limits.

    Raises
    ------
    NotApplicable
        If a device holds several stages, or has no room for one micro-batch.
    """
    one_stage_per_device(problem)
    limits = [
        problem.devices[stage.device].usable_bytes - stage.static_bytes for stage in problem.stages
    ]
    for index, (stage, limit) in enumerate(zip(problem.stages, limits, strict=True)):
        if stage.activation_bytes + _beside(stage) > limit:
            raise NotApplicable(
                Reason.DOES_NOT_FIT,
                f"stage {index} needs {stage.activation_bytes + _beside(stage)} bytes for one "
                f"micro-batch without offload and recompute, but device {stage.device} has room "
                f"for {limit}",
            )
    return _best(problem, limits)


def build_zb_1p(problem: Problem) -> Programs:
    """Return ZB-1p's programs: p activations on every stage, whatever the memory limits are.

    Raises
    ------
    NotApplicable
        If a device holds several stages.
    """
    return _with_activations(problem, len(problem.stages))


def build_zb_2p(problem: Problem) -> Programs:
    """Return ZB-2p's programs: 2p activations on every stage, whatever the memory limits are.

    Raises
    ------
    NotApplicable
        If a device holds several stages.
    """
    return _with_activations(problem, 2 * len(problem.stages))


def _with_activations(problem: Problem, number: int) -> Programs:
    one_stage_per_device(problem)
    return _best(
        problem, [number * stage.activation_bytes + _beside(stage) for stage in problem.stages]
    )


def _beside(stage: Stage) -> int:
    """Return what a stage needs beside its activations to run any one action."""
    growth = stage.weight_context_bytes - stage.activation_bytes
    return max(
        stage.forward_workspace_bytes,
        max(0, growth) + stage.backward_input_workspace_bytes,
        growth + stage.backward_weight_workspace_bytes,
    )


def _best(problem: Problem, limits: list[int]) -> Programs:
    line = _line(problem, limits)
    plans = (plan_line(line, *setting) for setting in _settings(problem))
    best = min(plans, key=lambda plan: _objective_ms(problem, plan))
    return programs_by_device(
        problem, [list(_program(best, stage)) for stage in range(len(problem.stages))]
    )


def _settings(problem: Problem) -> Iterator[tuple[bool, int, bool]]:
    """Yield hyper-parameters, the most successful first; large problems try fewer."""
    size = 3 * len(problem.stages) * problem.num_microbatches
    everything = product((False, True), (1, 2, 0), (True, False))
    return islice(everything, max(2, min(12, _WORK // size)))


def _line(problem: Problem, limits: list[int]) -> Line:
    stages = problem.stages
    return Line(
        duration=np.array(
            [
                [stage.forward_ms for stage in stages],
                [stage.backward_input_ms for stage in stages],
                [stage.backward_weight_ms for stage in stages],
            ],
            dtype=np.float64,
        ),
        there=np.array([there for there, _ in problem.boundary_ms], dtype=np.float64),
        back=np.array([back for _, back in problem.boundary_ms], dtype=np.float64),
        held=np.array([stage.activation_bytes for stage in stages], dtype=np.int64),
        context=np.array([stage.weight_context_bytes for stage in stages], dtype=np.int64),
        workspace=np.array(
            [
                [stage.forward_workspace_bytes for stage in stages],
                [stage.backward_input_workspace_bytes for stage in stages],
                [stage.backward_weight_workspace_bytes for stage in stages],
            ],
            dtype=np.int64,
        ),
        limit=np.array([min(limit, _UNLIMITED) for limit in limits], dtype=np.int64),
        num_microbatches=problem.num_microbatches,
    )


def _objective_ms(problem: Problem, plan: Plan) -> float:
    syncs = np.array([stage.grad_sync_ms for stage in problem.stages])
    ends = plan.free + syncs
    if problem.objective == "span":
        return float((ends - plan.first).max())
    return float(ends.max() - plan.first.min())


def _program(plan: Plan, stage: int) -> Iterator[Action]:
    next_of = [0, 0, 0]
    for kind in plan.kinds[stage].tolist():
        yield Action(stage, _TYPES[kind], next_of[kind])
        next_of[kind] += 1
