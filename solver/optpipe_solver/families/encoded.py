"""Programs of `execution` as `CompiledProblem` has them: B is a kind of its own there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optpipe_solver.improve.compiled import kernel
from optpipe_solver.improve.compiled.problem import KINDS, Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from optpipe.problem import Problem

__all__ = ["encoded"]


def encoded(problem: Problem, codes: Sequence[NDArray[np.int64]], *, fused: bool) -> Rows:
    """Return the programs of all devices, with room for a round trip per cell.

    ``fused``: their second kind stands for B, not for I.
    """
    m = problem.num_microbatches
    num_cells = len(problem.stages) * m
    widest = max(len(held) for held in problem.stages_of)
    actions = np.zeros((len(codes), len(KINDS) * m * widest), dtype=np.int64)
    for device, row in enumerate(codes):
        actions[device, : row.size] = row
    if fused:
        is_backward = actions // num_cells == kernel.BACKWARD_INPUT
        actions[is_backward] += (kernel.FULL_BACKWARD - kernel.BACKWARD_INPUT) * num_cells
    return Rows(actions, np.array([row.size for row in codes], dtype=np.int64))
