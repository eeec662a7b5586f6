"""Schedules whose forwards and backwards run in pairs: DualPipeV and Megatron-Core's combined 1F1B.

A pair that the problem does not allow is run as its two passes, the forward first.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from optpipe.schedule import Action, ActionType
from optpipe_solver.families.classic import in_groups
from optpipe_solver.families.common import (
    NotApplicable,
    NotApplicableReason,
    chunks_of_loop,
    devices_of_v,
)

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe.schedule import Program, Programs

__all__ = ["build_dualpipe_v", "build_overlapped_1f1b"]

_F, _I, _W, _B = (
    ActionType.FORWARD,
    ActionType.BACKWARD_INPUT,
    ActionType.BACKWARD_WEIGHT,
    ActionType.FULL_BACKWARD,
)


def build_dualpipe_v(problem: Problem) -> Programs:
    """DualPipeV: a V of two chunks whose forwards and backwards run in pairs.

    Liu et al. 2024, "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 3.2.1, cut in half
    (DeepSeek's ``dualpipev``); the order is that of torch 2.13's ``ScheduleDualPipeV``.

    Rule: of p devices in a V, device r runs 2(p - 1 - r) forwards of its first chunk, then r + 1
    times a forward of each, p - 1 - r times I, W and F of its second chunk; then, m - 2p + r + 1
    times, the pairs of F of the first with B of the second chunk and the other way round; p - 1 - r
    times B of the second and the pair of F of the second and B of the first; then the backwards
    that are left, the latter half of them split so that their W fill the waits. Memory: 2p + 1
    activations of one chunk. Bubble at equal times, pairs as long as one pass after the other: (p -
    1)(F + 2B - 3W), B both of I and W. It ignores memory limits, unequal chunks, offload and
    recompute.

    Raises
    ------
    NotApplicable
        If the problem has no pairs, the placement is no V, or m is less than 2p.
    """
    _needs_pairs(problem)
    p, m = devices_of_v(problem), problem.num_microbatches
    if m < 2 * p:
        raise NotApplicable(
            NotApplicableReason.TOO_FEW_MICROBATCHES,
            f"this rule needs at least 2p = {2 * p} micro-batches, but there are {m}",
        )
    programs: list[Program] = [()] * len(problem.devices)
    for rank in range(p):
        programs[problem.placement[rank]] = _VRow(problem, rank, p).program()
    return tuple(programs)


class _VRow:
    """The program of one device of DualPipeV, micro-batches in order for each stage and kind."""

    def __init__(self, problem: Problem, rank: int, p: int) -> None:
        self._problem, self._rank, self._p = problem, rank, p
        self._row: list[Action] = []
        self._count: Counter[tuple[int, bool]] = Counter()
        self._weights: deque[Action] = deque()

    def program(self) -> Program:
        first, second = self._rank, 2 * self._p - 1 - self._rank
        up, down = self._rank + 1, self._p - self._rank - 1
        for _ in range(2 * down):
            self._add(first, _F)
        for _ in range(up):
            self._add(first, _F)
            self._add(second, _F)
        for _ in range(down):
            self._add(second, _I)
            self._add_weight()
            self._add(second, _F)
        for turn in range(self._problem.num_microbatches - 2 * self._p + up):
            if turn == 0 and down == 0:
                self._add(first, _F)
                self._add(second, _B)
            else:
                self._add_pair(first, second)
            self._add_pair(second, first)
        for _ in range(down):
            self._add(second, _B)
            self._add_pair(second, first)
        # From here on W are kept for the waits; on odd devices one pass earlier.
        middle, odd = up // 2, self._rank % 2
        for turn in range(up):
            self._add(second, _I if turn > middle or (turn == middle and odd) else _B)
            self._add(first, _I if turn >= middle else _B)
        for _ in range(down):
            self._add_weight()
            self._add(first, _I)
        while self._weights:
            self._add_weight()
        return tuple(self._row)

    def _next(self, stage: int, kind: ActionType) -> Action:
        key = stage, kind is not _F
        self._count[key] += 1
        return Action(stage, kind, self._count[key] - 1)

    def _add(self, stage: int, kind: ActionType) -> None:
        action = self._next(stage, kind)
        self._row.append(action)
        if kind is _I:
            self._weights.append(action._replace(type=_W))

    def _add_weight(self) -> None:
        if self._weights:
            self._row.append(self._weights.popleft())

    def _add_pair(self, forward: int, backward: int) -> None:
        self._row += _together(self._problem, self._next(forward, _F), self._next(backward, _B))


def build_overlapped_1f1b(problem: Problem) -> Programs:
    """Interleaved 1F1B whose forwards and backwards run in pairs, as in Megatron-Core.

    Megatron-Core's combined 1F1B (``overlap_moe_expert_parallel_comm``) on the interleaved schedule
    of Narayanan et al. 2021 (arXiv 2104.04473), section 2.2; Kimi K2 trains so.

    Rule: as interleaved 1F1B (`build_interleaved`), but each device runs one forward more before it
    alternates: then the backward beside a forward is never of the same micro-batch, and the two run
    together. Memory: device r of p with v chunks holds at most min(m v, 2(p - 1 - r) + (v - 1)p +
    2) micro-batches of one chunk. Bubble: no formula. On one device with one stage, where
    Megatron-Core has it too, every F but the first runs with the B before. It ignores memory
    limits, unequal chunks, offload and recompute.

    Raises
    ------
    NotApplicable
        If the problem has no pairs, or the placement is neither one stage nor a loop of at least
        two rounds.
    """
    _needs_pairs(problem)
    chunks = 1 if len(problem.stages) == 1 else chunks_of_loop(problem)
    m = problem.num_microbatches
    p = len(problem.stages) // chunks
    programs: list[Program] = [()] * len(problem.devices)
    for rank in range(p):
        forwards = in_groups(_F, rank, p, chunks, m)
        backwards = in_groups(_B, rank, p, chunks, m)
        warmup = min(len(forwards), 2 * (p - 1 - rank) + (chunks - 1) * p + 1)
        beside = (
            _together(problem, forward, backward)
            if forward is not None and max(forward.microbatch, backward.microbatch) < m
            else (forward, backward)
            for forward, backward in zip_longest(forwards[warmup:], backwards)
        )
        row = chain(forwards[:warmup], chain.from_iterable(beside))
        programs[problem.placement[rank]] = tuple(
            action for action in row if action is not None and action.microbatch < m
        )
    return tuple(programs)


def _needs_pairs(problem: Problem) -> None:
    if not problem.pairs:
        raise NotApplicable(
            NotApplicableReason.NEEDS_PAIRS,
            "this rule runs forwards and backwards in pairs, but the problem has no pairs",
        )


def _together(problem: Problem, forward: Action, backward: Action) -> Program:
    """Return a pair where the problem allows it, else its two passes one after the other."""
    key = forward.stage, backward.stage, backward.type.value
    allowed = key in problem.hidden_ms and forward.cell != backward.cell
    return forward, backward._replace(paired=allowed)
