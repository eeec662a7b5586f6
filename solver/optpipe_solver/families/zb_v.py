"""ZB-V: zero bubbles with 1F1B's memory, on a V placement.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, appendix; the same schedule is V-ZB of Qi
et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, section 4 and table 1.

Rule: the building block of a V placement with offsets of 3 passes between neighbouring devices in
all four halves and 1 at the turns, repeated every 6 passes, squeezed and reordered
(`repeat_and_squeeze`), with at most 2p stage activations on a device. Memory: p micro-batches of a
device's two stages (min with m), on every device, as 1F1B's first. Bubble (span): zero at equal
times for every p and m >= 2p - 1, and 2p - 1 - m passes for fewer (p <= m); where W is shorter, at
least (p - 1)(F + I + 2C - 2W) - W, for passes of one stage and communication C, because p
activations hold no more W back for the tail. Ignored: memory limits (activations are counted, not
weighed), offload and recompute. The order of the block is that of equal times; how W fills it
follows real times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.families.repeat_and_squeeze import squeezed_v
from optpipe_solver.families.shape import devices_of_v

if TYPE_CHECKING:
    from optpipe.action import Programs
    from optpipe.problem import Problem

__all__ = ["build_zb_v"]


def build_zb_v(problem: Problem) -> Programs:
    """Return ZB-V's programs.

    Raises
    ------
    NotApplicable
        If the placement is not a V.
    """
    num_devices = devices_of_v(problem)
    return squeezed_v(problem, offsets=(3, 3, 3, 3), gaps=(1, 1, 1), most=num_devices)
