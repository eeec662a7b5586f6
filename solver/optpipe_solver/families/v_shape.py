"""Schedules of building blocks: ZB-V, V-Half and V-Min, and the search over all blocks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf, log
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from optpipe_solver.arrays.encoding import CompiledProblem
from optpipe_solver.families.common import (
    NotApplicable,
    NotApplicableReason,
    devices_of_v,
    fusing_pays,
)
from optpipe_solver.families.squeeze import (
    Early,
    SqueezePolicy,
    Squeezer,
    encoded,
    squeezed_v,
    uniform_block,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe_solver.families.squeeze import BuildingBlock, Squeezed

__all__ = [
    "build_building_blocks",
    "build_v_half",
    "build_v_min",
    "build_zb_v",
    "candidate_blocks",
    "distance",
]


_WORK = 2_000_000
_FINALISTS = 4
_JUDGED = 2
_THRIFTY = SqueezePolicy(Early.NEVER, -1.0)
_POLICIES = (
    *(SqueezePolicy(early, patience) for patience in (1.0, 0.5, 0.0) for early in reversed(Early)),
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

    Rule: try building blocks with uniform offsets in each half of the model, keep the ones whose
    squeezed schedule (`squeeze`) is shortest under the limit, try ways of filling waits
    on them, and keep the best as simulated. Blocks come from three sets: on the grid of equal
    times, free of collisions, with offsets of 1 to 3 passes in each half (those of ZB-V, V-Half and
    V-Min among them, and 1F1B's on a line); with offsets of 1 to 2.5 times the real mean time of a
    half's passes; and V-Min's offsets with ever longer periods, down to one micro-batch after the
    other, for memory below V-Min's. They are tried in the order of how closely their estimated
    memory, ceil(lifespan / period) activations per stage, meets the limit, until the budget of work
    is spent. Any placement is accepted: the halves are those of the list of stages.

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
    best = min(found[:_JUDGED], key=lambda squeezed: _simulated_ms(compiled, squeezed))
    return best.programs(len(problem.stages))


def candidate_blocks(problem: Problem) -> list[BuildingBlock]:
    """Return the blocks to try, those whose memory is closest to the limits first."""
    blocks = [*_on_the_grid(problem), *_in_real_time(problem), *_ever_slower(problem)]
    return sorted(blocks, key=lambda block: distance(problem, block))


def _search(problem: Problem, *, fused: bool) -> list[Squeezed]:
    """Return the schedules of the most promising blocks, over all micro-batches."""
    squeezer = Squeezer.in_bytes(problem, fused=fused)
    few = min(problem.num_microbatches, 2 * len(problem.devices) + 4)
    looks: dict[float, BuildingBlock] = {}
    for block in candidate_blocks(problem)[: _affordable(problem, few)]:
        squeezed = squeezer.squeeze(block, SqueezePolicy(), few)
        # Equal lengths are nearly always equal orders: one of them is enough.
        length = inf if squeezed is None else squeezed.objective_ms(problem.objective)
        looks.setdefault(length, block)
    best = [looks[length] for length in sorted(looks)[:_FINALISTS]]
    runs = [(block, policy) for policy in _POLICIES for block in best]
    affordable = _affordable(problem, problem.num_microbatches)
    schedules = [squeezer.squeeze(block, policy) for block, policy in runs[:affordable]]
    schedules.append(squeezer.squeeze(_one_after_the_other(problem), _THRIFTY))
    return [squeezed for squeezed in schedules if squeezed is not None]


def _affordable(problem: Problem, num_microbatches: int) -> int:
    return max(_FINALISTS, _WORK // (3 * len(problem.stages) * num_microbatches))


def _simulated_ms(compiled: CompiledProblem, squeezed: Squeezed) -> float:
    """Return the objective, gradient reductions included."""
    return compiled.objective_ms(encoded(compiled.problem, squeezed.codes, fused=squeezed.fused))


def distance(problem: Problem, block: BuildingBlock) -> float:
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

    Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, appendix; the same schedule is V-ZB of
    Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, section 4 and table 1.

    Rule: the building block of a V placement with offsets of 3 passes between neighbouring devices
    in all four halves and 1 at the turns, repeated every 6 passes, squeezed and reordered
    (`squeeze`), with at most 2p stage activations on a device. Memory: p micro-batches
    of a device's two stages (min with m), on every device, as 1F1B's first. Bubble (span): zero at
    equal times for every p and m >= 2p - 1, and 2p - 1 - m passes for fewer (p <= m); where W is
    shorter, at least (p - 1)(F + I + 2C - 2W) - W, for passes of one stage and communication C,
    because p activations hold no more W back for the tail. Ignored: memory limits (activations are
    counted, not weighed), offload and recompute. The order of the block is that of equal times; how
    W fills it follows real times.

    Raises
    ------
    NotApplicable
        If the placement is not a V.
    """
    num_devices = devices_of_v(problem)
    return squeezed_v(problem, offsets=(3, 3, 3, 3), gaps=(1, 1, 1), most=num_devices)


