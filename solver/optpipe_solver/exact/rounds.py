"""Exact searches in rounds: over few devices they raise the bound, as beams they find better ones.

A choice of devices has a *ceiling*: the length of its shortest relaxed schedule found so far, with
the other devices as waiting times. The choice proves no bound above its ceiling. A search just
below the ceiling that finds no schedule settles the choice. Such a search just below the best
schedule known settles the problem. Small choices go first. They often settle problems that are too
large for a search over all devices. Mostly the memory of one to three devices prevents a shorter
schedule. Several choices may each have a short schedule, but none together. So each choice passes
its earliest starts of passes on to the others (`search_in_turn`).

Beams keep all devices, and of each layer only the most promising states; each is wider than the
last. States, dominance and bound are those of `fifo_search` or `general_search`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import floor, inf
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from optpipe_solver.bounds.heads_tails import Events, heads_beside, nothing_known, refill
from optpipe_solver.bounds.relaxation import relaxed
from optpipe_solver.budget import Stop, check_stop
from optpipe_solver.exact.fifo_search import fifo_can_search, search_fifo_beam
from optpipe_solver.exact.general_search import (
    beam_can_search,
    cells_can_search,
    general_can_search,
    search_beam,
    search_general,
)
from optpipe_solver.exact.layers import HorizonAnswer, LayeredOutcome
from optpipe_solver.feasibility import knows_menu, refuse_unless
from optpipe_solver.incumbent import Goal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from optpipe.problem import Problem
    from optpipe_solver.incumbent import Incumbent

__all__ = [
    "IN_TURN",
    "SMALL",
    "beam_can_improve",
    "exact_search_can_prove",
    "improve_by_beam",
    "improve_by_exact_search",
    "search_in_turn",
]


IN_TURN = "search-in-turn"
"""The method name of bounds that choices prove with the earliest starts of the others."""

_GENERAL, _CELLS, _ROUNDS = "general-search", "cell-search", "few devices"
_MOST_IN_LAYER = (2_000, 16_000, 128_000, 512_000)
"""Maximum states in one layer: a few hundred bytes each. Small choices get more sooner."""

_MOST_STATES = 50_000_000
_MOST_IN_TURN = 3_000_000
"""Maximum states met for one answer; in turn, the search remembers the steps between them."""

_LEARNT = 1e-9
"""Minimum delay of a start that counts as new, as a share of the horizon."""

_SHARES = (0.25, 0.5, 0.75)
_FIRST_SHARE, _LEAST_SHARE = 1 / 8, 1 / 16
"""First and smallest step that choices search in turn, as shares of the way to the best schedule.

