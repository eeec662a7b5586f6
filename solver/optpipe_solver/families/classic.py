"""Schedules with a fixed rule per device: serial, GPipe, 1F1B, interleaved, of pairs, of slices.

DualPipeV and Megatron-Core's combined 1F1B run forwards and backwards in pairs. A pair that the
problem does not allow runs as its two passes, the forward first.

In Seq1F1B and SlimPipe, micro-batches are slices of samples. Samples run first in, first out. The
slices of a sample run last in, first out: a slice's keys and values get gradients from all later
ones. Both rules set the maximum number of slices that a device holds. A device runs forwards up to
this number, then one B and one F in turn, then the rest.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from optpipe.schedule import Action, ActionType
from optpipe_solver.arrays.encoding import new_action
from optpipe_solver.budget import check_stop
from optpipe_solver.families.common import (
    NotApplicable,
    NotApplicableReason,
    chunks_of_loop,
    devices_of_v,
    one_stage_per_device,
    programs_by_device,
)
from optpipe_solver.feasibility import feasibility, serial_plan
from optpipe_solver.reductions import serial_groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.problem import Problem
    from optpipe.schedule import Program, Programs

__all__ = [
    "build_dualpipe_v",
    "build_gpipe",
    "build_interleaved",
    "build_one_f_one_b",
    "build_overlapped_1f1b",
    "build_recompute_1f1b",
    "build_seq1f1b",
    "build_serial",
    "build_slimpipe",
    "in_groups",
]


def build_interleaved(problem: Problem) -> Programs:
    """Interleaved 1F1B of Megatron-LM.

    Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", section 2.2.

    Rule: p devices in a loop hold v chunks each; stage k is on device k mod p. Micro-batches go in
    groups of p. A device runs the forwards of its first chunk for the whole group, then those of
    its second, ... It runs the fused backwards in the same groups, last chunk first. Device r runs
    2(p - 1 - r) + (v - 1)p forwards, then alternates one forward and one backward, then drains. The
    paper requires m to be a multiple of p. Here m is rounded up to a multiple, and the actions of
    the surplus micro-batches are left out, which cannot cause a deadlock. Memory: device r holds at
    most min(m v, 2(p - 1 - r) + (v - 1)p + 1) micro-batches of one chunk. On the first device that
    is the paper's p(1 + (p - 1)/(p v)) of a whole device's. Bubble at equal times and free
    communication: (p - 1)(F + B)/v with F and B of all chunks together. It ignores memory limits,
    unequal chunks, offload and recompute.

    Raises
    ------
    NotApplicable
        If the placement is no loop of at least two rounds.
    """
    chunks = chunks_of_loop(problem)
    num_ranks, m = len(problem.stages) // chunks, problem.num_microbatches
    programs: list[Program] = [()] * len(problem.devices)
    for rank in range(num_ranks):
        check_stop()
        forwards = in_groups(ActionType.FORWARD, rank, num_ranks, chunks, m)
        backwards = in_groups(ActionType.FULL_BACKWARD, rank, num_ranks, chunks, m)
        warmup = min(len(forwards), 2 * (num_ranks - 1 - rank) + (chunks - 1) * num_ranks)
        alternating = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
        drained = backwards[len(forwards) - warmup :]
        rounded_up = chain(forwards[:warmup], alternating, drained)
        row = tuple(action for action in rounded_up if action.microbatch < m)
        programs[problem.placement[rank]] = row
    return tuple(programs)


def in_groups(kind: ActionType, rank: int, num_ranks: int, chunks: int, m: int) -> list[Action]:
    """Return a rank's forwards or backwards in order, with m rounded up to whole groups."""
    order = range(chunks) if kind is ActionType.FORWARD else reversed(range(chunks))
    stages = [chunk * num_ranks + rank for chunk in order]
    return [
        Action(stage, kind, j)
        for first in range(0, m, num_ranks)
        for stage in stages
        for j in range(first, first + num_ranks)
    ]


