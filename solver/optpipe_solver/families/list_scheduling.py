"""The greedy schedule, PipeOffload's GIS, GIS-H, PO-H and PO-F, and the start after AdaOffload.

PipeOffload, arXiv 2503.01328, sections 3.2 (selective offload) and 4.

Rule: a chunk of a loop placement lives from its F to its I, the first chunk longest. PO-H is GIS-H
that offloads the floor(v / 2) longest-lived of every device's v chunks, PO-F is GIS that offloads
all of them. Copies go out after the F and come back just before the I. As much is offloaded as
lowers the peak without delaying any pass (`hide_offload`). Copies are too slow for that if their
one-way time over a chunk's F + I + W is above 1/2 on a half-duplex lane. The published planner then
refuses; here the activations whose copies cannot be hidden stay. If the memory limit is lower, as
much is offloaded as it requires, of these chunks or of all, at the cost of stalls.

Lane models: that of the problem. With half duplex and a PCIe pair (``half_duplex`` and
``pcie_group``), each device's copies out and back exclude each other. This models the paper's
alternating slots of one round trip, in which one of the pair sends while the other receives. With
full duplex, each direction has a lane of its own.

Memory, in units of a device's micro-batch (v chunks), for d devices: PO-H (v + 2) / (8 v) of d,
asymptotically; bytes in transit and a group of consecutive F come on top. PO-F O(1 / (v d)) of
GIS's. Bubble: that of GIS-H and GIS. It ignores host limits until it has to fit them, recompute,
and the fused backward.
"""

from __future__ import annotations

from itertools import islice
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from optpipe.schedule import ActionType
from optpipe_solver.arrays.encoding import keeps_limits, program_of
from optpipe_solver.arrays.list_scheduler import ListRule, ListScheduler, Policy, SplitBackward
from optpipe_solver.budget import check_stop
from optpipe_solver.families.classic import build_one_f_one_b
from optpipe_solver.families.common import (
    NotApplicable,
    NotApplicableReason,
    chunks_of_loop,
    fusing_pays,
)
from optpipe_solver.families.zero_bubble import build_zb_h1
from optpipe_solver.offload_fit.fit import THOROUGH, Frame, fit, hide_offload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe.problem import Problem
    from optpipe.schedule import Program, Programs
    from optpipe_solver.arrays.encoding import Rows
    from optpipe_solver.offload_fit.fit import Fit

__all__ = [
    "build_ada_offload",
    "build_gis",
    "build_gis_h",
    "build_greedy",
    "build_po_f",
    "build_po_h",
    "greedy_candidates",
    "grouped_interleaved",
    "pipeoffload",
    "smallest_group",
]


_UNLIMITED = 2**60
_VIRTUAL = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, inf)
_WORK = 800_000
_FEWEST = 4
_MAX_POLICIES = 60
_FIT_TRIES = 2


def build_greedy(problem: Problem) -> Programs:
    """The Zero Bubble greedy under any memory limit, with offload if nothing else fits.

    After Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 3.1.

    Rule: list scheduling (`ListRule.GREEDY`) over a small grid of policies. They vary how eagerly
    weight gradients fill idle time, the micro-batches in flight per stage, and fused or split
    backward. Each policy runs first under the memory limit itself, then under larger, virtual
    limits whose excess `fit` offloads or recomputes. The best simulated schedule wins. Memory: at
    most the limit. Bubble: no formula; that of the best simulation. It ignores all later passes,
    and micro-batches go first in, first out.

    Raises
    ------
    NotApplicable
        If none of them fits.
    """
    best = min(greedy_candidates(problem), key=attrgetter("objective_ms"), default=None)
    if best is None:
        raise NotApplicable(
            NotApplicableReason.DOES_NOT_FIT,
            "no policy of the greedy finds a schedule within the memory limits",
        )
    return best.programs()


