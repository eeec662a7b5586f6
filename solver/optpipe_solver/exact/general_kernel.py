"""Compiled: the states of the general search, and how its events change them.

See `general_search` for states and why no schedule is lost. Times are whole numbers of a unit.

A *code* says how far a micro-batch is. Its lowest bits count the passes it has started, up the
stages and down again. Then a digit per stage has the *phase* and mode of its cell between F and
backward. Copies of a device are *counted*, or known *by cell* (``by_cell``):

* Counted, all have one size. An OFFLOAD follows its F immediately, and is no event. The state has
  the number of copies to come and of RELOADs on their way, and when the lane is free.
* By cell, each copy is an event, and a state has the end of the last one of every cell. With
  offload or recompute this meets more states, and each takes longer. So counted copies stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optpipe_solver.jit import lean

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe_solver.arrays import Flags, Ints

    Bytes = NDArray[np.int8]

__all__ = [
    "CELL_BITS",
    "DROP",
    "FORWARD",
    "FUSED",
    "GRADIENT",
    "KEEP",
    "KINDS",
    "MODE_BITS",
    "MOST_COMING",
    "OFFLOAD",
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
    "run",
    "start_of",
    "survey",
    "wastes",
]


POSITION_BITS, PHASE_BITS, MODE_BITS = 5, 3, 3
CELL_BITS = PHASE_BITS + MODE_BITS

HERE, AWAY, COMING, LESS = 0, 1, 2, 7
"""Phases: the backward's activation is there; OFFLOAD begun (counted: or to come); RECOMPUTE to
come. Counted, ``COMING`` is the last RELOAD of the device, ``COMING + 1`` the last but one, ..."""

LEAVES = COMING
"""By cell: OFFLOAD to come."""

MOST_COMING = LESS - COMING
"""RELOADs on their way that are told apart."""

FORWARD, GRADIENT, FUSED, WEIGHT, OFFLOAD, RELOAD, RECOMPUTE = range(7)
KINDS = 7
"""How many kinds of events there are: F, I, B, W, OFFLOAD, RELOAD, RECOMPUTE."""

KEEP, SEND, DROP = range(3)
"""Modes where copies are counted: those of v1."""

NEVER = 1 << 60


class GeneralProblem(NamedTuple):
    """The kept devices and stages in whole numbers.

    Entries are per stage, ``[s, k]`` per stage and mode, or per device where said.

    ``is_open[s, k]`` tells whether a stage has this mode. An F takes ``forward``. ``hidden`` is the
    maximum that it can hide in a pair. ``pairs_i`` and ``pairs_b`` tell whether an I, a B may pair.
    ``split_i`` and ``fused`` ``[s, k]`` hold ``inside`` of recomputation; ``shortest_i`` is the
    minimum ``split_i``. ``again[s, k]`` is the time of a RECOMPUTE, -1 where there is none.
    ``extra`` is the minimum recomputation of any mode. ``has_modes``: whether anything can be
    offloaded or recomputed.

    A cell holds ``forward_bytes[s, k]`` after its F, ``backward_bytes[s, k]`` when its backward
    begins, then ``context[s, c]`` in class c = ``context_of[s, k]`` until W. ``needs[kind, s, k]``
    are the bytes an event needs above those held before it (of a W by class); ``room`` is per
    device. ``moved[s, k]`` bytes take ``out`` and ``home``. ``same_as[s, k]`` is the first mode
    that equals k once all is there.

    ``lane_out`` and ``lane_home`` (device) are places in the times of a state. So are ``group_out``
    and ``group_home``, lanes shared with other devices, -1 = none. ``issued`` (device): whether a
    RELOAD is between two compute actions. Counted copies all have ``one_moved``, ``one_out`` and
    ``one_home`` (device). ``waits`` (device): whether all RELOADs on their way are waited for.

    ``there[s]`` and ``back[s]`` are the minimum times between the passes of s and those of the next
    kept stage. After the last kept stage, ``there`` is the time to its own backward. ``head`` is
    the time before the first. ``rest[q]`` is the minimum time from the start of a micro-batch's
    pass q to the end of the schedule; q counts up the stages and down again. ``head_f[k, s]``
    is the earliest start of the k-th F of s, ``head_i[k, s]`` of the k-th I or B. ``last_f[k, s]``
    is the minimum time after the end of the k-th last F, k from 0. ``last_i`` and ``last_w`` are
    the same for the pieces ``gradient`` and ``weight`` (see `bounds.relaxation`).

    ``home_device`` is -1, or by cell under span that of stage 0, beyond the last where that is not
    kept. ``steps`` is the maximum number of events that a mode has in addition to passes.
    ``paired``, ``inputs``, ``ends``, ``begins`` and ``num_times`` are places in the times of a
    state. ``horizon`` is the length limit of the search.
    """

    num_microbatches: int
    by_cell: bool
    has_modes: bool
    device: Ints
    is_open: Flags
    forward: Ints
    hidden: Ints
    pairs_i: Flags
    pairs_b: Flags
    may_fuse: Flags
    split_i: Ints
    split_w: Ints
    fused: Ints
    shortest_i: Ints
    gradient: Ints
    weight: Ints
    inside: Ints
    again: Ints
    extra: Ints
    forward_bytes: Ints
    backward_bytes: Ints
    context: Ints
    context_of: Ints
    needs: Ints
    same_as: Ints
    moved: Ints
    out: Ints
    home: Ints
    room: Ints
    lane_out: Ints
    lane_home: Ints
    group_out: Ints
    group_home: Ints
    issued: Flags
    one_moved: Ints
    one_out: Ints
    one_home: Ints
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
    home_device: int
    steps: int
    paired: int
    inputs: int
    ends: int
    begins: int
    num_times: int
    horizon: int


class GeneralState(NamedTuple):
    """A partial schedule.

    ``codes`` are those of all micro-batches, in order, equal ones by when their next input is
    there. ``waiting[s C + c]`` counts the W of stage s that could start, by class c of their
    context, C classes a stage. ``times`` holds in this order

    * the clock;
    * per device, when compute is free;
    * per lane, when it is free;
    * per device, when compute is free for a backward that pairs with the F before it;
    * per micro-batch, when the input of its next pass is there;
    * by cell, the end of its last copy, RECOMPUTE or F;
    * by cell under span, per device, minus when it began.

    None is before the clock, and nothing that only a device waits
    for before that device is free (see `_forget`).
    """

    codes: Ints
    waiting: Bytes
    times: NDArray[np.int32]


class GeneralLoads(NamedTuple):
    """Sums over a state: per device ``held_bytes`` and micro-batches ``sent``.

    ``held_bytes`` counts what is AWAY as if it were there. ``owed`` is the time of the
    recomputation to come. Per stage: ``forwards``, ``gradients`` and ``weights`` started. Per
    position: ``num_at`` of micro-batches, and when the first of them is ``ready``.
    """

    held_bytes: Ints
    sent: Ints
    owed: Ints
    forwards: Ints
    gradients: Ints
    weights: Ints
    num_at: Ints
    ready: Ints


def make_general_state(model: GeneralProblem) -> GeneralState:
    """Return the state before everything."""
    state = GeneralState(
        np.zeros(model.num_microbatches, dtype=np.int64),
        np.zeros(model.context.size, dtype=np.int8),
        np.zeros(model.num_times, dtype=np.int32),
    )
    state.times[model.inputs : model.ends] = model.head
    return state


def make_general_loads(model: GeneralProblem) -> GeneralLoads:
    """Return loads to write on."""
    num_stages = len(model.forward)
    devices = [np.zeros(len(model.room), dtype=np.int64) for _ in range(3)]
    stages = [np.zeros(num_stages, dtype=np.int64) for _ in range(3)]
    positions = [np.zeros(2 * num_stages + 1, dtype=np.int64) for _ in range(2)]
    return GeneralLoads(*devices, *stages, *positions)


@lean
def position_of(code: int) -> int:
    """Return how many passes a micro-batch has started on its way."""
    return int(code & ((1 << POSITION_BITS) - 1))


@lean
def cell_of(code: int, s: int) -> tuple[int, int]:
    """Return phase and mode of a micro-batch on stage s."""
    digit = code >> (POSITION_BITS + CELL_BITS * s) & ((1 << CELL_BITS) - 1)
    return int(digit & ((1 << PHASE_BITS) - 1)), int(digit >> PHASE_BITS)


@lean
def with_cell(code: int, s: int, phase: int, k: int) -> int:
    """Return the code with another phase and mode on stage s."""
    before, mode = cell_of(code, s)
    more = phase - before + ((k - mode) << PHASE_BITS)
    return int(code + (more << (POSITION_BITS + CELL_BITS * s)))


@lean
def is_held(code: int, s: int, num_stages: int) -> bool:
    """Whether F has started on stage s and the backward has not."""
    return bool(s < position_of(code) <= 2 * num_stages - 1 - s)


@lean
def survey(model: GeneralProblem, state: GeneralState, loads: GeneralLoads) -> None:
    """Write the sums of a state into the loads, except ``num_at`` and ``ready``."""
    num_stages, classes = model.context.shape
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
                _hold(model, code, s, loads)
    for s in range(num_stages):
        device, all_waiting = model.device[s], 0
        for c in range(classes):
            waiting = state.waiting[classes * s + c]
            all_waiting += waiting
            loads.held_bytes[device] += waiting * model.context[s, c]
        loads.weights[s] = loads.gradients[s] - all_waiting
        if model.by_cell:
            loads.owed[device] += (model.num_microbatches - loads.forwards[s]) * model.extra[s]


@lean
def _hold(model: GeneralProblem, code: int, s: int, loads: GeneralLoads) -> None:
    """Add what one micro-batch holds and owes on stage s, between F and backward."""
    device = model.device[s]
    phase, k = cell_of(code, s)
    if phase == HERE:
        loads.held_bytes[device] += model.backward_bytes[s, k]
    else:
        loads.held_bytes[device] += model.forward_bytes[s, k]
        loads.owed[device] += max(0, model.again[s, k])
        loads.sent[device] += phase == AWAY
    if model.by_cell:
        loads.owed[device] += model.inside[s, k]


@lean
def fits_from(
    model: GeneralProblem,
    state: GeneralState,
    loads: GeneralLoads,
    device: int,
    what: tuple[int, int, bool],
) -> int:
    """Return when so many more bytes fit on a device; -1 = only after other activations leave.

    ``what`` has the bytes, and how many counted copies to the host may not have ended, one after
    the other. Its last value tells whether a backward that may pair needs the bytes. A gap before a
    copy is over when its F ends. Only a backward that pairs may start sooner: for it nothing is
    known of copies before the last one.
    """
    needs, most, pairs = what
    sent = loads.sent[device]
    over = loads.held_bytes[device] + needs - model.room[device]
    if model.by_cell:
        return _fits_by_cell(model, state, device, over) if over > 0 else int(state.times[0])
    if over > 0:
        if model.one_moved[device] == 0:
            return -1
        most = min(most, sent - (over + model.one_moved[device] - 1) // model.one_moved[device])
        if most < 0:
            return -1
    if most >= sent or (pairs and most > 0):
        return int(state.times[0])
    left = state.times[model.lane_out[device]] - most * model.one_out[device]
    return int(max(left, state.times[0]))


@lean
def _fits_by_cell(model: GeneralProblem, state: GeneralState, device: int, over: int) -> int:
    """Return when copies to the host have freed so many bytes if nothing starts; -1 = never."""
    num_stages, at = len(model.forward), int(state.times[0])
    while at < NEVER:
        freed, following = 0, NEVER
        for s in range(num_stages):
            if model.device[s] != device:
                continue
            for j in range(len(state.codes)):
                phase, k = cell_of(state.codes[j], s)
                if phase == AWAY:
                    end = state.times[model.ends + j * num_stages + s]
                    if end <= at:
                        freed += model.moved[s, k]
                    else:
                        following = min(following, end)
        if freed >= over:
            return at
        at = int(following)
    return -1


@lean
def start_of(
    model: GeneralProblem,
    state: GeneralState,
    loads: GeneralLoads,
    event: tuple[int, int, int, int],
) -> int:
    """Return when an event (kind, index of the micro-batch, stage, mode) can start; -1 = it cannot.

    A W has the class of its context in place of a mode. A RELOAD starts when it is issued, or where
    lanes are shared when its copy does.
    """
    kind, j, s, k = event
    device = model.device[s]
    if kind == OFFLOAD:
        return max(_end_of(model, state, j, s), _lanes_free(model, state, device, kind))
    most = loads.sent[device] - (kind == RELOAD)
    pairs = (kind == GRADIENT and model.pairs_i[s]) or (kind == FUSED and model.pairs_b[s])
    fits = fits_from(model, state, loads, device, (model.needs[kind, s, k], most, pairs))
    if fits < 0:
        return -1
    if kind == RELOAD and not model.issued[device]:
        start = max(fits, _lanes_free(model, state, device, kind))
    else:
        start = max(fits, free_at(model, state, device, pairs))
    if kind == FORWARD:
        start = max(start, model.head_f[loads.forwards[s], s])
    if kind <= FUSED:
        start = max(start, ready_at(model, state, j, s))
        if kind >= GRADIENT:
            start = max(start, model.head_i[loads.gradients[s], s])
    elif model.by_cell and kind != WEIGHT:
        start = max(start, _end_of(model, state, j, s))
    return int(start)


@lean
def free_at(model: GeneralProblem, state: GeneralState, device: int, pairs: bool) -> int:
    """Return when a device is free for a pass: for one that pairs, while the F before it runs."""
    return int(state.times[device + (model.paired if pairs else 1)])


@lean
def _end_of(model: GeneralProblem, state: GeneralState, j: int, s: int) -> int:
    """Return when the last copy, RECOMPUTE or F of a cell ends, by cell."""
    return int(state.times[model.ends + j * len(model.forward) + s])


@lean
def _lanes_free(model: GeneralProblem, state: GeneralState, device: int, kind: int) -> int:
    """Return when the lanes of an OFFLOAD or RELOAD are free."""
    own = model.lane_out[device] if kind == OFFLOAD else model.lane_home[device]
    group = model.group_out[device] if kind == OFFLOAD else model.group_home[device]
    free = state.times[own]
    return int(free if group < 0 else max(free, state.times[group]))


@lean
def ready_at(model: GeneralProblem, state: GeneralState, j: int, s: int) -> int:
    """Return when the next pass of a micro-batch, on stage s, has its input and its activation.

    A missing activation needs copies or RECOMPUTE, which start when device and lanes are free.
    """
    device, ready = model.device[s], state.times[model.inputs + j]
    if position_of(state.codes[j]) < len(model.forward):
        return int(ready)
    phase, k = cell_of(state.codes[j], s)
    if model.by_cell:
        return max(int(ready), _cell_ready(model, state, j, s))
    free, lane = state.times[1 + device], state.times[model.lane_home[device]]
    if phase == AWAY and model.waits[device]:
        return int(max(ready, max(free, lane) + model.one_home[device]))
    if phase == LESS:
        return int(max(ready, free + model.again[s, k]))
    if COMING <= phase < LESS:
        return int(max(ready, lane - (phase - COMING) * model.one_home[device]))
    return int(ready)


@lean
def _cell_ready(model: GeneralProblem, state: GeneralState, j: int, s: int) -> int:
    """Return when all is there that the backward of a cell needs, by cell."""
    phase, k = cell_of(state.codes[j], s)
    device, at = model.device[s], _end_of(model, state, j, s)
    if phase == LEAVES:
        at += model.out[s, k]
    if phase in (LEAVES, AWAY):
        at = max(at, _lanes_free(model, state, device, RELOAD)) + model.home[s, k]
    if phase != HERE and model.again[s, k] >= 0:
        at = max(at, int(state.times[1 + device])) + model.again[s, k]
    return int(at)


@lean
def wastes(
    model: GeneralProblem, state: GeneralState, loads: GeneralLoads, device: int, start: int
) -> bool:
    """Whether an I or W that waits would fit into idle time before the start of an event.

    Counted, on the event's device; by cell, on any, and OFFLOADs too.
    """
    if start <= state.times[0 if model.by_cell else 1 + device]:
        return False
    num_stages, classes = model.context.shape
    for s in range(num_stages):
        own, length = model.device[s], model.split_w[s]
        free = state.times[1 + own]
        if (own != device and not model.by_cell) or length == 0 or free + length > start:
            continue
        for c in range(classes):
            if state.waiting[classes * s + c]:
                what = (model.needs[WEIGHT, s, c], loads.sent[own], False)
                room = fits_from(model, state, loads, own, what)
                if room >= 0 and max(room, free) + length <= start:
                    return True
    if model.by_cell and _wastes_offload(model, state, start):
        return True
    return _wastes_gradient(model, state, loads, device, start)


@lean
def _wastes_offload(model: GeneralProblem, state: GeneralState, start: int) -> bool:
    for s in range(len(model.forward)):
        lanes = _lanes_free(model, state, model.device[s], OFFLOAD)
        for j in range(len(state.codes)):
            phase, k = cell_of(state.codes[j], s)
            if phase == LEAVES and model.out[s, k] > 0:
                at = max(lanes, _end_of(model, state, j, s))
                if at + model.out[s, k] <= start:
                    return True
    return False


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
        if (model.device[s] != device and not model.by_cell) or model.may_fuse[s]:
            continue
        if model.has_modes and not _may_go_first(model, loads.gradients[s], s, start):
            continue
        phase, k = cell_of(state.codes[j], s)
        if phase in (AWAY, LESS) or (model.by_cell and phase != HERE) or model.split_i[s, k] == 0:
            continue
        if model.context[s, model.context_of[s, k]] > model.backward_bytes[s, k]:
            continue
        begin = start_of(model, state, loads, (GRADIENT, j, s, k))
        if begin >= 0 and begin + model.split_i[s, k] <= start:
            return True
    return False


@lean
def _may_go_first(model: GeneralProblem, k: int, s: int, start: int) -> bool:
    """Whether all I of s from the k-th on may each be one number later, as none starts sooner."""
    for number in range(k, model.num_microbatches - 1):
        least = max(start + (number - k) * model.shortest_i[s], model.head_i[number, s])
        if least < model.head_i[number + 1, s]:
            return False
    return True


@lean
def run(
    model: GeneralProblem,
    state: GeneralState,
    event: tuple[int, int, int, int],
    start: int,
    new: GeneralState,
) -> int:
    """Write the state after an event from its start (see `start_of`); return the steps it takes."""
    steps = advance(model, state, event, start, new)
    _sort(model, new)
    return steps


@lean
def advance(
    model: GeneralProblem,
    state: GeneralState,
    event: tuple[int, int, int, int],
    start: int,
    new: GeneralState,
) -> int:
    """As `run`, with every micro-batch left in its place."""
    kind, j, s, k = event
    device, steps = model.device[s], 1
    _carry_over(model, state, start, new)
    if kind == FORWARD:
        if 0 <= model.home_device != device and _is_first(model, state, device):
            new.times[model.begins + device] = -start
        steps = _forward(model, new, event, start)
    elif kind <= FUSED:
        _backward(model, new, event, start)
        steps = 2 if kind == FUSED else 1
    elif kind == WEIGHT:
        new.times[1 + device] = start + model.split_w[s]
        new.waiting[model.context.shape[1] * s + k] -= 1
    elif kind == RECOMPUTE:
        new.times[1 + device] = start + model.again[s, k]
        _put(model, new, (j, s), (HERE, k), start + model.again[s, k])
    elif model.by_cell:
        _copy(model, new, event, start)
    else:
        _reload(model, new, j, s)
    new.times[model.paired + device] = new.times[1 + device]
    if kind == FORWARD:
        new.times[model.paired + device] -= model.hidden[s]
    _forget(model, new)
    if not model.by_cell:
        _settle(model, new)
    return int(steps)


@lean
def _carry_over(model: GeneralProblem, state: GeneralState, start: int, new: GeneralState) -> None:
    """Copy a state, with no time before the new clock but when devices began."""
    for i in range(len(state.codes)):
        new.codes[i] = state.codes[i]
    for i in range(len(state.waiting)):
        new.waiting[i] = state.waiting[i]
    for i in range(model.begins):
        new.times[i] = max(state.times[i], start)
    for i in range(model.begins, len(state.times)):
        new.times[i] = state.times[i]


@lean
def _put(
    model: GeneralProblem,
    new: GeneralState,
    cell: tuple[int, int],
    what: tuple[int, int],
    end: int,
) -> None:
    """Give a cell (index of the micro-batch, stage) its phase and mode, and by cell its end."""
    j, s = cell
    phase, k = what
    new.codes[j] = with_cell(new.codes[j], s, phase, model.same_as[s, k] if phase == HERE else k)
    if model.by_cell:
        new.times[model.ends + j * len(model.forward) + s] = end


@lean
def _is_first(model: GeneralProblem, state: GeneralState, device: int) -> bool:
    """Whether nothing has started on a device."""
    for s in range(len(model.forward)):
        if model.device[s] == device:
            for j in range(len(state.codes)):
                if position_of(state.codes[j]) > s:
                    return False
    return True


@lean
def _forward(
    model: GeneralProblem, new: GeneralState, event: tuple[int, int, int, int], start: int
) -> int:
    """Run an F; return its steps: one, and one for each event that its mode has not."""
    _, j, s, k = event
    device, phase, steps = model.device[s], HERE, 1 + model.steps
    end = start + model.forward[s]
    new.times[model.inputs + j] = end + model.there[s]
    end += model.hidden[s]
    new.times[1 + device] = max(new.times[1 + device], end)
    if model.again[s, k] >= 0:
        phase, steps = LESS, steps - 1
    if model.moved[s, k] > 0 and model.by_cell:
        phase, steps = LEAVES, steps - 2
    elif model.moved[s, k] > 0:
        phase, steps = AWAY, steps - 1
        lane = model.lane_out[device]
        new.times[lane] = max(new.times[lane], new.times[1 + device]) + model.one_out[device]
    new.codes[j] += 1
    _put(model, new, (j, s), (phase, k), end)
    return int(steps)


@lean
def _backward(
    model: GeneralProblem, new: GeneralState, event: tuple[int, int, int, int], start: int
) -> None:
    """Run an I or B."""
    kind, j, s, k = event
    device = model.device[s]
    end = start + (model.fused[s, k] if kind == FUSED else model.split_i[s, k])
    new.times[model.inputs + j] = end + model.back[s - 1] if s > 0 else start
    new.times[1 + device] = max(new.times[1 + device], end)
    if kind == GRADIENT:
        new.waiting[model.context.shape[1] * s + model.context_of[s, k]] += 1
    new.codes[j] += 1
    _put(model, new, (j, s), (HERE, KEEP), start)


@lean
def _copy(
    model: GeneralProblem, new: GeneralState, event: tuple[int, int, int, int], start: int
) -> None:
    """Run a copy on its lanes, by cell."""
    kind, j, s, k = event
    device, phase = model.device[s], HERE
    is_out = kind == OFFLOAD
    end = max(start, _lanes_free(model, new, device, kind))
    end += model.out[s, k] if is_out else model.home[s, k]
    new.times[model.lane_out[device] if is_out else model.lane_home[device]] = end
    group = model.group_out[device] if is_out else model.group_home[device]
    if group >= 0:
        new.times[group] = end
    if is_out:
        phase = AWAY
    elif model.again[s, k] >= 0:
        phase = LESS
    _put(model, new, (j, s), (phase, k), end)


@lean
def _reload(model: GeneralProblem, new: GeneralState, j: int, s: int) -> None:
    """Put a RELOAD after those of its device, counted."""
    device = model.device[s]
    for i in range(len(new.codes)):
        for other in range(len(model.forward)):
            if model.device[other] == device:
                phase, k = cell_of(new.codes[i], other)
                if COMING <= phase < LESS - 1:
                    new.codes[i] = with_cell(new.codes[i], other, phase + 1, k)
                elif phase == LESS - 1:
                    new.codes[i] = with_cell(new.codes[i], other, HERE, KEEP)
    new.codes[j] = with_cell(new.codes[j], s, COMING, SEND)
    new.times[model.lane_home[device]] += model.one_home[device]


@lean
def _forget(model: GeneralProblem, new: GeneralState) -> None:
    """Raise all times of a device to when it is free, even for a pair, if they are earlier.

    Nothing on the device starts before that, so states that differ only there become one. By cell,
    copies may start before.
    """
    devices, num_stages = len(model.room), len(model.forward)
    last = 2 * num_stages - 1
    if not model.by_cell:
        clock = free_at(model, new, 0, True)
        for device in range(1, devices):
            clock = min(clock, free_at(model, new, device, True))
        new.times[0] = max(new.times[0], clock)
        for i in range(devices):
            free = free_at(model, new, i, True)
            new.times[model.lane_out[i]] = max(new.times[model.lane_out[i]], free)
            new.times[model.lane_home[i]] = max(new.times[model.lane_home[i]], free)
    for j in range(len(new.codes)):
        at, free = position_of(new.codes[j]), new.times[0]
        if at <= last:
            free = free_at(model, new, model.device[min(at, last - at)], True)
        new.times[model.inputs + j] = max(new.times[model.inputs + j], free)
        if model.by_cell:
            _forget_ends(model, new, j)


@lean
def _forget_ends(model: GeneralProblem, new: GeneralState, j: int) -> None:
    """Raise the ends of cells that only passes or issues wait for."""
    num_stages = len(model.forward)
    for s in range(num_stages):
        phase, _ = cell_of(new.codes[j], s)
        device = model.device[s]
        if is_held(new.codes[j], s, num_stages) and (
            phase in (HERE, LESS) or (phase == AWAY and model.issued[device])
        ):
            at = model.ends + j * num_stages + s
            new.times[at] = max(new.times[at], new.times[1 + device])


@lean
def _settle(model: GeneralProblem, new: GeneralState) -> None:
    """Mark activations as there that have come back by the time their device is free, counted."""
    for i in range(len(new.codes)):
        if new.codes[i] >> POSITION_BITS == 0:
            continue
        for s in range(len(model.forward)):
            phase, _ = cell_of(new.codes[i], s)
            if COMING <= phase < LESS:
                device = model.device[s]
                end = new.times[model.lane_home[device]] - (phase - COMING) * model.one_home[device]
                if end <= free_at(model, new, device, True):
                    new.codes[i] = with_cell(new.codes[i], s, HERE, KEEP)


@lean
def _sort(model: GeneralProblem, new: GeneralState) -> None:
    """Sort micro-batches by code, then by when their next input is there."""
    first, num_stages = model.inputs, len(model.forward)
    for i in range(1, len(new.codes)):
        k = i
        while k > 0 and (
            new.codes[k - 1] > new.codes[k]
            or (
                new.codes[k - 1] == new.codes[k] and new.times[first + k - 1] > new.times[first + k]
            )
        ):
            _swap(new.codes, k - 1, k)
            _swap(new.times, first + k - 1, first + k)
            if model.by_cell:
                for at in range(model.ends + k * num_stages, model.ends + (k + 1) * num_stages):
                    _swap(new.times, at - num_stages, at)
            k -= 1


@lean
def _swap(row: NDArray[Any], a: int, b: int) -> None:
    row[a], row[b] = row[b], row[a]
