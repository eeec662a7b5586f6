"""Compiled: all states that counts of passes and the clock can reach, layer by layer.

See `counts` for what a state is and why nothing is lost. Times are whole numbers of a unit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.lean import lean

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Grid = NDArray[np.int64]
    Bytes = NDArray[np.int8]
    Flags = NDArray[np.bool_]

__all__ = ["Layer", "Line", "State", "expand", "make_layer", "make_state"]


class Line(NamedTuple):
    """A problem in whole numbers: entries per stage, ``room`` per device.

    ``there[s]`` and ``back[s]`` are the boundary transfers between s and s + 1. ``last_f[k, s]`` is
    the least time after the end of the k-th last F of s, k from 0; ``last_i`` and ``last_w`` after
    the pieces ``gradient`` and ``weight`` (see `bounds.relaxation`). ``horizon`` is the longest
    schedule looked for.
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
    workspace: Grid
    room: Ints
    there: Ints
    back: Ints
    last_f: Grid
    last_i: Grid
    last_w: Grid
    horizon: int


class Layer(NamedTuple):
    """States with the same number of passes done: ``size[0]`` rows.

    ``counts`` holds per stage the F, gradients and W started; ``times`` the clock, when each device
    is free, and when the last output of F, then of I or B, of each stage is where it is needed,
    none before the clock. ``parent`` is the row of the state before in its layer, ``way`` 4 x stage
    + kind of the pass between. ``first`` and ``link`` chain rows with one hash.
    """

    counts: Bytes
    times: Grid
    alive: Flags
    parent: Ints
    way: Ints
    link: Ints
    first: Ints
    size: Ints


class State(NamedTuple):
    """One row of a layer; ``ends`` is a place to compute in, one entry per stage."""

    counts: Bytes
    times: Ints
    ends: Ints


def make_layer(most: int, num_stages: int, num_devices: int) -> Layer:
    """Return an empty layer with room for ``most`` states."""
    slots = 1
    while slots < most:
        slots *= 2
    return Layer(
        counts=np.zeros((most, 3 * num_stages), dtype=np.int8),
        times=np.zeros((most, 1 + num_devices + 2 * num_stages), dtype=np.int64),
        alive=np.zeros(most, dtype=np.bool_),
        parent=np.zeros(most, dtype=np.int64),
        way=np.zeros(most, dtype=np.int64),
        link=np.full(most, -1, dtype=np.int64),
        first=np.full(slots, -1, dtype=np.int64),
        size=np.zeros(1, dtype=np.int64),
    )


def make_state(num_stages: int, num_devices: int) -> State:
    """Return a state to write into."""
    return State(
        np.zeros(3 * num_stages, dtype=np.int8),
        np.zeros(1 + num_devices + 2 * num_stages, dtype=np.int64),
        np.zeros(num_stages, dtype=np.int64),
    )


@lean
def expand(
    line: Line, layers: tuple[Layer, Layer, Layer], new: State, begin: int, most: int
) -> int:
    """Add the successors of up to ``most`` states of the first layer from row ``begin`` on.

    Those by F, I and W go to the second layer, those by B to the third: it counts as two passes.
    Returns the next row, -1 where a layer is full. ``new`` is written to.
    """
    layer, one, two = layers
    end = min(layer.size[0], begin + most)
    for row in range(begin, end):
        if not layer.alive[row]:
            continue
        state = State(layer.counts[row], layer.times[row], new.ends)
        for s in range(len(line.forward)):
            for kind in range(4):
                start = _start(line, state, s, kind)
                if start < 0 or (kind != 2 and _wastes(line, state, s, start)):
                    continue
                _run(line, state, (s, kind, start), new)
                if max(_end_by_pass(line, new, s, kind), _least_end(line, new)) > line.horizon:
                    continue
                if not _keep(two if kind == 3 else one, new, (row, 4 * s + kind)):
                    return -1
    return int(end)


@lean
def _arrival(line: Line, state: State, s: int, gradient: int, index: int) -> int:
    """Return when an output of s is where it is needed: the last one made; the clock for others."""
    made = state.counts[3 * s + gradient]
    if index == made - 1:
        return int(state.times[1 + len(line.room) + len(line.forward) * gradient + s])
    return int(state.times[0])