def greedy_candidates(problem: Problem) -> Iterator[Fit]:
    """Yield schedules within the limits, one per policy that works; large problems try fewer.

    A policy that gets stuck does not count as tried.
    """
    scheduled = (scheduler.run(policy) for scheduler, policy in _policies(problem))
    num_actions = 3 * len(problem.stages) * problem.num_microbatches
    tried = max(_FEWEST, min(_MAX_POLICIES, _WORK // num_actions))
    for schedule in islice(filter(None, scheduled), tried):
        fitted = fit(Frame(problem, schedule.rows()), _FIT_TRIES)
        if fitted is not None:
            yield fitted


def _policies(problem: Problem) -> Iterator[tuple[ListScheduler, Policy]]:
    room = [problem.room_bytes(device) for device in range(len(problem.devices))]
    may_shrink = any(
        problem.can_offload(s) or stage.can_recompute for s, stage in enumerate(problem.stages)
    )
    splits = (
        (SplitBackward.ALWAYS, SplitBackward.NEVER)
        if fusing_pays(problem)
        else (SplitBackward.ALWAYS,)
    )
    schedulers = [
        ListScheduler(
            problem,
            limits=tuple(_UNLIMITED if factor == inf else int(factor * size) for size in room),
        )
        for factor in (_VIRTUAL if may_shrink else (1.0,))
    ]
    for in_flight in (inf, 1.0, 2.0, 1.5):
        for scheduler in schedulers:
            for split in splits:
                for patience in (1.0, 0.0, 0.5) if split else (1.0,):
                    yield scheduler, Policy(ListRule.GREEDY, patience, split, in_flight=in_flight)


# --- PipeOffload: GIS and GIS-H, PO-H and PO-F, and the start after AdaOffload.


_LARGE = 20_000


def build_po_h(problem: Problem) -> Programs:
    """Return GIS-H with half of the chunks offloaded.

    Raises
    ------
    NotApplicable
        As GIS-H, or if nothing can be offloaded, or if no offload fits the memory limits.
    """
    return pipeoffload(problem, smallest_group(problem), max(1, chunks_of_loop(problem) // 2))


def build_po_f(problem: Problem) -> Programs:
    """Return GIS with all chunks offloaded.

    Raises
    ------
    NotApplicable
        As GIS, or if nothing can be offloaded, or if no offload fits the memory limits.
    """
    chunks = chunks_of_loop(problem)
    return pipeoffload(problem, len(problem.stages) // chunks, chunks)


def pipeoffload(problem: Problem, group: int, num_chunks: int) -> Programs:
    """Return the interleaved schedule with the longest-lived chunks of every device offloaded.

    Parameters
    ----------
    problem
        Its limits are kept.
    group
        Micro-batches per group, from half of the devices to all of them.
    num_chunks
        How many of a device's chunks are offloaded, at least 1.

    Raises
    ------
    NotApplicable
        If the placement is no loop, there are fewer micro-batches than a group holds, nothing can
        be offloaded, or the limits cannot be kept in this order.
    """
    programs = grouped_interleaved(problem, group)
    d = len(problem.stages) // chunks_of_loop(problem)
    leaving = range(num_chunks * d)
    if not any(map(problem.can_offload, leaving)):
        raise NotApplicable(
            NotApplicableReason.CANNOT_OFFLOAD,
            f"none of the first {num_chunks} chunks of any device can be offloaded: that takes "
            "offload_bytes of the stage, and d2h_gb_per_s and h2d_gb_per_s of its device",
        )
    frame = Frame(problem, programs, leaving)
    hidden = hide_offload(frame)
    if keeps_limits(frame.compiled, hidden):
        return frame.decode(hidden)
    # With stalls; for large problems the first way that fits.
    found = [fit(frame, THOROUGH)]
    if not found[0] or len(problem.stages) * problem.num_microbatches <= _LARGE:
        found.append(fit(Frame(problem, programs), THOROUGH))
    best = min(filter(None, found), key=attrgetter("objective_ms"), default=None)
    if best is None:
        raise NotApplicable(
            NotApplicableReason.DOES_NOT_FIT,
            f"interleaving groups of {group} micro-batches does not fit the memory limits, "
            "whatever is offloaded",
        )
    return best.programs()


_TYPES = (ActionType.FORWARD, ActionType.BACKWARD_INPUT, ActionType.BACKWARD_WEIGHT)


def build_gis(problem: Problem) -> Programs:
    """GIS, the generalised interleaved schedule (PipeOffload, arXiv 2503.01328, section 4).

    For a loop placement: d devices with v chunks each, chunk c of the k-th device is stage c d + k.

    Rule: micro-batches go through the chunks in groups of g, ceil(d / 2) <= g <= d. A group runs
    its forwards of chunk 0, then of chunk 1, ... The k-th device runs g (v - 1) + d - k forwards.
    It then alternates one I, followed by its W, and one forward. The I's go in the same order of
    groups, last chunk first. The program is the order of slots in a building block. For chunk c and
    the group's i-th micro-batch, the k-th device starts F at slot 3 (g c + i) + k, and I at
    3 (g (v - 1) + g (v - 1 - c) + i) + 3 (d - 1) + 1 - 2 k. GIS proper is g = d, GIS-H is g =
    ceil(d / 2).

    Memory: g (v - 1) + d chunk activations on the first device, g (v - 1) + d - k on the k-th. In
    units of a device's micro-batch (v chunks) that is d for g = d. Bubble at equal times and m a
    multiple of g: (d - 1)(F + I). Smaller groups add (v - 1) times (d - g) F + max(0, d I - g (I +
    W)). It ignores memory limits, offload, recompute and the fused backward.

    Raises
    ------
    NotApplicable
        If the placement is no loop, or there are fewer micro-batches than a group holds.
    """
    return grouped_interleaved(problem, len(set(problem.placement)))


def grouped_interleaved(problem: Problem, group: int) -> Programs:
    """Return the programs for groups of a given size.

    Raises
    ------
    NotApplicable
        If the placement is no loop, or there are fewer micro-batches than a group holds.
    """
    chunks = chunks_of_loop(problem)
    d, m = len(problem.stages) // chunks, problem.num_microbatches
    if m < group:
        raise NotApplicable(
            NotApplicableReason.TOO_FEW_MICROBATCHES,
            f"the {d} devices take micro-batches in groups of {group}, but there are only {m}",
        )
    programs: list[Program] = [() for _ in problem.devices]
    for k in range(d):
        check_stop()
        programs[problem.stages[k].device] = _device_program(k, d, chunks, group, m)
    return tuple(programs)


def _device_program(k: int, d: int, chunks: int, group: int, m: int) -> Program:
    """Return the k-th device's actions in the order of their slots."""
    chunk, j = (grid.ravel() for grid in np.meshgrid(np.arange(chunks), np.arange(m)))
    start = 3 * (j // group) * group * chunks + 3 * (j % group)
    forward_at = start + 3 * group * chunk + k
    backward_at = start + 3 * group * (2 * (chunks - 1) - chunk) + 3 * (d - 1) + 1 - 2 * k
    order = np.argsort(np.concatenate([forward_at, backward_at]), kind="stable")
    is_backward, cell = np.divmod(order, j.size)
    # Every I is repeated; the second entry becomes the W right after it, 2 in _TYPES.
    times = 1 + is_backward
    cell, kind = np.repeat(cell, times), np.repeat(is_backward, times)
    kind[np.cumsum(times) - 1] *= 2
    types = map(_TYPES.__getitem__, kind.tolist())
    return program_of((chunk * d + k)[cell].tolist(), types, j[cell].tolist())


def build_gis_h(problem: Problem) -> Programs:
    """GIS-H: the interleaved schedule with about half of GIS's memory.

    PipeOffload, arXiv 2503.01328, section 4: GIS with the smallest group that keeps the steady
    state free of bubbles. Rule: g = ceil(d / 2). It is larger, up to d, if the stages are too
    unequal. Then g micro-batches of the busiest stage must cover one pass through a chunk's
    devices: g max(F + I + W) >= sum F and >= sum I.

    Memory: g (v - 1) + d chunk activations. For even d, in units of a device's micro-batch (v
    chunks), that is d (v + 1) / (2 v). For odd d it is one half of (v - 1) / v more. Bubble at
    equal times: (d - 1)(F + I) + (v - 1)(d / 2)(F + I - W) for even d. It ignores memory limits,
    offload, recompute and the fused backward.

    Raises
    ------
    NotApplicable
        If the placement is no loop, or there are fewer micro-batches than a group holds.
    """
    return grouped_interleaved(problem, smallest_group(problem))


def smallest_group(problem: Problem) -> int:
    """Return the smallest group size that keeps the steady state free of bubbles.

    Raises
    ------
    NotApplicable
        If the placement is no loop.
    """
    chunks = chunks_of_loop(problem)
    d = len(problem.stages) // chunks
    group = (d + 1) // 2
    for chunk in range(chunks):
        stages = problem.stages[chunk * d : (chunk + 1) * d]
        busiest = max(s.forward_ms + s.backward_input_ms + s.backward_weight_ms for s in stages)
        through = max(sum(s.forward_ms for s in stages), sum(s.backward_input_ms for s in stages))
        while group < d and group * busiest < through:
            group += 1
    return group


# --- What OptPipe's MILP starts from.

_LARGE_BASES = 60_000
_FEW_BASES = 2


def build_ada_offload(problem: Problem) -> Programs:
    """A start after AdaOffload: as many forwards ahead as without limits, offloaded if needed.

    OptPipe, arXiv 2510.05186, its section on the initial schedule. Its MILP starts from a tight
    schedule that offloads adaptively, only as much as the limit requires.

    Rule: take tight schedules that ignore memory, and make each fit (`fit`). These are ZB-H1 and
    1F1B on a line, GIS and GIS-H on a loop, and list scheduling with 1F1B's depth on any placement.
    The best simulated one wins; large problems try only the first two. Memory: at most the limit.
    Bubble: that of the schedule taken, plus stalls if copies cannot be hidden. It ignores that
    another order of F and I could need fewer copies. So it fails if the bytes of the micro-batches
    in flight that cannot be moved exceed the limit.

    Raises
    ------
    NotApplicable
        If none of them can be made to fit.
    """
    size = 3 * len(problem.stages) * problem.num_microbatches
    bases = _bases(problem)
    fitted = (
        fit(Frame(problem, base), THOROUGH)
        for base in (islice(bases, _FEW_BASES) if size > _LARGE_BASES else bases)
    )
    best = min(filter(None, fitted), key=attrgetter("objective_ms"), default=None)
    if best is None:
        raise NotApplicable(
            NotApplicableReason.DOES_NOT_FIT,
            "what offload and recompute leave of the micro-batches in flight exceeds the memory "
            "limits",
        )
    return best.programs()


def _bases(problem: Problem) -> Iterator[Programs | Rows]:
    builders: tuple[Callable[[Problem], Programs], ...] = (
        build_zb_h1,
        build_one_f_one_b,
        build_gis_h,
        build_gis,
    )
    for build in builders:
        try:
            yield build(problem)
        except NotApplicable:
            continue
    scheduler = ListScheduler(problem, limits=(_UNLIMITED,) * len(problem.devices))
    for in_flight, patience in ((1.0, 0.0), (1.0, 1.0), (1.5, 1.0), (inf, 1.0)):
        schedule = scheduler.run(Policy(ListRule.GREEDY, patience, in_flight=in_flight))
        if schedule is not None:
            yield schedule.rows()
