"""A schedule of any size that takes no solver: 1F1B with split backwards."""

from optpipe import Problem, Programs
from tests.building import one_f_one_b, problem, stage

GIB = 2**30


def large_case(num_devices: int, num_microbatches: int) -> tuple[Problem, Programs]:
    """1F1B on a linear placement; 64 x 512 are 98,304 actions, and device 0 is nearly full."""
    sizes = {"activation_bytes": 64 * GIB // num_devices, "static_bytes": 12 * GIB}
    stages = [stage(device, 29.7, 29.4, 19.9, **sizes) for device in range(num_devices)]
    devices = [{"memory_bytes": 80 * GIB}] * num_devices
    name = f"{num_devices} x {num_microbatches}"
    whole = problem(stages, devices, num_microbatches, name=name)
    return whole, one_f_one_b(num_devices, num_microbatches, "IW")