The step is kept after a proof, doubled if that was easy, and otherwise halved.
"""

_EASY = 12
"""A search is easy if it meets less than so many times the states that one layer may hold."""

SMALL = 15
"""Cells (stages x micro-batches) up to which a problem is small."""

_FEW = 6
"""Up to so many devices every subset is a choice; beyond that, only neighbours."""


@dataclass(slots=True)
class _DeviceSubset:
    """Some devices, the search that covers them, and the facts known of them."""

    devices: tuple[int, ...]
    method: str
    ceiling_ms: float = float("inf")
    is_settled: bool = False

    @property
    def size(self) -> int:
        """How many devices."""
        return len(self.devices)


@dataclass(slots=True)
class _Lesson:
    """The facts known of schedules within a horizon, and the choices still to search, in order."""

    horizon_ms: float
    known: Events
    waiting: deque[tuple[int, ...]]


@dataclass(slots=True)
class _InTurn:
    """Choices that pass their results on to each other, and a horizon at which they find schedules.

    ``unknown_ms``: the shortest horizon that took too many states, and how many may be in a layer.
    ``begun``: a question that the end of a turn cut short.
    """

    choices: tuple[tuple[int, ...], ...]
    ceiling_ms: float = float("inf")
    unknown_ms: tuple[float, int] = (float("inf"), 0)
    begun: _Lesson | None = None

    @property
    def size(self) -> int:
        """How many devices at a time."""
        return len(self.choices[0])


def exact_search_can_prove(problem: Problem) -> bool:
    """Whether few devices prove something true: micro-batches are equal."""
    return problem.is_even


_EVEN = "equal micro-batches in a free order"


class _Series:
    """Questions of one kind, of ever more devices with ever more states allowed.

    One device more counts as one step of states less. ``vain`` counts the states met since the
    series last raised the bound, or began. ``raises`` counts how often it did.
    """

    def __init__(self, questions: Iterable[_DeviceSubset | _InTurn]) -> None:
        ranked = [
            (one.size, level, one) for one in questions for level in range(len(_MOST_IN_LAYER))
        ]
        ranked.sort(key=lambda item: (item[0] + item[1], item[0]))
        self.waiting = deque((one, _MOST_IN_LAYER[level]) for _, level, one in ranked)
        self.vain, self.raises = 0.0, 0

    @property
    def cost(self) -> float:
        """States that may be in vain after the next question, by the number of raises."""
        return (self.vain + _EASY * self.waiting[0][1]) / (1 + self.raises)

    @property
    def is_at_first(self) -> bool:
        """Whether single devices with the fewest states are next, which is soon over."""
        question, most_in_layer = self.waiting[0]
        return question.size == 1 and most_in_layer == _MOST_IN_LAYER[0]


class _Rounds:
    """Single devices alone, then in turn; after that the series that seems cheaper."""

    def __init__(self, best: Incumbent) -> None:
        self.best = best
        self.stop = Stop(0.0)
        alone = [_DeviceSubset(*choice) for choice in _choices(best.problem)]
        self.series = _Series(alone), _Series(_in_turn(best.problem))
        self.series_now = self.series[0]

    def run(self, stop: Stop) -> bool:
        """Search until the turn is over; return whether questions are left."""
        self.stop = stop
        while not self._is_over():
            left = [series for series in self.series if series.waiting]
            if not left:
                return False
            first = (series for series in left if series.is_at_first)
            self._ask_next(next(first, None) or min(left, key=lambda series: series.cost))
        return True

    def _ask_next(self, series: _Series) -> None:
        """Ask the next question, or go on with it."""
        self.series_now = series
        question, most_in_layer = series.waiting[0]
        if isinstance(question, _InTurn):
            self._raise_in_turn(question, most_in_layer)
        else:
            self._raise(question, most_in_layer)
        if not self._is_over():
            series.waiting.popleft()

    def _raise(self, choice: _DeviceSubset, most_in_layer: int) -> None:
        """Search just below the ceiling until that settles it; after too many states, lower."""
        while not self._is_over() and self._is_useful(choice):
            goal = self._goal(choice)
            answer = self._ask(choice, goal.horizon_ms, most_in_layer)
            if answer is HorizonAnswer.NONE:
                choice.is_settled = True
                self._prove(goal.proven_ms, choice.method)
            elif answer is HorizonAnswer.UNKNOWN:
                self._halve(choice, most_in_layer)
                return

    def _halve(self, choice: _DeviceSubset, most_in_layer: int) -> None:
        """Raise the bound by a quarter of what lies between it and the goal, then to the middle.

        A lower horizon leaves less to search: if a quarter fails, every larger share does.
        """
        low_ms, goal = self.best.bound_ms, self._goal(choice)
        for share in _SHARES:
            horizon_ms = goal.between(low_ms, share)
            if self._is_over() or not self.best.bound_ms < horizon_ms < goal.horizon_ms:
                continue
            if self._ask(choice, horizon_ms, most_in_layer) is not HorizonAnswer.NONE:
                return
            self._prove(goal.proven(horizon_ms), choice.method)

    def _raise_in_turn(self, question: _InTurn, most_in_layer: int) -> None:
        """Raise the bound in steps, as long as they are large enough to be worth it.

        If choices learn nothing new, larger choices mostly still learn within the same horizon. So
        a shorter horizon comes next only if the search was easy.
        """
        share = _FIRST_SHARE
        while share >= _LEAST_SHARE and not self._is_over():
            goal = Goal.of(self.best.problem, self.best.objective_ms)
            lesson, question.begun, shorter = question.begun, None, share
            if lesson is None:
                horizon_ms = min(goal.between(self.best.bound_ms, share), goal.horizon_ms)
                known = nothing_known(relaxed(self.best.problem))
                lesson = _Lesson(horizon_ms, known, deque(question.choices))
                shorter = share / 2
            too_long_ms, most = question.unknown_ms
            too_long_ms = min(question.ceiling_ms, too_long_ms if most >= most_in_layer else inf)
            if not self.best.bound_ms < lesson.horizon_ms < too_long_ms:
                share = shorter
                continue
            found = search_in_turn(
                self.best.problem,
                question.choices,
                lesson.horizon_ms,
                lesson=lesson,
                most_states=int(min(_MOST_IN_TURN, self.stop.left_work)),
                most_in_layer=most_in_layer,
                should_stop=self._is_over,
            )
            self._spend(found.num_states)
            is_easy = found.num_states < _EASY * most_in_layer
            if found.answer is HorizonAnswer.NONE:
                self._prove(goal.proven(lesson.horizon_ms), IN_TURN)
                share = min(1.0, 2 * share) if is_easy else share
                continue
            share = shorter
            if found.answer is HorizonAnswer.FOUND:
                question.ceiling_ms = lesson.horizon_ms
                if not is_easy:
                    return
            elif self._is_over():
                question.begun = lesson
            else:
                question.unknown_ms = lesson.horizon_ms, most_in_layer

    def _prove(self, bound_ms: float, method: str) -> None:
        """Offer a bound; if it is better, the states met before were not in vain."""
        if self.best.offer_bound(min(bound_ms, self.best.objective_ms), method):
            self.series_now.vain = 0.0
            self.series_now.raises += 1

    def _spend(self, num_states: int) -> None:
        """Count states that were met."""
        self.stop.spend(num_states)
        self.series_now.vain += num_states

    def _ask(self, choice: _DeviceSubset, horizon_ms: float, most_in_layer: int) -> HorizonAnswer:
        found = search_general(
            self.best.problem,
            choice.devices,
            horizon_ms,
            most_states=int(min(_MOST_STATES, self.stop.left_work)),
            most_in_layer=most_in_layer,
            should_stop=self._is_over,
            by_cell=choice.method == _CELLS,
        )
        self._spend(found.num_states)
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


def _choices(problem: Problem) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield the choices that can be searched, small ones first, neighbours before others.

    Each comes with the search that covers it.
    """
    used = [device for device, stages in enumerate(problem.stages_of) if stages]
    for size in range(1, len(used) + 1):
        chosen = [tuple(used[at : at + size]) for at in range(len(used) - size + 1)]
        if len(used) <= _FEW:
            chosen += [few for few in combinations(used, size) if few not in set(chosen)]
        for devices in chosen:
            check_stop()
            for method in _methods(problem, devices):
                yield devices, method


