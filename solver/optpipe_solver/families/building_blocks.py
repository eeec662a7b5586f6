"""Schedules from building blocks: ZB-V, V-Half and V-Min, and searches over blocks.

Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024 (arXiv 2405.15362),
sections 3 and 4 and its appendix on squeezing and reordering.

A *building block* gives the start times of F and I of one micro-batch on every stage; micro-batch j
repeats them j periods later. The model has four halves: first half forwards, second half forwards,
second half backwards, first half backwards. Within a half, all neighbouring stages have the same
offset, and there is a gap at each of the three turns. Only the *order* of F and I on a device is
taken from the block, so the block may contain collisions. Memory: at equal times a stage holds
ceil(lifespan / period) activations, lifespan = from its F to its W.

* *Squeeze*: run that order with the problem's real times, everything as soon as possible
  (`optpipe_solver.arrays.list_scheduler`, `ListRule.BLOCK`).
* *Reorder*: a device whose next pass is not ready may run a later F or I of its order. All passes
  that it skips must still fit into memory, each W right after its I. So it never gets stuck.
* *W* fills waits, or runs when a pass that is ready does not fit.

Ignored: offload, recompute, gradient reductions; FIFO order of micro-batches in every stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product, zip_longest
from math import inf, log
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from optpipe_solver.arrays.encoding import CompiledProblem
from optpipe_solver.arrays.list_scheduler import (
    Early,
    ListRule,
    ListScheduler,
    Order,
    Policy,
    SplitBackward,
)
from optpipe_solver.families.common import (
    NotApplicable,
    NotApplicableReason,
    devices_of_v,
    fusing_pays,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe_solver.arrays import Floats
    from optpipe_solver.arrays.list_scheduler import ListSchedule

__all__ = [
    "BuildingBlock",
    "build_building_blocks",
    "build_paired_blocks",
    "build_v_half",
    "build_v_min",
    "build_zb_v",
    "candidate_blocks",
    "uniform_block",
    "unroll",
]


@dataclass(frozen=True, slots=True, eq=False)
class BuildingBlock:
    """Start times of one micro-batch's F and I, by stage, and the period to the next micro-batch.

    No pass may start before its dependencies; the unit of time is arbitrary.
    """

    forward: Floats
    backward: Floats
    period: float


def uniform_block(
    num_stages: int, offsets: Sequence[float], gaps: Sequence[float], period: float
) -> BuildingBlock:
    """Return the block with uniform offsets in each half of the model.

    Parameters
    ----------
    num_stages
        The first half is stages 0 to num_stages // 2 - 1.
    offsets
        Time from a pass to the next of its chain: F in the first half, F in the second, I in the
        second, I in the first.
    gaps
        The same at the turns: F into the second half, last F to first I, I into the first half.
    period
        Time from one micro-batch to the next.
    """
    half = num_stages // 2
    rest = num_stages - half
    there = [offsets[0]] * (half - 1) + [gaps[0]] * (half > 0) + [offsets[1]] * (rest - 1)
    back = [offsets[2]] * (rest - 1) + [gaps[2]] * (half > 0) + [offsets[3]] * (half - 1)
    times = np.cumsum([0.0, *there, gaps[1], *back])
    return BuildingBlock(times[:num_stages], times[num_stages:][::-1], period)


def unroll(problem: Problem, block: BuildingBlock, m: int) -> Order:
    """Return the order of F and I on every device: by time in the block, then along the chain."""
    widest = max(len(stages) for stages in problem.stages_of)
    sequence = np.zeros((len(problem.devices), 2 * m * widest), dtype=np.int64)
    length = np.array([2 * m * len(stages) for stages in problem.stages_of], dtype=np.int64)
    # One more than m, and beyond every index: the next micro-batch of a code that is all done.
    place = np.full((2 * len(problem.stages), m + 1), np.iinfo(np.int64).max)
    repeats = np.arange(m) * block.period
    for device, stages in enumerate(problem.stages_of):
        if not stages:
            continue
        there = np.array(stages)
        back = there[::-1]
        codes = np.concatenate([2 * there, 2 * back + 1])
        times = np.concatenate([block.forward[there], block.backward[back]])
        order = np.argsort((times[:, None] + repeats).ravel(), kind="stable")
        sequence[device, : order.size] = codes.repeat(m)[order]
        index = np.empty_like(order)
        index[order] = np.arange(order.size)
        place[codes, :m] = index.reshape(-1, m)
    return Order(sequence, length, place)


# --- The search over blocks.


_WORK = 2_000_000
_FINALISTS = 4
_JUDGED = 2
_FIRST = Policy(ListRule.BLOCK)
_THRIFTY = Policy(ListRule.BLOCK, patience=-1.0, early=Early.NEVER)
_POLICIES = (
    *(
        Policy(ListRule.BLOCK, patience=patience, early=early)
        for patience in (1.0, 0.5, 0.0)
        for early in reversed(Early)
    ),
    _THRIFTY,
)
_TURNS = sorted(
    (gaps for gaps in product(range(1, 6), repeat=3) if sum(gaps) <= 7),
    key=lambda gaps: (gaps[0] + gaps[2], sum(gaps)),
)


def build_building_blocks(problem: Problem) -> Programs:
    """The search over building blocks, under the memory limit in bytes.

    Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024 (arXiv 2405.15362),
    section 4 (its adaptive scheduler).

    Rule: try building blocks with uniform offsets in each half of the model. Keep the blocks whose
    squeezed schedules are shortest under the limit, try several ways to fill waits on them, and
    keep the best simulated schedule. There are three sets of blocks. The first are on the grid of
    equal times, free of collisions, with offsets of 1 to 3 passes in each half. They include those
    of ZB-V, V-Half and V-Min, and 1F1B's on a line. The second have offsets of 1 to 2.5 times the
    real mean time of a half's passes. The third, for less memory than V-Min's, have its offsets and
    ever longer periods, down to serial execution. Blocks whose estimated memory, ceil(lifespan /
    period) activations per stage, is closest to the limit come first, until the work budget is
    spent. Any placement is accepted: the halves are those of the list of stages.

    Memory: at most the limit, activations, weight contexts and workspaces counted in bytes. Bubble:
    no formula. Ignored: offload and recompute; micro-batches go first in, first out.

    Raises
    ------
    NotApplicable
        If none fits without offload and recompute.
    """
    found = _search(problem, fused=False)
    if not found or fusing_pays(problem):
        found += _search(problem, fused=True)
    if not found:
        raise NotApplicable(
            NotApplicableReason.DOES_NOT_FIT,
            "no building block fits the memory limits without offload and recompute, not even one "
            "micro-batch after the other",
        )
    found.sort(key=lambda squeezed: squeezed.objective_ms(problem.objective))
    compiled = CompiledProblem.of(problem)
    best = min(found[:_JUDGED], key=lambda squeezed: compiled.objective_ms(squeezed.rows()))
    return best.programs()


def candidate_blocks(problem: Problem) -> list[BuildingBlock]:
    """Return the blocks to try, those whose memory is closest to the limits first."""
    blocks = [*_on_the_grid(problem), *_in_real_time(problem), *_ever_slower(problem)]
    return sorted(blocks, key=lambda block: _distance(problem, block))


def _search(problem: Problem, *, fused: bool) -> list[ListSchedule]:
    """Return the schedules of the most promising blocks, over all micro-batches."""
    scheduler, split = (
        ListScheduler(problem),
        SplitBackward.NEVER if fused else SplitBackward.ALWAYS,
    )

    def squeezed(block: BuildingBlock, policy: Policy, m: int | None) -> ListSchedule | None:
        order = unroll(problem, block, m or problem.num_microbatches)
        return scheduler.run(policy._replace(split=split), order, m)

    few = min(problem.num_microbatches, 2 * len(problem.devices) + 4)
    looks: dict[float, BuildingBlock] = {}
    for block in candidate_blocks(problem)[: _affordable(problem, few)]:
        look = squeezed(block, _FIRST, few)
        # Equal lengths are nearly always equal orders: one of them is enough.
        length = inf if look is None else look.objective_ms(problem.objective)
        looks.setdefault(length, block)
    best = [looks[length] for length in sorted(looks)[:_FINALISTS]]
    runs = [(block, policy) for policy in _POLICIES for block in best]
    affordable = _affordable(problem, problem.num_microbatches)
    schedules = [squeezed(block, policy, None) for block, policy in runs[:affordable]]
    schedules.append(squeezed(_one_after_the_other(problem), _THRIFTY, None))
    return [schedule for schedule in schedules if schedule is not None]


def _affordable(problem: Problem, num_microbatches: int) -> int:
    return max(_FINALISTS, _WORK // (3 * len(problem.stages) * num_microbatches))


def _distance(problem: Problem, block: BuildingBlock) -> float:
    """Return how far, in orders of magnitude, the block's estimated memory is from the limit."""
    lifespans = np.maximum(1, np.ceil((block.backward - block.forward) / block.period))
    fullest = 0.0
    for device, stages in enumerate(problem.stages_of):
        room = problem.room_bytes(device)
        used = sum(float(lifespans[s]) * problem.stages[s].activation_bytes for s in stages)
        fullest = max(fullest, used / max(1, room))
    return abs(log(max(fullest, 1e-12)))


