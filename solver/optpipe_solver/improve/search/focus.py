"""Where a cooling makes its moves: everywhere, or in a stretch of time on all devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optpipe_solver.improve.compiled import kernel
from optpipe_solver.improve.moves import draws

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe_solver.improve.compiled.kernel import Work
    from optpipe_solver.improve.compiled.problem import CompiledProblem, Rows

__all__ = ["everywhere", "some_stretch"]

_LEAST_SHARE, _MOST_SHARE = 0.25, 0.45
"""How much of the makespan a stretch takes."""

_LAST = 0.7
"""How often it is the last one at least."""


def everywhere(rows: Rows) -> NDArray[np.int64]:
    """Return the focus of a search that leaves nothing out."""
    focus = np.zeros((rows.lengths.size, 2), dtype=np.int64)
    focus[:, 1] = rows.actions.shape[1]
    return focus


def some_stretch(
    compiled: CompiledProblem, rows: Rows, work: Work, draw: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """Return the focus on a random stretch of time, often the last one; ``work`` is scratch.

    Behind the last stretch nothing has to fit: of all it is the freest, and the quickest to time.
    """
    ends = _ends_ms(compiled, rows, work)
    share = _LEAST_SHARE + (_MOST_SHARE - _LEAST_SHARE) * draws.unit(draw)
    begin = 1.0 - share
    if draws.unit(draw) >= _LAST:
        begin *= draws.unit(draw)
    whole = max((float(row[-1]) for row in ends if row.size), default=0.0)
    return _places(ends, begin * whole, (begin + share) * whole * (1 + 1e-9))


def _ends_ms(compiled: CompiledProblem, rows: Rows, work: Work) -> list[NDArray[np.float64]]:
    """Return, by device, when the last F, I or B up to each action ends, in ms; 0 before one."""
    kernel.length(rows.actions, rows.lengths, compiled.times, work)
    cells = compiled.times.num_cells
    ends = np.zeros((8, cells))
    ends[kernel.FORWARD] = work.end[:cells]
    ends[kernel.BACKWARD_INPUT] = ends[kernel.FULL_BACKWARD] = work.end[cells : 2 * cells]
    known = ends.reshape(-1)
    return [
        np.maximum.accumulate(known[row[:count]])
        for row, count in zip(rows.actions, rows.lengths, strict=True)
    ]


def _places(ends: list[NDArray[np.float64]], low_ms: float, high_ms: float) -> NDArray[np.int64]:
    """Return, by device, the places of what ends between two times."""
    focus = np.zeros((len(ends), 2), dtype=np.int64)
    for device, row in enumerate(ends):
        focus[device] = np.searchsorted(row, low_ms), np.searchsorted(row, high_ms, "right")
    return focus
