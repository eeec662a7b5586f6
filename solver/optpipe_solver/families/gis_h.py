"""GIS-H: the interleaved schedule with about half of GIS's memory.

PipeOffload, arXiv 2503.01328, section 4: `gis` with the smallest group that keeps the steady state
free of bubbles. Rule: g = ceil(d / 2), more where the stages are so unequal that g micro-batches of
the busiest do not cover one pass through a chunk's devices: g max(F + I + W) >= sum F and >= sum I,
up to d.

Memory: g (v - 1) + d chunk activations, for even d in units of a device's micro-batch (v chunks)
d (v + 1) / (2 v); for odd d one half of (v - 1) / v more. Bubble at equal times:
(d - 1)(F + I) + (v - 1)(d / 2)(F + I - W) for even d. It ignores memory limits, offload, recompute
and the fused backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.families.gis import grouped_interleaved
from optpipe_solver.families.shape import chunks_of_loop

if TYPE_CHECKING:
    from optpipe.action import Programs
    from optpipe.problem import Problem

__all__ = ["build_gis_h", "smallest_group"]


def build_gis_h(problem: Problem) -> Programs:
    """Return the programs of GIS-H.

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
