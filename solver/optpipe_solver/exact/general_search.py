"""The general search: over the ways of micro-batches, with any modes, in any order.

A *state* has the progress of each micro-batch, and phase and mode of its cells between F and
backward. It has the number of W that wait, the clock, and times. The times say when compute and
copy lanes of each device are free, and when each micro-batch's next input arrives. By cell, they
also say when its last copy ends. Layers count steps: every cell has as many, whatever its mode. The
search relaxes or leaves out some constraints, but misses no schedule (docs/exact.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optpipe.schedule import Action, ActionType
from optpipe_solver.bounds.heads_tails import ANYTIME, Events
from optpipe_solver.exact.general_kernel import (
    CELL_BITS,
    DROP,
    FORWARD,
    FUSED,
    GRADIENT,
    KEEP,
    MODE_BITS,
    POSITION_BITS,
    RECOMPUTE,
    RELOAD,
    SEND,
    WEIGHT,
    advance,
    make_general_loads,
    make_general_state,
    start_of,
    survey,
)
from optpipe_solver.exact.general_layers import (
    chain_general,
    event_of,
    expand_general,
    make_general_layer,
    make_steps,
    rate,
    set_out,
    sweep,
)
from optpipe_solver.exact.general_problem import (
    copies_are_equal,
    general_problem_of,
    unit_ms,
    useful_menus,
)
from optpipe_solver.exact.layers import HorizonAnswer, LayeredOutcome, LayeredSearch, keep_rows
from optpipe_solver.feasibility import knows_menu, refuse_unless

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe_solver.exact.general_kernel import GeneralProblem
    from optpipe_solver.exact.general_layers import GeneralLayer

    Event = tuple[int, int, int, int]

__all__ = [
    "beam_can_search",
    "cells_can_search",
    "general_can_search",
    "programs_of",
    "search_beam",
    "search_general",
]

_EXACT_SLICE = 200
"""States that an exact search expands between two looks at whether to stop."""

_STEPS_EACH = 6
"""Steps to remember of a layer, per state that the layer may hold."""

_BEAM_SLICE = 50
"""States that a beam expands between two looks at whether to stop, and whether there is room."""


_MOST_LAYERS = 5
"""An F takes 4 steps at most: its own, and those of OFFLOAD, RELOAD and RECOMPUTE that it saves."""

_MOST_MICROBATCHES = 100
"""W are counted in a byte; beyond a few dozen micro-batches no search ends anyway."""

_MOST_STAGES = (63 - POSITION_BITS) // CELL_BITS
"""Codes have 64 bits."""

_MOST_CELLS = 32
"""Cells up to which a search by cell ends."""


def general_can_search(problem: Problem, devices: Sequence[int]) -> bool:
    """Whether counted copies say all there is about these devices, their menus included."""
    stages = sum(len(problem.stages_of[device]) for device in devices)
    return (
        1 <= stages <= _MOST_STAGES
        and problem.is_even
        and problem.num_microbatches <= _MOST_MICROBATCHES
        and (problem.objective == "makespan" or len(devices) == 1)
        and all(knows_menu(problem, device) for device in devices)
        and all(copies_are_equal(problem, device) for device in devices)
    )


def cells_can_search(problem: Problem, devices: Sequence[int]) -> bool:
    """Whether cells are few enough, micro-batches are equal, and no pass may pair."""
    kept = [s for device in devices for s in problem.stages_of[device]]
    return (
        not problem.pairs
        and problem.is_even
        and 1 <= len(kept) <= _MOST_STAGES
        and len(kept) * problem.num_microbatches <= _MOST_CELLS
        and all(len(menu) <= 2**MODE_BITS for menu in useful_menus(problem, kept))
    )


_GENERAL_RULE = (
    f"1 to {_MOST_STAGES} stages, up to {_MOST_MICROBATCHES} equal micro-batches in a free order, "
    "under span one device, menus of keep, offload and recompute, and copies of one size a device"
)

_CELLS_RULE = (
    f"at most {_MOST_CELLS} cells of 1 to {_MOST_STAGES} stages, equal micro-batches in a free "
    f"order, no pairs, at most {2**MODE_BITS} modes a stage, and no known starts"
)


def beam_can_search(problem: Problem) -> bool:
    """Whether a state says all there is about the problem, lanes and hosts that are shared aside.

    Every device must have a stage: the others have no program to write.
    """
    return all(problem.stages_of) and general_can_search(problem, range(len(problem.devices)))


def search_general(
    problem: Problem,
    devices: Sequence[int],
    horizon_ms: float,
    *,
    most_states: int,
    most_in_layer: int,
    should_stop: Callable[[], bool] = lambda: False,
    known: Events | None = None,
    by_cell: bool = False,
) -> LayeredOutcome:
    """Search for a schedule of some devices within ``horizon_ms``, the others being no obstacle.

    ``by_cell``: a state has the end of each cell's copies, if `cells_can_search` allows it. This
    covers any menu, shared lanes, and several devices under span. Else copies are counted, as
    `general_can_search` allows.

    ``NONE`` proves that no schedule of the problem is that short. The answer is unknown if the
    search meets more than ``most_states``, or ``most_in_layer`` in one layer, or is stopped.
    ``known`` are lower bounds of the starts of F and I within the horizon. The answer then says
    what the search adds.
    """
    can_search = cells_can_search if by_cell else general_can_search
    is_supported = can_search(problem, devices) and not (by_cell and known)
    rule = _CELLS_RULE if by_cell else _GENERAL_RULE
    refuse_unless(is_supported, "search_general", problem, rule)
    most_steps = 0 if known is None else _STEPS_EACH * most_in_layer
    search = _GeneralSearch(
        problem,
        devices,
        horizon_ms,
        most_in_layer,
        known=known,
        most_steps=most_steps,
        by_cell=by_cell,
    )
    answer = search.walk(should_stop, most_states)
    if answer is not HorizonAnswer.FOUND:
        return LayeredOutcome(answer, search.num_states)
    earliest = None if known is None else search.earliest()
    return LayeredOutcome(answer, search.num_states, found_ms=search.least_ms(), earliest=earliest)


def search_beam(
    problem: Problem,
    horizon_ms: float,
    width: int,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> LayeredOutcome:
    """Look for a schedule of at most ``horizon_ms``, ``width`` states of each layer expanded.

    The schedule found may be longer than the horizon, or break a rule of hosts, where states relax
    the rules of programs. Each state is a partial schedule of all devices together, with its choice
    of what is offloaded and recomputed. So the search finds schedules that differ from a good one
    on every device. Moves on programs reach those only through worse ones. With 2,000 states per
    layer, the search reaches the best known length on 10 of 17 problems in `benchmarks`. Those are
    the problems of four devices with offload or recompute, and take about a second each (measured).
    """
    rule = f"{_GENERAL_RULE}; and a stage on every device"
    refuse_unless(beam_can_search(problem), "search_beam", problem, rule)
    m, num_stages = problem.num_microbatches, len(problem.stages)
    most_new = _BEAM_SLICE * (num_stages + m * (5 + num_stages))
    devices = range(len(problem.devices))
    search = _GeneralSearch(
        problem, devices, horizon_ms, 2 * width + most_new, width=width, most_new=most_new
    )
    answer = search.walk(should_stop)
    programs = None
    if answer is HorizonAnswer.FOUND:
        programs = programs_of(problem, search.general, search.shortest_way())
    return LayeredOutcome(answer, search.num_states, programs)


class _GeneralSearch(LayeredSearch["GeneralLayer"]):
    """At most ``most_new`` states are made of a beam's slice: so many must have room.

    With ``most_steps`` of each layer, the search remembers steps for `earliest`.
    """

    def __init__(
        self,
        problem: Problem,
        devices: Sequence[int],
        horizon_ms: float,
        most_in_layer: int,
        *,
        width: int | None = None,
        most_new: int = 0,
        known: Events | None = None,
        most_steps: int = 0,
        by_cell: bool = False,
    ) -> None:
        self.general = general_problem_of(problem, horizon_ms, devices, known, by_cell=by_cell)
        self.problem = problem
        self.kept = [s for s, stage in enumerate(problem.stages) if stage.device in devices]
        self.steps = make_steps(most_steps)
        self.noted: list[tuple[NDArray[np.int32], NDArray[np.int32]]] = []
        self.unit_ms = unit_ms(problem, horizon_ms)
        self.most_new = most_new
        start, steps = make_general_state(self.general), self.general.steps
        layers = [make_general_layer(most_in_layer, start) for _ in range(2 + max(1, steps))]
        num_cells = problem.num_microbatches * len(self.kept)
        super().__init__(layers, (3 + steps) * num_cells, width)
        # The exact search writes no programs, and may meet millions of states.
        self.keeps_ways = width is not None
        loads = make_general_loads(self.general), make_general_loads(self.general)
        self.work = start, *loads, self.steps
        set_out(layers[0], start)

    def _leave(self, layer: GeneralLayer) -> None:
        if len(self.steps.rows):
            noted = self.steps.rows[: int(self.steps.size[0])].copy()
            self.noted.append((noted, layer.instead[: int(layer.size[0])].copy()))
            self.steps.size[0] = 0
        super()._leave(layer)

    def earliest(self) -> Events:
        """Return the earliest starts of F and I on the ways that reach the last layer, in ms."""
        m, num_kept = self.general.num_microbatches, len(self.kept)
        least = np.full(2 * m * num_kept, self.general.horizon, dtype=np.int64)
        last = np.ones(int(self.layers[0].size[0]), dtype=np.bool_)
        following = last, last
        for noted, instead in reversed(self.noted):
            reach = np.zeros(len(instead), dtype=np.bool_)
            sweep(noted, instead, reach, following, least)
            following = reach, following[0]
        starts = np.full((2, m, len(self.problem.stages)), ANYTIME)
        starts[:, :, self.kept] = least.reshape(2, m, num_kept) * self.unit_ms
        return Events(starts[0], starts[1], np.full_like(starts[0], ANYTIME))

    def least_ms(self) -> float:
        """Return the length of the shortest relaxed schedule in the last layer."""
        return int(self._ends()[self.layers[0].alive[: len(self._ends())]].min()) * self.unit_ms

    def shortest_way(self) -> list[int]:
        """Return the ways to the end that comes first, from the beginning."""
        return self._way_to_first(self._ends(), self._is_double)

    def _is_double(self, way: int) -> bool:
        kind, _, _, k = event_of(self.general, way)
        return kind == FUSED or (kind == FORWARD and k == KEEP)

    def _ends(self) -> NDArray[np.int32]:
        last = self.layers[0]
        return last.end[: int(last.size[0])]

    def _step(self, at: int) -> int:
        if self.width is not None:
            for following in self.layers[1:]:
                if following.size[0] + self.most_new > len(following.alive):
                    self._thin(following)
                    chain_general(following)
        # Compiled for the most steps that an event may take; repeated layers are never reached.
        last = self.layers[-1]
        one, two, three, four, five = *self.layers, *[last] * (_MOST_LAYERS - len(self.layers))
        most = _EXACT_SLICE if self.width is None else _BEAM_SLICE
        layers = one, two, three, four, five
        return expand_general(self.general, layers, self.work, at, most)

    def _thin(self, layer: GeneralLayer) -> None:
        """Keep the most promising rows of a layer, in their order; of equal ones the first."""
        size = int(layer.size[0])
        rows = np.flatnonzero(layer.alive[:size])
        if self.width is not None and len(rows) > self.width:
            self.is_thinned = True
            rates = np.empty(size, dtype=np.int64)
            rate(self.general, layer, self.work[1], rates)
            best = np.argsort(rates[rows], kind="stable")[: self.width]
            rows = np.sort(rows[best])
        keep_rows(layer, layer[:6], rows)


# --- Programs of a way through the states of the general search, all devices kept.
# A state names no micro-batch: equal ones are interchangeable. Here each keeps its number all
# along, and an event finds its micro-batch by rank. States relax copies, so programs write each
# copy in full: an OFFLOAD follows its F, a RELEASE comes right before the first action that needs
# its bytes, oldest OFFLOAD first. The programs keep the memory limit of every device (a state
# counts the same bytes). They may take longer than the state says, or break a rule, if copies of a
# device are unequal, a host is full or a lane is shared. The caller must evaluate them.

_TYPES = {
    GRADIENT: ActionType.BACKWARD_INPUT,
    FUSED: ActionType.FULL_BACKWARD,
    WEIGHT: ActionType.BACKWARD_WEIGHT,
    RELOAD: ActionType.RELOAD,
    RECOMPUTE: ActionType.RECOMPUTE,
}


def programs_of(problem: Problem, general: GeneralProblem, ways: Iterable[int]) -> Programs:
    """Return the programs of all events on a way, first to last; ``general`` keeps all devices."""
    rows = [_GrowingProgram(problem, device) for device in range(len(problem.devices))]
    for event in _events(general, ways):
        s = event[2]
        rows[problem.stages[s].device].add(event, int(general.needs[event[0], s, event[3]]))
    return tuple(tuple(row.actions) for row in rows)


def _events(general: GeneralProblem, ways: Iterable[int]) -> Iterable[Event]:
    """Yield the events with numbers of micro-batches that stay, instead of ranks."""
    state, new = make_general_state(general), make_general_state(general)
    loads = make_general_loads(general)
    inputs = slice(general.inputs, general.ends)
    for way in ways:
        kind, rank, s, k = event_of(general, way)
        j = int(np.lexsort((state.times[inputs], state.codes))[rank])
        event = kind, j, s, k
        yield event
        survey(general, state, loads)
        advance(general, state, event, start_of(general, state, loads, event), new)
        state, new = new, state


class _GrowingProgram:
    """The program of one device as it grows, with the bytes it holds."""

    def __init__(self, problem: Problem, device: int) -> None:
        self.problem = problem
        self.room = problem.room_bytes(device)
        self.actions: list[Action] = []
        self.held_bytes = 0
        self.leaving: list[tuple[int, int]] = []
        self.waiting: dict[int, list[int]] = {s: [] for s in problem.stages_of[device]}

    def add(self, event: Event, needed: int) -> None:
        """Write an event down, after the RELEASEs that free the bytes it needs."""
        kind, j, s, k = event
        while self.leaving and (
            self.held_bytes + needed > self.room or (kind == RELOAD and (s, j) in self.leaving)
        ):
            self._release()
        if kind == FORWARD:
            self._forward(k, j, s)
            return
        if kind == GRADIENT:
            self.waiting[s].append(j)
        elif kind == WEIGHT:
            j = self.waiting[s].pop(0)
        self.actions.append(Action(s, _TYPES[kind], j))
        self.held_bytes += self._added(kind, s)

    def _forward(self, mode: int, j: int, s: int) -> None:
        stage = self.problem.stages[s]
        self.actions.append(Action(s, ActionType.FORWARD, j))
        self.held_bytes += (stage.checkpoint_bytes or 0) if mode == DROP else stage.activation_bytes
        if mode == SEND:
            self.actions.append(Action(s, ActionType.OFFLOAD, j))
            self.leaving.append((s, j))

    def _release(self) -> None:
        s, j = self.leaving.pop(0)
        self.actions.append(Action(s, ActionType.RELEASE, j))
        self.held_bytes -= self.problem.stages[s].offload_bytes

    def _added(self, kind: int, s: int) -> int:
        """Return the bytes held after an event that is no F, less those before."""
        stage = self.problem.stages[s]
        if kind == GRADIENT:
            return stage.weight_context_bytes - stage.activation_bytes
        if kind == FUSED:
            return -stage.activation_bytes
        if kind == WEIGHT:
            return -stage.weight_context_bytes
        if kind == RELOAD:
            return stage.offload_bytes
        return stage.activation_bytes - (stage.checkpoint_bytes or 0)
