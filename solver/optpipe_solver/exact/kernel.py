"""Compiled: what a state of `counts` says, when its next passes can start, and what they change.

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
    Floats = NDArray[np.float64]

__all__ = [
    "Desk",
    "Line",
    "State",
    "input_of_f",
    "input_of_i",
    "length_of",
    "make_desk",
    "make_state",
    "pass_over",
    "piece_of",
    "run",
    "start_of",
    "wastes",
    "weigh",
]


class Line(NamedTuple):
    """A problem in whole numbers: entries per stage, ``room`` per device.

    ``there[s]`` and ``back[s]`` are the boundary transfers between s and s + 1. ``last_f[k, s]`` is
    the least time after the end of the k-th last F of s, k from 0; ``last_i`` and ``last_w`` after
    the pieces ``gradient`` and ``weight`` (see `bounds.relaxation`). ``shortest`` is the least time
    of any pass, ``horizon`` the longest schedule looked for. ``urgency`` is what a bound of the end
    counts for that lies so many slots below the horizon, ``slots`` per unit; then nothing.
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
    shortest: int
    horizon: int
    slots: float
    urgency: Floats


class State(NamedTuple):
    """How far all is.

    ``counts`` holds per stage the F, gradients and W started; ``times`` the clock, when each device
    is free, and when the last output of F, then of I or B, of each stage is where it is needed,
    none before the clock.
    """

    counts: Bytes
    times: Ints


class Desk(NamedTuple):
    """What is read off a state: per device bytes ``held`` and the time of all pieces ``left``.

    ``ends`` is a place to compute in, per stage.
    """

    held: Ints
    left: Ints
    ends: Ints


def make_state(num_stages: int, num_devices: int) -> State:
    """Return a state to write into."""
    return State(
        np.zeros(3 * num_stages, dtype=np.int8),
        np.zeros(1 + num_devices + 2 * num_stages, dtype=np.int64),
    )


def make_desk(num_stages: int, num_devices: int) -> Desk:
    """Return a desk to write on."""
    held, left = (np.zeros(num_devices, dtype=np.int64) for _ in range(2))
    return Desk(held, left, np.zeros(num_stages, dtype=np.int64))


@lean
def weigh(line: Line, state: State, desk: Desk) -> None:
    """Write on the desk what every device holds, and what it has left to run."""
    desk.held[:] = 0
    desk.left[:] = 0
    m = line.num_microbatches
    for s in range(len(line.forward)):
        device = line.device[s]
        f, b, w = state.counts[3 * s], state.counts[3 * s + 1], state.counts[3 * s + 2]
        desk.held[device] += (f - b) * line.activation[s] + (b - w) * line.context[s]
        desk.left[device] += (m - f) * line.forward[s] + (m - b) * line.gradient[s]
        desk.left[device] += (m - w) * line.weight[s]


@lean
def length_of(line: Line, s: int, kind: int) -> int:
    """Return the time of a pass."""
    if kind == 0:
        return int(line.forward[s])
    if kind == 2:
        return int(line.split_w[s])
    return int(line.fused[s] if kind == 3 else line.split_i[s])


@lean
def piece_of(line: Line, s: int, kind: int) -> int:
    """Return the time of the pieces that a pass stands for, at most its own."""
    if kind == 0:
        return int(line.forward[s])
    gradient = line.gradient[s] if kind != 2 else 0
    return int(gradient + (line.weight[s] if kind != 1 else 0))


@lean
def _arrival(line: Line, state: State, s: int, gradient: int, index: int) -> int:
    """Return when an output of s is where it is needed: the last one made; the clock for others."""
    made = state.counts[3 * s + gradient]
    if index == made - 1:
        return int(state.times[1 + len(line.room) + len(line.forward) * gradient + s])
    return int(state.times[0])


@lean
def start_of(line: Line, state: State, desk: Desk, s: int, kind: int) -> int:
    """Return when the next pass of a kind (0 F, 1 I, 2 W, 3 B) can start on s; -1 = it cannot.

    The desk says what devices hold.
    """
    device = line.device[s]
    needs = desk.held[device] + line.workspace[kind, s]
    if kind == 0:
        needs += line.activation[s]
    elif kind == 1:
        needs += max(0, line.context[s] - line.activation[s])
    if needs > line.room[device]:
        return -1
    ready = _input(line, state, s, kind)
    return -1 if ready < 0 else max(ready, int(state.times[1 + device]))


@lean
def _input(line: Line, state: State, s: int, kind: int) -> int:
    """Return when what the next pass of a kind needs is there; -1 = it is not even begun."""
    if kind == 0:
        return input_of_f(line, state, s)
    if kind == 2:
        waits = state.counts[3 * s + 2] < state.counts[3 * s + 1]
        return int(state.times[0]) if waits else -1
    if kind == 3 and not line.may_fuse[s]:
        return -1
    return input_of_i(line, state, s)


@lean
def input_of_f(line: Line, state: State, s: int) -> int:
    """Return when the input of the next F of s is there; -1 = nobody has started to make it."""
    f = state.counts[3 * s]
    if f == line.num_microbatches:
        return -1
    if s == 0:
        return int(state.times[0])
    return _arrival(line, state, s - 1, 0, f) if state.counts[3 * s - 3] > f else -1


@lean
def input_of_i(line: Line, state: State, s: int) -> int:
    """Return when the gradient for the next I of s is there; -1 = nobody has started to make it."""
    b = state.counts[3 * s + 1]
    if b >= state.counts[3 * s]:
        return -1
    if s + 1 == len(line.forward):
        return int(state.times[0])
    return _arrival(line, state, s + 1, 1, b) if state.counts[3 * s + 4] > b else -1


@lean
def wastes(line: Line, state: State, desk: Desk, s: int, start: int) -> bool:
    """Whether a W that waits would fit into the idle time before the start of another pass."""
    device = line.device[s]
    free = state.times[1 + device]
    if free + line.shortest > start:
        return False
    for other in range(len(line.forward)):
        if line.device[other] == device and free + line.split_w[other] <= start:
            waits = state.counts[3 * other + 2] < state.counts[3 * other + 1]
            if waits and desk.held[device] + line.workspace[2, other] <= line.room[device]:
                return True
    return False


@lean
def run(line: Line, state: State, what: tuple[int, int, int], new: State) -> None:
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
def pass_over(line: Line, new: State, device: int, start: int) -> None:
    """Let the lower devices that stay idle as a pass starts wait until anything ends."""
    then = -1
    for lower in range(1, 1 + device):
        if new.times[lower] <= start:
            if then < 0:
                then = _next_end(line, new.times, start)
            new.times[lower] = then


@lean
def _next_end(line: Line, times: Ints, start: int) -> int:
    """Return when a pass ends or an output arrives next, or may, of what is yet to start."""
    then = start + line.shortest
    for at in times:
        if at > start:
            then = min(then, at)
    return int(then)
