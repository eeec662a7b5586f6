"""A beam search over counts of passes: the exact search with most states left out.

States, passes, dominance and the bound are those of `counts`; of each layer only the most
promising states (`count_bounds.rate_of`) are expanded. Where all times are equal very many
programs are equally long, and moves that change one device at a time walk among them without an
end; a state stands for all devices at once. On `loop2-equal-p8-m16-4.5a` of the benchmarks 500
states per layer lead from 605 to 590 ms, and 2,000 to 580 ms, which is the bound (measured).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optpipe_solver.exact.count_layers import chain, expand, make_layer
from optpipe_solver.exact.counts import Answer, CountsOutcome, programs_to
from optpipe_solver.exact.kernel import make_desk, make_state
from optpipe_solver.exact.layer_walk import LayerWalk, keep_rows
from optpipe_solver.exact.line import line_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.problem import Problem
    from optpipe_solver.exact.count_layers import Layer

__all__ = ["search_counts_beam"]

_SLICE = 5_000
"""States expanded between two looks at whether to stop."""

_SPARE = 3
"""Room in a layer, in widths: when it is full, the most promising states are kept."""


def search_counts_beam(
    problem: Problem,
    horizon_ms: float,
    width: int,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> CountsOutcome:
    """Look for a schedule of at most ``horizon_ms``, ``width`` states of each layer expanded.

    The problem must be one of counts. ``Answer.NONE`` only where no state was left out: then no
    schedule lies within the horizon. What is found may be longer, where counts relax something.
    """
    return _Beam(problem, horizon_ms, width).run(should_stop)


class _Beam(LayerWalk["Layer"]):
    def __init__(self, problem: Problem, horizon_ms: float, width: int) -> None:
        self.problem = problem
        self.width = width
        self.line = line_of(problem, horizon_ms)
        size = len(problem.stages), len(problem.devices)
        super().__init__([make_layer(_SPARE * width, *size) for _ in range(3)])
        self.work = make_state(*size), make_desk(*size)
        self.layers[0].alive[0] = True
        self.layers[0].size[0] = 1

    def run(self, should_stop: Callable[[], bool]) -> CountsOutcome:
        """Expand layer after layer."""
        cells = self.problem.num_microbatches * len(self.problem.stages)
        answer = self.walk(3 * cells, should_stop)
        if answer is not Answer.FOUND:
            return CountsOutcome(answer, None, self.num_states)
        programs = programs_to(self.problem, self.ways, self.layers[0])
        return CountsOutcome(answer, programs, self.num_states)

    def _clear(self, layer: Layer) -> None:
        super()._clear(layer)
        layer.limit[0] = np.inf

    def _expand(self, should_stop: Callable[[], bool]) -> bool:
        """Expand the first layer; return False where told to stop."""
        layer, one, two = self.layers
        at = 0
        while at < layer.size[0]:
            if should_stop():
                return False
            then = expand(self.line, (layer, one, two), self.work, at, _SLICE)
            if then < min(at + _SLICE, layer.size[0]):
                for following in (one, two):
                    self._thin(following)
                    chain(following)
            at = then
        return True

    def _thin(self, layer: Layer) -> None:
        """Keep the most promising rows of a layer, in their order, and bar what is not better."""
        rows = np.flatnonzero(layer.alive[: layer.size[0]])
        if len(rows) > self.width:
            self.is_thinned = True
            best = np.argpartition(layer.rate[rows], self.width - 1)[: self.width]
            layer.limit[0] = layer.rate[rows[best]].max()
            rows = np.sort(rows[best])
        keep_rows(layer, layer[:5], rows)
