"""Problems on a V placement, device d holds stages d and 2p - 1 - d; or any one, in pairs."""

from collections.abc import Sequence
from typing import Any

from optpipe import Problem
from tests.building import bus, problem, stage


def v_problem(
    times: Sequence[tuple[float, float, float]], m: int, memory: int = 10**12, **fields: Any
) -> Problem:
    """One (F, I, W) per stage, one byte per activation; ``memory`` in bytes per device."""
    p = len(times) // 2
    stages = [
        stage(min(s, 2 * p - 1 - s), f, i, w, activation_bytes=1)
        for s, (f, i, w) in enumerate(times)
    ]
    return problem(stages, [bus(memory_bytes=memory) for _ in range(p)], m, **fields)


def equal_v(p: int, m: int, memory: int = 10**12) -> Problem:
    """Every pass takes 1 ms; judged by span."""
    return v_problem([(1, 1, 1)] * (2 * p), m, memory, objective="span")


def all_in_pairs(
    placement: Sequence[int], m: int, memory: int = 10**12, hidden_ms: float = 1.0
) -> Problem:
    """Passes of 1 ms, a byte per activation; every F may pair with every B of its device."""
    pairs = [
        {"forward": a, "backward": b, "hidden_ms": hidden_ms}
        for a, here in enumerate(placement)
        for b, there in enumerate(placement)
        if here == there
    ]
    stages = [stage(device, activation_bytes=1) for device in placement]
    devices = [bus(memory_bytes=memory) for _ in set(placement)]
    return problem(stages, devices, m, pairs=pairs, format="optpipe/problem/v2")