def _on_the_grid(problem: Problem) -> Iterator[BuildingBlock]:
    """Yield blocks of equal times in which no two passes of a device collide."""
    num_stages = len(problem.stages)
    period = 3 * max(len(stages) for stages in problem.stages_of)
    for offsets in product((1, 2, 3), repeat=4):
        free = _free_turns(problem, offsets, period)
        for gaps in sorted({free[0], free[-1]} if free else {_TURNS[0]}):
            yield uniform_block(num_stages, offsets, gaps, period)


def _free_turns(problem: Problem, offsets: tuple[int, ...], period: int) -> list[tuple[int, ...]]:
    """Return the gaps at the turns with which no passes collide, the longest middle gap last."""
    num_stages = len(problem.stages)
    passes = np.array(
        [
            np.concatenate([block.forward, block.backward])
            for block in (uniform_block(num_stages, offsets, gaps, period) for gaps in _TURNS)
        ]
    )
    passes %= period
    free = np.ones(len(_TURNS), dtype=bool)
    for stages in problem.stages_of:
        here = np.sort(passes[:, [*stages, *(num_stages + s for s in stages)]], axis=1)
        free &= (np.diff(here, axis=1) > 0).all(axis=1)
    turns = [gaps for gaps, is_free in zip(_TURNS, free, strict=True) if is_free]
    direct = [gaps for gaps in turns if gaps[0] == gaps[2] == 1]
    return direct or turns[:1]


