"""The same problem in another unit of time, so that HiGHS sees numbers it can compute with.

Its tolerances are absolute: with an objective of 1e9 ms it was seen to prove what is not so.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from optpipe.problem import Problem

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["scale_for", "scaled"]

_LEAST_MS, _MOST_MS = 16.0, 65_536.0
_AIM_MS = 1024.0

_STAGE_TIMES = (
    "forward_ms",
    "backward_input_ms",
    "backward_weight_ms",
    "backward_ms",
    "recompute_ms",
    "grad_sync_ms",
)


def scale_for(objective_ms: float) -> float:
    """Return a power of 2 that brings an objective near 1 s; 1 where it is near enough."""
    if objective_ms <= 0 or _LEAST_MS <= objective_ms <= _MOST_MS:
        return 1.0
    return 2.0 ** round(math.log2(_AIM_MS / objective_ms))


def scaled(problem: Problem, factor: float) -> Problem:
    """Return the problem with every time multiplied by a factor > 0.

    A power of 2 loses nothing: every schedule then takes exactly so many times as long.
    """
    if factor == 1.0:
        return problem
    slower = {"d2h_gb_per_s": 1 / factor, "h2d_gb_per_s": 1 / factor}
    between = {"latency_ms": factor, "bandwidth_gb_per_s": 1 / factor}
    changed = problem.model_copy(
        update={
            "devices": [_times(device, slower) for device in problem.devices],
            "stages": [_times(s, dict.fromkeys(_STAGE_TIMES, factor)) for s in problem.stages],
            "links": [_times(link, between) for link in problem.links],
        }
    )
    return Problem.parse(changed.model_dump(by_alias=True))


def _times(value: BaseModel, factors: dict[str, float]) -> BaseModel:
    known = {name: getattr(value, name) for name in factors}
    return value.model_copy(
        update={name: was * factors[name] for name, was in known.items() if was is not None}
    )