def _in_turn(problem: Problem) -> Iterator[_InTurn]:
    """Yield the choices of one, two, ... neighbours, where several have one clock."""
    used = [device for device, stages in enumerate(problem.stages_of) if stages]
    for size in range(1, len(used) if problem.objective == "makespan" else 0):
        chosen = [tuple(used[at : at + size]) for at in range(len(used) - size + 1)]
        choices = tuple(devices for devices in chosen if general_can_search(problem, devices))
        if len(choices) > 1:
            yield _InTurn(choices)


def search_in_turn(
    problem: Problem,
    choices: Sequence[tuple[int, ...]],
    horizon_ms: float,
    *,
    most_states: int,
    most_in_layer: int,
    should_stop: Callable[[], bool] = lambda: False,
    lesson: _Lesson | None = None,
) -> LayeredOutcome:
    """Search for a schedule within ``horizon_ms``, each choice using the others' results.

    A choice finds when its F and I start at the earliest in any schedule within the horizon. The
    next choice uses the consequences (`bounds.heads_tails`). A choice that learns more is searched
    again. ``NONE`` proves that no schedule of the problem is that short. ``FOUND`` means that no
    choice learns any more. Otherwise unknown: too many states, or stopped. A search that gave no
    answer continues with its ``lesson``.
    """
    is_supported = problem.objective == "makespan" and all(
        general_can_search(problem, choice) for choice in choices
    )
    rule = "the objective makespan, and choices of devices that search_general supports"
    refuse_unless(is_supported, "search_in_turn", problem, rule)
    if lesson is None:
        lesson = _Lesson(horizon_ms, nothing_known(relaxed(problem)), deque(choices))
    model, origin, met = relaxed(problem), np.zeros(len(problem.stages)), 0
    before = heads_beside(model, refill(model), origin, lesson.known)
    while lesson.waiting:
        devices = lesson.waiting[0]
        found = search_general(
            problem,
            devices,
            lesson.horizon_ms,
            most_states=most_states - met,
            most_in_layer=most_in_layer,
            should_stop=should_stop,
            known=lesson.known,
        )
        met += found.num_states
        if found.earliest is None:
            return LayeredOutcome(found.answer, met)
        lesson.known = Events(*map(np.maximum, lesson.known, found.earliest))
        after = heads_beside(model, refill(model), origin, lesson.known)
        news = _LEARNT * lesson.horizon_ms
        later = [new > old + news for old, new in zip(before, after, strict=True)]
        learnt = set(model.device[np.any(later, axis=(0, 1))])
        before = after
        lesson.waiting.popleft()
        lesson.waiting += [
            other
            for other in choices
            if other != devices and other not in lesson.waiting and not learnt.isdisjoint(other)
        ]
    return LayeredOutcome(HorizonAnswer.FOUND, met)


