"""Two devices, two micro-batches, one of them offloaded: small enough to draw by hand."""

import pytest

from optpipe import Problem, Programs, load_csv
from tests.building import problem, stage


def make_small_problem(memory_bytes: int = 16) -> Problem:
    """F, I, W take 2, 2, 1 ms; a transfer takes 1 ms; an activation takes 6 of 16 bytes."""
    sizes = {"activation_bytes": 6, "weight_context_bytes": 3, "offload_bytes": 6}
    stages = [stage(device, 2, 2, 1, static_bytes=4, **sizes) for device in range(2)]
    device = {"memory_bytes": memory_bytes, "d2h_gb_per_s": 6e-6, "h2d_gb_per_s": 6e-6}
    return problem(stages, [device] * 2, m=2, name="small")


@pytest.fixture
def small_problem() -> Problem:
    return make_small_problem()


def make_small_programs() -> Programs:
    """Device 0 parks micro-batch 0 on the host while micro-batch 1 runs forward."""
    return load_csv(
        "0F0,0OFFLOAD0,0RELEASE0,0F1,0RELOAD0,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"
    )


@pytest.fixture
def small_programs() -> Programs:
    return make_small_programs()
