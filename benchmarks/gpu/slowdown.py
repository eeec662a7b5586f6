"""(b) Every micro-batch offloaded, against none, at several sizes.

k is one copy to the host over the compute of one micro-batch, F + I + W, as measured. With both
directions under compute at full speed copies are hidden up to k = 1. PipeOffload (arXiv
2503.01328), whose lane is half duplex, calls all of it hidden where the round trip is: k up to 1/2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.gpu.alone import (
    Sizes,
    alone,
    forget,
    in_flight,
    make_stage,
    problem_of,
    run_program,
)
from optpipe.runtime.measuring import Effort

if TYPE_CHECKING:
    import torch

MICROBATCHES = 12
AHEAD = 8
REAL = tuple(
    Sizes(hidden=hidden, sequence=sequence, blocks=2)
    for hidden in (2048, 4096, 8192)
    for sequence in (1024, 4096)
)
TINY = (Sizes(hidden=32, sequence=16, blocks=1, dtype="fp32"),)


def measure_it(name: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Return one row per size."""
    with alone(name) as device:
        return [_row(sizes, device, tiny=tiny) for sizes in (TINY if tiny else REAL)]


def _row(sizes: Sizes, device: torch.device, *, tiny: bool) -> dict[str, Any]:
    forget(device)
    effort = Effort(3, 1) if tiny else Effort(8, 3)
    stage = make_stage(sizes, device)
    problem = problem_of(stage, sizes, device, num_microbatches=MICROBATCHES, effort=effort)
    none, full = (
        run_program(
            stage,
            sizes,
            problem,
            in_flight(MICROBATCHES, AHEAD, offload=offload),
            device=device,
            steps=2 if tiny else 5,
        )
        for offload in (False, True)
    )
    held = problem.stages[0]
    return {
        "hidden": sizes.hidden,
        "sequence": sizes.sequence,
        "F + I + W ms": held.busy_ms,
        "offloadable %": 100 * held.offload_bytes / held.activation_bytes,
        "k": problem.offload_ms(0) / held.busy_ms,
        "none ms": none.measured_ms,
        "full ms": full.measured_ms,
        "slowdown %": 100 * (full.measured_ms / none.measured_ms - 1),
        "simulated %": 100 * (full.planned_ms / none.planned_ms - 1),
        "none MB": none.measured_bytes / 1e6,
        "full MB": full.measured_bytes / 1e6,
    }
