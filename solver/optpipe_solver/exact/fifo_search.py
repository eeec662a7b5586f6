"""An exact search over counts of passes, where first in, first out loses nothing.

There a schedule is said by the order of F, I, W and B on every device alone: the k-th pass of a
kind on a stage is that of the k-th micro-batch. Passes are started in the order of their start
times, so a *state* is: how many of each kind every stage has started; the clock, which is the
latest start; when each device is free; and when the last F and the last gradient of every stage
are where they are needed. Times before the clock count as the clock. Memory depends on the counts
alone. Relaxed: of several outputs on their way at once over one boundary only the last is waited
for, and gradient reductions of one device do not queue.

*Every schedule is met.* Sort its passes by start: each is a step from the state before, at the
earliest start that clock, device and input allow, or later; the earliest loses nothing.

*Dominance.* Of two states with the same counts, one with no time later than the other's can do
whatever that one can, no later: the other is dropped.

*Left out.* An F, I or B that starts so late that a waiting W of its device would fit in before.
Among the ways to complete a state within the horizon take those with the least sum of starts, and
of these the one with its W earliest in the order: if it began so, moving that W forward would harm
nothing (it only frees bytes, and fits by its workspace), yet make the sum less or the W earlier. So
each state that can be completed keeps a way to be.

*Ties.* Of passes that start at one instant t those of lower devices come first: as a pass starts,
each lower device that is free is taken to be busy until u, the next time at which anything ends or
arrives, or would if it were to start at t. That harms nothing where no pass takes no time (where
one does, u = t). In the completion above let x be the pass of the lowest device among those that
start first, at t. What a lower device starts next begins later than t; before u it cannot: its
input, and the end of what its device runs, are there by t or else not before u, and it fits as
well at t, so beginning at t would make the sum less. So the completion that is kept takes x next,
and goes on after u on all those devices.

*Bound.* A state is dropped if the least time of what must follow (`bounds.tails`, loads) ends
behind the horizon.

States go layer by layer, by passes done (a B counts as two), so each is expanded once, after all
that could dominate it are known. If a layer and the one behind it are empty, no schedule lies
within the horizon; if the last holds a state, its way back is a schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import floor
from typing import TYPE_CHECKING, Any

import numpy as np

from optpipe.schedule import Action, ActionType
from optpipe_solver.arrays.grid import grid_ms
from optpipe_solver.bounds.heads_tails import drain, tails
from optpipe_solver.bounds.relaxation import relaxed
from optpipe_solver.exact.fifo_kernel import (
    FifoProblem,
    expand_fifo,
    make_fifo_layer,
    make_fifo_loads,
    make_fifo_state,
)
from optpipe_solver.exact.layers import SLICE, expand_layer
from optpipe_solver.feasibility import fifo_loses_nothing, fusing_may_pay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from optpipe.problem import Problem, Stage
    from optpipe.schedule import Programs
    from optpipe_solver.exact.fifo_kernel import FifoLayer

    Ways = list[tuple[NDArray[Any], NDArray[Any]]]
    Ints = NDArray[np.int64]

__all__ = [
    "FifoOutcome",
    "HorizonAnswer",
    "fifo_can_search",
    "fifo_problem_of",
    "programs_to",
    "search_fifo",
]


_MOST_MICROBATCHES = 100
"""Counts are kept in a byte."""

_KINDS = (
    ActionType.FORWARD,
    ActionType.BACKWARD_INPUT,
    ActionType.BACKWARD_WEIGHT,
    ActionType.FULL_BACKWARD,
)


class HorizonAnswer(StrEnum):
    """What a search within a horizon came to."""

    NONE = "none"
    FOUND = "found"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class FifoOutcome:
    """The end of a search: programs where it found some, and how many states it kept."""

    answer: HorizonAnswer
    programs: Programs | None
    num_states: int


def fifo_can_search(problem: Problem) -> bool:
    """Whether a state says all there is about a problem."""
    return (
        problem.objective == "makespan"
        and problem.num_microbatches <= _MOST_MICROBATCHES
        and fifo_loses_nothing(problem)
    )


def search_fifo(
    problem: Problem,
    horizon_ms: float,
    *,
    most_states: int,
    most_in_layer: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> FifoOutcome:
    """Look for a schedule of at most ``horizon_ms``; the problem must be one of counts.

    Unknown if more than ``most_states`` are met, ``most_in_layer`` in one layer, or if told to
    stop.
    """
    search = _FifoSearch(problem, horizon_ms, most_in_layer)
    return search.run(most_states, should_stop)


class _FifoSearch:
    def __init__(self, problem: Problem, horizon_ms: float, most_in_layer: int) -> None:
        self.problem = problem
        self.fifo = fifo_problem_of(problem, horizon_ms)
        self.size = len(problem.stages), len(problem.devices)
        self.layers = [make_fifo_layer(most_in_layer, *self.size) for _ in range(3)]
        self.work = make_fifo_state(*self.size), make_fifo_loads(*self.size)
        self.layers[0].alive[0] = True
        self.layers[0].size[0] = 1
        self.ways: Ways = []
        self.num_states = 1

    def run(self, most_states: int, should_stop: Callable[[], bool]) -> FifoOutcome:
        """Expand layer after layer."""
        for _ in range(3 * self.problem.num_microbatches * len(self.problem.stages)):
            layer, one, two = self.layers
            if not self._expand(most_states, should_stop):
                return FifoOutcome(HorizonAnswer.UNKNOWN, None, self.num_states)
            if one.size[0] == 0 and two.size[0] == 0:
                return FifoOutcome(HorizonAnswer.NONE, None, self.num_states)
            size = layer.size[0]
            self.ways.append((layer.parent[:size].copy(), layer.way[:size].copy()))
            layer.first[:] = -1
            layer.size[0] = 0
            self.layers = [one, two, layer]
        programs = programs_to(self.problem, self.ways, self.layers[0])
        return FifoOutcome(HorizonAnswer.FOUND, programs, self.num_states)

    def _expand(self, most_states: int, should_stop: Callable[[], bool]) -> bool:
        """Expand the first layer; return False where it is too much, or told to stop."""
        layer, one, two = self.layers

        def step(at: int) -> int:
            then = expand_fifo(self.fifo, (layer, one, two), self.work, at, SLICE)
            return -1 if then < min(at + SLICE, layer.size[0]) else then

        done, self.num_states = expand_layer(
            self.layers, step, self.num_states, most_states, should_stop
        )
        return done


def programs_to(problem: Problem, ways: Ways, last: FifoLayer) -> Programs:
    """Return the programs of the shortest way to have all done, gradient reductions aside.

    ``ways`` holds parents and ways of the states of every layer before the last.
    """
    size = last.size[0]
    latest = last.times[:size].max(axis=1)
    ends = np.where(last.alive[:size], latest, np.iinfo(np.int64).max)
    row, at = int(np.argmin(ends)), len(ways)
    parents, codes = last.parent, last.way
    passes: list[int] = []
    while at > 0:
        passes.append(int(codes[row]))
        row = int(parents[row])
        at -= 2 if passes[-1] % 4 == 3 else 1
        parents, codes = ways[at]
    return _programs(problem, passes[::-1])


def _programs(problem: Problem, passes: list[int]) -> Programs:
    """Return the programs of passes, each 4 x stage + kind, with first in, first out labels."""
    rows: list[list[Action]] = [[] for _ in problem.devices]
    forwards, gradients = [0] * len(problem.stages), [0] * len(problem.stages)
    waiting: list[list[int]] = [[] for _ in problem.stages]
    for code in passes:
        s, kind = divmod(code, 4)
        if kind == 0:
            j, forwards[s] = forwards[s], forwards[s] + 1
        elif kind == 2:
            j = waiting[s].pop(0)
        else:
            j, gradients[s] = gradients[s], gradients[s] + 1
            if kind == 1:
                waiting[s].append(j)
        rows[problem.stages[s].device].append(Action(s, _KINDS[kind], j))
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

    The unit divides all times where there is such a one; then nothing is rounded, and a schedule
    within the horizon lasts whole units. Else it is so small that rounding costs 1e-12 per pass of
    the horizon; then a schedule within the horizon is one of the rounded problem too, and no
    longer: times only shrink.
    """
    unit = grid_ms(problem) or max(1.0, horizon_ms) / _STEPS
    model = relaxed(problem)
    behind = tails(model, drain(model), np.zeros(len(problem.stages)))
    stages = problem.stages
    passes = _passes(problem, unit)
    length = max(float(passes.mean()), 1.0)
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
        activation=_whole(s.activation_bytes for s in stages),
        context=_whole(s.weight_context_bytes for s in stages),
        workspace=_workspace(stages),
        room=_whole(
            held.usable_bytes - problem.static_bytes_of(device)
            for device, held in enumerate(problem.devices)
        ),
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


def _workspace(stages: Sequence[Stage]) -> Ints:
    rows = [
        [s.forward_workspace_bytes for s in stages],
        [s.backward_input_workspace_bytes for s in stages],
        [s.backward_weight_workspace_bytes for s in stages],
        [s.backward_workspace_bytes for s in stages],
    ]
    return np.array(rows, dtype=np.int64)


def _units(values: Iterable[float], unit: float) -> Ints:
    return _whole(value / unit + _ROUNDING for value in values)


def _whole(values: Iterable[float]) -> Ints:
    return np.array([int(value) for value in values], dtype=np.int64)