@lean
def _start(line: Line, state: State, s: int, kind: int) -> int:
    """Return when the next pass of a kind (0 F, 1 I, 2 W, 3 B) can start on s; -1 = it cannot."""
    device = line.device[s]
    ready = int(state.times[0])
    needs = line.workspace[kind, s]
    if kind == 0:
        ready = _input_of_f(line, state, s)
        needs += line.activation[s]
    elif kind == 2:
        if state.counts[3 * s + 2] >= state.counts[3 * s + 1]:
            return -1
    elif kind == 1 or line.may_fuse[s]:
        ready = _input_of_i(line, state, s)
        if kind == 1:
            needs += max(0, line.context[s] - line.activation[s])
    else:
        return -1
    if ready < 0 or _held(line, state, device) + needs > line.room[device]:
        return -1
    return max(ready, int(state.times[1 + device]))


@lean
def _input_of_f(line: Line, state: State, s: int) -> int:
    """Return when the input of the next F of s is there; -1 = nobody has started to make it."""
    f = state.counts[3 * s]
    if f == line.num_microbatches:
        return -1
    if s == 0:
        return int(state.times[0])
    return _arrival(line, state, s - 1, 0, f) if state.counts[3 * s - 3] > f else -1


@lean
def _input_of_i(line: Line, state: State, s: int) -> int:
    """Return when the gradient for the next I of s is there; -1 = nobody has started to make it."""
    b = state.counts[3 * s + 1]
    if b >= state.counts[3 * s]:
        return -1
    if s + 1 == len(line.forward):
        return int(state.times[0])
    return _arrival(line, state, s + 1, 1, b) if state.counts[3 * s + 4] > b else -1


@lean
def _held(line: Line, state: State, device: int) -> int:
    held = 0
    for s in range(len(line.forward)):
        if line.device[s] == device:
            f, b, w = state.counts[3 * s], state.counts[3 * s + 1], state.counts[3 * s + 2]
            held += (f - b) * line.activation[s] + (b - w) * line.context[s]
    return held


@lean
def _wastes(line: Line, state: State, s: int, start: int) -> bool:
    """Whether a W that waits would fit into the idle time before the start of another pass."""
    device = line.device[s]
    for other in range(len(line.forward)):
        waits = state.counts[3 * other + 2] < state.counts[3 * other + 1]
        if line.device[other] == device and waits:
            fits = _held(line, state, device) + line.workspace[2, other] <= line.room[device]
            if fits and state.times[1 + device] + line.split_w[other] <= start:
                return True
    return False


@lean
def _run(line: Line, state: State, what: tuple[int, int, int], new: State) -> None:
    """Write the state after a pass: stage, kind and start."""
    s, kind, start = what
    num_stages, num_devices, device = len(line.forward), len(line.room), line.device[s]
    counts, times = new.counts, new.times
    for i in range(len(counts)):
        counts[i] = state.counts[i]
    for i in range(len(times)):
        times[i] = max(state.times[i], start)
    length = line.forward[s]
    if kind == 2:
        length = line.split_w[s]
    elif kind > 0:
        length = line.fused[s] if kind == 3 else line.split_i[s]
    times[1 + device] = start + length
    counts[3 * s] += kind == 0
    counts[3 * s + 1] += kind % 2 == 1
    counts[3 * s + 2] += kind >= 2
    if kind == 0 and s + 1 < num_stages:
        times[1 + num_devices + s] = start + length + line.there[s]
    elif kind % 2 == 1 and s > 0:
        times[1 + num_devices + num_stages + s] = start + length + line.back[s - 1]


@lean
def _end_by_pass(line: Line, new: State, s: int, kind: int) -> int:
    """Return a lower bound of the end from what must follow the pass that has just started."""
    m, end = line.num_microbatches, new.times[1 + line.device[s]]
    f, b, w = new.counts[3 * s], new.counts[3 * s + 1], new.counts[3 * s + 2]
    if kind == 0:
        return int(end + line.last_f[m - f, s])
    if kind == 1:
        return int(end + line.last_i[m - b, s])
    return int(end + line.last_w[m - w, s])


