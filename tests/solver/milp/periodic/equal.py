"""Equal times, half of an activation held until W: the problems of the published minima."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.building import PLENTY, problem, stage

if TYPE_CHECKING:
    from optpipe import Problem


def equal(p: int, shape: str, m: int = 4, limit: int = PLENTY) -> Problem:
    """Two chunks of 1 ms passes per device; 2 bytes per chunk's activation, 1 of them until W.

    1F1B holds p activations of two chunks each on a line: 4 * p bytes.
    """
    line = list(range(p))
    placement = line + (line[::-1] if shape == "v" else line)
    stages = [stage(d, activation_bytes=2, weight_context_bytes=1) for d in placement]
    return problem(stages, [{"memory_bytes": limit}] * p, m=m)