def build_serial(problem: Problem) -> Programs:
    """Serial execution: one micro-batch after the other, no overlap at all.

    Not a published schedule. It fits whenever any schedule fits (`optpipe_solver.smallest_memory`
    has the proof), so that every feasible problem has a schedule. Slices run sample after sample,
    stage by stage and back in the reverse order. Memory: one micro-batch, or sample. Makespan: m
    times the critical path; the bubble is the rest. It ignores everything but memory.

    Raises
    ------
    NotApplicable
        If no schedule at all fits.
    """
    feasible = feasibility(problem)
    if feasible.plan is None:
        raise NotApplicable(NotApplicableReason.INFEASIBLE, feasible.message)
    known: dict[tuple[int, ...], Programs] = {}
    rows: list[list[Action]] = [[] for _ in problem.devices]
    for group in serial_groups(problem):
        check_stop()
        kind = tuple(problem.cost_of[j] for j in group)
        if kind not in known:
            plan = serial_plan(problem, group).plan
            assert plan is not None  # noqa: S101 - else there were no plan for all
            known[kind] = plan.programs
        for row, program in zip(rows, known[kind], strict=True):
            row += [
                new_action((stage, letter, group[j], mode, paired))
                for stage, letter, j, mode, paired in program
            ]
    return tuple(map(tuple, rows))


def build_gpipe(problem: Problem) -> Programs:
    """GPipe: all forwards, then all backwards.

    Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism", section 2.3. With several stages on a device it is the breadth-first schedule of
    Lamy-Poirier 2023, "Breadth-First Pipeline Parallelism", section 3.

    Rule: every device runs the forwards of its stages in model order, each for all micro-batches,
    then the fused backwards of its stages in reverse. Micro-batches go first in, first out in both.
    The paper's figure runs backwards last in, first out; for equal micro-batches neither time nor
    memory differs. Memory: all m micro-batches on every stage. Bubble at equal times, one stage per
    device: (p - 1)(F + B), the same as 1F1B. The makespan is (m + p - 1)(F + B). It ignores memory
    limits, offload and the paper's recompute.
    """
    microbatches = range(problem.num_microbatches)
    programs = []
    for stages in problem.stages_of:
        check_stop()
        forwards = [Action(s, ActionType.FORWARD, j) for s in stages for j in microbatches]
        backwards = [
            Action(s, ActionType.FULL_BACKWARD, j) for s in reversed(stages) for j in microbatches
        ]
        programs.append((*forwards, *backwards))
    return tuple(programs)


def build_one_f_one_b(problem: Problem) -> Programs:
    """1F1B, also called PipeDream-Flush.

    Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", section 2.2.

    Rule: stage s of S runs S - 1 - s forwards, then alternates one forward and one backward, then
    drains. The backward is fused. Memory: stage s holds min(m, S - s) micro-batches. Bubble at
    equal times: (S - 1)(F + B), i.e. a makespan of (m + S - 1)(F + B). It ignores memory limits,
    offload and recompute.

    Raises
    ------
    NotApplicable
        If a device holds several stages.
    """
    one_stage_per_device(problem)
    num_stages, m = len(problem.stages), problem.num_microbatches
    by_stage = []
    for stage in range(num_stages):
        check_stop()
        warmup = min(m, num_stages - 1 - stage)
        program = [Action(stage, ActionType.FORWARD, j) for j in range(warmup)]
        for j in range(m):
            if warmup + j < m:
                program.append(Action(stage, ActionType.FORWARD, warmup + j))
            program.append(Action(stage, ActionType.FULL_BACKWARD, j))
        by_stage.append(program)
    return programs_by_device(problem, by_stage)


