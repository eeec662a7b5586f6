"""A beam search over the states of the general search, with most of them left out.

States, events, dominance and the bound are those of `general_search`, all devices kept; of each
layer only the most promising states (`rate`) are expanded. Each stands for a partial schedule of
all devices at once, with its choice of what is offloaded and recomputed: so the search meets
schedules that differ from a good one on every device, which moves on programs reach through worse
ones only. With 2,000 states per layer it meets the best length known of 10 of the 17 problems of
four devices with offload or recompute in `benchmarks`, in about a second each (measured).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from math import floor
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from optpipe_solver.arrays.grid import Goal
from optpipe_solver.exact.fifo_kernel import (
    chain_fifo,
    expand_fifo,
    make_fifo_layer,
    make_fifo_loads,
    make_fifo_state,
)
from optpipe_solver.exact.fifo_search import (
    FifoOutcome,
    HorizonAnswer,
    fifo_can_search,
    fifo_problem_of,
    programs_to,
)
from optpipe_solver.exact.general_kernel import (
    FUSED,
    KEEP,
    GeneralState,
    make_general_loads,
    make_general_state,
    survey,
)
from optpipe_solver.exact.general_layers import (
    chain_general,
    expand_general,
    make_general_layer,
    set_out,
)
from optpipe_solver.exact.general_search import general_can_search, general_problem_of, programs_of
from optpipe_solver.jit import lean

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe_solver.budget import Stop
    from optpipe_solver.exact.fifo_kernel import FifoLayer
    from optpipe_solver.exact.general_kernel import GeneralLoads, GeneralProblem
    from optpipe_solver.exact.general_layers import GeneralLayer
    from optpipe_solver.incumbent import Incumbent

__all__ = [
    "BeamOutcome",
    "LayerWalk",
    "beam_can_search",
    "improve_by_beam",
    "keep_rows",
    "rate",
    "search_beam",
    "search_fifo_beam",
]


# --- What both beam searches share: layers of states, expanded one after the other, some left out.


class _WalkedLayer(Protocol):
    @property
    def parent(self) -> NDArray[Any]: ...
    @property
    def way(self) -> NDArray[Any]: ...
    @property
    def alive(self) -> NDArray[Any]: ...
    @property
    def first(self) -> NDArray[Any]: ...
    @property
    def size(self) -> NDArray[Any]: ...


_L = TypeVar("_L", bound=_WalkedLayer)


class LayerWalk(ABC, Generic[_L]):
    """A walk from the empty schedule to whole ones.

    A state of one layer leads into the next one or, where it takes two passes at once, into the one
    after that; so three layers are held. ``ways`` has, of each layer that was left, the parents of
    its states and what led to them.
    """

    def __init__(self, layers: list[_L]) -> None:
        self.layers = layers
        self.ways: list[tuple[NDArray[Any], NDArray[Any]]] = []
        self.num_states = 0
        self.is_thinned = False

    def walk(self, num_layers: int, should_stop: Callable[[], bool]) -> HorizonAnswer:
        """Expand so many layers; where states are in the last one the answer is ``FOUND``.

        ``NONE`` only where no state was left out.
        """
        for _ in range(num_layers):
            layer, one, two = self.layers
            self._thin(layer)
            size = int(layer.size[0])
            self.num_states += size
            self.ways.append((layer.parent[:size].copy(), layer.way[:size].copy()))
            if not self._expand(should_stop):
                return HorizonAnswer.UNKNOWN
            if one.size[0] == 0 and two.size[0] == 0:
                return HorizonAnswer.UNKNOWN if self.is_thinned else HorizonAnswer.NONE
            self._clear(layer)
            self.layers = [one, two, layer]
        return HorizonAnswer.FOUND

    @abstractmethod
    def _thin(self, layer: _L) -> None:
        """Keep the most promising states of a layer; note where one is left out."""

    @abstractmethod
    def _expand(self, should_stop: Callable[[], bool]) -> bool:
        """Expand the first layer into the others; return False where told to stop."""

    def _clear(self, layer: _L) -> None:
        """Make a layer ready to be filled again."""
        layer.first[:] = -1
        layer.size[0] = 0


def keep_rows(layer: _WalkedLayer, columns: tuple[NDArray[Any], ...], rows: NDArray[Any]) -> None:
    """Move rows of a layer to its beginning, in their order, and end it behind them."""
    kept = len(rows)
    for column in columns:
        column[:kept] = column[rows]
    layer.alive[:kept] = True
    layer.size[0] = kept


_GENERAL_SLICE = 50
"""States expanded between two looks at whether to stop, and at whether there is room for more."""


@dataclass(frozen=True, slots=True)
class BeamOutcome:
    """The end of a search: programs where it found some, and how many states it expanded.

    ``Answer.NONE`` only where no state was left out: then no schedule lies within the horizon.
    """

    answer: HorizonAnswer
    programs: Programs | None
    num_states: int


def beam_can_search(problem: Problem) -> bool:
    """Whether a state says all there is about the problem, lanes and hosts that are shared aside.

    Every device must have a stage: the others have no program to write.
    """
    return all(problem.stages_of) and general_can_search(problem, range(len(problem.devices)))


def search_beam(
    problem: Problem,
    horizon_ms: float,
    width: int,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> BeamOutcome:
    """Look for a schedule of at most ``horizon_ms``, ``width`` states of each layer expanded.

    What is found may be longer than the horizon, or break a rule of hosts, where states relax what
    programs must do (see `general_search`).
    """
    return _GeneralBeam(problem, horizon_ms, width).run(should_stop)


class _GeneralBeam(LayerWalk["GeneralLayer"]):
    def __init__(self, problem: Problem, horizon_ms: float, width: int) -> None:
        self.problem = problem
        self.width = width
        self.general = general_problem_of(problem, horizon_ms, range(len(problem.devices)))
        m, num_stages = problem.num_microbatches, len(problem.stages)
        size = m, num_stages, len(problem.devices)
        self.most_new = _GENERAL_SLICE * (num_stages + m * (FUSED + 1 + num_stages))
        super().__init__([make_general_layer(2 * width + self.most_new, *size) for _ in range(3)])
        self.work = (
            make_general_state(*size),
            make_general_loads(*size[1:]),
            make_general_loads(*size[1:]),
        )
        set_out(self.layers[0], self.general)

    def run(self, should_stop: Callable[[], bool]) -> BeamOutcome:
        """Expand layer after layer."""
        cells = self.problem.num_microbatches * len(self.problem.stages)
        answer = self.walk(4 * cells, should_stop)
        if answer is not HorizonAnswer.FOUND:
            return BeamOutcome(answer, None, self.num_states)
        programs = programs_of(self.problem, self.general, self._way_back(self.layers[0]))
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
                    chain_general(following)
            at = expand_general(self.general, (layer, one, two), self.work, at, _GENERAL_SLICE)
        return True

    def _thin(self, layer: GeneralLayer) -> None:
        """Keep the most promising rows of a layer, in their order; of equal ones the first."""
        size = int(layer.size[0])
        rows = np.flatnonzero(layer.alive[:size])
        if len(rows) > self.width:
            self.is_thinned = True
            rates = np.empty(size, dtype=np.int64)
            rate(self.general, layer, self.work[1], rates)
            best = np.argsort(rates[rows], kind="stable")[: self.width]
            rows = np.sort(rows[best])
        keep_rows(layer, layer[:6], rows)

    def _way_back(self, last: GeneralLayer) -> list[int]:
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


# --- Compiled: how promising the states of a layer of `beam` are.


@lean
def rate(
    general: GeneralProblem, layer: GeneralLayer, loads: GeneralLoads, rates: NDArray[np.int64]
) -> None:
    """Write the rate of every row, the lower the more promising; the loads are written to.

    It is the lower bound of the end, and as many such bounds agree, the mean over the devices of
    when each could have all its work done if it never waited again: that is what idle time and
    RECOMPUTEs have cost so far.
    """
    devices = len(general.room)
    for row in range(layer.size[0]):
        state = GeneralState(layer.codes[row], layer.weights[row], layer.times[row])
        survey(general, state, loads)
        total = 0
        for device in range(devices):
            total += state.times[1 + device] + loads.owed[device]
        for s in range(len(general.forward)):
            total += (general.num_microbatches - loads.forwards[s]) * general.forward[s]
            total += (general.num_microbatches - loads.gradients[s]) * general.gradient[s]
            total += (general.num_microbatches - state.weights[s]) * general.weight[s]
        rates[row] = layer.end[row] + total // devices


# --- A beam search over counts of passes: the exact search with most states left out.
# States, passes, dominance and the bound are those of `fifo_search`; of each layer only the most
# promising states (`fifo_kernel`) are expanded. Where all times are equal very many
# programs are equally long, and moves that change one device at a time walk among them without an
# end; a state stands for all devices at once. On `loop2-equal-p8-m16-4.5a` of the benchmarks 500
# states per layer lead from 605 to 590 ms, and 2,000 to 580 ms, which is the bound (measured).

_FIFO_SLICE = 5_000
"""States expanded between two looks at whether to stop."""

_SPARE = 3
"""Room in a layer, in widths: when it is full, the most promising states are kept."""


def search_fifo_beam(
    problem: Problem,
    horizon_ms: float,
    width: int,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> FifoOutcome:
    """Look for a schedule of at most ``horizon_ms``, ``width`` states of each layer expanded.

    The problem must be one of counts. ``Answer.NONE`` only where no state was left out: then no
    schedule lies within the horizon. What is found may be longer, where counts relax something.
    """
    return _FifoBeam(problem, horizon_ms, width).run(should_stop)


class _FifoBeam(LayerWalk["FifoLayer"]):
    def __init__(self, problem: Problem, horizon_ms: float, width: int) -> None:
        self.problem = problem
        self.width = width
        self.fifo = fifo_problem_of(problem, horizon_ms)
        size = len(problem.stages), len(problem.devices)
        super().__init__([make_fifo_layer(_SPARE * width, *size) for _ in range(3)])
        self.work = make_fifo_state(*size), make_fifo_loads(*size)
        self.layers[0].alive[0] = True
        self.layers[0].size[0] = 1

    def run(self, should_stop: Callable[[], bool]) -> FifoOutcome:
        """Expand layer after layer."""
        cells = self.problem.num_microbatches * len(self.problem.stages)
        answer = self.walk(3 * cells, should_stop)
        if answer is not HorizonAnswer.FOUND:
            return FifoOutcome(answer, None, self.num_states)
        programs = programs_to(self.problem, self.ways, self.layers[0])
        return FifoOutcome(answer, programs, self.num_states)

    def _clear(self, layer: FifoLayer) -> None:
        super()._clear(layer)
        layer.limit[0] = np.inf

    def _expand(self, should_stop: Callable[[], bool]) -> bool:
        """Expand the first layer; return False where told to stop."""
        layer, one, two = self.layers
        at = 0
        while at < layer.size[0]:
            if should_stop():
                return False
            then = expand_fifo(self.fifo, (layer, one, two), self.work, at, _FIFO_SLICE)
            if then < min(at + _FIFO_SLICE, layer.size[0]):
                for following in (one, two):
                    self._thin(following)
                    chain_fifo(following)
            at = then
        return True

    def _thin(self, layer: FifoLayer) -> None:
        """Keep the most promising rows of a layer, in their order, and bar what is not better."""
        rows = np.flatnonzero(layer.alive[: layer.size[0]])
        if len(rows) > self.width:
            self.is_thinned = True
            best = np.argpartition(layer.rate[rows], self.width - 1)[: self.width]
            layer.limit[0] = layer.rate[rows[best]].max()
            rows = np.sort(rows[best])
        keep_rows(layer, layer[:5], rows)


# --- Find what is better by beam searches below the best schedule known, each wider than the last.

_METHOD = "beam"
_MOST, _WIDEN = 128_000, 4.0
"""States of one layer that are expanded at most, and how many times more than before."""

_LEAST, _SURE = 1.5, 0.8
"""No search is worth it that is less than so many times wider; share of what is left to use."""

_ROUNDING = 1e-6
"""Share of a step of the grid that a length may be off."""


class _SearchFound(Protocol):
    @property
    def answer(self) -> HorizonAnswer: ...
    @property
    def programs(self) -> Programs | None: ...
    @property
    def num_states(self) -> int: ...


class _WidthSearch(Protocol):
    def __call__(
        self, horizon_ms: float, width: int, *, should_stop: Callable[[], bool]
    ) -> _SearchFound: ...


class _BeamSearch(NamedTuple):
    """A search, its first width, and where its horizons lie between bound and best schedule known.

    The shorter the horizon, the sooner a search that fails is over, and the fewer states compete.
    Where the bound is the optimum, the search over counts is quickest there (measured). ``again``
    says whether a width that found something is tried again.
    """

    search: _WidthSearch
    first: int
    shares: tuple[float, ...]
    again: bool


def improve_by_beam(best: Incumbent, stop: Stop) -> None:
    """Search below the best schedule known, ever wider; work is counted in states expanded.

    Over counts of passes where first in, first out loses nothing, else as the general search. Where
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
