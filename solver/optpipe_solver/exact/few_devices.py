"""Raise the bound by exact searches over few devices at a time, the others being waiting times.

A choice of devices has a *ceiling*: the length of the shortest relaxed schedule of these devices
found so far. No bound beyond it can come of this choice. A search that ends in no schedule just
below the ceiling, or just below the best schedule known, settles the choice, and the latter the
problem. Small choices go first, and often settle what all devices together are too many for: the
obstacle to a shorter schedule is mostly the memory of one device, two or three.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from optpipe_solver.exact.counts import Answer
from optpipe_solver.exact.journeys import journeys_can_search, search_journeys
from optpipe_solver.milp.horizon.grid import Goal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe.problem import Problem
    from optpipe_solver.incumbent import Incumbent

__all__ = ["prove_by_few_devices"]

_METHOD = "journeys"
_MOST_IN_LAYER = (2_000, 16_000, 128_000, 512_000)
"""States in one layer, at most: a few hundred bytes each. Small choices get more sooner."""

_HALVINGS = 2
_FEW = 6
"""Up to so many devices every choice is one, beyond that neighbours alone."""


@dataclass(slots=True)
class _Choice:
    """Some devices, and what is known of them."""

    devices: tuple[int, ...]
    ceiling_ms: float = float("inf")
    is_settled: bool = False


def prove_by_few_devices(
    best: Incumbent, *, most_states: int, should_stop: Callable[[], bool] = lambda: False
) -> int:
    """Raise the bound as far as few devices at a time can; return the states met.

    Nothing here is random: with ``most_states`` the run is a function of problem and start.
    """
    rounds = _Rounds(best, most_states, should_stop)
    rounds.run()
    return rounds.num_states


class _Rounds:
    """Every choice with ever more states allowed; one device more is as one step of these less."""

    def __init__(self, best: Incumbent, most_states: int, should_stop: Callable[[], bool]) -> None:
        self.best = best
        self.most_states = most_states
        self.should_stop = should_stop
        self.choices = [_Choice(devices) for devices in _choices(best.problem)]
        self.num_states = 0

    def run(self) -> None:
        sizes = sorted({len(choice.devices) for choice in self.choices})
        turns = [(size + level, size) for size in sizes for level in range(len(_MOST_IN_LAYER))]
        for turn, size in sorted(turns):
            for choice in self.choices:
                if len(choice.devices) == size:
                    self._raise(choice, _MOST_IN_LAYER[turn - size])

    def _raise(self, choice: _Choice, most_in_layer: int) -> None:
        """Search just below the ceiling until that settles it; where it is too much, lower."""
        while not self._is_over() and self._is_useful(choice):
            goal = self._goal(choice)
            answer = self._ask(choice, goal.horizon_ms, most_in_layer)
            if answer is Answer.NONE:
                choice.is_settled = True
                self.best.offer_bound(min(goal.proven_ms, self.best.objective_ms), _METHOD)
            elif answer is Answer.UNKNOWN:
                self._halve(choice, most_in_layer)
                return

    def _halve(self, choice: _Choice, most_in_layer: int) -> None:
        """Raise the bound by halving what lies between it and the goal: that is less to search."""
        low, high = self.best.bound_ms, self._goal(choice).horizon_ms
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self._is_over() or middle <= self.best.bound_ms:
                return
            if self._ask(choice, middle, most_in_layer) is Answer.NONE:
                self.best.offer_bound(min(middle, self.best.objective_ms), _METHOD)
                low = middle
            else:
                high = middle

    def _ask(self, choice: _Choice, horizon_ms: float, most_in_layer: int) -> Answer:
        found = search_journeys(
            self.best.problem,
            choice.devices,
            horizon_ms,
            most_states=self.most_states - self.num_states,
            most_in_layer=most_in_layer,
            should_stop=self._is_over,
        )
        self.num_states += found.num_states
        if found.found_ms is not None:
            choice.ceiling_ms = min(choice.ceiling_ms, found.found_ms, horizon_ms)
        return found.answer

    def _goal(self, choice: _Choice) -> Goal:
        """Return what lies just below the ceiling, or below the best schedule if that is less."""
        length = min(choice.ceiling_ms, self.best.objective_ms)
        return Goal.of(self.best.problem, length, cutoff=True)

    def _is_useful(self, choice: _Choice) -> bool:
        return not choice.is_settled and self._goal(choice).horizon_ms > self.best.bound_ms

    def _is_over(self) -> bool:
        best = self.best
        return best.is_optimal or self.num_states >= self.most_states or self.should_stop()


def _choices(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Yield the choices that can be searched, small ones first, neighbours before others."""
    used = [device for device, held in enumerate(problem.stages_of) if held]
    for size in range(1, len(used) + 1):
        for at in range(len(used) - size + 1):
            neighbours = tuple(used[at : at + size])
            if journeys_can_search(problem, neighbours):
                yield neighbours
        for chosen in combinations(used, size) if len(used) <= _FEW else ():
            is_gap = used.index(chosen[-1]) - used.index(chosen[0]) >= size
            if is_gap and journeys_can_search(problem, chosen):
                yield chosen