def build_recompute_1f1b(problem: Problem) -> Programs:
    """1F1B-R: 1F1B with full activation recomputation.

    Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", on the schedule of Narayanan
    et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    sections 2.2 and 3.5; 1F1B-R in Qi et al. 2024, "Pipeline Parallelism with Controllable Memory".

    Rule: 1F1B in which every forward keeps only its checkpoint and a recompute precedes every
    backward. This holds on every stage, the last included (Megatron-LM's ``full`` granularity). The
    recompute needs no gradient, so it starts while the device still waits for one. Memory: stage s
    of S holds min(m, S - s) checkpoints and one whole activation. Bubble at equal times: at most
    (S - 1)(F + R + B), in addition to m R of recompute on every device. It ignores memory limits
    and offload. Skipping recompute on the last stage, or where memory suffices, would be cheaper.

    Raises
    ------
    NotApplicable
        If a device holds several stages, or a stage cannot be recomputed.
    """
    plain = build_one_f_one_b(problem)
    for index, stage in enumerate(problem.stages):
        if not stage.can_recompute:
            raise NotApplicable(
                NotApplicableReason.NEEDS_RECOMPUTE,
                f"this rule recomputes every stage, but stage {index} has no recompute_ms",
            )
    programs = []
    for program in plain:
        row: list[Action] = []
        for action in program:
            if action.type is ActionType.FULL_BACKWARD:
                row.append(action._replace(type=ActionType.RECOMPUTE))
            row.append(action)
        programs.append(tuple(row))
    return tuple(programs)


def build_seq1f1b(problem: Problem) -> Programs:
    """Seq1F1B: 1F1B whose unit is a slice of a sequence.

    Sun et al. 2024, "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language
    Model Training", arXiv 2406.03488. Only the abstract was available; the rule and its numbers are
    those of the authors' code (thunlp/Seq1F1B, Megatron-LM with ``pipe_sp_splits``).

    Rule: with n slices per sample, device r of p runs p - r - 2 + n forwards of slices. It then
    alternates one forward and one backward, then drains. Backwards run sample after sample, the
    last slice of each first. The backward is fused. With samples of several sizes, n is the size of
    the largest. Memory: device r holds at most n + p - 1 - r slices; 1F1B holds n (p - r). Bubble
    at equal times per slice: (p - 1)(F + B)/n with F and B of a whole sample. It is longer if later
    slices attend to more tokens and take longer. The paper avoids this with slices of equal work;
    here the problem defines the slices. If slices are whole samples, this is 1F1B. It ignores
    memory limits, offload and recompute, and its interleaved variant is left out.

    Raises
    ------
    NotApplicable
        If there are no samples, or a device holds several stages.
    """
    _some_slices(problem)
    one_stage_per_device(problem)
    return _programs(problem, chunks=1, group=1, ahead=1)


def build_slimpipe(problem: Problem) -> Programs:
    """SlimPipe: slices of equal length, on a line or interleaved.

    Li et al. 2025, "SlimPipe: Memory-Thrifty and Efficient Pipeline Parallelism for Long-Context
    LLM Training", arXiv 2504.14519. Only the abstract was available. The number of slices in flight
    is that of other code with this name (``pipelining_with_slicing``). The order of chunks is that
    of a third (``SlimPipeSchedule``). The interleaved combination of both is ours.

    Rule: p devices hold v chunks each, as a line (v = 1) or a loop, stage k on device k mod p. The
    n slices of a sample go in groups of p. A device runs a group's forwards of its first chunk, of
    its second, ..., then the next group's. It runs the backwards in exactly the reverse order,
    sample after sample. Device r holds up to n v + 2(p - 1 - r) slices of a chunk, then alternates
    one backward and one forward. Memory: (1 + 2(p - 1)/(n v))/p of what one sample holds on all
    devices: about one sample's part; 1F1B holds p of them. Bubble at equal times per slice:
    (p - 1)(F + B)/(n v) with F and B of a whole sample and of all chunks. It ignores memory limits
    and offload. It leaves out the paper's context exchange, because no action here is a pass on two
    devices. There, other devices attend for the device with the longest slice.

    Raises
    ------
    NotApplicable
        If there are no samples, the placement is neither a line nor a loop, or, in a loop, the
        samples do not all have the same number of slices, a multiple of p.
    """
    _some_slices(problem)
    if all(len(stages) <= 1 for stages in problem.stages_of):
        return _programs(problem, chunks=1, group=1, ahead=2)
    chunks = chunks_of_loop(problem)
    p = len(problem.stages) // chunks
    sizes = sorted({len(sample) for sample in problem.samples})
    if len(sizes) > 1 or sizes[0] % p or problem.order == "given":
        raise NotApplicable(
            NotApplicableReason.NEEDS_SLICES,
            f"this rule interleaves groups of {p} slices and asks for samples of equally many, a "
            f"multiple of {p}, in a free order, but samples have {', '.join(map(str, sizes))}",
        )
    return _programs(problem, chunks=chunks, group=p, ahead=2)