def _methods(problem: Problem, devices: Sequence[int]) -> Iterator[str]:
    """Yield the methods that can search some devices.

    By cell, states are more precise, and more numerous. It is for small problems, for menus, and
    under span for one device, as it includes when the first stage's device begins.
    """
    is_general = general_can_search(problem, devices)
    if is_general:
        yield _GENERAL
    descriptions = [problem.devices[device] for device in devices]
    is_relaxed = any(one.half_duplex or one.pcie_group is not None for one in descriptions)
    is_small = len(problem.stages) * problem.num_microbatches <= SMALL
    has_menu = not all(knows_menu(problem, device) for device in devices)
    is_late = problem.objective == "span" and len(devices) == 1
    is_wanted = has_menu or is_late or (is_small and (is_relaxed or not is_general))
    if is_wanted and cells_can_search(problem, devices):
        yield _CELLS


def improve_by_exact_search(best: Incumbent, stop: Stop) -> None:
    """Raise the bound as far as few devices at a time can; work is counted in states met.

    A later turn continues the one before. Nothing here is random or parallel. With limited work the
    run is a function of problem, start and turns, as long as time does not end it.
    """
    problem = best.problem
    refuse_unless(exact_search_can_prove(problem), "improve_by_exact_search", problem, _EVEN)
    if best.programs is not None and not best.is_optimal:
        rounds = best.unfinished.pop(_ROUNDS, None)
        if not isinstance(rounds, _Rounds):
            rounds = _Rounds(best)
        if rounds.run(stop.turn()):
            best.unfinished[_ROUNDS] = rounds
    if not stop.spent:
        stop.spend(1)


_METHOD = "beam"
_MOST, _WIDEN = 128_000, 4.0
"""States of one layer that are expanded at most, and how many times more than before."""

_LEAST, _SURE = 1.5, 0.8
"""A search must be at least so many times wider than the last; share of what is left to use."""

_ROUNDING = 1e-6
"""Share of a step of the grid that a length may be off."""


class _WidthSearch(Protocol):
    def __call__(
        self, horizon_ms: float, width: int, *, should_stop: Callable[[], bool]
    ) -> LayeredOutcome: ...


class _BeamSearch(NamedTuple):
    """A search, its first width, and where its horizons lie between bound and best schedule known.

    At a shorter horizon a failing search ends sooner, and fewer states compete. The fifo search is
    quickest when the bound is the optimum (measured). ``again`` says whether a width that found
    something is tried again.
    """

    search: _WidthSearch
    first: int
    shares: tuple[float, ...]
    again: bool


def beam_can_improve(problem: Problem) -> bool:
    """Whether one of the two beams can search a problem."""
    return fifo_can_search(problem) or beam_can_search(problem)


def improve_by_beam(best: Incumbent, stop: Stop) -> None:
    """Search below the best schedule known, ever wider; work is counted in states expanded.

    It is the fifo search if first in, first out loses nothing, else the general search. If no state
    was left out, no schedule lies within the horizon, and the search offers that as a bound.
    Nothing here is random or parallel. With limited work the run is a function of problem and
    start, as long as time does not end it.
    """
    beam = _beam_of(best.problem)
    rule = "what search_fifo_beam or search_beam supports"
    refuse_unless(beam is not None, "improve_by_beam", best.problem, rule)
    if beam is None or best.programs is None or best.is_optimal:
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
    """Return the search whose states fully describe a problem."""
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
