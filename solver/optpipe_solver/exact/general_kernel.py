"""Compiled: the states of the general search, and what its events change.

See `general_search` for what a state is and why nothing is lost. Times are whole numbers of a unit.

A *code* says how far a micro-batch is: in its lowest bits the number of passes it has started on
its way up the stages and down again, then per stage a digit, its *mode* between F and backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.jit import lean

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe_solver.arrays import Flags, Ints

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
    "LANES",
    "MODE_BITS",
    "MOST_COMING",
    "POSITION_BITS",
    "RECOMPUTE",
    "RELOAD",
    "SEND",
    "WEIGHT",
    "GeneralLoads",
    "GeneralProblem",
    "GeneralState",
    "advance",
    "free_at",
    "make_general_loads",
    "make_general_state",
    "needs",
    "run",
    "start_of",
    "survey",
    "wastes",
]


LANES = 4
POSITION_BITS = 5
MODE_BITS = 3
AWAY, COMING, CHECKPOINT = 1, 2, 7
"""Modes: to be or being or having been offloaded; from ``COMING`` on the last RELOAD of the device,
the last but one, ...; with its checkpoint alone. 0 is all there."""

MOST_COMING = CHECKPOINT - COMING
"""RELOADs on their way that are told apart."""

KEEP, SEND, DROP, GRADIENT, FUSED, WEIGHT, RELOAD, RECOMPUTE = range(8)
"""Events: F in three ways, I, B, W, RELOAD, RECOMPUTE."""


class GeneralProblem(NamedTuple):
    """The kept devices and stages in whole numbers: entries per stage, or per device where said.

    ``moved`` (device) is what one copy carries, in bytes, ``out`` and ``home`` (device) how long it
    takes; 0 bytes = nothing can be offloaded; ``waits`` (device): whether all RELOADs on their way
    are waited for. ``again`` is the time of a RECOMPUTE, -1 where there
    is none. An F takes ``forward`` and ``hidden``, the most that it can hide in a pair; ``pairs_i``
    and ``pairs_b`` tell whether an I, a B may pair. ``workspace`` has a row each for F, I, W, B,
    RECOMPUTE; ``room`` is per device.
    ``there[s]`` and ``back[s]`` are the least times between the passes of s and those of the next
    kept stage, behind the last one ``there`` to its own backward; ``head`` is that before the
    first. ``has_modes``: whether anything can be offloaded or recomputed. ``rest[q]`` is the least
    time from the start of the q-th pass of a micro-batch, on its way up and down the stages, to the
    end of the schedule. ``head_f[k, s]`` is the earliest start of the k-th F of s, ``last_f[k, s]``
    the least time after the end of the k-th last, k from 0; ``head_i[k, s]`` the earliest start of
    the k-th I or B, ``last_i`` and ``last_w`` the times after the pieces ``gradient`` and
    ``weight`` (see `bounds.relaxation`). ``horizon`` is the longest schedule looked for.
    """

    num_microbatches: int
    device: Ints
    forward: Ints
    hidden: Ints
    pairs_i: Flags
    pairs_b: Flags
    split_i: Ints
    split_w: Ints
    fused: Ints
    gradient: Ints
    weight: Ints
    again: Ints
    may_fuse: Flags
    may_leave: Flags
    has_modes: bool
    activation: Ints
    context: Ints
    checkpoint: Ints
    workspace: Ints
    room: Ints
    moved: Ints
    out: Ints
    home: Ints
    waits: Flags
    there: Ints
    back: Ints
    head: int
    rest: Ints
    head_f: Ints
    head_i: Ints
    last_f: Ints
    last_i: Ints
    last_w: Ints
    horizon: int


class GeneralState(NamedTuple):
    """How far all is.

    ``codes`` of all micro-batches, in order, equal ones by when their next input is there;
    ``weights`` = W started per stage; ``times``: the clock, then per device when compute, D2H and
    H2D are free, and compute for a backward that pairs with the F before it, ``LANES`` in all, then
    per micro-batch when the input of its next pass is there; none before the clock, copies and
    inputs not before their device is free (see `_forget`).
    """

    codes: Codes
    weights: Bytes
    times: NDArray[np.int32]


class GeneralLoads(NamedTuple):
    """What is read off a state: per device ``held_bytes`` and micro-batches ``sent``.

    ``held_bytes`` counts what is AWAY as if it were there. ``owed`` is the time of the RECOMPUTEs
    to come. Per stage: ``forwards`` and ``gradients`` started. Per position: ``num_at`` of
    micro-batches, and when the first of them is ``ready`` for its next pass.
    """

    held_bytes: Ints
    sent: Ints
    owed: Ints
    forwards: Ints
    gradients: Ints
    num_at: Ints
    ready: Ints


def make_general_state(num_microbatches: int, num_stages: int, num_devices: int) -> GeneralState:
    """Return the state before everything."""
    return GeneralState(
        np.zeros(num_microbatches, dtype=np.int32),
        np.zeros(num_stages, dtype=np.int8),
        np.zeros(1 + LANES * num_devices + num_microbatches, dtype=np.int32),
    )


def make_general_loads(num_stages: int, num_devices: int) -> GeneralLoads:
    """Return loads to write on."""
    devices = [np.zeros(num_devices, dtype=np.int64) for _ in range(3)]
    stages = [np.zeros(num_stages, dtype=np.int64) for _ in range(2)]
    positions = [np.zeros(2 * num_stages + 1, dtype=np.int64) for _ in range(2)]
    return GeneralLoads(*devices, *stages, *positions)


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
def survey(model: GeneralProblem, state: GeneralState, loads: GeneralLoads) -> None:
    """Write on the loads what a state holds, ``num_at`` and ``ready`` aside."""
    num_stages = len(model.forward)
    loads.held_bytes[:] = 0
    loads.sent[:] = 0
    loads.owed[:] = 0
    loads.forwards[:] = 0
    loads.gradients[:] = 0
    for j in range(len(state.codes)):
        code = state.codes[j]
        at = position_of(code)
        for s in range(min(at, num_stages)):
            loads.forwards[s] += 1
            if at > 2 * num_stages - 1 - s:
                loads.gradients[s] += 1
            else:
                _hold(model, mode_of(code, s), s, loads)
    for s in range(num_stages):
        waiting = loads.gradients[s] - state.weights[s]
        loads.held_bytes[model.device[s]] += waiting * model.context[s]


@lean
def _hold(model: GeneralProblem, mode: int, s: int, loads: GeneralLoads) -> None:
    """Add what one micro-batch holds on stage s, between F and backward."""
    device = model.device[s]
    if mode == CHECKPOINT:
        loads.held_bytes[device] += model.checkpoint[s]
        loads.owed[device] += model.again[s]
    else:
        loads.held_bytes[device] += model.activation[s]
        loads.sent[device] += mode == AWAY


@lean
def fits_from(
    model: GeneralProblem,
    state: GeneralState,
    loads: GeneralLoads,
    device: int,
    what: tuple[int, int, bool],
) -> int:
    """Return from when on so many more bytes fit on a device; -1 = not before others go.

    ``what``: the bytes, how many copies to the host may not have ended, one after the other, and
    whether it is for a backward that may pair. A gap before a copy is over when its F ends; only
    such a backward starts sooner, so of copies before the last one nothing is known to it.
    """
    needs, most, pairs = what
    sent = loads.sent[device]
    over = loads.held_bytes[device] + needs - model.room[device]
    if over > 0:
        if model.moved[device] == 0:
            return -1
        most = min(most, sent - (over + model.moved[device] - 1) // model.moved[device])
        if most < 0:
            return -1
    if most >= sent or (pairs and most > 0):
        return int(state.times[0])
    left = state.times[1 + len(model.room) + device] - most * model.out[device]
    return int(max(left, state.times[0]))


@lean
def start_of(
    model: GeneralProblem, state: GeneralState, loads: GeneralLoads, event: tuple[int, int, int]
) -> int:
    """Return when an event (kind, index of the micro-batch, stage) can start; -1 = it cannot.

    A RELOAD starts when it is issued.
    """
    kind, j, s = event
    device = model.device[s]
    most = loads.sent[device] - (kind == RELOAD)
    pairs = (kind == GRADIENT and model.pairs_i[s]) or (kind == FUSED and model.pairs_b[s])
    fits = fits_from(model, state, loads, device, (needs(model, kind, s), most, pairs))
    if fits < 0:
        return -1
    start = max(fits, free_at(model, state, device, pairs))
    if kind <= DROP:
        start = max(start, model.head_f[loads.forwards[s], s])
    if kind <= FUSED:
        start = max(start, ready_at(model, state, j, s))
        if kind >= GRADIENT:
            start = max(start, model.head_i[loads.gradients[s], s])
    return int(start)


@lean
def free_at(model: GeneralProblem, state: GeneralState, device: int, pairs: bool) -> int:
    """Return when a device is free for a pass: for one that pairs, while the F before it runs."""
    return int(state.times[1 + device + pairs * (LANES - 1) * len(model.room)])


@lean
def needs(model: GeneralProblem, kind: int, s: int) -> int:
    """Return the bytes an event needs above those held before it."""
    if kind == RELOAD:
        return int(model.moved[model.device[s]])
    if kind == RECOMPUTE:
        return int(model.activation[s] - model.checkpoint[s] + model.workspace[4, s])
    if kind == GRADIENT:
        return int(max(0, model.context[s] - model.activation[s]) + model.workspace[1, s])
    if kind == FUSED:
        return int(model.workspace[3, s])
    if kind == WEIGHT:
        return int(model.workspace[2, s])
    makes = model.checkpoint[s] if kind == DROP else model.activation[s]
    return int(makes + model.workspace[0, s])


@lean
def ready_at(model: GeneralProblem, state: GeneralState, j: int, s: int) -> int:
    """Return when the next pass of a micro-batch, on stage s, has its input and its activation.

    What is AWAY or CHECKPOINT needs a RELOAD or RECOMPUTE, which starts when the device is free.
    """
    devices, device = len(model.room), model.device[s]
    ready = state.times[1 + LANES * devices + j]
    if position_of(state.codes[j]) < len(model.forward):
        return int(ready)
    mode = mode_of(state.codes[j], s)
    free, lane = state.times[1 + device], state.times[1 + 2 * devices + device]
    if mode == AWAY and model.waits[device]:
        return int(max(ready, max(free, lane) + model.home[device]))
    if mode == CHECKPOINT:
        return int(max(ready, free + model.again[s]))
    if COMING <= mode < CHECKPOINT:
        return int(max(ready, lane - (mode - COMING) * model.home[device]))
    return int(ready)


@lean
def wastes(
    model: GeneralProblem, state: GeneralState, loads: GeneralLoads, device: int, start: int
) -> bool:
    """Whether an I or W that waits would fit into the idle time before the start of an event."""
    free = state.times[1 + device]
    if start <= free:
        return False
    for s in range(len(model.forward)):
        if model.device[s] == device and state.weights[s] < loads.gradients[s]:
            what = (model.workspace[2, s], loads.sent[device], False)
            room = fits_from(model, state, loads, device, what)
            if room >= 0 and max(room, free) + model.split_w[s] <= start and model.split_w[s] > 0:
                return True
    return _wastes_gradient(model, state, loads, device, start)


@lean
def _wastes_gradient(
    model: GeneralProblem, state: GeneralState, loads: GeneralLoads, device: int, start: int
) -> bool:
    last = 2 * len(model.forward) - 1
    for j in range(len(state.codes)):
        at = position_of(state.codes[j])
        if at <= last // 2 or at > last:
            continue
        s = last - at
        if model.device[s] != device or model.may_fuse[s] or model.split_i[s] == 0:
            continue
        if model.has_modes and not _may_go_first(model, loads.gradients[s], s, start):
            continue
        mode = mode_of(state.codes[j], s)
        if mode in (AWAY, CHECKPOINT) or model.context[s] > model.activation[s]:
            continue
        begin = start_of(model, state, loads, (GRADIENT, j, s))
        if begin >= 0 and begin + model.split_i[s] <= start:
            return True
    return False


@lean
def _may_go_first(model: GeneralProblem, k: int, s: int, start: int) -> bool:
    """Whether all I of s from the k-th on may each be one number later, as none starts sooner."""
    for number in range(k, model.num_microbatches - 1):
        least = max(start + (number - k) * model.split_i[s], model.head_i[number, s])
        if least < model.head_i[number + 1, s]:
            return False
    return True


@lean
def run(
    model: GeneralProblem,
    state: GeneralState,
    event: tuple[int, int, int],
    start: int,
    new: GeneralState,
) -> None:
    """Write the state after an event (kind, index of the micro-batch, stage) from its start."""
    advance(model, state, event, start, new)
    _sort(new, 1 + LANES * len(model.room))


@lean
def advance(
    model: GeneralProblem,
    state: GeneralState,
    event: tuple[int, int, int],
    start: int,
    new: GeneralState,
) -> None:
    """As `run`, with every micro-batch left in its place."""
    kind, j, s = event
    device, devices = model.device[s], len(model.room)
    for i in range(len(state.codes)):
        new.codes[i] = state.codes[i]
    for i in range(len(state.weights)):
        new.weights[i] = state.weights[i]
    for i in range(len(state.times)):
        new.times[i] = max(state.times[i], start)
    paired = 1 + (LANES - 1) * devices + device
    if kind == RELOAD:
        _reload(model, new, j, s)
    elif kind == RECOMPUTE:
        new.times[1 + device] = start + model.again[s]
        new.codes[j] = with_mode(new.codes[j], s, 0)
    elif kind == WEIGHT:
        new.times[1 + device] = start + model.split_w[s]
        new.weights[s] += 1
    else:
        _pass(model, new, event, start)
        if kind == SEND:
            lane = 1 + devices + device
            new.times[lane] = max(new.times[lane], new.times[1 + device]) + model.out[device]
    new.times[paired] = new.times[1 + device]
    if kind <= DROP:
        new.times[paired] -= model.hidden[s]
    _forget(model, new)
    _settle(model, new)


@lean
def _pass(
    model: GeneralProblem, new: GeneralState, event: tuple[int, int, int], start: int
) -> None:
    """Run F, I or B of a micro-batch."""
    kind, j, s = event
    end, arrival = start + model.forward[s], 0
    code = new.codes[j] + 1
    if kind < GRADIENT:
        arrival = end + model.there[s]
        code = with_mode(code, s, AWAY * (kind == SEND) + CHECKPOINT * (kind == DROP))
    else:
        end = start + (model.fused[s] if kind == FUSED else model.split_i[s])
        arrival = end + model.back[s - 1] if s > 0 else start
        code = with_mode(code, s, 0)
        new.weights[s] += kind == FUSED
    new.codes[j] = code
    if kind < GRADIENT:
        end += model.hidden[s]
    lane = 1 + model.device[s]
    new.times[lane] = max(new.times[lane], end)
    new.times[1 + LANES * len(model.room) + j] = arrival


@lean
def _reload(model: GeneralProblem, new: GeneralState, j: int, s: int) -> None:
    """Put a RELOAD behind those of its device."""
    device, devices = model.device[s], len(model.room)
    for i in range(len(new.codes)):
        for other in range(len(model.forward)):
            if model.device[other] == device:
                mode = mode_of(new.codes[i], other)
                if COMING <= mode < CHECKPOINT:
                    after = mode + 1 if mode + 1 < CHECKPOINT else 0
                    new.codes[i] = with_mode(new.codes[i], other, after)
    new.codes[j] = with_mode(new.codes[j], s, COMING)
    lane = 1 + 2 * devices + device
    new.times[lane] += model.home[device]


@lean
def _forget(model: GeneralProblem, new: GeneralState) -> None:
    """Raise all that a device has sooner than it is free, even for a pair, to then.

    Nothing of it starts before that, so states that differ in no more are one.
    """
    devices, last = len(model.room), 2 * len(model.forward) - 1
    clock = free_at(model, new, 0, True)
    for device in range(1, devices):
        clock = min(clock, free_at(model, new, device, True))
    new.times[0] = max(new.times[0], clock)
    for device in range(devices):
        free = free_at(model, new, device, True)
        for lane in range(1, LANES - 1):
            at = 1 + lane * devices + device
            new.times[at] = max(new.times[at], free)
    for j in range(len(new.codes)):
        at, free = position_of(new.codes[j]), new.times[0]
        if at <= last:
            free = free_at(model, new, model.device[min(at, last - at)], True)
        new.times[1 + LANES * devices + j] = max(new.times[1 + LANES * devices + j], free)


@lean
def _settle(model: GeneralProblem, new: GeneralState) -> None:
    """What has come back by the time its device is free is there."""
    devices = len(model.room)
    for i in range(len(new.codes)):
        if new.codes[i] >> POSITION_BITS == 0:
            continue
        for s in range(len(model.forward)):
            mode = mode_of(new.codes[i], s)
            if COMING <= mode < CHECKPOINT:
                device = model.device[s]
                free, end = free_at(model, new, device, True), new.times[1 + 2 * devices + device]
                if end - (mode - COMING) * model.home[device] <= free:
                    new.codes[i] = with_mode(new.codes[i], s, 0)


@lean
def _sort(new: GeneralState, first: int) -> None:
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
