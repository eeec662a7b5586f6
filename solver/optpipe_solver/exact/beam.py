"""A beam search over the journeys of micro-batches: the exact search with most states left out.

States, events, dominance and the bound are those of `journeys`, all devices kept; of each layer
only the most promising states (`beam_kernel`) are expanded. Each stands for a partial schedule of
all devices at once, with its choice of what is offloaded and recomputed: so the search meets
schedules that differ from a good one on every device, which moves on programs reach through worse
ones only. With 2,000 states per layer it meets the best length known of 10 of the 17 problems of
four devices with offload or recompute in `benchmarks`, in about a second each (measured).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from optpipe_solver.exact.beam_kernel import rate
from optpipe_solver.exact.counts import Answer
from optpipe_solver.exact.journey_kernel import FUSED, KEEP, make_desk, make_state
from optpipe_solver.exact.journey_layers import chain, expand, make_layer, set_out
from optpipe_solver.exact.journey_programs import programs_of
from optpipe_solver.exact.journeys import journeys_can_search
from optpipe_solver.exact.layer_walk import LayerWalk, keep_rows
from optpipe_solver.exact.road import road_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe_solver.exact.journey_layers import Layer

__all__ = ["BeamOutcome", "beam_can_search", "search_beam"]

_SLICE = 50
"""States expanded between two looks at whether to stop, and at whether there is room for more."""


@dataclass(frozen=True, slots=True)
class BeamOutcome:
    """The end of a search: programs where it found some, and how many states it expanded.

    ``Answer.NONE`` only where no state was left out: then no schedule lies within the horizon.
    """

    answer: Answer
    programs: Programs | None
    num_states: int


def beam_can_search(problem: Problem) -> bool:
    """Whether a state says all there is about the problem, lanes and hosts that are shared aside.

    Every device must have a stage: the others have no program to write.
    """
    return all(problem.stages_of) and journeys_can_search(problem, range(len(problem.devices)))


def search_beam(
    problem: Problem,
    horizon_ms: float,
    width: int,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> BeamOutcome:
    """Look for a schedule of at most ``horizon_ms``, ``width`` states of each layer expanded.

    What is found may be longer than the horizon, or break a rule of hosts, where states relax what
    programs must do (see `journeys`).
    """
    return _Beam(problem, horizon_ms, width).run(should_stop)


class _Beam(LayerWalk["Layer"]):
    def __init__(self, problem: Problem, horizon_ms: float, width: int) -> None:
        self.problem = problem
        self.width = width
        self.road = road_of(problem, horizon_ms, range(len(problem.devices)))
        m, num_stages = problem.num_microbatches, len(problem.stages)
        size = m, num_stages, len(problem.devices)
        self.most_new = _SLICE * (num_stages + m * (FUSED + 1 + num_stages))
        super().__init__([make_layer(2 * width + self.most_new, *size) for _ in range(3)])
        self.work = make_state(*size), make_desk(*size[1:]), make_desk(*size[1:])
        set_out(self.layers[0], self.road)

    def run(self, should_stop: Callable[[], bool]) -> BeamOutcome:
        """Expand layer after layer."""
        cells = self.problem.num_microbatches * len(self.problem.stages)
        answer = self.walk(4 * cells, should_stop)
        if answer is not Answer.FOUND:
            return BeamOutcome(answer, None, self.num_states)
        programs = programs_of(self.problem, self.road, self._way_back(self.layers[0]))
        return BeamOutcome(answer, programs, self.num_states)

    def _expand(self, should_stop: Callable[[], bool]) -> bool:
        """Expand the first layer; return False where told to stop."""
        layer, one, two = self.layers
        at = 0
        while at < layer.size[0]:
            if should_stop():
                return False
            for following in (one, two):
                if following.size[0] + self.most_new > len(following.alive):
                    self._thin(following)
                    chain(following)
            at = expand(self.road, (layer, one, two), self.work, at, _SLICE)
        return True

    def _thin(self, layer: Layer) -> None:
        """Keep the most promising rows of a layer, in their order; of equal ones the first."""
        size = int(layer.size[0])
        rows = np.flatnonzero(layer.alive[:size])
        if len(rows) > self.width:
            self.is_thinned = True
            rates = np.empty(size, dtype=np.int64)
            rate(self.road, layer, self.work[1], rates)
            best = np.argsort(rates[rows], kind="stable")[: self.width]
            rows = np.sort(rows[best])
        keep_rows(layer, layer[:6], rows)

    def _way_back(self, last: Layer) -> list[int]:
        """Return the ways to the end that comes first, from the beginning."""
        size = int(last.size[0])
        ends = np.where(last.alive[:size], last.end[:size], np.iinfo(np.int32).max)
        row, at = int(np.argmin(ends)), len(self.ways)
        parents, ways = last.parent, last.way
        found: list[int] = []
        while at > 0:
            found.append(int(ways[row]))
            row = int(parents[row])
            at -= 2 if found[-1] % 8 in {KEEP, FUSED} else 1
            parents, ways = self.ways[at]
        return found[::-1]
