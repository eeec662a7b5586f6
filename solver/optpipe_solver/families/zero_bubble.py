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

from optpipe.schedule import Action, ActionType
from optpipe_solver.arrays.encoding import KINDS, durations_of, memory_of
from optpipe_solver.families.common import (
    NotApplicable,
    NotApplicableReason,
    one_stage_per_device,
    programs_by_device,
)
from optpipe_solver.families.zero_bubble_kernel import WEIGHT, StageLine, plan_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.problem import Problem, Stage
    from optpipe.schedule import Programs
    from optpipe_solver.families.zero_bubble_kernel import GreedyRun

__all__ = ["build_zb_1p", "build_zb_2p", "build_zb_h1", "build_zb_h2", "build_zero_bubble_greedy"]


_TYPES = KINDS[: WEIGHT + 1]
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
    limits = [problem.room_bytes(stage.device) for stage in problem.stages]
    for index, (stage, limit) in enumerate(zip(problem.stages, limits, strict=True)):
        if stage.activation_bytes + _beside(stage) > limit:
            raise NotApplicable(
                NotApplicableReason.DOES_NOT_FIT,
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


def _line(problem: Problem, limits: list[int]) -> StageLine:
    return StageLine(
        duration=durations_of(problem)[: len(_TYPES)],
        there=np.array([there for there, _ in problem.boundary_ms], dtype=np.float64),
        back=np.array([back for _, back in problem.boundary_ms], dtype=np.float64),
        held=np.array([stage.activation_bytes for stage in problem.stages], dtype=np.int64),
        context=np.array([stage.weight_context_bytes for stage in problem.stages], dtype=np.int64),
        workspace=memory_of(problem).workspace[: len(_TYPES)],
        limit=np.array([min(limit, _UNLIMITED) for limit in limits], dtype=np.int64),
        num_microbatches=problem.num_microbatches,
    )


def _objective_ms(problem: Problem, plan: GreedyRun) -> float:
    syncs = np.array([stage.grad_sync_ms for stage in problem.stages])
    ends = plan.free + syncs
    if problem.objective == "span":
        return float((ends - plan.first).max())
    return float(ends.max() - plan.first.min())


def _program(plan: GreedyRun, stage: int) -> Iterator[Action]:
    next_of = [0, 0, 0]
    for kind in plan.kinds[stage].tolist():
        yield Action(stage, _TYPES[kind], next_of[kind])
        next_of[kind] += 1


def build_zb_h1(problem: Problem) -> Programs:
    """ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.1).

    Rule: forwards and input gradients stand in 1F1B's order; stage s runs its W as soon as more
    than s of them wait, so that in-flight forwards (S - s) and waiting W (s) together never exceed
    S, and the rest fills the drain, one W after each I. Memory: S micro-batches on every stage (m
    when fewer), as 1F1B's first stage. Bubble at equal times: (S - 1)(F + I - W). It ignores memory
    limits, offload and recompute.

    Raises
    ------
    NotApplicable
        If a device holds several stages.
    """
    return _handcrafted(problem, 1)


def build_zb_h2(problem: Problem) -> Programs:
    """ZB-H2: the handcrafted zero-bubble schedule.

    Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.2 and figure 3 (bottom).

    Rule: as ZB-H1 with everything twice: stage s of S first runs 2(S - 1 - s) + 1 forwards, which
    fills the wait for its first input gradient, then alternates I and F; a weight gradient lags 2s
    micro-batches behind, so that the tail becomes a parallelogram: the devices end as staggered as
    they began. Memory: stage s holds at most 2(S - s) - 1 micro-batches between F and I and 2s
    between I and W, never above the 2S - 1 of the first stage (min with m). Bubble at equal times
    and m >= 2S - 1: zero (span); the paper states (S - 1)(F + I - 2W) for its profiled times. It
    ignores memory limits, unequal stages (the counts do not change with times), offload and
    recompute.

    Raises
    ------
    NotApplicable
        If a device holds several stages.
    """
    return _handcrafted(problem, 2)


def _handcrafted(problem: Problem, times: int) -> Programs:
    """Return the programs with ``times`` as many forwards ahead and W behind as ZB-H1 has."""
    one_stage_per_device(problem)
    last, m = len(problem.stages) - 1, problem.num_microbatches
    by_stage = [_stage_program(s, times * (last - s), times * s, m) for s in range(last + 1)]
    return programs_by_device(problem, by_stage)


def _stage_program(stage: int, ahead: int, lag: int, m: int) -> list[Action]:
    """Return ``ahead`` forwards, then I and F in turn; W lag ``lag`` micro-batches behind I."""
    ahead = min(ahead, m)
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
