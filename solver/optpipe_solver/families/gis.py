"""GIS, the generalised interleaved schedule (PipeOffload, arXiv 2503.01328, section 4).

For a loop placement: d devices with v chunks each, chunk c of the k-th device is stage c d + k.

Rule: micro-batches go through the chunks in groups of g, ceil(d / 2) <= g <= d: a group's forwards
of chunk 0, then of chunk 1, ... The k-th device runs g (v - 1) + d - k forwards, then one I, its W
right behind, and one forward in turn, the I's in the same order of groups, last chunk first.
Inside a building block the k-th device starts F of chunk c and the group's i-th micro-batch at slot
3 (g c + i) + k, and its I at 3 (g (v - 1) + g (v - 1 - c) + i) + 3 (d - 1) + 1 - 2 k; the order of
these slots is the program. GIS proper is g = d, GIS-H (`gis_h`) is g = ceil(d / 2).

Memory: g (v - 1) + d chunk activations on the first device, g (v - 1) + d - k on the k-th. In units
of a device's micro-batch (v chunks) that is d for g = d. Bubble at equal times and m a multiple of
g: (d - 1)(F + I), plus (v - 1) times (d - g) F + max(0, d I - g (I + W)) for smaller groups.
It ignores memory limits, offload, recompute and the fused backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optpipe.action import ActionType
from optpipe_solver.columns import program_of
from optpipe_solver.families.not_applicable import NotApplicable, Reason
from optpipe_solver.families.shape import chunks_of_loop

if TYPE_CHECKING:
    from optpipe.action import Program, Programs
    from optpipe.problem import Problem

__all__ = ["build_gis", "gis_bubble_ms", "gis_peak_chunks", "grouped_interleaved"]

_TYPES = (ActionType.FORWARD, ActionType.BACKWARD_INPUT, ActionType.BACKWARD_WEIGHT)


def build_gis(problem: Problem) -> Programs:
    """Return the programs of GIS with groups of d micro-batches.

    Raises
    ------
    NotApplicable
        If the placement is no loop, or there are fewer micro-batches than a group holds.
    """
    chunks_of_loop(problem)
    return grouped_interleaved(problem, len(set(problem.placement)))


def gis_peak_chunks(num_devices: int, chunks: int, group: int) -> int:
    """Return g (v - 1) + d: the chunk activations that the first device holds at most."""
    return group * (chunks - 1) + num_devices


def gis_bubble_ms(
    num_devices: int, chunks: int, group: int, *, forward: float, inputs: float, weights: float
) -> float:
    """Return the bubble at equal times per chunk, m being a multiple of the group."""
    short = (num_devices - group) * forward
    short += max(0.0, num_devices * inputs - group * (inputs + weights))
    return (num_devices - 1) * (forward + inputs) + (chunks - 1) * short


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
            Reason.TOO_FEW_MICROBATCHES,
            f"the {d} devices take micro-batches in groups of {group}, but there are only {m}",
        )
    programs: list[Program] = [() for _ in problem.devices]
    for k in range(d):
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
    # Every I stands twice: the second time it is the W right behind it, 2 in _TYPES.
    times = 1 + is_backward
    cell, kind = np.repeat(cell, times), np.repeat(is_backward, times)
    kind[np.cumsum(times) - 1] *= 2
    types = map(_TYPES.__getitem__, kind.tolist())
    return program_of((chunk * d + k)[cell].tolist(), types, j[cell].tolist())
