"""GPipe: all forwards, then all backwards.

Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
section 2.3; with several stages on a device it is the breadth-first schedule of Lamy-Poirier 2023,
"Breadth-First Pipeline Parallelism", section 3.

Rule: every device runs the forwards of its stages in model order, each for all micro-batches, then
the fused backwards of its stages in reverse. Micro-batches go first in, first out in both (the
paper's figure runs backwards last in, first out; for equal micro-batches neither time nor memory
differs). Memory: all m micro-batches on every stage. Bubble at equal times, one stage per device:
(p - 1)(F + B), i.e. a makespan of (m + p - 1)(F + B), as 1F1B. It ignores memory limits, offload
and the paper's recompute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe.action import Action, ActionType

if TYPE_CHECKING:
    from optpipe.action import Programs
    from optpipe.problem import Problem

__all__ = ["build_gpipe"]


def build_gpipe(problem: Problem) -> Programs:
    """Return GPipe's programs; it applies to every placement."""
    microbatches = range(problem.num_microbatches)
    return tuple(
        (
            *(Action(s, ActionType.FORWARD, j) for s in held for j in microbatches),
            *(Action(s, ActionType.FULL_BACKWARD, j) for s in reversed(held) for j in microbatches),
        )
        for held in problem.stages_of
    )
