"""Compiled: the states of the fifo search, the start times of passes, and the state after a pass.

See `fifo_search` for states and why no schedule is lost. Times are whole numbers of a unit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optpipe_solver.jit import lean

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe_solver.arrays import Flags, Floats, Ints

    Bytes = NDArray[np.int8]

__all__ = [
    "SEED",
    "FifoLayer",
    "FifoLoads",
    "FifoProblem",
    "FifoState",
    "chain_fifo",
    "ends_late",
    "expand_fifo",
    "hashed",
    "input_of_f",
    "input_of_i",
    "length_of",
    "make_fifo_layer",
    "make_fifo_loads",
    "make_fifo_state",
    "not_later",
    "pass_over",
    "piece_of",
    "rate_of",
    "run",
    "same",
    "start_of",
    "wastes",
    "weigh",
]


class FifoProblem(NamedTuple):
    """A problem in whole numbers: entries per stage, ``room`` per device.

    ``there[s]`` and ``back[s]`` are the boundary transfers between s and s + 1. ``last_f[k, s]`` is
    the minimum time after the end of the k-th last F of s, k from 0. ``last_i`` and ``last_w`` are
    the same for the pieces ``gradient`` and ``weight`` (see `bounds.relaxation`). ``shortest`` is
    the minimum time of any pass. ``horizon`` is the length limit of the search. ``urgency`` weighs
    a bound of the end by its slot below the horizon, ``slots`` per unit, then 0.
    """

    num_microbatches: int
    device: Ints
    forward: Ints
    split_i: Ints
    split_w: Ints
    fused: Ints
    gradient: Ints
    weight: Ints
    may_fuse: Flags
    activation: Ints
    context: Ints
    workspace: Ints
    room: Ints
    there: Ints
    back: Ints
    last_f: Ints
    last_i: Ints
    last_w: Ints
    shortest: int
    horizon: int
    slots: float
    urgency: Floats


class FifoState(NamedTuple):
    """A partial schedule.

    ``counts`` holds per stage the F, gradients and W started. ``times`` holds the clock, when each
    device is free, and when the last output of F, then of I or B, of each stage arrives. None is
    before the clock.
    """

    counts: Bytes
    times: Ints


class FifoLoads(NamedTuple):
    """Sums over a state: per device ``held_bytes`` and the time of all pieces ``left``.

    ``ends`` is scratch, per stage.
    """

    held_bytes: Ints
    left: Ints
    ends: Ints


def make_fifo_state(num_stages: int, num_devices: int) -> FifoState:
    """Return a state to write into."""
    return FifoState(
        np.zeros(3 * num_stages, dtype=np.int8),
        np.zeros(1 + num_devices + 2 * num_stages, dtype=np.int64),
    )


def make_fifo_loads(num_stages: int, num_devices: int) -> FifoLoads:
    """Return loads to write on."""
    held_bytes, left = (np.zeros(num_devices, dtype=np.int64) for _ in range(2))
    return FifoLoads(held_bytes, left, np.zeros(num_stages, dtype=np.int64))


@lean
def weigh(line: FifoProblem, state: FifoState, loads: FifoLoads) -> None:
    """Write into the loads the bytes that each device holds, and the time of its pieces left."""
    loads.held_bytes[:] = 0
    loads.left[:] = 0
    m = line.num_microbatches
    for s in range(len(line.forward)):
        device = line.device[s]
        f, b, w = state.counts[3 * s], state.counts[3 * s + 1], state.counts[3 * s + 2]
        loads.held_bytes[device] += (f - b) * line.activation[s] + (b - w) * line.context[s]
        loads.left[device] += (m - f) * line.forward[s] + (m - b) * line.gradient[s]
        loads.left[device] += (m - w) * line.weight[s]


@lean
def length_of(line: FifoProblem, s: int, kind: int) -> int:
    """Return the time of a pass."""
    if kind == 0:
        return int(line.forward[s])
    if kind == 2:
        return int(line.split_w[s])
    return int(line.fused[s] if kind == 3 else line.split_i[s])


@lean
def piece_of(line: FifoProblem, s: int, kind: int) -> int:
    """Return the time of the pieces that make up a pass, at most its own time."""
    if kind == 0:
        return int(line.forward[s])
    gradient = line.gradient[s] if kind != 2 else 0
    return int(gradient + (line.weight[s] if kind != 1 else 0))


@lean
def _arrival(line: FifoProblem, state: FifoState, s: int, gradient: int, index: int) -> int:
    """Return when an output of s is where it is needed: the last one made; the clock for others."""
    num_done = state.counts[3 * s + gradient]
    if index == num_done - 1:
        return int(state.times[1 + len(line.room) + len(line.forward) * gradient + s])
    return int(state.times[0])


@lean
def start_of(line: FifoProblem, state: FifoState, loads: FifoLoads, s: int, kind: int) -> int:
    """Return when the next pass of a kind (0 F, 1 I, 2 W, 3 B) can start on s; -1 = it cannot.

    ``loads`` has the bytes that devices hold.
    """
    device = line.device[s]
    needs = loads.held_bytes[device] + line.workspace[kind, s]
    if kind == 0:
        needs += line.activation[s]
    elif kind == 1:
        needs += max(0, line.context[s] - line.activation[s])
    if needs > line.room[device]:
        return -1
    ready = _input(line, state, s, kind)
    return -1 if ready < 0 else max(ready, int(state.times[1 + device]))


@lean
def _input(line: FifoProblem, state: FifoState, s: int, kind: int) -> int:
    """Return when the next input of a kind of pass arrives; -1 = its producer has not started."""
    if kind == 0:
        return input_of_f(line, state, s)
    if kind == 2:
        waits = state.counts[3 * s + 2] < state.counts[3 * s + 1]
        return int(state.times[0]) if waits else -1
    if kind == 3 and not line.may_fuse[s]:
        return -1
    return input_of_i(line, state, s)


@lean
def input_of_f(line: FifoProblem, state: FifoState, s: int) -> int:
    """Return when the input of the next F of s arrives; -1 = its producer has not started."""
    f = state.counts[3 * s]
    if f == line.num_microbatches:
        return -1
    if s == 0:
        return int(state.times[0])
    return _arrival(line, state, s - 1, 0, f) if state.counts[3 * s - 3] > f else -1


@lean
def input_of_i(line: FifoProblem, state: FifoState, s: int) -> int:
    """Return when the gradient for the next I of s arrives; -1 = its producer has not started."""
    b = state.counts[3 * s + 1]
    if b >= state.counts[3 * s]:
        return -1
    if s + 1 == len(line.forward):
        return int(state.times[0])
    return _arrival(line, state, s + 1, 1, b) if state.counts[3 * s + 4] > b else -1


@lean
def wastes(line: FifoProblem, state: FifoState, loads: FifoLoads, s: int, start: int) -> bool:
    """Whether a W that waits would fit into the idle time before the start of another pass."""
    device = line.device[s]
    free = state.times[1 + device]
    if free + line.shortest > start:
        return False
    for other in range(len(line.forward)):
        if line.device[other] == device and free + line.split_w[other] <= start:
            waits = state.counts[3 * other + 2] < state.counts[3 * other + 1]
            if waits and loads.held_bytes[device] + line.workspace[2, other] <= line.room[device]:
                return True
    return False


@lean
def run(line: FifoProblem, state: FifoState, what: tuple[int, int, int], new: FifoState) -> None:
    """Write the state after a pass: stage, kind and start."""
    s, kind, start = what
    num_stages, num_devices, device = len(line.forward), len(line.room), line.device[s]
    counts, times = new.counts, new.times
    for i in range(len(counts)):
        counts[i] = state.counts[i]
    for i in range(len(times)):
        times[i] = max(state.times[i], start)
    length = length_of(line, s, kind)
    times[1 + device] = start + length
    counts[3 * s] += kind == 0
    counts[3 * s + 1] += kind % 2 == 1
    counts[3 * s + 2] += kind >= 2
    if kind == 0 and s + 1 < num_stages:
        times[1 + num_devices + s] = start + length + line.there[s]
    elif kind % 2 == 1 and s > 0:
        times[1 + num_devices + num_stages + s] = start + length + line.back[s - 1]


@lean
def pass_over(line: FifoProblem, new: FifoState, device: int, start: int) -> None:
    """Let the lower devices that stay idle as a pass starts wait until anything ends."""
    then = -1
    for lower in range(1, 1 + device):
        if new.times[lower] <= start:
            if then < 0:
                then = _next_end(line, new.times, start)
            new.times[lower] = then


@lean
def _next_end(line: FifoProblem, times: Ints, start: int) -> int:
    """Return when a pass ends or an output arrives next, or may, of what is yet to start."""
    then = start + line.shortest
    for at in times:
        if at > start:
            then = min(then, at)
    return int(then)


# --- Compiled: layers of states, the successors of each, and dominance among them.


class FifoLayer(NamedTuple):
    """States with the same number of passes done: ``size[0]`` rows.

    ``counts`` and ``times`` are those of `FifoState`. ``rate`` says how promising the state is;
    rows with a rate of ``limit[0]`` or more are not added. ``parent`` is the row of its predecessor
    in that layer, ``way`` is 4 x stage + kind of the pass between them. ``first`` and ``link``
    chain rows with one hash.
    """

    counts: NDArray[np.int8]
    times: Ints
    rate: Floats
    parent: Ints
    way: Ints
    alive: Flags
    link: Ints
    first: Ints
    size: Ints
    limit: Floats


def make_fifo_layer(most: int, num_stages: int, num_devices: int) -> FifoLayer:
    """Return an empty layer with room for ``most`` states and the successors of one."""
    most += 4 * num_stages
    slots = 1
    while slots < most:
        slots *= 2
    return FifoLayer(
        counts=np.zeros((most, 3 * num_stages), dtype=np.int8),
        times=np.zeros((most, 1 + num_devices + 2 * num_stages), dtype=np.int64),
        rate=np.zeros(most, dtype=np.float64),
        parent=np.zeros(most, dtype=np.int64),
        way=np.zeros(most, dtype=np.int64),
        alive=np.zeros(most, dtype=np.bool_),
        link=np.full(most, -1, dtype=np.int64),
        first=np.full(slots, -1, dtype=np.int64),
        size=np.zeros(1, dtype=np.int64),
        limit=np.full(1, np.inf),
    )


@lean
def chain_fifo(layer: FifoLayer) -> None:
    """Chain all rows of a layer anew."""
    layer.first[:] = -1
    for row in range(layer.size[0]):
        slot = hashed(SEED, layer.counts[row]) & (len(layer.first) - 1)
        layer.link[row], layer.first[slot] = layer.first[slot], row


@lean
def expand_fifo(
    line: FifoProblem,
    layers: tuple[FifoLayer, FifoLayer, FifoLayer],
    work: tuple[FifoState, FifoLoads],
    begin: int,
    most: int,
) -> int:
    """Add the successors of up to ``most`` states of the first layer from row ``begin`` on.

    Successors by F, I and W go to the second layer, those by B to the third: a B counts as two
    passes. Returns the next row to expand; it comes earlier if a layer may lack room for that row's
    successors. ``work`` is scratch.
    """
    layer, one, two = layers
    end = min(layer.size[0], begin + most)
    for row in range(begin, end):
        if _has_no_room(line, one) or _has_no_room(line, two):
            return int(row)
        if layer.alive[row]:
            state = FifoState(layer.counts[row], layer.times[row])
            _expand_row(line, layers, state, work, row)
    return int(end)


@lean
def _has_no_room(line: FifoProblem, layer: FifoLayer) -> bool:
    return bool(layer.size[0] + 4 * len(line.forward) > len(layer.alive))


@lean
def _expand_row(
    line: FifoProblem,
    layers: tuple[FifoLayer, FifoLayer, FifoLayer],
    state: FifoState,
    work: tuple[FifoState, FifoLoads],
    row: int,
) -> None:
    """Add the state after each pass to its layer if it is worth it."""
    _, one, two = layers
    new, loads = work
    weigh(line, state, loads)
    for s in range(len(line.forward)):
        for kind in range(4):
            start = start_of(line, state, loads, s, kind)
            if start < 0 or (kind != 2 and wastes(line, state, loads, s, start)):
                continue
            what = s, kind, start
            if ends_late(line, state, loads, what):
                continue
            run(line, state, what, new)
            pass_over(line, new, line.device[s], start)
            rate = rate_of(line, new, loads, what)
            if rate < 0:
                continue
            if kind == 3:
                _keep(two, new, rate, (row, 4 * s + kind))
            else:
                _keep(one, new, rate, (row, 4 * s + kind))


@lean
def _keep(layer: FifoLayer, state: FifoState, rate: float, origin: tuple[int, int]) -> None:
    """Add a state unless it is barred, or another with its counts is nowhere later."""
    if rate >= layer.limit[0]:
        return
    slot = hashed(SEED, state.counts) & (len(layer.first) - 1)
    at = layer.first[slot]
    while at >= 0:
        if layer.alive[at] and same(layer.counts[at], state.counts):
            if not_later(layer.times[at], state.times):
                return
            if not_later(state.times, layer.times[at]):
                layer.alive[at] = False
        at = layer.link[at]
    row = layer.size[0]
    for i in range(len(state.counts)):
        layer.counts[row, i] = state.counts[i]
    for i in range(len(state.times)):
        layer.times[row, i] = state.times[i]
    layer.rate[row] = rate
    layer.parent[row], layer.way[row] = origin
    layer.alive[row] = True
    layer.link[row], layer.first[slot] = layer.first[slot], row
    layer.size[0] += 1


SEED = 1469598103
"""The initial value of `hashed`."""


@lean
def hashed(value: int, row: NDArray[Any]) -> int:
    """Return a hash of whole numbers, given that of those before them."""
    for x in row:
        value = (value ^ int(x)) * 1099511 & 0x7FFFFFFFFFFF
        value ^= value >> 17
    return value


@lean
def same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Whether two rows of equal length are equal."""
    for i in range(len(a)):  # noqa: SIM110 - compiled
        if a[i] != b[i]:
            return False
    return True


