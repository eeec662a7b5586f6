"""Interleaved 1F1B of Megatron-LM.

Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", section 2.2.

Rule: p devices in a loop hold v chunks each; stage k stands on device k mod p. Micro-batches go in
groups of p: a device runs the forwards of its first chunk for the whole group, then those of its
second, ...; the fused backwards in the same groups, last chunk first. Device r runs
2(p - 1 - r) + (v - 1)p forwards, then alternates one forward and one backward, then drains. The
paper asks for m to be a multiple of p; here m is rounded up to one, and the actions of the
micro-batches too many are left out, which cannot make the programs wait in a circle.
Memory: device r holds at most min(m v, 2(p - 1 - r) + (v - 1)p + 1) micro-batches of one chunk,
which on the first is the paper's p(1 + (p - 1)/(p v)) of a whole device's. Bubble at equal times
and free communication: (p - 1)(F + B)/v with F and B of all chunks together. It ignores memory
limits, unequal chunks, offload and recompute.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from optpipe.action import Action, ActionType
from optpipe_solver.families.shape import chunks_of_loop

if TYPE_CHECKING:
    from optpipe.action import Programs
    from optpipe.problem import Problem

__all__ = ["build_interleaved"]


def build_interleaved(problem: Problem) -> Programs:
    """Return interleaved 1F1B's programs.

    Raises
    ------
    NotApplicable
        If the placement is no loop of at least two rounds.
    """
    chunks = chunks_of_loop(problem)
    num_ranks = len(problem.stages) // chunks
    programs: list[list[Action]] = [[] for _ in problem.devices]
    for rank in range(num_ranks):
        programs[problem.placement[rank]] = _program(
            rank, num_ranks, chunks, problem.num_microbatches
        )
    return tuple(map(tuple, programs))


def _program(rank: int, num_ranks: int, chunks: int, m: int) -> list[Action]:
    forwards = _in_groups(ActionType.FORWARD, rank, num_ranks, chunks, m)
    backwards = _in_groups(ActionType.FULL_BACKWARD, rank, num_ranks, chunks, m)
    warmup = min(len(forwards), 2 * (num_ranks - 1 - rank) + (chunks - 1) * num_ranks)
    alternating = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
    drained = backwards[len(forwards) - warmup :]
    rounded_up = [*forwards[:warmup], *alternating, *drained]
    return [action for action in rounded_up if action.microbatch < m]


def _in_groups(kind: ActionType, rank: int, num_ranks: int, chunks: int, m: int) -> list[Action]:
    """Return a rank's forwards or backwards in order, m rounded up to whole groups."""
    order = range(chunks) if kind is ActionType.FORWARD else reversed(range(chunks))
    stages = [chunk * num_ranks + rank for chunk in order]
    return [
        Action(stage, kind, j)
        for first in range(0, m, num_ranks)
        for stage in stages
        for j in range(first, first + num_ranks)
    ]
