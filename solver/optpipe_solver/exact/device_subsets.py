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

from optpipe_solver.bounds.configurations import configurations_ms
from optpipe_solver.exact.fifo_search import fifo_can_search, search_fifo
from optpipe_solver.exact.general_search import general_can_search, search_general
from optpipe_solver.exact.layers import HorizonAnswer
from optpipe_solver.incumbent import Goal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.problem import Problem
    from optpipe_solver.budget import Stop
    from optpipe_solver.incumbent import Incumbent

__all__ = ["improve_by_exact_search", "prove_by_few_devices"]


_SUBSET_METHOD = "general-search"
_MOST_IN_SUBSET_LAYER = (2_000, 16_000, 128_000, 512_000)
"""States in one layer, at most: a few hundred bytes each. Small choices get more sooner."""

_HALVINGS = 2
_FEW = 6
"""Up to so many devices every choice is one, beyond that neighbours alone."""


@dataclass(slots=True)
class _DeviceSubset:
    """Some devices, and what is known of them."""

    devices: tuple[int, ...]
    ceiling_ms: float = float("inf")
    is_settled: bool = False


def prove_by_few_devices(best: Incumbent, stop: Stop) -> None:
    """Raise the bound as far as few devices at a time can; work is counted in states met.

    Nothing here is random: where work is limited the run is a function of problem and start.
    """
    _Rounds(best, stop).run()


class _Rounds:
    """Every choice with ever more states allowed; one device more is as one step of these less."""

    def __init__(self, best: Incumbent, stop: Stop) -> None:
        self.best = best
        self.stop = stop
        self.choices = [_DeviceSubset(devices) for devices in _choices(best.problem)]

    def run(self) -> None:
        sizes = sorted({len(choice.devices) for choice in self.choices})
        turns = [
            (size + level, size) for size in sizes for level in range(len(_MOST_IN_SUBSET_LAYER))
        ]
        for turn, size in sorted(turns):
            for choice in self.choices:
                if len(choice.devices) == size:
                    self._raise(choice, _MOST_IN_SUBSET_LAYER[turn - size])

    def _raise(self, choice: _DeviceSubset, most_in_layer: int) -> None:
        """Search just below the ceiling until that settles it; where it is too much, lower."""
        while not self._is_over() and self._is_useful(choice):
            goal = self._goal(choice)
            answer = self._ask(choice, goal.horizon_ms, most_in_layer)
            if answer is HorizonAnswer.NONE:
                choice.is_settled = True
                self.best.offer_bound(min(goal.proven_ms, self.best.objective_ms), _SUBSET_METHOD)
            elif answer is HorizonAnswer.UNKNOWN:
                self._halve(choice, most_in_layer)
                return

    def _halve(self, choice: _DeviceSubset, most_in_layer: int) -> None:
        """Raise the bound by halving what lies between it and the goal: that is less to search."""
        low, high = self.best.bound_ms, self._goal(choice).horizon_ms
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self._is_over() or middle <= self.best.bound_ms:
                return
            if self._ask(choice, middle, most_in_layer) is HorizonAnswer.NONE:
                self.best.offer_bound(min(middle, self.best.objective_ms), _SUBSET_METHOD)
                low = middle
            else:
                high = middle

    def _ask(self, choice: _DeviceSubset, horizon_ms: float, most_in_layer: int) -> HorizonAnswer:
        found = search_general(
            self.best.problem,
            choice.devices,
            horizon_ms,
            most_states=_states_left(self.stop),
            most_in_layer=most_in_layer,
            should_stop=self._is_over,
        )
        self.stop.spend(found.num_states)
        if found.found_ms is not None:
            choice.ceiling_ms = min(choice.ceiling_ms, found.found_ms, horizon_ms)
        return found.answer

    def _goal(self, choice: _DeviceSubset) -> Goal:
        """Return what lies just below the ceiling, or below the best schedule if that is less."""
        length = min(choice.ceiling_ms, self.best.objective_ms)
        return Goal.of(self.best.problem, length)

    def _is_useful(self, choice: _DeviceSubset) -> bool:
        return not choice.is_settled and self._goal(choice).horizon_ms > self.best.bound_ms

    def _is_over(self) -> bool:
        return self.best.is_optimal or self.stop.is_over()


