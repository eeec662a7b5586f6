"""Find what is better by beam searches below the best schedule known, each wider than the last.

States, dominance and bound are those of `fifo_search` or `general_search`, all devices kept; of
each layer only the most promising states are expanded.
"""

from __future__ import annotations

from functools import partial
from math import floor
from typing import TYPE_CHECKING, NamedTuple, Protocol

from optpipe_solver.exact.fifo_search import fifo_can_search, search_fifo_beam
from optpipe_solver.exact.general_search import beam_can_search, search_beam
from optpipe_solver.exact.layers import HorizonAnswer
from optpipe_solver.incumbent import Goal

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.problem import Problem
    from optpipe_solver.budget import Stop
    from optpipe_solver.exact.layers import LayeredOutcome
    from optpipe_solver.incumbent import Incumbent

__all__ = ["improve_by_beam"]


_METHOD = "beam"
_MOST, _WIDEN = 128_000, 4.0
"""States of one layer that are expanded at most, and how many times more than before."""

_LEAST, _SURE = 1.5, 0.8
"""No search is worth it that is less than so many times wider; share of what is left to use."""

_ROUNDING = 1e-6
"""Share of a step of the grid that a length may be off."""


class _WidthSearch(Protocol):
    def __call__(
        self, horizon_ms: float, width: int, *, should_stop: Callable[[], bool]
    ) -> LayeredOutcome: ...


class _BeamSearch(NamedTuple):
    """A search, its first width, and where its horizons lie between bound and best schedule known.

    The shorter the horizon, the sooner a search that fails is over, and the fewer states compete.
    Where the bound is the optimum, the fifo search is quickest there (measured). ``again``
    says whether a width that found something is tried again.
    """

    search: _WidthSearch
    first: int
    shares: tuple[float, ...]
    again: bool


def improve_by_beam(best: Incumbent, stop: Stop) -> None:
    """Search below the best schedule known, ever wider; work is counted in states expanded.

    The fifo search where first in, first out loses nothing, else the general search. Where
    no state had to be left out nothing within the horizon exists, which is offered as a bound.
    Nothing here is random or parallel. Where work is limited the run is a function of problem and
    start, as long as time does not end it.
    """
    beam = _beam_of(best.problem)
    if best.programs is None or best.is_optimal or beam is None:
        return
    turn = stop.turn(should_stop=lambda: best.is_optimal)
    # The first call in a process loads compiled code, which says nothing of how long others take.
    beam.search(0.0, 1, should_stop=turn.is_over)
    width = beam.first
    while width <= _MOST:
        began = turn.left_s()
        answer, met = _round(best, beam, width, turn)
        turn.spend(met)
        if answer is HorizonAnswer.NONE or turn.is_over():
            break
        left = turn.left_s() / max(1e-6, began - turn.left_s())
        if turn.work is not None:
            left = turn.left_work / met
        if left < _LEAST / _SURE:
            break
        if answer is not HorizonAnswer.FOUND or not beam.again:
            width = int(width * min(_WIDEN, _SURE * left))
    if not stop.spent:
        stop.spend(1)


def _beam_of(problem: Problem) -> _BeamSearch | None:
    """Return the search that can say all there is about a problem."""
    if fifo_can_search(problem):
        return _BeamSearch(partial(search_fifo_beam, problem), 2_000, (0.0, 1.0), again=False)
    if beam_can_search(problem):
        return _BeamSearch(partial(search_beam, problem), 500, (1.0,), again=True)
    return None


def _round(best: Incumbent, beam: _BeamSearch, width: int, stop: Stop) -> tuple[HorizonAnswer, int]:
    """Search at ever longer horizons until something better is found; return the states too."""
    goal = Goal.of(best.problem, best.objective_ms)
    answer, met = HorizonAnswer.UNKNOWN, 0
    for horizon, proven in _horizons(best.bound_ms, goal, beam.shares):
        found = beam.search(horizon, width, should_stop=stop.is_over)
        met += found.num_states
        answer = found.answer
        if answer is HorizonAnswer.NONE:
            best.offer_bound(min(proven, best.objective_ms), _METHOD)
        if found.programs is not None:
            if best.offer(found.programs, _METHOD):
                return HorizonAnswer.FOUND, met
            answer = HorizonAnswer.UNKNOWN
        if stop.is_over():
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
