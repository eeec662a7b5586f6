"""The fifo search: over counts of passes, where first in, first out loses nothing.

A *state* has the counts of F, I, W and B that every stage has started. It has the clock, which is
the latest start, and times, none before the clock. The times say when each device is free, and when
the last F and gradient of every stage arrive. States go layer by layer, by passes done (a B counts
as two). If a layer and the next one are empty, no schedule lies within the horizon. If the last
layer holds a state, its way back is a schedule. docs/exact.md says why no schedule is missed.

It is a kernel of its own because the general search takes 3.5 to 4.5 times as long per state on
problems of eight devices (measured).
"""

from __future__ import annotations

from math import floor
from typing import TYPE_CHECKING

import numpy as np

from optpipe.schedule import Action
from optpipe_solver.arrays.encoding import KINDS, memory_of
from optpipe_solver.bounds.heads_tails import drain, tails
from optpipe_solver.bounds.relaxation import relaxed
from optpipe_solver.exact.fifo_kernel import (
    FifoProblem,
    chain_fifo,
    expand_fifo,
    make_fifo_layer,
    make_fifo_loads,
    make_fifo_state,
)
from optpipe_solver.exact.layers import (
    HorizonAnswer,
    LayeredOutcome,
    LayeredSearch,
    keep_rows,
    whole,
)
from optpipe_solver.feasibility import fifo_loses_nothing, fusing_may_pay, refuse_unless
from optpipe_solver.incumbent import grid_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe_solver.arrays import Ints
    from optpipe_solver.exact.fifo_kernel import FifoLayer

__all__ = ["fifo_can_search", "fifo_problem_of", "search_fifo_beam"]


_MOST_MICROBATCHES = 100
"""Counts are kept in a byte."""

_BEAM_SLICE = 5_000
"""States that a beam expands between two looks at whether to stop."""

_SPARE = 3
"""Capacity of a beam's layer, in widths: a full layer keeps only the most promising states."""


def fifo_can_search(problem: Problem) -> bool:
    """Whether a state says all there is about a problem."""
    return (
        problem.objective == "makespan"
        and problem.is_even
        and not problem.pairs
        and problem.num_microbatches <= _MOST_MICROBATCHES
        and fifo_loses_nothing(problem)
    )