def _states_left(stop: Stop) -> int:
    return int(min(_MOST_STATES, stop.left_work))


def _choices(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Yield the choices that can be searched, small ones first, neighbours before others."""
    used = [device for device, held in enumerate(problem.stages_of) if held]
    for size in range(1, len(used) + 1):
        for at in range(len(used) - size + 1):
            neighbours = tuple(used[at : at + size])
            if general_can_search(problem, neighbours):
                yield neighbours
        for chosen in combinations(used, size) if len(used) <= _FEW else ():
            is_gap = used.index(chosen[-1]) - used.index(chosen[0]) >= size
            if is_gap and general_can_search(problem, chosen):
                yield chosen


# --- Prove as much as can be proven about a problem without HiGHS's branch and bound.

_METHOD = "fifo-search"
_MOST_STATES = 50_000_000
_MOST_IN_LAYER = 200_000
_FIFO_SHARE = 0.6
"""Share of time or states for the fifo search, where few devices may prove as much."""

_FIRST = 10_000
_TRIALS = 6


def improve_by_exact_search(best: Incumbent, stop: Stop) -> None:
    """Raise the bound, and find what is better; work is counted in states met.

    First the configuration bound; then, where it applies, the fifo search:
    below the best schedule known, and where that is too much at horizons nearer to the bound; then
    searches over few devices, which know offload, recompute and any order of micro-batches. Nothing
    here is random or parallel. Where work is limited the run is a function of problem and start, as
    long as time does not end it.
    """
    bound_ms = configurations_ms(best.problem, should_stop=stop.is_over)
    best.offer_bound(min(bound_ms, best.objective_ms), "configurations")
    if best.programs is not None and not best.is_optimal:
        if fifo_can_search(best.problem):
            _Trials(best, stop.turn(_FIFO_SHARE)).run()
        prove_by_few_devices(best, stop.turn())
    if not stop.spent:
        stop.spend(1)


class _Trials:
    """Searches at one horizon after another.

    A search that ends in no schedule proves its horizon, one that finds a schedule lowers the goal.
    """

    def __init__(self, best: Incumbent, stop: Stop) -> None:
        self.best = best
        self.stop = stop
        self.floor = best.bound_ms

    def run(self) -> None:
        """Search below the best schedule with ever more states allowed, and between by halves."""
        most = _FIRST
        while most <= _MOST_IN_LAYER and not self._is_over():
            answer = HorizonAnswer.FOUND
            while answer is HorizonAnswer.FOUND and not self._is_over():
                answer = self._below(1.0, most)
            self._between(most)
            most *= 4

    def _between(self, most: int) -> None:
        """Raise the bound by halving what lies between it and the best schedule."""
        self.floor = self.best.bound_ms
        low, high = 0.0, 1.0
        for _ in range(_TRIALS):
            if self._is_over():
                return
            middle = (low + high) / 2
            answer = self._below(middle, most)
            if answer is HorizonAnswer.FOUND:
                return
            low, high = (middle, high) if answer is HorizonAnswer.NONE else (low, middle)

    def _below(self, share: float, most_in_layer: int) -> HorizonAnswer:
        """Look for a schedule that lies below a share of the gap; offer what comes of it."""
        best = self.best
        goal = Goal.of(best.problem, best.objective_ms)
        horizon = self.floor + share * (goal.horizon_ms - self.floor)
        found = search_fifo(
            best.problem,
            horizon,
            most_states=_states_left(self.stop),
            most_in_layer=most_in_layer,
            should_stop=self._is_over,
        )
        self.stop.spend(found.num_states)
        if found.answer is HorizonAnswer.NONE:
            best.offer_bound(goal.proven_ms if share == 1.0 else horizon, _METHOD)
        if found.programs is not None and not best.offer(found.programs, _METHOD):
            return HorizonAnswer.UNKNOWN
        return found.answer

    def _is_over(self) -> bool:
        return self.best.is_optimal or self.stop.is_over()