def _in_real_time(problem: Problem) -> Iterator[BuildingBlock]:
    """Yield blocks whose offsets are multiples of the halves' mean pass and transfer times."""
    num_stages = len(problem.stages)
    half = num_stages // 2
    halves = (range(half), range(half, num_stages))
    there = [stage.forward_ms for stage in problem.stages]
    back = [stage.backward_input_ms for stage in problem.stages]
    hops = problem.boundary_ms
    means = [
        fmean([there[s] + hops[s][0] for s in halves[0]] or [0.0]),
        fmean([there[s] + hops[s][0] for s in halves[1]]),
        fmean([back[s] + hops[s][1] for s in halves[1]]),
        fmean([back[s] + hops[s][1] for s in halves[0]] or [0.0]),
    ]
    period = max(problem.busy_ms / problem.num_microbatches, 1e-9)
    for factors in product((1.0, 1.5, 2.5), repeat=4):
        offsets = [mean * factor for mean, factor in zip(means, factors, strict=True)]
        yield uniform_block(num_stages, offsets, (means[1], means[1], means[3]), period)


def _ever_slower(problem: Problem) -> Iterator[BuildingBlock]:
    """Yield V-Min's block with ever longer periods."""
    serial = _one_after_the_other(problem)
    period = 3.0 * max(len(stages) for stages in problem.stages_of)
    while period < serial.period:
        yield replace(serial, period=period)
        period *= 1.25
    yield serial


def _one_after_the_other(problem: Problem) -> BuildingBlock:
    """Return the block in which a micro-batch starts when the one before it has ended."""
    num_stages = len(problem.stages)
    return uniform_block(num_stages, (1, 1, 1, 1), (1, 1, 1), 2 * num_stages)


def build_zb_v(problem: Problem) -> Programs:
    """ZB-V: zero bubbles with 1F1B's memory, on a V placement.

    Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, appendix. The same schedule is V-ZB of
    Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, section 4 and table 1.

    Rule: squeeze and reorder the building block of a V placement, repeated every 6 passes, with at
    most 2p stage activations on a device. Its offsets are 3 passes between neighbouring devices in
    all four halves, and 1 at the turns. Memory: p micro-batches of a device's two stages (min with
    m), on every device, as 1F1B's first. Bubble (span) at equal times: zero for m >= 2p - 1, and
    2p - 1 - m passes for p <= m < 2p - 1. If W is shorter, p activations leave no more W for the
    tail. The bubble is then at least (p - 1)(F + I + 2C - 2W) - W, for passes of one stage and
    communication C. Ignored: memory limits (activations are counted, not weighed), offload and
    recompute. The order of the block is that of equal times; W fill waits by real times.

    Raises
    ------
    NotApplicable
        If the placement is not a V.
    """
    num_devices = devices_of_v(problem)
    return _squeezed_v(problem, offsets=(3, 3, 3, 3), gaps=(1, 1, 1), most=num_devices)