def build_v_half(problem: Problem) -> Programs:
    """V-Half: half of 1F1B's memory, on a V placement.

    Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024 (arXiv 2405.15362),
    section 4 and table 1.

    Rule: the building block of a V placement with offsets of 2, 1, 2, 1 passes between neighbouring
    devices (F down, F up, I down, I up), so that a micro-batch's lifespans on a device sum to 6p,
    repeated every 6 passes, squeezed and reordered (`squeeze`). The gap between the last
    F and the first I is 3 for even p and 2 for odd p, so that no passes of a device collide.
    Memory: (p + 2) // 2 micro-batches of a device's two stages (min with m). Bubble at equal times:
    a rate of about p / 2m, that is 3p passes; here 3p - 7 passes for even p > 2, 3p - 4 for odd p >
    1 and none for p <= 2. It repeats with every micro-batch where W + 2I < 2F or W + 2F < 2I, or
    where communication is slow. Ignored: memory limits (activations are counted, not weighed),
    offload and recompute. The order of the block is that of equal times; how W fills it follows
    real times.

    Raises
    ------
    NotApplicable
        If the placement is not a V.
    """
    num_devices = devices_of_v(problem)
    turn = 3 if num_devices % 2 == 0 else 2
    return squeezed_v(problem, offsets=(2, 1, 2, 1), gaps=(1, turn, 1), most=(num_devices + 2) // 2)


def build_v_min(problem: Problem) -> Programs:
    """V-Min: the least memory that V building blocks reach, a third of 1F1B's.

    Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024 (arXiv 2405.15362),
    section 4 and table 1.

    Rule: the building block of a V placement with offsets of 1 pass between neighbouring devices in
    all four halves, so that a micro-batch's lifespans on a device sum to 4p, repeated every 6
    passes, squeezed and reordered (`squeeze`). The gap between the last F and the first
    I is 5 where p % 3 = 2 and 3 elsewhere, the shortest bubbles without collisions. Memory: (p + 4)
    // 3 micro-batches of a device's two stages (min with m). Bubble at equal times: a rate of about
    2p / 3m, that is 4p passes; here 4p - (7, 5, 9)[p % 3] for p > 2 and none for p <= 2. Unequal
    times and communication add a bubble to every micro-batch: the block has no slack. Ignored:
    memory limits (activations are counted, not weighed), offload and recompute. The order of the
    block is that of equal times; how W fills it follows real times.

    Raises
    ------
    NotApplicable
        If the placement is not a V.
    """
    num_devices = devices_of_v(problem)
    turn = 5 if num_devices % 3 == 2 else 3
    return squeezed_v(problem, offsets=(1, 1, 1, 1), gaps=(1, turn, 1), most=(num_devices + 4) // 3)