def _some_slices(problem: Problem) -> None:
    if not problem.has_samples:
        raise NotApplicable(
            NotApplicableReason.NEEDS_SLICES,
            "this rule is for slices of sequences, but no micro-batches name a sample",
        )


def _programs(problem: Problem, *, chunks: int, group: int, ahead: int) -> Programs:
    """Return the programs: device r is ``ahead`` times p - 1 - r slices ahead of the last."""
    p = len(problem.stages) // chunks
    if problem.order == "given":
        forwards = [(0, j) for j in range(problem.num_microbatches)]
    else:
        forwards = [unit for sample in problem.samples for unit in _units(sample, chunks, group)]
    backwards = [unit for sample in problem.samples for unit in _units(sample, chunks, group)[::-1]]
    place = {unit: at for at, unit in enumerate(forwards)}
    waits, needed = 0, 0
    for at, unit in enumerate(backwards):
        needed = max(needed, place[unit] + 1)
        waits = max(waits, needed - at)
    programs: list[Program] = [()] * len(problem.devices)
    for rank in range(p):
        first = waits + ahead * (p - 1 - rank)
        ahead_of = [Action(c * p + rank, ActionType.FORWARD, j) for c, j in forwards]
        back = [Action(c * p + rank, ActionType.FULL_BACKWARD, j) for c, j in backwards]
        row = ahead_of[:first]
        for at, backward in enumerate(back):
            row += [backward, *ahead_of[first + at : first + at + 1]]
        programs[problem.placement[rank]] = tuple(row)
    return tuple(programs)


def _units(sample: Sequence[int], chunks: int, group: int) -> list[tuple[int, int]]:
    return [
        (chunk, j)
        for start in range(0, len(sample), group)
        for chunk in range(chunks)
        for j in sample[start : start + group]
    ]


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

    Rule: each of p devices in a V has a first and a second chunk. Device r first runs 2(p - 1 - r)
    forwards of the first chunk. Then it runs r + 1 times a forward of each chunk, and p - 1 - r
    times I, W and F of the second. Then, m - 2p + r + 1 times, it runs two pairs: F of the first
    chunk with B of the second, and the reverse. Then, p - 1 - r times, it runs B of the second
    chunk, and the pair of F of the second and B of the first. The remaining backwards follow; the
    latter half of them is split so that their W fill the waits. Memory: 2p + 1 activations of one
    chunk. Bubble at equal times, if a pair takes as long as its passes in turn:
    (p - 1)(F + 2B - 3W), where B includes W. It ignores memory limits, unequal chunks, offload and
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
        # From here on W are delayed to fill the waits; on odd devices one pass earlier.
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
    of Narayanan et al. 2021 (arXiv 2104.04473), section 2.2. Kimi K2 was trained with it.

    Rule: as interleaved 1F1B (`build_interleaved`), but each device runs one more forward before it
    alternates. Then a forward and the backward next to it are never of the same micro-batch, and
    the two run as a pair. Memory: device r of p with v chunks holds micro-batches of one chunk, at
    most min(m v, 2(p - 1 - r) + (v - 1)p + 2). Bubble: no formula. On one device with one stage,
    which Megatron-Core supports too, every F but the first runs with the B before it. It ignores
    memory limits, unequal chunks, offload and recompute.

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
    """Return a pair if the problem allows it, else its two passes one after the other."""
    key = forward.stage, backward.stage, backward.type.value
    allowed = key in problem.hidden_ms and forward.cell != backward.cell
    return forward, backward._replace(paired=allowed)
