"""Compiled: layers of states of the general search, their successors, and dominance among them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.exact.fifo_kernel import SEED, hashed, same
from optpipe_solver.exact.general_kernel import (
    AWAY,
    FORWARD,
    FUSED,
    GRADIENT,
    HERE,
    KINDS,
    LEAVES,
    LESS,
    NEVER,
    OFFLOAD,
    RECOMPUTE,
    RELOAD,
    SEND,
    WEIGHT,
    GeneralState,
    cell_of,
    free_at,
    is_held,
    position_of,
    ready_at,
    run,
    start_of,
    survey,
    wastes,
)
from optpipe_solver.jit import lean

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe_solver.arrays import Flags, Ints
    from optpipe_solver.exact.general_kernel import GeneralLoads, GeneralProblem

__all__ = [
    "GeneralLayer",
    "NotedSteps",
    "chain_general",
    "event_of",
    "expand_general",
    "least_end",
    "least_end_by",
    "make_general_layer",
    "make_steps",
    "rate",
    "set_out",
    "sweep",
    "way_of",
]


_NONE = -1


class GeneralLayer(NamedTuple):
    """States with the same number of steps done: ``size[0]`` rows.

    ``end`` is the greatest lower bound of the end on the way to a state. ``parent`` is the row
    before it, in that row's layer. ``way`` is the event between them (see `way_of`). ``first`` and
    ``link`` chain rows with one hash.
    """

    codes: Ints
    waiting: NDArray[np.int8]
    times: NDArray[np.int32]
    end: NDArray[np.int32]
    parent: NDArray[np.int32]
    way: NDArray[np.int32]
    alive: Flags
    link: NDArray[np.int32]
    instead: NDArray[np.int32]
    first: NDArray[np.int32]
    size: Ints


class NotedSteps(NamedTuple):
    """Steps between states, ``size[0]`` rows of five numbers.

    They are the row before; the row after, or the row kept instead (`_keep`), and its distance in
    layers; the pass (`_number_of`) and its start.
    """

    rows: NDArray[np.int32]
    size: Ints


def make_steps(most: int) -> NotedSteps:
    """Return storage for so many steps; without storage no step is remembered."""
    return NotedSteps(np.zeros((most, 5), dtype=np.int32), np.zeros(1, dtype=np.int64))


@lean
def sweep(
    steps: NDArray[np.int32],
    instead: NDArray[np.int32],
    reach: Flags,
    following: tuple[Flags, Flags],
    least: Ints,
) -> None:
    """Note which rows of a layer reach the end, and the earliest start of every pass on the way.

    ``following`` has the same for the next two layers, ``instead`` the row that replaced a dropped
    one.
    """
    for i in range(len(steps)):
        source, target, wide, number, start = steps[i]
        reaches = following[0][target] if wide == 1 else following[1][target]
        if reaches:
            reach[source] = True
            if number >= 0:
                least[number] = min(least[number], start)
    for row in range(len(reach) - 1, -1, -1):
        if instead[row] >= 0:
            reach[row] = reach[instead[row]]


def make_general_layer(most: int, start: GeneralState) -> GeneralLayer:
    """Return an empty layer with room for ``most`` states of the size of ``start``."""
    slots = 1
    while slots < most:
        slots *= 2
    return GeneralLayer(
        codes=np.empty((most, len(start.codes)), dtype=np.int64),
        waiting=np.empty((most, len(start.waiting)), dtype=np.int8),
        times=np.empty((most, len(start.times)), dtype=np.int32),
        end=np.zeros(most, dtype=np.int32),
        parent=np.empty(most, dtype=np.int32),
        way=np.empty(most, dtype=np.int32),
        alive=np.zeros(most, dtype=np.bool_),
        link=np.empty(most, dtype=np.int32),
        instead=np.empty(most, dtype=np.int32),
        first=np.full(slots, _NONE, dtype=np.int32),
        size=np.zeros(1, dtype=np.int64),
    )


def set_out(layer: GeneralLayer, start: GeneralState) -> None:
    """Put the state before everything into an empty layer."""
    layer.codes[0], layer.waiting[0], layer.times[0] = start
    layer.end[0], layer.parent[0], layer.way[0], layer.instead[0] = 0, _NONE, _NONE, _NONE
    layer.alive[0] = True
    layer.size[0] = 1


@lean
def chain_general(layer: GeneralLayer) -> None:
    """Chain all rows of a layer anew."""
    layer.first[:] = _NONE
    for row in range(layer.size[0]):
        state = GeneralState(layer.codes[row], layer.waiting[row], layer.times[row])
        slot = _hash(state) & (len(layer.first) - 1)
        layer.link[row], layer.first[slot] = layer.first[slot], row


@lean
def expand_general(
    model: GeneralProblem,
    layers: tuple[GeneralLayer, GeneralLayer, GeneralLayer, GeneralLayer, GeneralLayer],
    work: tuple[GeneralState, GeneralLoads, GeneralLoads, NotedSteps],
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
            state = GeneralState(layer.codes[row], layer.waiting[row], layer.times[row])
            if not _expand_row(model, layers, state, work, (layer.end[row], row)):
                return -1
    return int(end)


@lean
def _expand_row(
    model: GeneralProblem,
    layers: tuple[GeneralLayer, GeneralLayer, GeneralLayer, GeneralLayer, GeneralLayer],
    state: GeneralState,
    work: tuple[GeneralState, GeneralLoads, GeneralLoads, NotedSteps],
    known: tuple[int, int],
) -> bool:
    """Add the state after each event to its layer if it is worth it; False = no room.

    ``known`` is the bound and the row of the state.
    """
    new, loads, other, noted = work
    end, row = known
    survey(model, state, loads)
    latest = _latest(model, loads)
    num_stages, classes = model.context.shape
    ways = model.is_open.shape[1] + 2 + num_stages
    for number in range(num_stages * classes + len(state.codes) * ways):
        event = _event(model, state, number)
        if event[0] == _NONE:
            continue
        start = start_of(model, state, loads, event)
        least = max(end, least_end_by(model, loads, event, start))
        if start < 0 or start > latest or least > model.horizon:
            continue
        if wastes(model, state, loads, model.device[event[2]], start):
            continue
        steps = run(model, state, event, start, new)
        least = max(least, least_end(model, new, other))
        if least > model.horizon:
            continue
        target = _keep(layers[steps], new, (least, row, way_of(model, event)))
        of = _number_of(model, loads, event)
        if target < 0 or not _note(noted, (row, target, steps), of, start):
            return False
    return True


@lean
def _event(model: GeneralProblem, state: GeneralState, number: int) -> tuple[int, int, int, int]:
    """Return one of all events as (kind, index of the micro-batch, stage, mode); -1 = not now.

    First the W of each class per stage. Then per micro-batch its next pass, F in every mode, I and
    B, and the next copy or RECOMPUTE of its cell on every stage. Of equal ones the first goes.
    """
    num_stages, classes = model.context.shape
    modes = model.is_open.shape[1]
    if number < num_stages * classes:
        kind = WEIGHT if state.waiting[number] > 0 else _NONE
        return (kind, 0, number // classes, number % classes)
    j = (number - num_stages * classes) // (modes + 2 + num_stages)
    way = (number - num_stages * classes) % (modes + 2 + num_stages)
    code, kind, s, k = state.codes[j], _NONE, way - modes - 2, 0
    if s >= 0:
        phase, k = cell_of(code, s)
        kind = _copy_kind(model, phase)
    else:
        q = position_of(code)
        s = q if q < num_stages else 2 * num_stages - 1 - q
        if s < 0:
            return (_NONE, j, 0, 0)
        if q < num_stages:
            k = way
            kind = FORWARD if way < modes and model.is_open[s, way] else _NONE
        elif way >= modes:
            phase, k = cell_of(code, s)
            kind = GRADIENT + way - modes
            is_there = phase == HERE if model.by_cell else phase not in (AWAY, LESS)
            if not is_there or (kind == FUSED and not model.may_fuse[s]):
                kind = _NONE
    if kind != _NONE and _is_again(model, state, j, kind):
        kind = _NONE
    return (kind, j, s, k)


@lean
def _copy_kind(model: GeneralProblem, phase: int) -> int:
    """Return which copy or RECOMPUTE comes next in a phase, -1 = none."""
    if phase == AWAY:
        return RELOAD
    if phase == LESS:
        return RECOMPUTE
    return OFFLOAD if model.by_cell and phase == LEAVES else _NONE


@lean
def _is_again(model: GeneralProblem, state: GeneralState, j: int, kind: int) -> bool:
    """Whether the micro-batch before is as far, so that it goes first.

    For copies and RECOMPUTEs its next input must be there at the same time, too.
    """
    if j == 0 or state.codes[j - 1] != state.codes[j]:
        return False
    at = model.inputs + j
    if kind > WEIGHT and state.times[at - 1] != state.times[at]:
        return False
    if model.by_cell:
        num_stages = len(model.forward)
        for i in range(model.ends + j * num_stages, model.ends + (j + 1) * num_stages):
            if state.times[i - num_stages] != state.times[i]:
                return False
    return True


@lean
def way_of(model: GeneralProblem, event: tuple[int, int, int, int]) -> int:
    """Return an event (kind, index of the micro-batch, stage, mode) as one number."""
    kind, j, s, k = event
    return int(((j * len(model.forward) + s) * KINDS + kind) * model.is_open.shape[1] + k)


def event_of(model: GeneralProblem, way: int) -> tuple[int, int, int, int]:
    """Return the event that `way_of` gives a number."""
    rest, k = divmod(way, model.is_open.shape[1])
    rest, kind = divmod(rest, KINDS)
    j, s = divmod(rest, len(model.forward))
    return kind, j, s, k


@lean
def _note(steps: NotedSteps, way: tuple[int, int, int], number: int, start: int) -> bool:
    """Remember a step where steps are; False = no room."""
    i, most = steps.size[0], len(steps.rows)
    if 0 < i == most:
        return False
    if i < most:
        for column in range(3):
            steps.rows[i, column] = way[column]
        steps.rows[i, 3], steps.rows[i, 4] = number, start
        steps.size[0] += 1
    return True


@lean
def _number_of(model: GeneralProblem, loads: GeneralLoads, event: tuple[int, int, int, int]) -> int:
    """Return k x stages + s of the k-th F of s, m x stages more of its k-th I or B, else -1."""
    kind, _, s, _ = event
    if kind == FORWARD:
        return int(loads.forwards[s] * len(model.forward) + s)
    if kind <= FUSED:
        return int((model.num_microbatches + loads.gradients[s]) * len(model.forward) + s)
    return _NONE


@lean
def _keep(layer: GeneralLayer, state: GeneralState, known: tuple[int, int, int]) -> int:
    """Add a state unless another with its codes and W is nowhere later; return whose row is kept.

    -1 = no room.

    ``known`` is its bound, the row before it, and the way from there.
    """
    slot = _hash(state) & (len(layer.first) - 1)
    at, before = layer.first[slot], _NONE
    while at >= 0:
        following = layer.link[at]
        sooner, later = _compare(layer.times[at], state.times)
        if (sooner or later) and _same(layer, at, state):
            if sooner:
                return int(at)
            layer.alive[at] = False
            layer.instead[at] = layer.size[0]
            # No later state needs a comparison with it.
            if before < 0:
                layer.first[slot] = following
            else:
                layer.link[before] = following
        else:
            before = at
        at = following
    row = layer.size[0]
    if row == len(layer.alive):
        return -1
    for i in range(len(state.codes)):
        layer.codes[row, i] = state.codes[i]
    for i in range(len(state.waiting)):
        layer.waiting[row, i] = state.waiting[i]
    for i in range(len(state.times)):
        layer.times[row, i] = state.times[i]
    layer.end[row], layer.parent[row], layer.way[row] = known
    layer.alive[row] = True
    layer.instead[row] = _NONE
    layer.link[row], layer.first[slot] = layer.first[slot], row
    layer.size[0] += 1
    return int(row)


@lean
def _compare(a: NDArray[np.int32], b: NDArray[np.int32]) -> tuple[bool, bool]:
    """Whether no time of ``a`` is later than that of ``b``, and the other way round."""
    sooner, later = True, True
    for i in range(len(a)):
        if a[i] > b[i]:
            sooner = False
        elif a[i] < b[i]:
            later = False
        if not (sooner or later):
            break
    return sooner, later


@lean
def _hash(state: GeneralState) -> int:
    return hashed(hashed(SEED, state.codes), state.waiting)


@lean
def _same(layer: GeneralLayer, row: int, state: GeneralState) -> bool:
    return same(layer.codes[row], state.codes) and same(layer.waiting[row], state.waiting)


# --- Compiled: how long every schedule through a state is at least.


@lean
def least_end(model: GeneralProblem, state: GeneralState, loads: GeneralLoads) -> int:
    """Return a lower bound of the end of all schedules through a state; the loads are written to.

    It is the maximum of five bounds. Three follow from the remaining way of each micro-batch, the
    next pass at every position, and the next W of every stage. Two follow from the remaining work
    of every device and from its RELOADs.
    """
    survey(model, state, loads)
    least = max(_by_ways(model, state, loads), _by_positions(model, state, loads))
    return max(least, _by_load(model, state, loads))


@lean
def least_end_by(
    model: GeneralProblem, loads: GeneralLoads, event: tuple[int, int, int, int], start: int
) -> int:
    """Return a lower bound of the end if an event starts then: what must follow it, by number.

    ``loads`` is that of the state before. After the k-th F of a stage, m - k are to come. So its
    tail is at least that of the k-th from the end; likewise I and W.
    """
    kind, _, s, k = event
    left_i = model.num_microbatches - 1 - loads.gradients[s]
    left_w = model.num_microbatches - 1 - loads.weights[s]
    if kind == FORWARD:
        left_f = model.num_microbatches - 1 - loads.forwards[s]
        return int(start + model.forward[s] + model.last_f[left_f, s])
    if kind == WEIGHT:
        return int(start + model.split_w[s] + model.last_w[left_w, s])
    if kind == GRADIENT:
        return int(start + model.split_i[s, k] + model.last_i[left_i, s])
    if kind == FUSED:
        end = start + model.fused[s, k] + model.last_w[left_w, s]
        return int(max(end, start + model.gradient[s] + model.last_i[left_i, s]))
    return int(start)


@lean
def _latest(model: GeneralProblem, loads: GeneralLoads) -> int:
    """Return the latest start of the next event after which every device can still finish.

    This alone leaves out many events, before the state after them is made. Under span a device that
    has ended says nothing of others.
    """
    m, latest = model.num_microbatches, model.horizon if model.home_device < 0 else NEVER
    for device in range(len(model.room)):
        if _has_own_clock(model, device):
            continue
        load = loads.owed[device]
        for s in range(len(model.forward)):
            if model.device[s] == device:
                load += (m - loads.forwards[s]) * model.forward[s]
                load += (m - loads.gradients[s]) * model.gradient[s]
                load += (m - loads.weights[s]) * model.weight[s]
        if load > 0:
            latest = min(latest, model.horizon - load)
    return int(latest)


@lean
def _has_own_clock(model: GeneralProblem, device: int) -> bool:
    """Whether the horizon of a device counts from its first start: not that of stage 0."""
    return bool(model.home_device >= 0 and device != model.home_device)


@lean
def _by_ways(model: GeneralProblem, state: GeneralState, loads: GeneralLoads) -> int:
    """The way of each micro-batch; note how many are where, and the first to be ready."""
    num_stages, least = len(model.forward), 0
    last = 2 * num_stages - 1
    for q in range(last + 2):
        loads.num_at[q] = 0
        loads.ready[q] = NEVER
    for j in range(len(state.codes)):
        q = position_of(state.codes[j])
        loads.num_at[q] += 1
        if q > last:
            continue
        s = q if q < num_stages else last - q
        pairs = q >= num_stages and (model.pairs_i[s] or model.pairs_b[s])
        ready = max(ready_at(model, state, j, s), free_at(model, state, model.device[s], pairs))
        loads.ready[q] = min(loads.ready[q], ready)
        for other in range(num_stages if model.by_cell else 0):
            if is_held(state.codes[j], other, num_stages):
                _, k = cell_of(state.codes[j], other)
                ready += model.inside[other, k]
        least = max(least, ready + model.rest[q])
    return int(least)


@lean
def _by_positions(model: GeneralProblem, state: GeneralState, loads: GeneralLoads) -> int:
    """The next pass at every position, of any micro-batch, and what must follow by number."""
    num_stages, least, left, before = len(model.forward), 0, 0, 0
    m = model.num_microbatches
    for q in range(2 * num_stages):
        is_forward = q < num_stages
        s = q if is_forward else 2 * num_stages - 1 - q
        pairs = not is_forward and (model.pairs_i[s] or model.pairs_b[s])
        free = free_at(model, state, model.device[s], pairs)
        ready = loads.ready[q]
        if left > 0:
            come = model.there[min(q - 1, s)] if q <= num_stages else model.back[s]
            ready = min(ready, before + come)
        left += loads.num_at[q]
        if left > 0:
            heads = model.head_f if is_forward else model.head_i
            begin = max(ready, free, heads[m - left, s])
            before = begin + (model.forward[s] if is_forward else model.gradient[s])
            tails = model.last_f if is_forward else model.last_i
            least = max(least, before + tails[left - 1, s])
        if not is_forward and loads.weights[s] < m:
            begin = free if loads.weights[s] < loads.gradients[s] else before
            least = max(least, begin + model.weight[s] + model.last_w[m - 1 - loads.weights[s], s])
    return int(least)


@lean
def _by_load(model: GeneralProblem, state: GeneralState, loads: GeneralLoads) -> int:
    """All that each device has left, one after the other; its RELOADs, one after the other."""
    m, least, num_stages = model.num_microbatches, 0, len(model.forward)
    for device in range(len(model.room)):
        end = free_at(model, state, device, True) + loads.owed[device]
        tail, weights, is_over = NEVER, 0, True
        for s in range(num_stages):
            if model.device[s] != device:
                continue
            end += (m - loads.forwards[s]) * model.forward[s]
            end += (m - loads.gradients[s]) * model.gradient[s]
            weights += (m - loads.weights[s]) * model.weight[s]
            if loads.gradients[s] < m:
                is_over = False
                tail = min(tail, model.last_i[0, s])
        if model.home_device >= 0 and is_over and weights == 0 and end <= state.times[0]:
            # Under span the clock may have moved on since the device ended.
            continue
        if _has_own_clock(model, device):
            least = max(least, end + weights + state.times[model.begins + device])
            continue
        least = max(least, end + weights, 0 if is_over else end + tail)
        if not model.by_cell:
            least = max(least, _by_reloads(model, state, loads, device))
    return int(least)


@lean
def _by_reloads(
    model: GeneralProblem, state: GeneralState, loads: GeneralLoads, device: int
) -> int:
    """After the k-th last RELOAD of what is AWAY, k of its I start; no copy ends after the end."""
    sent, num_stages = loads.sent[device], len(model.forward)
    away, lane = state.times[model.lane_out[device]], state.times[model.lane_home[device]]
    least = max(away, lane)
    at = max(state.times[1 + device], lane)
    for n in range(sent if model.waits[device] else 0):
        tail = NEVER
        for s in range(num_stages):
            if model.device[s] == device and model.is_open[s, SEND]:
                k = min(sent - 1 - n, model.num_microbatches - 1) if _is_only(model, s) else 0
                tail = min(tail, model.gradient[s] + model.last_i[k, s])
        least = max(least, at + (n + 1) * model.one_home[device] + tail)
    return int(least)


@lean
def _is_only(model: GeneralProblem, s: int) -> bool:
    """Whether a stage is alone on its device."""
    for other in range(len(model.forward)):
        if other != s and model.device[other] == model.device[s]:
            return False
    return True


@lean
def rate(general: GeneralProblem, layer: GeneralLayer, loads: GeneralLoads, rates: Ints) -> None:
    """Write the rate of every row, the lower the more promising; the loads are written to.

    It is the lower bound of the end plus the mean over the devices of when each could finish all
    its work without waiting again. The mean measures the cost of idle time and RECOMPUTEs so far;
    many lower bounds are equal.
    """
    devices = len(general.room)
    for row in range(layer.size[0]):
        state = GeneralState(layer.codes[row], layer.waiting[row], layer.times[row])
        survey(general, state, loads)
        total = 0
        for device in range(devices):
            total += state.times[1 + device] + loads.owed[device]
        for s in range(len(general.forward)):
            total += (general.num_microbatches - loads.forwards[s]) * general.forward[s]
            total += (general.num_microbatches - loads.gradients[s]) * general.gradient[s]
            total += (general.num_microbatches - loads.weights[s]) * general.weight[s]
        rates[row] = layer.end[row] + total // devices
