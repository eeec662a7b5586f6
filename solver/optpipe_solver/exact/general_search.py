"""Some devices of a problem, the rest as waiting times, in whole numbers, for `general_kernel`."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from math import floor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe.schedule import Action, ActionType
from optpipe_solver.bounds.heads_tails import (
    ANYTIME,
    Events,
    drain,
    heads_beside,
    nothing_known,
    refill,
    tails,
)
from optpipe_solver.bounds.relaxation import relaxed
from optpipe_solver.exact.general_kernel import (
    DROP,
    FUSED,
    GRADIENT,
    KEEP,
    LANES,
    MODE_BITS,
    MOST_COMING,
    POSITION_BITS,
    RECOMPUTE,
    RELOAD,
    SEND,
    WEIGHT,
    GeneralProblem,
    advance,
    make_general_loads,
    make_general_state,
    needs,
    start_of,
    survey,
)
from optpipe_solver.exact.general_layers import (
    chain_general,
    expand_general,
    make_general_layer,
    make_steps,
    rate,
    set_out,
    sweep,
)
from optpipe_solver.exact.layers import (
    HorizonAnswer,
    LayeredOutcome,
    LayeredSearch,
    keep_rows,
    whole,
)
from optpipe_solver.feasibility import (
    fusing_may_pay,
    knows_menu,
    memory_binds,
    refuse_unless,
)
from optpipe_solver.incumbent import grid_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe_solver.arrays import Floats, Ints
    from optpipe_solver.bounds.relaxation import Relaxed
    from optpipe_solver.exact.general_layers import GeneralLayer

    Event = tuple[int, int, int]

__all__ = [
    "beam_can_search",
    "copies_are_equal",
    "delays",
    "general_can_search",
    "general_problem_of",
    "programs_of",
    "search_beam",
    "search_general",
    "unit_ms",
]

_EXACT_SLICE = 200
"""States that an exact search expands between two looks at whether to stop."""

_STEPS_EACH = 6
"""NotedSteps to remember of a layer, per state that there may be in it."""

_BEAM_SLICE = 50
"""States that a beam expands between two looks at whether to stop, and whether there is room."""


_STEPS = 4e8
"""Most units in the horizon: the sum of five times that are no longer fits into 32 bits."""

_ROUNDING = 1e-6
"""Share of a unit that a time in ms may be off."""

_ALL_ROUNDING = 1e-3
"""Share of a unit that the times of a path may be off together."""

_WORKSPACES = ("forward", "backward_input", "backward_weight", "backward", "recompute")


class _Copy(NamedTuple):
    """What one copy of a device carries, in bytes, and its ms each way."""

    moved: int = 0
    out: float = 0.0
    home: float = 0.0


def unit_ms(problem: Problem, horizon_ms: float) -> float:
    """Return the unit of time: a common divisor of all times where 32 bits can count by it."""
    finest = max(1.0, horizon_ms) / _STEPS
    grid = grid_ms(problem)
    return max(grid, finest)


def copies_are_equal(problem: Problem, device: int) -> bool:
    """Whether all that a device can offload has one size, so that copies can be counted."""
    return len({_copy(problem, s) for s in problem.stages_of[device]} - {_Copy()}) <= 1


def general_problem_of(
    problem: Problem, horizon_ms: float, devices: Sequence[int], known: Events | None = None
) -> GeneralProblem:
    """Return the problem of some devices with every time rounded down to whole units.

    The unit divides all times where there is such a one; else it is so small that rounding hardly
    matters: a schedule within the horizon stays one, as times only shrink. Under span there must be
    one device.
    """
    unit = unit_ms(problem, horizon_ms)
    horizon = floor(horizon_ms / unit + _ALL_ROUNDING)
    units = partial(_units, unit=unit, most=horizon + 1)
    model = relaxed(problem)
    before, after = _clock(problem, model, devices, known)
    kept = [s for s, stage in enumerate(problem.stages) if stage.device in devices]
    stages = [problem.stages[s] for s in kept]
    index = {device: k for k, device in enumerate(devices)}
    copies = [_device_copy(problem, device) for device in devices]
    head, there, back = delays(model, kept)
    forward, gradient = units(model.forward[kept]), units(model.gradient[kept])
    there_units, back_units = units(there), units(back)
    last_i = _grid(after.gradient[:, kept], unit)
    licensed = {(pair.backward, pair.with_) for pair in problem.pairs}
    return GeneralProblem(
        num_microbatches=problem.num_microbatches,
        device=whole(index[s.device] for s in stages),
        forward=forward,
        hidden=whole(s.forward_ms / unit + _ROUNDING for s in stages) - forward,
        pairs_i=np.array([(s, "I") in licensed for s in kept]),
        pairs_b=np.array([(s, "B") in licensed for s in kept]),
        split_i=units(s.backward_input_ms for s in stages),
        split_w=units(s.backward_weight_ms for s in stages),
        fused=units(s.fused_backward_ms for s in stages),
        gradient=gradient,
        weight=units(model.weight[kept]),
        again=units(_again_ms(problem, s) for s in kept),
        may_fuse=np.array([fusing_may_pay(problem, s) or (s, "B") in licensed for s in kept]),
        may_leave=np.array([_copy(problem, s).moved > 0 for s in kept]),
        has_modes=any(_copy(problem, s).moved > 0 or _again_ms(problem, s) >= 0 for s in kept),
        activation=whole(s.activation_bytes for s in stages),
        context=whole(s.weight_context_bytes for s in stages),
        checkpoint=whole(s.checkpoint_bytes or 0 for s in stages),
        workspace=np.array(
            [[getattr(s, f"{name}_workspace_bytes") for s in stages] for name in _WORKSPACES],
            dtype=np.int64,
        ),
        room=whole(problem.room_bytes(device) for device in devices),
        moved=whole(copy.moved for copy in copies),
        out=units(copy.out for copy in copies),
        home=units(copy.home for copy in copies),
        waits=np.array(
            [_waits(problem, device, copy) for device, copy in zip(devices, copies, strict=True)]
        ),
        there=there_units,
        back=back_units,
        head=0 if problem.objective == "span" else int(units([head])[0]),
        rest=_rest(forward, gradient, there_units, back_units, int(last_i[0, 0])),
        head_f=_grid(before.forward[:, kept], unit),
        head_i=_grid(before.gradient[:, kept], unit),
        last_f=_grid(after.forward[:, kept], unit),
        last_i=last_i,
        last_w=_grid(after.weight[:, kept], unit),
        horizon=horizon,
    )


def _clock(
    problem: Problem, model: Relaxed, devices: Sequence[int], known: Events | None
) -> tuple[Events, Events]:
    """Return heads and tails on the clock of the schedule, or under span on that of the device."""
    origin = np.zeros(len(problem.stages))
    if problem.objective == "span":
        origin = np.where(model.device == devices[0], 0.0, ANYTIME)
    before = heads_beside(model, refill(model), origin, known or nothing_known(model))
    return before, tails(model, drain(model), origin)


def _copy(problem: Problem, s: int) -> _Copy:
    """Return the copy of a stage; where memory never binds nobody needs any."""
    if not problem.can_offload(s) or not memory_binds(problem, problem.stages[s].device):
        return _Copy()
    return _Copy(problem.stages[s].offload_bytes, problem.offload_ms(s), problem.reload_ms(s))


def _device_copy(problem: Problem, device: int) -> _Copy:
    copies = (_copy(problem, s) for s in problem.stages_of[device])
    return next((copy for copy in copies if copy.moved), _Copy())


def _waits(problem: Problem, device: int, copy: _Copy) -> bool:
    """Whether all RELOADs that can be on their way to a device at once are told apart."""
    return copy.moved > 0 and problem.room_bytes(device) // copy.moved <= MOST_COMING


def _again_ms(problem: Problem, s: int) -> float:
    """Return the time of a RECOMPUTE, -1 where there is none or memory never binds."""
    stage = problem.stages[s]
    if stage.recompute_ms is None or not memory_binds(problem, stage.device):
        return -1.0
    return stage.recompute_ms


def delays(model: Relaxed, kept: Sequence[int]) -> tuple[float, list[float], list[float]]:
    """Return the ms before the first kept stage, and up and down from each to the next.

    Behind the last one up means all the way to the end of the pipeline and back to it.
    """
    forward = model.forward + model.there
    gradient = model.gradient + np.roll(model.back, 1)
    there, back = [], []
    for s, following in pairwise([*kept, len(model.forward)]):
        there.append(float(model.there[s] + forward[s + 1 : following].sum()))
        back.append(float(model.back[following - 1] + gradient[s + 1 : following].sum()))
    there[-1] += back[-1]
    back[-1] = 0.0
    return float(forward[: kept[0]].sum()), there, back


def _rest(forward: Ints, gradient: Ints, there: Ints, back: Ints, end: int) -> Ints:
    """Return the least time from the start of each pass of a micro-batch to the end of all."""
    down = gradient + np.roll(back, 1)
    down[0] = gradient[0]
    rest = [end]
    for step in (*down, *(forward + there)[::-1]):
        rest.append(rest[-1] + int(step))
    return np.array(rest[::-1], dtype=np.int64)


def _grid(values: Floats, unit: float) -> Ints:
    most = np.iinfo(np.int32).max
    return _units(np.maximum(0.0, values).ravel(), unit, most).reshape(values.shape)


def _units(values: Iterable[float], unit: float, most: int) -> Ints:
    """Return times in whole units, -1 as it is; none longer than ``most``, which is too long."""
    return whole(value if value < 0 else min(most, value / unit + _ROUNDING) for value in values)


# --- The general search: over the ways of micro-batches, with offload and recompute, in any order.
# A *state* is how far each micro-batch is and its *mode* on every stage between F and backward; how
# many W each stage has started; the clock; when the lanes of each device are free; and when the
# input of each micro-batch's next pass is there. Layers count steps: an F kept is two, one for the
# RELOAD or RECOMPUTE it saves, a B two, any other event one. docs/exact.md says what is relaxed and
# left out, and why no schedule is missed.

_MOST_MICROBATCHES = 100
"""W are counted in a byte; beyond a few dozen micro-batches no search ends anyway."""

_MOST_STAGES = (31 - POSITION_BITS) // MODE_BITS
"""Codes have 32 bits."""


def general_can_search(problem: Problem, devices: Sequence[int]) -> bool:
    """Whether a state says all there is about these devices, their menus included."""
    stages = sum(len(problem.stages_of[device]) for device in devices)
    return (
        1 <= stages <= _MOST_STAGES
        and problem.is_even
        and problem.num_microbatches <= _MOST_MICROBATCHES
        and (problem.objective == "makespan" or len(devices) == 1)
        and all(knows_menu(problem, device) for device in devices)
        and all(copies_are_equal(problem, device) for device in devices)
    )


_GENERAL_RULE = (
    f"1 to {_MOST_STAGES} stages, up to {_MOST_MICROBATCHES} equal micro-batches in a free order, "
    "under span one device, menus of keep, offload and recompute, and copies of one size a device"
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
) -> LayeredOutcome:
    """Ask whether some devices can be through within ``horizon_ms``, the others being no obstacle.

    ``NONE`` proves that no schedule of the problem is that short. Unknown if more than
    ``most_states`` are met, ``most_in_layer`` in one layer, or if told to stop. ``known`` are
    starts of F and I that no schedule within the horizon is sooner than; with them the answer says
    what the search adds to them.
    """
    is_supported = general_can_search(problem, devices)
    refuse_unless(is_supported, "search_general", problem, _GENERAL_RULE)
    most_steps = 0 if known is None else _STEPS_EACH * most_in_layer
    search = _GeneralSearch(
        problem, devices, horizon_ms, most_in_layer, known=known, most_steps=most_steps
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

    What is found may be longer than the horizon, or break a rule of hosts, where states relax what
    programs must do. Each state stands for a partial schedule of all devices at once, with its
    choice of what is offloaded and recomputed: so the search meets schedules that differ from a
    good one on every device, which moves on programs reach through worse ones only. With 2,000
    states per layer it meets the best length known of 10 of the 17 problems of four devices with
    offload or recompute in `benchmarks`, in about a second each (measured).
    """
    rule = f"{_GENERAL_RULE}; and a stage on every device"
    refuse_unless(beam_can_search(problem), "search_beam", problem, rule)
    m, num_stages = problem.num_microbatches, len(problem.stages)
    most_new = _BEAM_SLICE * (num_stages + m * (FUSED + 1 + num_stages))
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
    """``most_new`` states at most are made of a beam's slice: so many must have room.

    Where ``most_steps`` of each layer have room, steps are remembered, for `earliest`.
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
    ) -> None:
        self.general = general_problem_of(problem, horizon_ms, devices, known)
        self.problem = problem
        self.kept = [s for s, stage in enumerate(problem.stages) if stage.device in devices]
        self.steps = make_steps(most_steps)
        self.noted: list[tuple[NDArray[np.int32], NDArray[np.int32]]] = []
        self.unit_ms = unit_ms(problem, horizon_ms)
        self.most_new = most_new
        size = problem.num_microbatches, len(self.general.forward), len(devices)
        layers = [make_general_layer(most_in_layer, *size) for _ in range(3)]
        super().__init__(layers, 4 * size[0] * size[1], width)
        # The exact search is asked for no programs, and may meet millions of states.
        self.keeps_ways = width is not None
        self.work = (
            make_general_state(*size),
            make_general_loads(*size[1:]),
            make_general_loads(*size[1:]),
            self.steps,
        )
        set_out(layers[0], self.general)

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
        return self._way_to_first(self._ends(), lambda way: way % 8 in {KEEP, FUSED})

    def _ends(self) -> NDArray[np.int32]:
        last = self.layers[0]
        return last.end[: int(last.size[0])]

    def _step(self, at: int) -> int:
        layer, one, two = self.layers
        if self.width is None:
            return expand_general(self.general, (layer, one, two), self.work, at, _EXACT_SLICE)
        for following in (one, two):
            if following.size[0] + self.most_new > len(following.alive):
                self._thin(following)
                chain_general(following)
        return expand_general(self.general, (layer, one, two), self.work, at, _BEAM_SLICE)

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
# along, and what an event asks for is looked up by rank. Copies are what states relax, so they are
# said in full again: an OFFLOAD follows its F, a RELEASE stands before the first action that needs
# its bytes, oldest OFFLOAD first. The programs keep the memory limit of every device (a state
# counts the same bytes); where copies of a device are not each other's equal, a host is full or a
# lane is shared they may take longer than the state says, or break a rule: whoever offers them
# asks.

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
    for event in _events(problem, general, ways):
        s = event[2]
        rows[problem.stages[s].device].add(event, needs(general, event[0], s))
    return tuple(tuple(row.actions) for row in rows)


def _events(problem: Problem, general: GeneralProblem, ways: Iterable[int]) -> Iterable[Event]:
    """Yield the events with numbers of micro-batches that stay, instead of ranks."""
    size = problem.num_microbatches, len(general.forward), len(general.room)
    state, new, loads = (
        make_general_state(*size),
        make_general_state(*size),
        make_general_loads(*size[1:]),
    )
    inputs = 1 + LANES * len(general.room)
    state.times[inputs:] = general.head
    for way in ways:
        rank, s, kind = way // 64, way // 8 % 8, way % 8
        j = int(np.lexsort((state.times[inputs:], state.codes))[rank])
        event = kind, j, s
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
        """Write an event down, behind the RELEASEs that make room for what it needs."""
        kind, j, s = event
        while self.leaving and (
            self.held_bytes + needed > self.room or (kind == RELOAD and (s, j) in self.leaving)
        ):
            self._release()
        if kind <= DROP:
            self._forward(kind, j, s)
            return
        if kind == GRADIENT:
            self.waiting[s].append(j)
        elif kind == WEIGHT:
            j = self.waiting[s].pop(0)
        self.actions.append(Action(s, _TYPES[kind], j))
        self.held_bytes += self._added(kind, s)

    def _forward(self, kind: int, j: int, s: int) -> None:
        stage = self.problem.stages[s]
        self.actions.append(Action(s, ActionType.FORWARD, j))
        self.held_bytes += (stage.checkpoint_bytes or 0) if kind == DROP else stage.activation_bytes
        if kind == SEND:
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