def search_fifo_beam(
    problem: Problem,
    horizon_ms: float,
    width: int,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> LayeredOutcome:
    """Look for a schedule of at most ``horizon_ms``, ``width`` states of each layer expanded.

    `InputError` unless `fifo_can_search`. ``NONE`` only where no state was left out: then no
    schedule lies within the horizon. A schedule found may be longer, where states relax something.
    If all times are equal, very many programs are equally long. Moves that change one device at a
    time wander among them without end; a state describes all devices together. On
    `loop2-equal-p8-m16-4.5a` of the benchmarks 500 states per layer improve 605 ms to 590 ms. 2,000
    states reach 580 ms, which is the bound (measured).
    """
    refuse_unless(
        fifo_can_search(problem),
        "search_fifo_beam",
        problem,
        f"the objective makespan, up to {_MOST_MICROBATCHES} equal micro-batches in a free order, "
        "no pairs, and memory in which no mode but keep pays",
    )
    search = _FifoSearch(problem, horizon_ms, width)
    answer = search.walk(should_stop)
    programs = search.programs() if answer is HorizonAnswer.FOUND else None
    return LayeredOutcome(answer, search.num_states, programs)


class _FifoSearch(LayeredSearch["FifoLayer"]):
    def __init__(self, problem: Problem, horizon_ms: float, width: int) -> None:
        size = len(problem.stages), len(problem.devices)
        layers = [make_fifo_layer(_SPARE * width, *size) for _ in range(3)]
        super().__init__(layers, 3 * problem.num_microbatches * len(problem.stages), width)
        self.problem = problem
        self.fifo = fifo_problem_of(problem, horizon_ms)
        self.work = make_fifo_state(*size), make_fifo_loads(*size)
        layers[0].alive[0] = True
        layers[0].size[0] = 1

    def _step(self, at: int) -> int:
        layer, one, two = self.layers
        then = expand_fifo(self.fifo, (layer, one, two), self.work, at, _BEAM_SLICE)
        if then < min(at + _BEAM_SLICE, layer.size[0]):
            for following in (one, two):
                self._thin(following)
                chain_fifo(following)
        return then

    def _thin(self, layer: FifoLayer) -> None:
        """Keep the most promising rows of a layer, in their order, and bar what is not better."""
        rows = np.flatnonzero(layer.alive[: layer.size[0]])
        if self.width is not None and len(rows) > self.width:
            self.is_thinned = True
            best = np.argpartition(layer.rate[rows], self.width - 1)[: self.width]
            layer.limit[0] = layer.rate[rows[best]].max()
            rows = np.sort(rows[best])
        keep_rows(layer, layer[:5], rows)

    def _leave(self, layer: FifoLayer) -> None:
        super()._leave(layer)
        layer.limit[0] = np.inf

    def programs(self) -> Programs:
        """Return the programs of the shortest way to have all done, gradient reductions aside.

        Passes are 4 x stage + kind; labels go first in, first out.
        """
        problem, last = self.problem, self.layers[0]
        ends = last.times[: last.size[0]].max(axis=1)
        rows: list[list[Action]] = [[] for _ in problem.devices]
        forwards, gradients = [0] * len(problem.stages), [0] * len(problem.stages)
        waiting: list[list[int]] = [[] for _ in problem.stages]
        for code in self._way_to_first(ends, lambda code: code % 4 == 3):
            s, kind = divmod(code, 4)
            if kind == 0:
                j, forwards[s] = forwards[s], forwards[s] + 1
            elif kind == 2:
                j = waiting[s].pop(0)
            else:
                j, gradients[s] = gradients[s], gradients[s] + 1
                if kind == 1:
                    waiting[s].append(j)
            rows[problem.stages[s].device].append(Action(s, KINDS[kind], j))
        return tuple(tuple(row) for row in rows)


# --- A problem in whole numbers of a unit of time, for `fifo_kernel`.

_STEPS = 1e12
"""Units in the horizon, or in a ms if that is longer, where times have no common divisor."""

_ROUNDING = 1e-6
"""Share of a unit that sums of times in ms may be off."""

_SLOTS, _DECAYS, _PASSES = 512, 12, 5
"""Of the urgency: its slots, over so many decays by a factor of e, each as long as so many passes
on average. On `loop2-equal-p8-m16-4.5a` of the benchmarks 3 to 10 passes need the fewest states,
which are a fifth of those without urgency (measured)."""


def fifo_problem_of(problem: Problem, horizon_ms: float) -> FifoProblem:
    """Return the problem with every time rounded down to whole units, and so the horizon.

    If a unit divides all times, nothing is rounded, and a schedule within the horizon lasts whole
    units. Otherwise the unit is so small that rounding costs 1e-12 per pass of the horizon. Then a
    schedule within the horizon is also a schedule of the rounded problem, and no longer: times only
    shrink.
    """
    unit = grid_ms(problem) or max(1.0, horizon_ms) / _STEPS
    model = relaxed(problem)
    behind = tails(model, drain(model), np.zeros(len(problem.stages)))
    stages = problem.stages
    passes = _passes(problem, unit)
    length = max(float(passes.mean()), 1.0)
    memory = memory_of(problem)
    return FifoProblem(
        num_microbatches=problem.num_microbatches,
        device=np.array(problem.placement, dtype=np.int64),
        forward=_units((s.forward_ms for s in stages), unit),
        split_i=_units((s.backward_input_ms for s in stages), unit),
        split_w=_units((s.backward_weight_ms for s in stages), unit),
        fused=_units((s.fused_backward_ms for s in stages), unit),
        gradient=_units(model.gradient, unit),
        weight=_units(model.weight, unit),
        may_fuse=np.array([fusing_may_pay(problem, s) for s in range(len(stages))]),
        activation=whole(s.activation_bytes for s in stages),
        context=whole(s.weight_context_bytes for s in stages),
        workspace=(memory.rises - np.maximum(memory.adds, 0))[:4, :, 0],
        room=whole(map(problem.room_bytes, range(len(problem.devices)))),
        there=_units(model.there, unit),
        back=_units(model.back, unit),
        last_f=_units(behind.forward.ravel(), unit).reshape(behind.forward.shape),
        last_i=_units(behind.gradient.ravel(), unit).reshape(behind.gradient.shape),
        last_w=_units(behind.weight.ravel(), unit).reshape(behind.weight.shape),
        shortest=int(passes.min()),
        horizon=floor(horizon_ms / unit + _ROUNDING),
        slots=_SLOTS / (_DECAYS * _PASSES * length),
        urgency=length * np.exp(-_DECAYS / _SLOTS * np.arange(_SLOTS)),
    )


def _passes(problem: Problem, unit: float) -> Ints:
    """Return the times of F, I, W and, where it may be used, B of all stages."""
    times = [
        [s.forward_ms for s in problem.stages],
        [s.backward_input_ms for s in problem.stages],
        [s.backward_weight_ms for s in problem.stages],
        [s.fused_backward_ms for n, s in enumerate(problem.stages) if fusing_may_pay(problem, n)],
    ]
    return _units((time for row in times for time in row), unit)


def _units(values: Iterable[float], unit: float) -> Ints:
    return whole(value / unit + _ROUNDING for value in values)