@lean
def _least_end(line: Line, state: State) -> int:
    """Return a lower bound of the end of all schedules that go through a state."""
    least = max(_end_by_load(line, state), _end_by_forwards(line, state))
    return max(least, _end_by_backwards(line, state))


@lean
def _end_by_load(line: Line, state: State) -> int:
    """Every device still has all its pieces to run that have not started."""
    m, counts, least = line.num_microbatches, state.counts, 0
    for device in range(len(line.room)):
        end = state.times[1 + device]
        for s in range(len(line.forward)):
            if line.device[s] == device:
                end += (m - counts[3 * s]) * line.forward[s]
                end += (m - counts[3 * s + 1]) * line.gradient[s]
                end += (m - counts[3 * s + 2]) * line.weight[s]
        least = max(least, end)
    return least


@lean
def _end_by_forwards(line: Line, state: State) -> int:
    """The next F of each stage, and what must follow it; its least end is kept."""
    ends, least = state.ends, 0
    for s in range(len(line.forward)):
        f = state.counts[3 * s]
        if f == line.num_microbatches:
            continue
        ready = _input_of_f(line, state, s)
        if ready < 0:
            ready = ends[s - 1] + line.there[s - 1]
        ends[s] = max(ready, state.times[1 + line.device[s]]) + line.forward[s]
        least = max(least, ends[s] + line.last_f[line.num_microbatches - 1 - f, s])
    return int(least)


@lean
def _end_by_backwards(line: Line, state: State) -> int:
    """The next gradient and W of each stage, and what must follow them."""
    ends, m, least, behind = state.ends, line.num_microbatches, 0, 0
    for s in range(len(line.forward) - 1, -1, -1):
        f, b, w = state.counts[3 * s], state.counts[3 * s + 1], state.counts[3 * s + 2]
        free = state.times[1 + line.device[s]]
        if s + 1 < len(line.forward):
            behind += line.back[s]
        if b < m:
            ready = _input_of_i(line, state, s)
            if ready < 0:
                ready = max(behind, ends[s]) if f == b else behind
            behind = max(ready, free) + line.gradient[s]
            least = max(least, behind + line.last_i[m - 1 - b, s])
        if w < m:
            start = free if w < b else behind
            least = max(least, start + line.weight[s] + line.last_w[m - 1 - w, s])
    return int(least)


@lean
def _keep(layer: Layer, state: State, origin: tuple[int, int]) -> bool:
    """Add a state unless another with its counts is nowhere later; False = no room."""
    slot = _hash(state.counts) & (len(layer.first) - 1)
    at = layer.first[slot]
    while at >= 0:
        if layer.alive[at] and _same(layer.counts[at], state.counts):
            if _not_later(layer.times[at], state.times):
                return True
            if _not_later(state.times, layer.times[at]):
                layer.alive[at] = False
        at = layer.link[at]
    row = layer.size[0]
    if row == len(layer.alive):
        return False
    for i in range(len(state.counts)):
        layer.counts[row, i] = state.counts[i]
    for i in range(len(state.times)):
        layer.times[row, i] = state.times[i]
    layer.parent[row], layer.way[row] = origin
    layer.alive[row] = True
    layer.link[row], layer.first[slot] = layer.first[slot], row
    layer.size[0] += 1
    return True


@lean
def _hash(counts: Bytes) -> int:
    value = 1469598103
    for x in counts:
        value = (value ^ int(x)) * 1099511 & 0x7FFFFFFFFFFF
        value ^= value >> 17
    return value


@lean
def _same(a: Bytes, b: Bytes) -> bool:
    for i in range(len(a)):  # noqa: SIM110 - compiled
        if a[i] != b[i]:
            return False
    return True


@lean
def _not_later(a: Grid, b: Grid) -> bool:
    for i in range(len(a)):  # noqa: SIM110 - compiled
        if a[i] > b[i]:
            return False
    return True
