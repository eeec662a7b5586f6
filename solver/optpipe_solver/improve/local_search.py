"""Local search around the best schedule known, for a given time: annealing with restarts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from optpipe.action import ActionType
from optpipe_solver.improve import kernel
from optpipe_solver.improve.annealing import State, anneal
from optpipe_solver.improve.compiled import CompiledProblem, Rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.action import Programs
    from optpipe_solver.incumbent import Incumbent

__all__ = ["improve_by_local_search"]

_FIRST_WORK, _SLICE_WORK = 50_000, 3_000_000
"""Actions simulated between two looks at the clock and whether to stop: up to about 0.2 s.

The first slices are shorter, each twice the one before, so that the first gains come at once.
"""

_HOT, _COLD = 4e-3, 5e-5
"""Temperatures as fractions of the objective."""

_CYCLE = 20
"""Slices of one cooling from hot to cold; then it starts again from the best."""


def improve_by_local_search(
    best: Incumbent,
    *,
    time_limit_s: float,
    seed: int,
    should_stop: Callable[[], bool] | None = None,
) -> None:
    """Search until the time is over, the optimum is proven, or told to stop.

    Parameters
    ----------
    best
        Holds a schedule to start from; improvements go there.
    time_limit_s
        Seconds from now.
    seed
        What is tried, and in which order, is a function of it and of the start; time only decides
        where that ends.
    """
    if best.programs is None:
        return
    search = _Search(best, seed)
    end = time.perf_counter() + time_limit_s
    while time.perf_counter() < end and not best.is_optimal:
        if should_stop is not None and should_stop():
            return
        search.run_slice()


class _Search:
    def __init__(self, best: Incumbent, seed: int) -> None:
        self.best = best
        self.seed = seed
        self.compiled = CompiledProblem.of(best.problem)
        self.by_span = best.problem.objective == "span"
        self.work = kernel.workspace_for(self.compiled.times, len(best.problem.devices))
        self.state = self._state_of(self._programs())
        self.slices = 0

    def run_slice(self) -> None:
        """Anneal for about one slice; offer what got better."""
        step = self.slices % _CYCLE
        if step == 0 and self.slices:
            self.state = self._state_of(self._programs())
        cooling = (_COLD / _HOT) ** (1 / _CYCLE)
        hot = self.best.objective_ms * _HOT * cooling**step
        work = min(_SLICE_WORK, _FIRST_WORK << min(self.slices, 10))
        found = anneal(
            self.state,
            self.compiled.times,
            self.compiled.memory,
            self.work,
            self.by_span,
            self.best.objective_ms,
            hot,
            hot * cooling,
            max(16, work // int(self.state.lengths.sum())),
            self.seed * 1_000_003 + self.slices,
        )
        self.slices += 1
        if found < self.best.objective_ms:
            rows = Rows(self.state.best_actions, self.state.best_lengths)
            self.best.offer(self.compiled.decode(rows), "local-search")

    def _programs(self) -> Programs:
        if self.best.programs is None:
            raise ValueError("local search needs a schedule to start from")
        return self.best.programs

    def _state_of(self, programs: Programs) -> State:
        problem, cells = self.best.problem, self.compiled.times.num_cells
        rows = self.compiled.encode(programs)
        again = np.zeros(cells, dtype=np.bool_)
        for program in programs:
            for stage, kind, j in program:
                if kind is ActionType.RECOMPUTE:
                    again[stage * problem.num_microbatches + j] = True
        away = np.zeros(cells, dtype=np.bool_)
        hosts = np.array(
            [
                kernel.host_peak(row, count, self.compiled.times, self.compiled.memory, away)
                for row, count in zip(rows.actions, rows.lengths, strict=True)
            ],
            dtype=np.int64,
        )
        return State(
            actions=rows.actions,
            lengths=rows.lengths,
            best_actions=rows.actions.copy(),
            best_lengths=rows.lengths.copy(),
            again=again,
            away=away,
            hosts=hosts,
            backup=np.empty(rows.actions.shape[1], dtype=np.int64),
            fused=np.ones(len(problem.stages), dtype=np.bool_),
        )
