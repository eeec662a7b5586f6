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
from typing import TYPE_CHECKING, Any

import numpy as np

from optpipe.action import Action, ActionType
from optpipe_solver.exact.count_layers import expand, make_layer
from optpipe_solver.exact.kernel import make_desk, make_state
from optpipe_solver.exact.line import line_of
from optpipe_solver.exact.sweep import SLICE, expand_layer
from optpipe_solver.milp.improve import fifo_loses_nothing

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe_solver.exact.count_layers import Layer

    Ways = list[tuple[NDArray[Any], NDArray[Any]]]

__all__ = ["Answer", "CountsOutcome", "counts_can_search", "programs_to", "search_counts"]

_MOST_MICROBATCHES = 100
"""Counts are kept in a byte."""

_KINDS = (
    ActionType.FORWARD,
    ActionType.BACKWARD_INPUT,
    ActionType.BACKWARD_WEIGHT,
    ActionType.FULL_BACKWARD,
)


class Answer(StrEnum):
    """What a search within a horizon came to."""

    NONE = "none"
    FOUND = "found"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CountsOutcome:
    """The end of a search: programs where it found some, and how many states it kept."""

    answer: Answer
    programs: Programs | None
    num_states: int


def counts_can_search(problem: Problem) -> bool:
    """Whether a state says all there is about a problem."""
    return (
        problem.objective == "makespan"
        and problem.num_microbatches <= _MOST_MICROBATCHES
        and fifo_loses_nothing(problem)
    )


def search_counts(
    problem: Problem,
    horizon_ms: float,
    *,
    most_states: int,
    most_in_layer: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> CountsOutcome:
    """Look for a schedule of at most ``horizon_ms``; the problem must be one of counts.

    Unknown if more than ``most_states`` are met, ``most_in_layer`` in one layer, or if told to
    stop.
    """
    search = _Search(problem, horizon_ms, most_in_layer)
    return search.run(most_states, should_stop)


class _Search:
    def __init__(self, problem: Problem, horizon_ms: float, most_in_layer: int) -> None:
        self.problem = problem
        self.line = line_of(problem, horizon_ms)
        self.size = len(problem.stages), len(problem.devices)
        self.layers = [make_layer(most_in_layer, *self.size) for _ in range(3)]
        self.work = make_state(*self.size), make_desk(*self.size)
        self.layers[0].alive[0] = True
        self.layers[0].size[0] = 1
        self.ways: Ways = []
        self.num_states = 1

    def run(self, most_states: int, should_stop: Callable[[], bool]) -> CountsOutcome:
        """Expand layer after layer."""
        for _ in range(3 * self.problem.num_microbatches * len(self.problem.stages)):
            layer, one, two = self.layers
            if not self._expand(most_states, should_stop):
                return CountsOutcome(Answer.UNKNOWN, None, self.num_states)
            if one.size[0] == 0 and two.size[0] == 0:
                return CountsOutcome(Answer.NONE, None, self.num_states)
            size = layer.size[0]
            self.ways.append((layer.parent[:size].copy(), layer.way[:size].copy()))
            layer.first[:] = -1
            layer.size[0] = 0
            self.layers = [one, two, layer]
        programs = programs_to(self.problem, self.ways, self.layers[0])
        return CountsOutcome(Answer.FOUND, programs, self.num_states)

    def _expand(self, most_states: int, should_stop: Callable[[], bool]) -> bool:
        """Expand the first layer; return False where it is too much, or told to stop."""
        layer, one, two = self.layers

        def step(at: int) -> int:
            then = expand(self.line, (layer, one, two), self.work, at, SLICE)
            return -1 if then < min(at + SLICE, layer.size[0]) else then

        done, self.num_states = expand_layer(
            self.layers, step, self.num_states, most_states, should_stop
        )
        return done


def programs_to(problem: Problem, ways: Ways, last: Layer) -> Programs:
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