def build_v_half(problem: Problem) -> Programs:
    """V-Half: half of 1F1B's memory, on a V placement.

    Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024 (arXiv 2405.15362),
    section 4 and table 1.

    Rule: squeeze and reorder the building block of a V placement, repeated every 6 passes. Its
    offsets between neighbouring devices are 2, 1, 2, 1 passes (F down, F up, I down, I up), so that
    a micro-batch's lifespans on a device sum to 6p. The gap between the last F and the first I is 3
    for even p and 2 for odd p. With it no passes of a device collide. Memory: (p + 2) // 2
    micro-batches of a device's two stages (min with m). Bubble at equal times: a rate of about
    p / 2m, that is 3p passes. Here it is 3p - 7 passes for even p > 2, 3p - 4 for odd p > 1 and
    none for p <= 2. It repeats with every micro-batch if W + 2I < 2F or W + 2F < 2I, or if
    communication is slow. Ignored: memory limits (activations are counted, not weighed), offload
    and recompute. The order of the block is that of equal times; W fill waits by real times.

    Raises
    ------
    NotApplicable
        If the placement is not a V.
    """
    num_devices = devices_of_v(problem)
    turn = 3 if num_devices % 2 == 0 else 2
    return _squeezed_v(
        problem, offsets=(2, 1, 2, 1), gaps=(1, turn, 1), most=(num_devices + 2) // 2
    )


def build_v_min(problem: Problem) -> Programs:
    """V-Min: the minimum memory that V building blocks reach, a third of 1F1B's.

    Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024 (arXiv 2405.15362),
    section 4 and table 1.

    Rule: squeeze and reorder the building block of a V placement, repeated every 6 passes. Its
    offsets are 1 pass between neighbouring devices in all four halves, so that a micro-batch's
    lifespans on a device sum to 4p. The gap between the last F and the first I is 5 if p % 3 = 2,
    else 3: the shortest bubbles without collisions. Memory: (p + 4) // 3 micro-batches of a
    device's two stages (min with m). Bubble at equal times: a rate of about 2p / 3m, that is 4p
    passes. Here it is 4p - (7, 5, 9)[p % 3] for p > 2 and none for p <= 2. Unequal times and
    communication add a bubble to every micro-batch, because the block has no slack. Ignored: memory
    limits (activations are counted, not weighed), offload and recompute. The order of the block is
    that of equal times; W fill waits by real times.

    Raises
    ------
    NotApplicable
        If the placement is not a V.
    """
    num_devices = devices_of_v(problem)
    turn = 5 if num_devices % 3 == 2 else 3
    return _squeezed_v(
        problem, offsets=(1, 1, 1, 1), gaps=(1, turn, 1), most=(num_devices + 4) // 3
    )


def _squeezed_v(
    problem: Problem, *, offsets: Sequence[float], gaps: Sequence[float], most: int
) -> Programs:
    """Return the programs of a published V block: times in passes, repeated every 6 of them.

    ``most`` is the memory of a device in micro-batches of its two stages. The orders of ZB-V,
    V-Half and V-Min need no more, whatever the times (tested), so that the squeeze never fails.
    """
    num_stages = len(problem.stages)
    block = uniform_block(num_stages, offsets, gaps, period=6)
    order = unroll(problem, block, problem.num_microbatches)
    squeezed = ListScheduler(problem, activations=2 * most).run(_FIRST, order)
    if squeezed is None:
        raise AssertionError(f"a V block on {num_stages // 2} devices needs more than {most}")
    return squeezed.programs()


# --- Pairs.

_PAIR_WORK = 1_500_000
"""Actions executed to look at blocks, and as many again to try policies on the best of them."""

_PAIR_FEWEST, _PAIR_FINALISTS = 6, 5

_PAIR_LOOKS = (
    Policy(ListRule.PAIRS, wait=0.0),
    Policy(ListRule.PAIRS, wait=0.0, reach=4),
    Policy(ListRule.PAIRS, wait=0.0, reach=2, early=Early.BEFORE_WEIGHT, patience=0.5),
)

_PAIR_POLICIES = tuple(
    Policy(ListRule.PAIRS, wait=wait, reach=reach, early=early, patience=patience, split=split)
    for wait, reach, early, patience, split in product(
        (0.0, 0.5),
        (2, 4, 1_000_000),
        reversed(Early),
        (0.5, 1.0),
        (SplitBackward.ALWAYS, SplitBackward.IN_DRAIN),
    )
)


