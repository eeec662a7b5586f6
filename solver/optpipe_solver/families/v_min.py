"""V-Min: the least memory that V building blocks reach, a third of 1F1B's.

Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024 (arXiv 2405.15362),
section 4 and table 1.

Rule: the building block of a V placement with offsets of 1 pass between neighbouring devices in all
four halves, so that a micro-batch's lifespans on a device sum to 4p, repeated every 6 passes,
squeezed and reordered (`repeat_and_squeeze`). The gap between the last F and the first I is 5 where
p % 3 = 2 and 3 elsewhere, the shortest bubbles without collisions. Memory: (p + 4) // 3
micro-batches of a device's two stages (min with m). Bubble at equal times: a rate of about 2p / 3m,
that is 4p passes; here 4p - (7, 5, 9)[p % 3] for p > 2 and none for p <= 2. Unequal times and
communication add a bubble to every micro-batch: the block has no slack. Ignored: memory limits
(activations are counted, not weighed), offload and recompute. The order of the block is that of
equal times; how W fills it follows real times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.families.repeat_and_squeeze import squeezed_v
from optpipe_solver.families.shape import devices_of_v

if TYPE_CHECKING:
    from optpipe.action import Programs
    from optpipe.problem import Problem

__all__ = ["build_v_min"]


def build_v_min(problem: Problem) -> Programs:
    """Return V-Min's programs.

    Raises
    ------
    NotApplicable
        If the placement is not a V.
    """
    num_devices = devices_of_v(problem)
    turn = 5 if num_devices % 3 == 2 else 3
    return squeezed_v(problem, offsets=(1, 1, 1, 1), gaps=(1, turn, 1), most=(num_devices + 4) // 3)
