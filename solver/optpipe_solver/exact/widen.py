"""Find what is better by beam searches below the best schedule known, each wider than the last."""

from __future__ import annotations

from functools import partial
from math import floor
from typing import TYPE_CHECKING, NamedTuple, Protocol

from optpipe_solver.exact.beam import beam_can_search, search_beam
from optpipe_solver.exact.counts import Answer, counts_can_search
from optpipe_solver.exact.counts_beam import search_counts_beam
from optpipe_solver.milp.horizon.deadline import Deadline
from optpipe_solver.milp.horizon.grid import Goal

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe_solver.incumbent import Incumbent

__all__ = ["improve_by_beam"]

_METHOD = "beam"
_MOST, _WIDEN = 128_000, 4.0
"""States of one layer that are expanded at most, and how many times more than before."""

_LEAST, _SURE = 1.5, 0.8
"""No search is worth it that is less than so many times wider; share of what is left to use."""

_ROUNDING = 1e-6
"""Share of a step of the grid that a length may be off."""


class _Found(Protocol):
    @property
    def answer(self) -> Answer: ...
    @property
    def programs(self) -> Programs | None: ...
    @property
    def num_states(self) -> int: ...


class _Search(Protocol):
    def __call__(
        self, horizon_ms: float, width: int, *, should_stop: Callable[[], bool]
    ) -> _Found: ...


class _Beam(NamedTuple):
    """A search, its first width, and where its horizons lie between bound and best schedule known.

    The shorter the horizon, the sooner a search that fails is over, and the fewer states compete.
    Where the bound is the optimum, the search over counts is quickest there (measured). ``again``
    says whether a width that found something is tried again.
    """

    search: _Search
    first: int
    shares: tuple[float, ...]
    again: bool


def improve_by_beam(
    best: Incumbent,
    *,
    time_limit_s: float,
    threads: int,
    seed: int,
    should_stop: Callable[[], bool] | None = None,
    work_limit: int | None = None,
) -> int:
    """Search below the best schedule known, ever wider; return the states.

    Over counts of passes where first in, first out loses nothing, else over journeys. Where no
    state had to be left out nothing within the horizon exists, which is offered as a bound. Nothing
    here is random or parallel: ``threads`` and ``seed`` are those of every other part. With
    ``work_limit`` (states) the run is a function of problem and start, as long as time does not end
    it.
    """
    del threads, seed
    beam = _beam_of(best.problem)
    if best.programs is None or best.is_optimal or beam is None:
        return 0
    told = should_stop or (lambda: False)
    end = Deadline(time_limit_s, lambda: best.is_optimal or told())
    # The first call in a process loads compiled code, which says nothing of how long others take.
    beam.search(0.0, 1, should_stop=end.is_over)
    width, num_states = beam.first, 0
    while width <= _MOST:
        began = end.left_s()
        answer, met = _round(best, beam, width, end)
        num_states += met
        if answer is Answer.NONE or end.is_over():
            break
        left = end.left_s() / max(1e-6, began - end.left_s())
        if work_limit is not None:
            left = (work_limit - num_states) / met
        if left < _LEAST / _SURE:
            break
        if answer is not Answer.FOUND or not beam.again:
            width = int(width * min(_WIDEN, _SURE * left))
    return max(1, num_states)


def _beam_of(problem: Problem) -> _Beam | None:
    """Return the search that can say all there is about a problem."""
    if counts_can_search(problem):
        return _Beam(partial(search_counts_beam, problem), 2_000, (0.0, 1.0), again=False)
    if beam_can_search(problem):
        return _Beam(partial(search_beam, problem), 500, (1.0,), again=True)
    return None


def _round(best: Incumbent, beam: _Beam, width: int, end: Deadline) -> tuple[Answer, int]:
    """Search at ever longer horizons until something better is found; return the states too."""
    goal = Goal.of(best.problem, best.objective_ms, cutoff=True)
    answer, met = Answer.UNKNOWN, 0
    for horizon, proven in _horizons(best.bound_ms, goal, beam.shares):
        found = beam.search(horizon, width, should_stop=end.is_over)
        met += found.num_states
        answer = found.answer
        if answer is Answer.NONE:
            best.offer_bound(min(proven, best.objective_ms), _METHOD)
        if found.programs is not None:
            if best.offer(found.programs, _METHOD):
                return Answer.FOUND, met
            answer = Answer.UNKNOWN
        if end.is_over():
            break
    return answer, met


def _horizons(bound_ms: float, goal: Goal, shares: tuple[float, ...]) -> list[tuple[float, float]]:
    """Return different horizons up to that of the goal, and what each proves if none is within."""
    longest = goal.horizon_ms
    horizons = {bound_ms + share * (longest - bound_ms) for share in shares}
    if goal.grid > 0.0:
        longest = _on_grid(longest, goal.grid)
        horizons = {_on_grid(horizon, goal.grid) for horizon in horizons}
    shorter = sorted(horizon for horizon in horizons if horizon < longest)
    return [*((horizon, horizon) for horizon in shorter), (goal.horizon_ms, goal.proven_ms)]


def _on_grid(length_ms: float, grid: float) -> float:
    return grid * floor(length_ms / grid + _ROUNDING)