def build_paired_blocks(problem: Problem) -> Programs:
    """Building blocks whose forwards and backwards run in pairs, at any memory limit.

    Ours, after the building blocks of Qi et al., "Pipeline Parallelism with Controllable Memory",
    NeurIPS 2024 (arXiv 2405.15362), and the pairs of Liu et al. 2024, "DeepSeek-V3 Technical
    Report" (arXiv 2412.19437).

    Rule: a building block gives the order of passes on a device. A free device runs an allowed pair
    if both passes are ready, else the first pass of the order (see the module). The blocks are
    those of `build_building_blocks`, and blocks with the offsets of single passes, of pairs, and
    halfway between. The periods of the latter are 1 to 1.3 times the pairs of a micro-batch; for a
    V, DualPipeV's block is one of them. The best of several ways to fill waits on the best blocks
    is kept. Memory: at most the limit, workspaces included. Bubble: no formula. It ignores offload
    and recompute; micro-batches go first in, first out.

    Raises
    ------
    NotApplicable
        If the problem has no pairs, or nothing fits without offload and recompute.
    """
    if not problem.pairs:
        raise NotApplicable(
            NotApplicableReason.NEEDS_PAIRS,
            "this rule runs forwards and backwards in pairs, but the problem has no pairs",
        )
    scheduler, objective = ListScheduler(problem), problem.objective
    m = problem.num_microbatches
    few = min(m, 3 * len(problem.devices))
    looks: list[tuple[float, int, BuildingBlock]] = []
    runs = [(block, policy) for block in _paired_candidates(problem) for policy in _PAIR_LOOKS]
    for block, policy in runs[: _pairs_affordable(problem, few)]:
        look = scheduler.run(policy, unroll(problem, block, few), few)
        if look is not None:
            looks.append((look.objective_ms(objective), len(looks), block))
    best: list[BuildingBlock] = []
    for _, _, block in sorted(looks, key=lambda look: look[:2]):
        if all(block is not known for known in best):
            best.append(block)
    policies = (*_PAIR_LOOKS, *_PAIR_POLICIES)
    runs = [(block, policy) for policy in policies for block in best[:_PAIR_FINALISTS]]
    affordable = _pairs_affordable(problem, m)
    tried = (scheduler.run(policy, unroll(problem, one, m)) for one, policy in runs[:affordable])
    found = [schedule for schedule in tried if schedule is not None]
    if not found:
        raise NotApplicable(
            NotApplicableReason.DOES_NOT_FIT,
            "no building block with pairs fits the memory limits without offload and recompute",
        )
    return min(found, key=lambda schedule: schedule.objective_ms(objective)).programs()


def _pairs_affordable(problem: Problem, num_microbatches: int) -> int:
    actions = 3 * len(problem.stages) * num_microbatches
    return max(_PAIR_FEWEST, _PAIR_WORK // actions)


def _paired_candidates(problem: Problem) -> list[BuildingBlock]:
    """Return the blocks to try: alternately those of pairs and those of `candidate_blocks`.

    Of both kinds, blocks whose memory is closest to the limits come first.
    """
    pairs = sorted(_of_pairs(problem), key=lambda block: _distance(problem, block))
    alternately = zip_longest(pairs, candidate_blocks(problem))
    return [block for both in alternately for block in both if block is not None]


def _of_pairs(problem: Problem) -> Iterator[BuildingBlock]:
    """Yield blocks with the offsets of single passes, of pairs, and halfway between."""
    forward = fmean(stage.forward_ms for stage in problem.stages)
    backward = fmean(stage.backward_input_ms for stage in problem.stages)
    fused = fmean(stage.fused_backward_ms for stage in problem.stages)
    pair = forward + fused - max(pair.hidden_ms for pair in problem.pairs)
    there = fmean(there for there, _ in problem.boundary_ms)
    back = fmean(back for _, back in problem.boundary_ms)
    forwards = [ms + there for ms in (pair, forward, (forward + pair) / 2)]
    backwards = [ms + back for ms in (pair, backward, (backward + pair) / 2)]
    chunks = max(map(len, problem.stages_of))
    for slower in (1.0, 1.15, 1.3):
        for offsets in product(forwards, forwards, backwards, backwards):
            period = max(chunks * pair * slower, 1e-9)
            yield uniform_block(len(problem.stages), offsets, offsets[:3], period)