@lean
def not_later(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Whether no time of a row is later than that of another."""
    for i in range(len(a)):  # noqa: SIM110 - compiled
        if a[i] > b[i]:
            return False
    return True


# --- Compiled: how long every schedule through a state is at least, and its rate.


@lean
def ends_late(
    line: FifoProblem, state: FifoState, loads: FifoLoads, what: tuple[int, int, int]
) -> bool:
    """Whether what must follow a pass (stage, kind, start) goes beyond the horizon.

    That is what its device has left to run, and the tail of the k-th last pass of its kind.
    """
    s, kind, start = what
    left, end = line.num_microbatches - 1, start + length_of(line, s, kind)
    if start + loads.left[line.device[s]] > line.horizon:
        return True
    if kind == 0:
        end += line.last_f[left - state.counts[3 * s], s]
    elif kind == 1:
        end += line.last_i[left - state.counts[3 * s + 1], s]
    else:
        end += line.last_w[left - state.counts[3 * s + 2], s]
    return bool(end > line.horizon)


@lean
def rate_of(
    line: FifoProblem, new: FifoState, loads: FifoLoads, what: tuple[int, int, int]
) -> float:
    """Return the rate of the state after a pass; -1 = it ends after the horizon.

    A lower rate is more promising. It sums the times at which each device has run all its pieces,
    which measures idle time so far, and the `_urgency` of other bounds. Those are the end of the
    next F, gradient and W of every stage plus the work that must follow them. With l the mean time
    of a pass, a bound b adds l exp(-(horizon - b) / (5 l)). ``loads`` is that of the state before.
    """
    total = _loads(line, new, loads, what)
    forwards = _forwards(line, new, loads) if total >= 0 else -1.0
    backwards = _backwards(line, new, loads) if forwards >= 0 else -1.0
    return total + forwards + backwards if backwards >= 0 else -1.0


@lean
def _loads(line: FifoProblem, new: FifoState, loads: FifoLoads, what: tuple[int, int, int]) -> int:
    """Return the sum of when every device has run all its pieces that have not started; -1 = late.

    Idle time to come is not counted.
    """
    s, kind, _ = what
    total = 0
    for device in range(len(loads.left)):
        end = new.times[1 + device] + loads.left[device]
        if device == line.device[s]:
            end -= piece_of(line, s, kind)
        if end > line.horizon:
            return -1
        total += end
    return int(total)


@lean
def _urgency(urgency: Floats, slot: float) -> float:
    """Return what a bound of the end counts for in the rate: the more, the nearer the horizon."""
    return float(urgency[int(slot)]) if slot < len(urgency) else 0.0


@lean
def _forwards(line: FifoProblem, state: FifoState, loads: FifoLoads) -> float:
    """The next F of each stage, and what must follow it; its least end is kept; -1 = late."""
    ends, urgency = loads.ends, 0.0
    for s in range(len(line.forward)):
        f = state.counts[3 * s]
        if f == line.num_microbatches:
            continue
        ready = input_of_f(line, state, s)
        if ready < 0:
            ready = ends[s - 1] + line.there[s - 1]
        ends[s] = max(ready, state.times[1 + line.device[s]]) + line.forward[s]
        least = ends[s] + line.last_f[line.num_microbatches - 1 - f, s]
        if least > line.horizon:
            return -1.0
        urgency += _urgency(line.urgency, line.slots * (line.horizon - least))
    return urgency


@lean
def _backwards(line: FifoProblem, state: FifoState, loads: FifoLoads) -> float:
    """The next gradient and W of each stage, and what must follow them; -1 = late."""
    ends, m, behind, urgency = loads.ends, line.num_microbatches, 0, 0.0
    for s in range(len(line.forward) - 1, -1, -1):
        f, b, w = state.counts[3 * s], state.counts[3 * s + 1], state.counts[3 * s + 2]
        free = state.times[1 + line.device[s]]
        if s + 1 < len(line.forward):
            behind += line.back[s]
        if b < m:
            ready = input_of_i(line, state, s)
            if ready < 0:
                ready = max(behind, ends[s]) if f == b else behind
            behind = max(ready, free) + line.gradient[s]
            least = behind + line.last_i[m - 1 - b, s]
            if least > line.horizon:
                return -1.0
            urgency += _urgency(line.urgency, line.slots * (line.horizon - least))
        if w < m:
            least = (free if w < b else behind) + line.weight[s] + line.last_w[m - 1 - w, s]
            if least > line.horizon:
                return -1.0
            urgency += _urgency(line.urgency, line.slots * (line.horizon - least))
    return urgency
