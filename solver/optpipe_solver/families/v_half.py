"""V-Half: half of 1F1B's memory, on a V placement.

Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024 (arXiv 2405.15362),
section 4 and table 1.

Rule: the building block of a V placement with offsets of 2, 1, 2, 1 passes between neighbouring
devices (F down, F up, I down, I up), so that a micro-batch's lifespans on a device sum to 6p,
repeated every 6 passes, squeezed and reordered (`repeat_and_squeeze`). The gap between the last F
and the first I is 3 for even p and 2 for odd p, so that no passes of a device collide.
Memory: (p + 2) // 2 micro-batches of a device's two stages (min with m). Bubble at equal times: a
rate of about p / 2m, that is 3p passes; here 3p - 7 passes for even p > 2, 3p - 4 for odd p > 1 and
none for p <= 2. It repeats with every micro-batch where W + 2I < 2F or W + 2F < 2I, or where
communication is slow. Ignored: memory limits (activations are counted, not weighed), offload and
recompute. The order of the block is that of equal times; how W fills it follows real times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.families.repeat_and_squeeze import squeezed_v
from optpipe_solver.families.shape import devices_of_v

if TYPE_CHECKING:
    from optpipe.action import Programs
    from optpipe.problem import Problem

__all__ = ["build_v_half"]


def build_v_half(problem: Problem) -> Programs:
    """Return V-Half's programs.

    Raises
    ------
    NotApplicable
        If the placement is not a V.
    """
    num_devices = devices_of_v(problem)
    turn = 3 if num_devices % 2 == 0 else 2
    return squeezed_v(problem, offsets=(2, 1, 2, 1), gaps=(1, turn, 1), most=(num_devices + 2) // 2)
