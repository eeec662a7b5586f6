"""Compiled: states of the search over cells, their events, and layers of them.

See `cell_search` for what a state is and why nothing is lost. Times are whole numbers of a unit.

A *code* says how far a micro-batch is: in its lowest bits the number of passes it has started on
its way up the stages and down again, then per stage, between F and backward, its phase and mode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.exact.fifo_kernel import SEED, hashed, not_later, same
from optpipe_solver.jit import lean

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe_solver.arrays import Flags, Ints

    Times = NDArray[np.int32]

__all__ = [
    "CELL_BITS",
    "MODES_BITS",
    "PLACE_BITS",
    "CellLayer",
    "CellLoads",
    "CellProblem",
    "CellState",
    "expand_cells",
    "make_cell_layer",
    "make_cell_loads",
    "make_cell_state",
]


PLACE_BITS = 5
MODES_BITS = 3
CELL_BITS = MODES_BITS + 2
_HERE, _LEAVES, _AWAY, _LESS = range(4)
"""Phases: there is what the backward needs; OFFLOAD to come; OFFLOAD begun; RECOMPUTE to come."""

_F, _I, _W, _B, _OFFLOAD, _RELOAD, _RECOMPUTE = range(7)

_NEVER = 1 << 60


class CellProblem(NamedTuple):
    """Kept devices and stages in whole numbers: entries per stage, ``[s, k]`` per stage and mode.

    ``number`` is that of a stage's modes. ``gradient`` is the time of an I, ``fused`` of a B (-1
    where none pays), both with ``inside`` of recomputation, ``again`` of a RECOMPUTE (-1 = none),
    ``extra[s]`` the least of either that any mode has, ``moved`` the bytes of copies that take
    ``out`` and ``home``. A cell takes ``held_bytes`` from its F on, ``there`` when its backward
    begins, ``context`` from then to W. ``need_...`` are the bytes an action needs above those held
    before it. ``least_i`` and ``least_w`` are the pieces of `bounds.relaxation`. ``up[s]`` and
    ``down[s]`` are the least times between the passes of s and those of the next kept stage, ``up``
    of the last one to its own backward; ``head`` is that before the first. ``room`` is per device,
    as are the lanes of copies: ``lane_out``, ``lane_home`` its own, ``group_out``, ``group_home``
    shared ones or -1; ``issued``: whether a RELOAD stands between two compute actions. ``rest[q]``,
    ``head_f``, ``last_f``, ``last_i``, ``last_w`` are as in `general_kernel`. ``home_device`` is
    -1, or under span that of stage 0, beyond the last where that is not kept. ``steps`` is how many
    actions a mode has beside passes, at most.
    """

    num_microbatches: int
    device: Ints
    number: Ints
    forward: Ints
    weight: Ints
    gradient: Ints
    fused: Ints
    inside: Ints
    again: Ints
    extra: Ints
    moved: Ints
    out: Ints
    home: Ints
    held_bytes: Ints
    there: Ints
    context: Ints
    need_f: Ints
    need_i: Ints
    need_w: Ints
    need_b: Ints
    need_again: Ints
    least_i: Ints
    least_w: Ints
    up: Ints
    down: Ints
    head: int
    room: Ints
    lane_out: Ints
    lane_home: Ints
    group_out: Ints
    group_home: Ints
    issued: Flags
    rest: Ints
    head_f: Ints
    last_f: Ints
    last_i: Ints
    last_w: Ints
    home_device: int
    steps: int
    horizon: int


class CellState(NamedTuple):
    """How far all is.

    ``codes`` of all micro-batches, in order, equal ones by when their next input is there;
    ``waiting[s K + k]`` = W of a mode that could start, K modes a stage. ``times``: the clock; per
    device when compute is free; per lane when it is; per device minus when it began (0 but under
    span). ``cells[j]``: when the next input of the micro-batch is there, then per stage when its
    last copy, RECOMPUTE or F ends. None is before the clock.
    """

    codes: Ints
    waiting: NDArray[np.int8]
    times: Times
    cells: Times


class CellLoads(NamedTuple):
    """Per stage: F, backwards and W (or B) started; per position: how many, and when ready."""

    forwards: Ints
    backwards: Ints
    weights: Ints
    num_at: Ints
    ready: Ints


class CellLayer(NamedTuple):
    """States with the same number of steps done; see `general_layers.GeneralLayer`.

    ``end`` is the greatest lower bound of the end on the way to a state.
    """

    codes: Ints
    waiting: NDArray[np.int8]
    times: Times
    cells: Times
    end: NDArray[np.int32]
    alive: Flags
    link: NDArray[np.int32]
    first: NDArray[np.int32]
    size: Ints


def make_cell_state(m: int, num_stages: int, num_modes: int, num_times: int) -> CellState:
    """Return the state before everything."""
    return CellState(
        np.zeros(m, dtype=np.int64),
        np.zeros(num_stages * num_modes, dtype=np.int8),
        np.zeros(num_times, dtype=np.int32),
        np.zeros((m, 1 + num_stages), dtype=np.int32),
    )


def make_cell_loads(num_stages: int) -> CellLoads:
    """Return loads to write on."""
    stages = [np.zeros(num_stages, dtype=np.int64) for _ in range(3)]
    places = [np.zeros(2 * num_stages + 1, dtype=np.int64) for _ in range(2)]
    return CellLoads(*stages, *places)


def make_cell_layer(
    most: int, m: int, num_stages: int, num_modes: int, num_times: int
) -> CellLayer:
    """Return an empty layer with room for ``most`` states."""
    slots = 1
    while slots < most:
        slots *= 2
    return CellLayer(
        codes=np.zeros((most, m), dtype=np.int64),
        waiting=np.zeros((most, num_stages * num_modes), dtype=np.int8),
        times=np.zeros((most, num_times), dtype=np.int32),
        cells=np.zeros((most, m, 1 + num_stages), dtype=np.int32),
        end=np.zeros(most, dtype=np.int32),
        alive=np.zeros(most, dtype=np.bool_),
        link=np.full(most, -1, dtype=np.int32),
        first=np.full(slots, -1, dtype=np.int32),
        size=np.zeros(1, dtype=np.int64),
    )


@lean
def _place(code: int) -> int:
    """Return how many passes a micro-batch has started on its way."""
    return int(code & ((1 << PLACE_BITS) - 1))


@lean
def _cell(code: int, s: int) -> int:
    """Return phase and mode on stage s: ``phase + 4 mode``."""
    return int(code >> (PLACE_BITS + CELL_BITS * s) & ((1 << CELL_BITS) - 1))


@lean
def _with_cell(code: int, s: int, cell: int) -> int:
    return int(code + ((cell - _cell(code, s)) << (PLACE_BITS + CELL_BITS * s)))


@lean
def _slot(model: CellProblem, s: int, k: int) -> int:
    return int(s * model.held_bytes.shape[1] + k)


@lean
def _is_held(code: int, s: int, num_stages: int) -> bool:
    """Whether F has started on stage s and the backward has not."""
    at = _place(code)
    return bool(s < at <= 2 * num_stages - 1 - s)


@lean
def _survey(model: CellProblem, state: CellState, loads: CellLoads) -> None:
    """Write on the loads how much each stage has started."""
    num_stages = len(model.forward)
    for s in range(num_stages):
        forwards = backwards = waiting = 0
        for j in range(len(state.codes)):
            at = _place(state.codes[j])
            forwards += at > s
            backwards += at > 2 * num_stages - 1 - s
        for k in range(model.number[s]):
            waiting += state.waiting[_slot(model, s, k)]
        loads.forwards[s], loads.backwards[s] = forwards, backwards
        loads.weights[s] = backwards - waiting


@lean
def _fits(model: CellProblem, state: CellState, device: int, needs: int, at: int) -> int:
    """Return from when on so many more bytes fit on a device, not before a time; -1 = not yet.

    What is copied to the host is there until its copy has ended.
    """
    while True:
        held_bytes, following = _held(model, state, device, at)
        if held_bytes + needs <= model.room[device]:
            return int(at)
        if following == _NEVER:
            return -1
        at = following


@lean
def _held(model: CellProblem, state: CellState, device: int, at: int) -> tuple[int, int]:
    """Return the bytes held at a time if nothing starts, and when the next copy out ends."""
    num_stages, held_bytes, following = len(model.forward), 0, _NEVER
    for s in range(num_stages):
        if model.device[s] != device:
            continue
        for k in range(model.number[s]):
            held_bytes += state.waiting[_slot(model, s, k)] * model.context[s, k]
        for j in range(len(state.codes)):
            if not _is_held(state.codes[j], s, num_stages):
                continue
            cell = _cell(state.codes[j], s)
            phase, k = cell & 3, cell >> 2
            held_bytes += model.there[s, k] if phase == _HERE else model.held_bytes[s, k]
            if phase == _AWAY and state.cells[j, 1 + s] <= at:
                held_bytes -= model.moved[s, k]
            elif phase == _AWAY:
                following = min(following, state.cells[j, 1 + s])
    return held_bytes, following


@lean
def _start(
    model: CellProblem,
    state: CellState,
    loads: CellLoads,
    event: tuple[int, int, int, int],
) -> int:
    """Return when an event (kind, index of the micro-batch, stage, mode) can start; -1 = not yet.

    A RELOAD starts when it is issued, or where lanes are shared when its copy does.
    """
    kind, j, s, k = event
    device, clock = model.device[s], state.times[0]
    free = max(clock, state.times[1 + device])
    if kind == _OFFLOAD:
        return int(max(state.cells[j, 1 + s], _lanes(model, state, device, kind)))
    if kind == _RELOAD:
        at = state.cells[j, 1 + s]
        at = max(at, free) if model.issued[device] else max(at, _lanes(model, state, device, kind))
        return _fits(model, state, device, model.moved[s, k], at)
    if kind == _F:
        at = max(free, state.cells[j, 0], model.head_f[loads.forwards[s], s])
        return _fits(model, state, device, model.need_f[s, k], at)
    if kind == _W:
        return _fits(model, state, device, model.need_w[s, k], free)
    at = max(free, state.cells[j, 1 + s])
    if kind == _RECOMPUTE:
        return _fits(model, state, device, model.need_again[s, k], at)
    needs = model.need_b[s, k] if kind == _B else model.need_i[s, k]
    return _fits(model, state, device, needs, max(at, state.cells[j, 0]))


@lean
def _lanes(model: CellProblem, state: CellState, device: int, kind: int) -> int:
    """Return when the lanes of an OFFLOAD or RELOAD are free."""
    first = 1 + len(model.room)
    own = model.lane_out[device] if kind == _OFFLOAD else model.lane_home[device]
    group = model.group_out[device] if kind == _OFFLOAD else model.group_home[device]
    free = max(state.times[0], state.times[first + own])
    return int(free if group < 0 else max(free, state.times[first + group]))


@lean
def _occupy(model: CellProblem, new: CellState, device: int, kind: int, until: int) -> None:
    first = 1 + len(model.room)
    own = model.lane_out[device] if kind == _OFFLOAD else model.lane_home[device]
    group = model.group_out[device] if kind == _OFFLOAD else model.group_home[device]
    new.times[first + own] = until
    if group >= 0:
        new.times[first + group] = until


@lean
def _wastes(model: CellProblem, state: CellState, loads: CellLoads, start: int) -> bool:
    """Whether a W, OFFLOAD or I that waits could begin and end before an event starts."""
    num_stages, clock = len(model.forward), state.times[0]
    if start <= clock:
        return False
    for s in range(num_stages):
        device = model.device[s]
        free = max(clock, state.times[1 + device])
        for k in range(model.number[s]):
            if state.waiting[_slot(model, s, k)] and 0 < model.weight[s] <= start - free:
                at = _fits(model, state, device, model.need_w[s, k], free)
                if at >= 0 and at + model.weight[s] <= start:
                    return True
        for j in range(len(state.codes)):
            cell = _cell(state.codes[j], s)
            if cell & 3 == _LEAVES and _is_held(state.codes[j], s, num_stages):
                at = max(state.cells[j, 1 + s], _lanes(model, state, device, _OFFLOAD))
                if 0 < model.out[s, cell >> 2] <= start - at:
                    return True
    return _wastes_gradient(model, state, loads, start)


@lean
def _wastes_gradient(model: CellProblem, state: CellState, loads: CellLoads, start: int) -> bool:
    last = 2 * len(model.forward) - 1
    for j in range(len(state.codes)):
        q = _place(state.codes[j])
        if q <= last // 2 or q > last:
            continue
        s = last - q
        cell = _cell(state.codes[j], s)
        k = cell >> 2
        if cell & 3 != _HERE or model.fused[s, k] >= 0 or model.gradient[s, k] == 0:
            continue
        if model.context[s, k] > model.there[s, k]:
            continue
        at = _start(model, state, loads, (_I, j, s, k))
        if at >= 0 and at + model.gradient[s, k] <= start:
            return True
    return False


@lean
def _advance(
    model: CellProblem,
    state: CellState,
    event: tuple[int, int, int, int],
    start: int,
    new: CellState,
) -> int:
    """Write the state after an event from its start; return the steps it takes."""
    kind, _, s, k = event
    _copy(model, state, start, new)
    steps = 1
    if kind == _F:
        steps = _forward(model, new, event, start)
        if 0 <= model.home_device != model.device[s] and _is_first(model, state, model.device[s]):
            new.times[len(new.times) - len(model.room) + model.device[s]] = -start
    elif kind == _W:
        new.waiting[_slot(model, s, k)] -= 1
        new.times[1 + model.device[s]] = start + model.weight[s]
    elif kind >= _OFFLOAD:
        _go_on(model, new, event, start)
    else:
        _backward(model, new, event, start)
        steps = 2 if kind == _B else 1
    _sort(new)
    return int(steps)


@lean
def _go_on(
    model: CellProblem, new: CellState, event: tuple[int, int, int, int], start: int
) -> None:
    """Run a copy or RECOMPUTE."""
    kind, j, s, k = event
    device, phase = model.device[s], _HERE
    if kind == _RECOMPUTE:
        end = start + model.again[s, k]
        new.times[1 + device] = end
    else:
        end = max(start, _lanes(model, new, device, kind))
        end += model.out[s, k] if kind == _OFFLOAD else model.home[s, k]
        _occupy(model, new, device, kind, end)
        if kind == _OFFLOAD:
            phase = _AWAY
        elif model.again[s, k] >= 0:
            phase = _LESS
    new.codes[j] = _with_cell(new.codes[j], s, phase + 4 * k)
    new.cells[j, 1 + s] = end


@lean
def _backward(
    model: CellProblem, new: CellState, event: tuple[int, int, int, int], start: int
) -> None:
    """Run an I or B."""
    kind, j, s, k = event
    end = start + (model.fused[s, k] if kind == _B else model.gradient[s, k])
    new.codes[j] = _with_cell(new.codes[j], s, 0) + 1
    new.cells[j, 1 + s] = start
    new.cells[j, 0] = end + model.down[s - 1] if s > 0 else start
    new.times[1 + model.device[s]] = end
    if kind == _I:
        new.waiting[_slot(model, s, k)] += 1


@lean
def _is_first(model: CellProblem, state: CellState, device: int) -> bool:
    """Whether nothing has started on a device."""
    for s in range(len(model.forward)):
        if model.device[s] == device:
            for j in range(len(state.codes)):
                if _place(state.codes[j]) > s:
                    return False
    return True


@lean
def _copy(model: CellProblem, state: CellState, start: int, new: CellState) -> None:
    """Copy a state, with no time before the new clock."""
    for i in range(len(state.codes)):
        new.codes[i] = state.codes[i]
        for s in range(len(state.cells[i])):
            new.cells[i, s] = max(state.cells[i, s], start)
    for i in range(len(state.waiting)):
        new.waiting[i] = state.waiting[i]
    begun = len(state.times) - len(model.room)
    for i in range(len(state.times)):
        new.times[i] = state.times[i] if i >= begun else max(state.times[i], start)


@lean
def _forward(
    model: CellProblem, new: CellState, event: tuple[int, int, int, int], start: int
) -> int:
    """Run an F; return its steps: one, and one for each action that its mode has not."""
    _, j, s, k = event
    end, steps, phase = start + model.forward[s], 1 + model.steps, _HERE
    new.times[1 + model.device[s]] = end
    new.cells[j, 0] = end + model.up[s]
    new.cells[j, 1 + s] = end
    if model.again[s, k] >= 0:
        phase, steps = _LESS, steps - 1
    if model.moved[s, k] > 0:
        phase, steps = _LEAVES, steps - 2
    new.codes[j] = _with_cell(new.codes[j], s, phase + 4 * k) + 1
    return int(steps)


@lean
def _sort(new: CellState) -> None:
    """Sort micro-batches by code, then by when their next input is there."""
    for i in range(1, len(new.codes)):
        k = i
        while k > 0 and (
            new.codes[k - 1] > new.codes[k]
            or (new.codes[k - 1] == new.codes[k] and new.cells[k - 1, 0] > new.cells[k, 0])
        ):
            new.codes[k - 1], new.codes[k] = new.codes[k], new.codes[k - 1]
            for s in range(len(new.cells[k])):
                a, b = new.cells[k - 1, s], new.cells[k, s]
                new.cells[k - 1, s], new.cells[k, s] = b, a
            k -= 1


# --- How long every schedule through a state is at least.


@lean
def _least_after(
    model: CellProblem, loads: CellLoads, event: tuple[int, int, int, int], start: int
) -> int:
    """Return a lower bound of the end if an event starts then; loads are those before it."""
    kind, _, s, k = event
    m = model.num_microbatches
    if kind == _F:
        return int(start + model.forward[s] + model.last_f[m - 1 - loads.forwards[s], s])
    if kind == _W:
        return int(start + model.weight[s] + model.last_w[m - 1 - loads.weights[s], s])
    if kind == _I:
        left = m - 1 - loads.backwards[s]
        return int(start + model.gradient[s, k] + model.last_i[left, s])
    if kind == _B:
        by_w = start + model.fused[s, k] + model.last_w[m - 1 - loads.weights[s], s]
        left = m - 1 - loads.backwards[s]
        return int(max(by_w, start + model.least_i[s] + model.last_i[left, s]))
    return int(start)


@lean
def _least_end(model: CellProblem, state: CellState, loads: CellLoads) -> int:
    """Return a lower bound of the end of all schedules through a state; the loads are written."""
    _survey(model, state, loads)
    least = max(_by_ways(model, state, loads), _by_places(model, state, loads))
    return max(least, _by_load(model, state, loads))


@lean
def _ready(model: CellProblem, state: CellState, j: int, s: int) -> int:
    """Return when the next pass of a micro-batch, on stage s, can start at the earliest."""
    free = max(state.times[0], state.times[1 + model.device[s]])
    ready = max(free, state.cells[j, 0])
    if _place(state.codes[j]) < len(model.forward):
        return int(ready)
    cell, at = _cell(state.codes[j], s), state.cells[j, 1 + s]
    phase, k = cell & 3, cell >> 2
    if phase == _LEAVES:
        at += model.out[s, k]
    if phase in (_LEAVES, _AWAY):
        at = max(at, _lanes(model, state, model.device[s], _RELOAD)) + model.home[s, k]
    if phase != _HERE and model.again[s, k] >= 0:
        at = max(at, free) + model.again[s, k]
    return int(max(ready, at))


@lean
def _by_ways(model: CellProblem, state: CellState, loads: CellLoads) -> int:
    """The way of each micro-batch; note how many are where, and the first to be ready."""
    num_stages, least = len(model.forward), 0
    last = 2 * num_stages - 1
    for q in range(last + 2):
        loads.num_at[q] = 0
        loads.ready[q] = _NEVER
    for j in range(len(state.codes)):
        q = _place(state.codes[j])
        loads.num_at[q] += 1
        if q <= last:
            ready = _ready(model, state, j, q if q < num_stages else last - q)
            loads.ready[q] = min(loads.ready[q], ready)
            for s in range(num_stages):
                if _is_held(state.codes[j], s, num_stages):
                    ready += model.inside[s, _cell(state.codes[j], s) >> 2]
            least = max(least, ready + model.rest[q])
    return int(least)


@lean
def _by_places(model: CellProblem, state: CellState, loads: CellLoads) -> int:
    """The next pass at every position, whoever makes it, and what must follow by number."""
    num_stages, least, left, before = len(model.forward), 0, 0, 0
    for q in range(2 * num_stages):
        is_forward = q < num_stages
        s = q if is_forward else 2 * num_stages - 1 - q
        ready = loads.ready[q]
        if left > 0:
            come = model.up[q - 1] if q <= num_stages else model.down[s]
            ready = min(ready, before + come)
        left += loads.num_at[q]
        if left > 0:
            begin = max(ready, state.times[1 + model.device[s]])
            before = begin + (model.forward[s] if is_forward else model.least_i[s])
            tails = model.last_f if is_forward else model.last_i
            least = max(least, before + tails[left - 1, s])
    return int(least)


@lean
def _by_load(model: CellProblem, state: CellState, loads: CellLoads) -> int:
    """All that each device has left, one after the other; under span on its own clock."""
    m, least, num_stages, devices = model.num_microbatches, 0, len(model.forward), len(model.room)
    begun = len(state.times) - devices
    for device in range(devices):
        end, weights, tail, is_over = max(state.times[0], state.times[1 + device]), 0, _NEVER, True
        if model.home_device >= 0 and device != model.home_device:
            end = state.times[1 + device]
        for s in range(num_stages):
            if model.device[s] != device:
                continue
            for j in range(len(state.codes)):
                if _is_held(state.codes[j], s, num_stages):
                    cell = _cell(state.codes[j], s)
                    end += model.inside[s, cell >> 2]
                    if cell & 3 != _HERE:
                        end += max(0, model.again[s, cell >> 2])
            end += (m - loads.forwards[s]) * (model.forward[s] + model.extra[s])
            end += (m - loads.backwards[s]) * model.least_i[s]
            weights += (m - loads.weights[s]) * model.least_w[s]
            if loads.backwards[s] < m:
                is_over = False
                tail = min(tail, model.last_i[0, s])
        if model.home_device >= 0 and is_over and weights == 0 and end <= state.times[0]:
            # The clock has moved on since the device ended, which its span does not count.
            continue
        if model.home_device >= 0 and device != model.home_device:
            least = max(least, end + weights + state.times[begun + device])
        else:
            least = max(least, end + weights, 0 if is_over else end + tail)
    return int(least)


# --- Layers: the successors of states, and dominance among them.


@lean
def expand_cells(
    model: CellProblem,
    layers: tuple[CellLayer, CellLayer, CellLayer, CellLayer, CellLayer],
    work: tuple[CellState, CellLoads, CellLoads],
    begin: int,
    most: int,
) -> int:
    """Add the successors of up to ``most`` states of the first layer from row ``begin`` on.

    Returns the next row, -1 where a layer is full. ``work`` is written to.
    """
    layer = layers[0]
    end = min(layer.size[0], begin + most)
    for row in range(begin, end):
        if layer.alive[row]:
            state = CellState(
                layer.codes[row], layer.waiting[row], layer.times[row], layer.cells[row]
            )
            known = work[0], work[1], work[2], int(layer.end[row])
            if not _expand_row(model, layers, state, known):
                return -1
    return int(end)


@lean
def _expand_row(
    model: CellProblem,
    layers: tuple[CellLayer, CellLayer, CellLayer, CellLayer, CellLayer],
    state: CellState,
    work: tuple[CellState, CellLoads, CellLoads, int],
) -> bool:
    """Add the state after each event; ``work`` ends with the bound of the state."""
    _survey(model, state, work[1])
    num_stages = len(model.forward)
    for s in range(num_stages):
        for k in range(model.number[s]):
            if state.waiting[_slot(model, s, k)] and not _take(
                model, layers, state, work, (_W, 0, s, k)
            ):
                return False
    for j in range(len(state.codes)):
        twin = _twin(state, j)
        if twin < 2 and not _cells_go_on(model, layers, state, work, j):
            return False
        if twin == 0 and not _next_pass(model, layers, state, work, j):
            return False
    return True


@lean
def _cells_go_on(
    model: CellProblem,
    layers: tuple[CellLayer, CellLayer, CellLayer, CellLayer, CellLayer],
    state: CellState,
    work: tuple[CellState, CellLoads, CellLoads, int],
    j: int,
) -> bool:
    """Add the states after the next copy or RECOMPUTE of each cell of a micro-batch."""
    num_stages = len(model.forward)
    for s in range(num_stages):
        cell = _cell(state.codes[j], s)
        phase, k = cell & 3, cell >> 2
        if phase == _HERE or not _is_held(state.codes[j], s, num_stages):
            continue
        kind = _RECOMPUTE
        if phase == _LEAVES:
            kind = _OFFLOAD
        elif phase == _AWAY:
            kind = _RELOAD
        if not _take(model, layers, state, work, (kind, j, s, k)):
            return False
    return True


@lean
def _twin(state: CellState, j: int) -> int:
    """Return 2 where the micro-batch before is the same, 1 where only its input is sooner, else 0.

    Two with one code and the same times on all stages may change places.
    """
    if j == 0 or state.codes[j - 1] != state.codes[j]:
        return 0
    for s in range(1, len(state.cells[j])):
        if state.cells[j - 1, s] != state.cells[j, s]:
            return 0
    return 2 if state.cells[j - 1, 0] == state.cells[j, 0] else 1


@lean
def _next_pass(
    model: CellProblem,
    layers: tuple[CellLayer, CellLayer, CellLayer, CellLayer, CellLayer],
    state: CellState,
    work: tuple[CellState, CellLoads, CellLoads, int],
    j: int,
) -> bool:
    num_stages, q = len(model.forward), _place(state.codes[j])
    if q == 2 * num_stages:
        return True
    if q < num_stages:
        for k in range(model.number[q]):  # noqa: SIM110 - compiled
            if not _take(model, layers, state, work, (_F, j, q, k)):
                return False
        return True
    s = 2 * num_stages - 1 - q
    cell = _cell(state.codes[j], s)
    k = cell >> 2
    if cell & 3 != _HERE:
        return True
    if model.fused[s, k] >= 0 and not _take(model, layers, state, work, (_B, j, s, k)):
        return False
    return _take(model, layers, state, work, (_I, j, s, k))


@lean
def _take(
    model: CellProblem,
    layers: tuple[CellLayer, CellLayer, CellLayer, CellLayer, CellLayer],
    state: CellState,
    work: tuple[CellState, CellLoads, CellLoads, int],
    event: tuple[int, int, int, int],
) -> bool:
    """Add the state after an event to its layer if it is worth it; False = no room."""
    new, loads, other, _ = work
    start = _start(model, state, loads, event)
    least = max(work[3], _least_after(model, loads, event, start))
    if start < 0 or least > model.horizon or _wastes(model, state, loads, start):
        return True
    steps = _advance(model, state, event, start, new)
    least = max(least, _least_end(model, new, other))
    return least > model.horizon or _keep(layers[steps], new, least)


@lean
def _keep(layer: CellLayer, new: CellState, end: int) -> bool:
    """Add a state unless another with its codes and W is nowhere later; False = no room."""
    value = hashed(hashed(SEED, new.codes), new.waiting)
    slot = value & (len(layer.first) - 1)
    at = layer.first[slot]
    while at >= 0:
        if (
            layer.alive[at]
            and same(layer.codes[at], new.codes)
            and same(layer.waiting[at], new.waiting)
        ):
            if _nowhere_later(layer.times[at], layer.cells[at], new.times, new.cells):
                return True
            if _nowhere_later(new.times, new.cells, layer.times[at], layer.cells[at]):
                layer.alive[at] = False
        at = layer.link[at]
    row = layer.size[0]
    if row == len(layer.alive):
        return False
    for i in range(len(new.codes)):
        layer.codes[row, i] = new.codes[i]
        for s in range(len(new.cells[i])):
            layer.cells[row, i, s] = new.cells[i, s]
    for i in range(len(new.waiting)):
        layer.waiting[row, i] = new.waiting[i]
    for i in range(len(new.times)):
        layer.times[row, i] = new.times[i]
    layer.end[row] = end
    layer.alive[row] = True
    layer.link[row], layer.first[slot] = layer.first[slot], row
    layer.size[0] += 1
    return True


@lean
def _nowhere_later(times: Times, cells: Times, than: Times, those: Times) -> bool:
    if not not_later(times, than):
        return False
    for j in range(len(cells)):  # noqa: SIM110 - compiled
        if not not_later(cells[j], those[j]):
            return False
    return True
