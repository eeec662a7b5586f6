"""A schedule of any size that takes no solver: 1F1B with split backwards."""

from __future__ import annotations

from optpipe import Device, Problem, Programs, Stage
from tests.building import one_f_one_b

GIB = 2**30


def large_case(num_devices: int, num_microbatches: int) -> tuple[Problem, Programs]:
    """1F1B on a linear placement; 64 x 512 are 98,304 actions, and device 0 is nearly full."""
    stages = tuple(
        Stage(
            device=index,
            forward_ms=29.7,
            backward_input_ms=29.4,
            backward_weight_ms=19.9,
            activation_bytes=64 * GIB // num_devices,
            static_bytes=12 * GIB,
        )
        for index in range(num_devices)
    )
    problem = Problem(
        name=f"{num_devices} x {num_microbatches}",
        num_microbatches=num_microbatches,
        devices=(Device(memory_bytes=80 * GIB),) * num_devices,
        stages=stages,
    )
    return problem, one_f_one_b(num_devices, num_microbatches, "IW")
