"""The search over building blocks, under the memory limit in bytes.

Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024 (arXiv 2405.15362),
section 4 (its adaptive scheduler).

Rule: try building blocks with uniform offsets in each half of the model, keep the ones whose
squeezed schedule (`repeat_and_squeeze`) is shortest under the limit, try ways of filling waits on
them, and keep the best as simulated. Blocks come from three sets: on the grid of equal times, free
of collisions, with offsets of 1 to 3 passes in each half (those of ZB-V, V-Half and V-Min among
them, and 1F1B's on a line); with offsets of 1 to 2.5 times the real mean time of a half's passes;
and V-Min's offsets with ever longer periods, down to one micro-batch after the other, for memory
below V-Min's. They are tried in the order of how closely their estimated memory, ceil(lifespan /
period) activations per stage, meets the limit, until the budget of work is spent. Any placement is
accepted: the halves are those of the list of stages.

Memory: at most the limit, activations, weight contexts and workspaces counted in bytes. Bubble: no
formula. Ignored: offload and recompute; micro-batches go first in, first out.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf, log
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from optpipe_solver.families.encoded import encoded
from optpipe_solver.families.not_applicable import NotApplicable, Reason
from optpipe_solver.families.repeat_and_squeeze import Early, Policy, Squeezer, uniform_block
from optpipe_solver.improve.compiled.problem import CompiledProblem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe_solver.families.repeat_and_squeeze import Block, Squeezed

__all__ = ["build_building_blocks", "candidate_blocks"]

_WORK = 2_000_000
_FINALISTS = 4
_JUDGED = 2
_THRIFTY = Policy(Early.NEVER, -1.0)
_POLICIES = (
    *(Policy(early, patience) for patience in (1.0, 0.5, 0.0) for early in reversed(Early)),
    _THRIFTY,
)
_TURNS = sorted(
    (gaps for gaps in product(range(1, 6), repeat=3) if sum(gaps) <= 7),
    key=lambda gaps: (gaps[0] + gaps[2], sum(gaps)),
)


def build_building_blocks(problem: Problem) -> Programs:
    """Return the best squeezed building block within the memory limits.

    Raises
    ------
    NotApplicable
        If none fits without offload and recompute.
    """
    found = _search(problem, fused=False)
    if not found or _fusing_pays(problem):
        found += _search(problem, fused=True)
    if not found:
        raise NotApplicable(
            Reason.DOES_NOT_FIT,
            "no building block fits the memory limits without offload and recompute, not even one "
            "micro-batch after the other",
        )
    found.sort(key=lambda squeezed: _length(problem, squeezed))
    compiled = CompiledProblem.of(problem)
    return min(found[:_JUDGED], key=lambda squeezed: _simulated_ms(compiled, squeezed)).programs(
        len(problem.stages)
    )


def candidate_blocks(problem: Problem) -> list[Block]:
    """Return the blocks to try, those whose memory is closest to the limits first."""
    blocks = [*_on_the_grid(problem), *_in_real_time(problem), *_ever_slower(problem)]
    return sorted(blocks, key=lambda block: _distance(problem, block))


def _search(problem: Problem, *, fused: bool) -> list[Squeezed]:
    """Return the schedules of the most promising blocks, over all micro-batches."""
    squeezer = Squeezer.in_bytes(problem, fused=fused)
    few = min(problem.num_microbatches, 2 * len(problem.devices) + 4)
    looks: dict[float, Block] = {}
    for block in candidate_blocks(problem)[: _affordable(problem, few)]:
        squeezed = squeezer.squeeze(block, Policy(), few)
        # Equal lengths are nearly always equal orders: one of them is enough.
        looks.setdefault(inf if squeezed is None else _length(problem, squeezed), block)
    best = [looks[length] for length in sorted(looks)[:_FINALISTS]]
    runs = [(block, policy) for policy in _POLICIES for block in best]
    affordable = _affordable(problem, problem.num_microbatches)
    schedules = [squeezer.squeeze(block, policy) for block, policy in runs[:affordable]]
    schedules.append(squeezer.squeeze(_one_after_the_other(problem), _THRIFTY))
    return [squeezed for squeezed in schedules if squeezed is not None]


def _affordable(problem: Problem, num_microbatches: int) -> int:
    return max(_FINALISTS, _WORK // (3 * len(problem.stages) * num_microbatches))


def _length(problem: Problem, squeezed: Squeezed) -> float:
    return squeezed.makespan_ms if problem.objective == "makespan" else squeezed.span_ms


def _simulated_ms(compiled: CompiledProblem, squeezed: Squeezed) -> float:
    """Return the objective, gradient reductions included."""
    problem = compiled.problem
    rows = encoded(problem, squeezed.codes, fused=squeezed.fused)
    makespan_ms, span_ms = compiled.length_ms(rows)
    return makespan_ms if problem.objective == "makespan" else span_ms


def _distance(problem: Problem, block: Block) -> float:
    """Return how far, in orders of magnitude, the block's estimated memory is from the limit."""
    lifespans = np.maximum(1, np.ceil((block.backward - block.forward) / block.period))
    fullest = 0.0
    for device, held in enumerate(problem.stages_of):
        room = problem.devices[device].usable_bytes - problem.static_bytes_of(device)
        used = sum(float(lifespans[s]) * problem.stages[s].activation_bytes for s in held)
        fullest = max(fullest, used / max(1, room))
    return abs(log(max(fullest, 1e-12)))


def _on_the_grid(problem: Problem) -> Iterator[Block]:
    """Yield blocks of equal times in which no two passes of a device collide."""
    num_stages = len(problem.stages)
    period = 3 * max(len(held) for held in problem.stages_of)
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
    for held in problem.stages_of:
        here = np.sort(passes[:, [*held, *(num_stages + s for s in held)]], axis=1)
        free &= (np.diff(here, axis=1) > 0).all(axis=1)
    turns = [gaps for gaps, is_free in zip(_TURNS, free, strict=True) if is_free]
    direct = [gaps for gaps in turns if gaps[0] == gaps[2] == 1]
    return direct or turns[:1]


def _in_real_time(problem: Problem) -> Iterator[Block]:
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


def _ever_slower(problem: Problem) -> Iterator[Block]:
    """Yield V-Min's block with ever longer periods."""
    serial = _one_after_the_other(problem)
    period = 3.0 * max(len(held) for held in problem.stages_of)
    while period < serial.period:
        yield replace(serial, period=period)
        period *= 1.25
    yield serial


def _one_after_the_other(problem: Problem) -> Block:
    """Return the block in which a micro-batch starts when the one before it has ended."""
    num_stages = len(problem.stages)
    return uniform_block(num_stages, (1, 1, 1, 1), (1, 1, 1), 2 * num_stages)


def _fusing_pays(problem: Problem) -> bool:
    return any(
        stage.fused_backward_ms < stage.backward_input_ms + stage.backward_weight_ms
        or stage.weight_context_bytes > stage.activation_bytes
        for stage in problem.stages
    )
