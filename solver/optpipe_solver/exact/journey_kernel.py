"""Compiled: all states that the journeys of micro-batches can reach, layer by layer.

See `journeys` for what a state is and why nothing is lost. Times are whole numbers of a unit.

A *code* says how far a micro-batch is: in its lowest bits the number of passes it has started on
its way up the stages and down again, then per stage a digit, its *mode* between F and backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.lean import lean

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe_solver.exact.road import Road

    Ints = NDArray[np.int64]
    Codes = NDArray[np.int32]
    Bytes = NDArray[np.int8]

__all__ = [
    "AWAY",
    "CHECKPOINT",
    "COMING",
    "DROP",
    "FUSED",
    "GRADIENT",
    "KEEP",
    "MODE_BITS",
    "MOST_COMING",
    "POSITION_BITS",
    "RECOMPUTE",
    "RELOAD",
    "SEND",
    "WEIGHT",
    "Desk",
    "State",
    "advance",
    "make_desk",
    "make_state",
    "needs",
    "run",
    "start_of",
    "survey",
    "wastes",
]

POSITION_BITS = 5
MODE_BITS = 3
AWAY, COMING, CHECKPOINT = 1, 2, 7
"""Modes: to be or being or having been offloaded; from ``COMING`` on the last RELOAD of the device,
the last but one, ...; with its checkpoint alone. 0 is all there."""

MOST_COMING = CHECKPOINT - COMING
"""RELOADs on their way that are told apart."""

KEEP, SEND, DROP, GRADIENT, FUSED, WEIGHT, RELOAD, RECOMPUTE = range(8)
"""Events: F in three ways, I, B, W, RELOAD, RECOMPUTE."""


class State(NamedTuple):
    """How far all is.

    ``codes`` of all micro-batches, in order, equal ones by when their next input is there;
    ``weights`` = W started per stage; ``times``: the clock, then per device when compute, D2H and
    H2D are free, then per micro-batch when the input of its next pass is there; none before the
    clock.
    """

    codes: Codes
    weights: Bytes
    times: NDArray[np.int32]


class Desk(NamedTuple):
    """What is read off a state: per device bytes ``held`` and micro-batches ``sent``.

    ``held`` counts what is AWAY as if it were there. ``owed`` is the time of the RECOMPUTEs to
    come. Per stage: ``forwards`` and ``gradients`` started. Per position: ``num_at`` of
    micro-batches, and when the first of them is ``ready`` for its next pass.
    """

    held: Ints
    sent: Ints
    owed: Ints
    forwards: Ints
    gradients: Ints
    num_at: Ints
    ready: Ints


def make_state(num_microbatches: int, num_stages: int, num_devices: int) -> State:
    """Return the state before everything."""
    return State(
        np.zeros(num_microbatches, dtype=np.int32),
        np.zeros(num_stages, dtype=np.int8),
        np.zeros(1 + 3 * num_devices + num_microbatches, dtype=np.int32),
    )


def make_desk(num_stages: int, num_devices: int) -> Desk:
    """Return a desk to write on."""
    devices = [np.zeros(num_devices, dtype=np.int64) for _ in range(3)]
    stages = [np.zeros(num_stages, dtype=np.int64) for _ in range(2)]
    positions = [np.zeros(2 * num_stages + 1, dtype=np.int64) for _ in range(2)]
    return Desk(*devices, *stages, *positions)


@lean
def position_of(code: int) -> int:
    """Return how many passes a micro-batch has started on its way."""
    return int(code & ((1 << POSITION_BITS) - 1))


@lean
def mode_of(code: int, s: int) -> int:
    """Return the mode of a micro-batch on stage s."""
    return int(code >> (POSITION_BITS + MODE_BITS * s) & ((1 << MODE_BITS) - 1))


@lean
def with_mode(code: int, s: int, mode: int) -> int:
    """Return the code with another mode on stage s."""
    return int(code + ((mode - mode_of(code, s)) << (POSITION_BITS + MODE_BITS * s)))


@lean
def survey(road: Road, state: State, desk: Desk) -> None:
    """Write on the desk what a state holds, ``num_at`` and ``ready`` aside."""
    num_stages = len(road.forward)
    desk.held[:] = 0
    desk.sent[:] = 0
    desk.owed[:] = 0
    desk.forwards[:] = 0
    desk.gradients[:] = 0
    for j in range(len(state.codes)):
        code = state.codes[j]
        at = position_of(code)
        for s in range(min(at, num_stages)):
            desk.forwards[s] += 1
            if at > 2 * num_stages - 1 - s:
                desk.gradients[s] += 1
            else:
                _hold(road, mode_of(code, s), s, desk)
    for s in range(num_stages):
        waiting = desk.gradients[s] - state.weights[s]
        desk.held[road.device[s]] += waiting * road.context[s]


@lean
def _hold(road: Road, mode: int, s: int, desk: Desk) -> None:
    """Add what one micro-batch holds on stage s, between F and backward."""
    device = road.device[s]
    if mode == CHECKPOINT:
        desk.held[device] += road.checkpoint[s]
        desk.owed[device] += road.again[s]
    else:
        desk.held[device] += road.activation[s]
        desk.sent[device] += mode == AWAY


@lean
def fits_from(road: Road, state: State, desk: Desk, device: int, what: tuple[int, int]) -> int:
    """Return from when on ``what[0]`` more bytes fit on a device; -1 = not before others go.

    Copies to the host run one after the other: at most ``what[1]`` may not have ended.
    """
    needs, most = what
    sent = desk.sent[device]
    over = desk.held[device] + needs - road.room[device]
    if over > 0:
        if road.moved[device] == 0:
            return -1
        most = min(most, sent - (over + road.moved[device] - 1) // road.moved[device])
        if most < 0:
            return -1
    if most >= sent:
        return int(state.times[0])
    left = state.times[1 + len(road.room) + device] - most * road.out[device]
    return int(max(left, state.times[0]))


@lean
def start_of(road: Road, state: State, desk: Desk, event: tuple[int, int, int]) -> int:
    """Return when an event (kind, index of the micro-batch, stage) can start; -1 = it cannot.

    A RELOAD starts when it is issued.
    """
    kind, j, s = event
    device = road.device[s]
    most = desk.sent[device] - (kind == RELOAD)
    fits = fits_from(road, state, desk, device, (needs(road, kind, s), most))
    if fits < 0:
        return -1
    start = max(fits, state.times[1 + device])
    if kind <= DROP:
        start = max(start, road.head_f[desk.forwards[s], s])
    if kind <= FUSED:
        start = max(start, ready_at(road, state, j, s))
    return int(start)


@lean
def needs(road: Road, kind: int, s: int) -> int:
    """Return the bytes an event needs above those held before it."""
    if kind == RELOAD:
        return int(road.moved[road.device[s]])
    if kind == RECOMPUTE:
        return int(road.activation[s] - road.checkpoint[s] + road.workspace[4, s])
    if kind == GRADIENT:
        return int(max(0, road.context[s] - road.activation[s]) + road.workspace[1, s])
    if kind == FUSED:
        return int(road.workspace[3, s])
    if kind == WEIGHT:
        return int(road.workspace[2, s])
    makes = road.checkpoint[s] if kind == DROP else road.activation[s]
    return int(makes + road.workspace[0, s])


@lean
def ready_at(road: Road, state: State, j: int, s: int) -> int:
    """Return when the next pass of a micro-batch, on stage s, has its input and its activation.

    What is AWAY or CHECKPOINT needs a RELOAD or RECOMPUTE, which starts when the device is free.
    """
    devices, device = len(road.room), road.device[s]
    ready = state.times[1 + 3 * devices + j]
    if position_of(state.codes[j]) < len(road.forward):
        return int(ready)
    mode = mode_of(state.codes[j], s)
    free, lane = state.times[1 + device], state.times[1 + 2 * devices + device]
    if mode == AWAY and road.waits[device]:
        return int(max(ready, max(free, lane) + road.home[device]))
    if mode == CHECKPOINT:
        return int(max(ready, free + road.again[s]))
    if COMING <= mode < CHECKPOINT:
        return int(max(ready, lane - (mode - COMING) * road.home[device]))
    return int(ready)


@lean
def wastes(road: Road, state: State, desk: Desk, device: int, start: int) -> bool:
    """Whether an I or W that waits would fit into the idle time before the start of an event."""
    free = state.times[1 + device]
    if start <= free:
        return False
    for s in range(len(road.forward)):
        if road.device[s] == device and state.weights[s] < desk.gradients[s]:
            room = fits_from(road, state, desk, device, (road.workspace[2, s], desk.sent[device]))
            if room >= 0 and max(room, free) + road.split_w[s] <= start and road.split_w[s] > 0:
                return True
    return _wastes_gradient(road, state, desk, device, start)


@lean
def _wastes_gradient(road: Road, state: State, desk: Desk, device: int, start: int) -> bool:
    last = 2 * len(road.forward) - 1
    for j in range(len(state.codes)):
        at = position_of(state.codes[j])
        if at <= last // 2 or at > last:
            continue
        s = last - at
        if road.device[s] != device or road.may_fuse[s] or road.split_i[s] == 0:
            continue
        mode = mode_of(state.codes[j], s)
        if mode in (AWAY, CHECKPOINT) or road.context[s] > road.activation[s]:
            continue
        begin = start_of(road, state, desk, (GRADIENT, j, s))
        if begin >= 0 and begin + road.split_i[s] <= start:
            return True
    return False


@lean
def run(road: Road, state: State, event: tuple[int, int, int], start: int, new: State) -> None:
    """Write the state after an event (kind, index of the micro-batch, stage) from its start."""
    advance(road, state, event, start, new)
    _sort(new, 1 + 3 * len(road.room))


@lean
def advance(road: Road, state: State, event: tuple[int, int, int], start: int, new: State) -> None:
    """As `run`, with every micro-batch left in its place."""
    kind, j, s = event
    device, devices = road.device[s], len(road.room)
    for i in range(len(state.codes)):
        new.codes[i] = state.codes[i]
    for i in range(len(state.weights)):
        new.weights[i] = state.weights[i]
    for i in range(len(state.times)):
        new.times[i] = max(state.times[i], start)
    _settle(road, new)
    if kind == RELOAD:
        _reload(road, new, j, s)
    elif kind == RECOMPUTE:
        new.times[1 + device] = start + road.again[s]
        new.codes[j] = with_mode(new.codes[j], s, 0)
    elif kind == WEIGHT:
        new.times[1 + device] = start + road.split_w[s]
        new.weights[s] += 1
    else:
        _pass(road, new, event, start)
        if kind == SEND:
            lane = 1 + devices + device
            new.times[lane] = max(new.times[lane], new.times[1 + device]) + road.out[device]


@lean
def _pass(road: Road, new: State, event: tuple[int, int, int], start: int) -> None:
    """Run F, I or B of a micro-batch."""
    kind, j, s = event
    end, arrival = start + road.forward[s], 0
    code = new.codes[j] + 1
    if kind < GRADIENT:
        arrival = end + road.there[s]
        code = with_mode(code, s, AWAY * (kind == SEND) + CHECKPOINT * (kind == DROP))
    else:
        end = start + (road.fused[s] if kind == FUSED else road.split_i[s])
        arrival = end + road.back[s - 1] if s > 0 else start
        code = with_mode(code, s, 0)
        new.weights[s] += kind == FUSED
    new.codes[j] = code
    new.times[1 + road.device[s]] = end
    new.times[1 + 3 * len(road.room) + j] = arrival


@lean
def _reload(road: Road, new: State, j: int, s: int) -> None:
    """Put a RELOAD behind those of its device."""
    device, devices = road.device[s], len(road.room)
    for i in range(len(new.codes)):
        for other in range(len(road.forward)):
            if road.device[other] == device:
                mode = mode_of(new.codes[i], other)
                if COMING <= mode < CHECKPOINT:
                    after = mode + 1 if mode + 1 < CHECKPOINT else 0
                    new.codes[i] = with_mode(new.codes[i], other, after)
    new.codes[j] = with_mode(new.codes[j], s, COMING)
    lane = 1 + 2 * devices + device
    new.times[lane] += road.home[device]


@lean
def _settle(road: Road, new: State) -> None:
    """What has come back by the clock is there."""
    devices, clock = len(road.room), new.times[0]
    for i in range(len(new.codes)):
        if new.codes[i] >> POSITION_BITS == 0:
            continue
        for s in range(len(road.forward)):
            mode = mode_of(new.codes[i], s)
            if COMING <= mode < CHECKPOINT:
                device = road.device[s]
                end = new.times[1 + 2 * devices + device]
                if end - (mode - COMING) * road.home[device] <= clock:
                    new.codes[i] = with_mode(new.codes[i], s, 0)


@lean
def _sort(new: State, first: int) -> None:
    """Sort micro-batches by code, then by when their next input is there."""
    for i in range(1, len(new.codes)):
        k = i
        while k > 0 and (
            new.codes[k - 1] > new.codes[k]
            or (
                new.codes[k - 1] == new.codes[k] and new.times[first + k - 1] > new.times[first + k]
            )
        ):
            new.codes[k - 1], new.codes[k] = new.codes[k], new.codes[k - 1]
            a, b = first + k - 1, first + k
            new.times[a], new.times[b] = new.times[b], new.times[a]
            k -= 1
