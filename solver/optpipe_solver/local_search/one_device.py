"""The best program of one device, all others' orders fixed, by a search over counts.

Only for schedules that offload nothing, have no RECOMPUTE and one mode per stage. *Exact* means: no
program of this device in the same modes, fused and split backwards alike, makes the schedule with
the other programs (micro-batches renamed, see `in_order`) better by more than a thousand-millionth,
if ``is_exact`` says so; the other devices' times move along. The argument has four steps.

1. With the others in order, the device may keep every stage's passes in order too (`in_order`
changes nothing but the device's own names), so a program is a sequence of counts. 2. Heads, lags
and tails are all that the others mean (`Ways`): the objective is the longest path, and each path is
pieces of these and of the device's own passes. 3. Bytes are a function of the counts, so memory is
exact. 4. Dominated labels are dropped only for better ones with the same counts (`search`).

Under span the others' first starts must not move: each device's first stage comes before any stage
that returns to a device. At most one stage of a device may have a gradient reduction, because
several queue in an order of their own. Where messages queue on links the ways leave that out, so
that paths are too short: what they exclude stays excluded, but a program that they promise may
prove no better; then ``is_exact`` is False.

The search, compiled: all orders of the device's passes that can end in time, by counts. Labels with
the same counts hold the same bytes and have the same passes to come. Of two such labels the one
that is free no later and whose passes are ready no later does whatever the other does, no later
(every release is a maximum of what is known now and of ends to come, so it grows with them): the
other is dropped. A label is dropped too when a pass to come cannot reach the objective in time,
even if nothing but what its release says, the order of its stage's own passes, and the device's
remaining work is in its way.

Where only one stage has W to do, and one fits and ends before any F or backward could start,
nothing else is tried: put first in whatever follows, it delays nothing and only frees bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.arrays import simulate
from optpipe_solver.arrays.encoding import Rows
from optpipe_solver.arrays.simulate import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    input_of,
)
from optpipe_solver.feasibility import refuse_unless
from optpipe_solver.jit import lean

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe_solver.arrays import Flags, Floats, Ints
    from optpipe_solver.arrays.encoding import CompiledProblem
    from optpipe_solver.arrays.simulate import TimeArrays

__all__ = [
    "LEFT_OUT",
    "Chores",
    "DeviceQuestion",
    "Labels",
    "OneDevice",
    "OneDeviceOutcome",
    "Others",
    "Polish",
    "Scene",
    "Ways",
    "can_reoptimise",
    "find_ways",
    "in_order",
    "labels_for",
    "others_for",
    "search",
    "ways_for",
]


# --- Compiled: what the other devices, their orders fixed, mean to the passes of one device.
# Without the device's own program the other programs and the transfers make a graph without
# circles. Every path of the whole schedule's graph is cut by the device's passes into pieces that
# lie in it: before the first pass a *head*, from a pass to another a *lag* (Balas, Lenstra and
# Vazacopoulos 1995 call it a delayed precedence), behind the last a *tail*. So with all of them
# known, the others need not be looked at again.


# --- The compiled search over labels.


class Scene(NamedTuple):
    """Programs that transfer nothing and do not wait in a circle, and the device looked at.

    ``stages`` are the device's own, at least one; ``begins`` is by device what its last end is
    counted from (ms).
    """

    actions: Ints
    counts: Ints
    times: TimeArrays
    begins: Floats
    device: int
    stages: Ints


class Ways(NamedTuple):
    """Longest paths (ms) around the passes of a device, -inf where there is none.

    Passes are numbered ``(2 * stage + kind) * m + microbatch``: stages of the device from 0, kind 0
    = F, 1 = I or B. ``head`` leads to a pass's start, ``lag[a, b]`` from the end of a to the start
    of b, ``tail`` from a pass's end to the objective, ``floor[0]`` past the device. ``needs[b, p]``
    is how many passes of part p (those with ``a // m == p``) have a way to b: they must come before
    it, or the programs wait in a circle.
    """

    head: Floats
    lag: Floats
    tail: Floats
    floor: Floats
    needs: Ints


class Others(NamedTuple):
    """Scratch: the other devices' actions in an order in which each follows what it waits for.

    ``sequence[:size[0]]`` are they; ``place`` and ``clock`` are by device, ``end`` and ``known`` by
    F, then by backward of each cell; ``synced`` is when a device's reduction ends (ms).
    """

    sequence: Ints
    size: Ints
    place: Ints
    clock: Floats
    synced: Floats
    end: Floats
    known: Flags


def ways_for(num_stages: int, num_microbatches: int) -> Ways:
    """Return room for the ways of a device with so many stages."""
    num_passes = 2 * num_stages * num_microbatches
    return Ways(
        head=np.zeros(num_passes),
        lag=np.zeros((num_passes, num_passes)),
        tail=np.zeros(num_passes),
        floor=np.zeros(1),
        needs=np.zeros((num_passes, 2 * num_stages), dtype=np.int64),
    )


def others_for(times: TimeArrays, num_devices: int) -> Others:
    """Return scratch for a problem."""
    return Others(
        sequence=np.zeros(3 * times.num_cells, dtype=np.int64),
        size=np.zeros(1, dtype=np.int64),
        place=np.zeros(num_devices, dtype=np.int64),
        clock=np.zeros(num_devices),
        synced=np.zeros(num_devices),
        end=np.zeros(2 * times.num_cells),
        known=np.zeros(2 * times.num_cells, dtype=np.bool_),
    )


@lean
def find_ways(scene: Scene, others: Others, ways: Ways) -> None:
    """Fill in the ways of a device."""
    times, stages = scene.times, scene.stages
    m = times.num_microbatches
    _line_up(scene, others)
    others.end[:] = -np.inf
    others.clock[:] = 0.0
    ways.floor[0] = _run(scene, others)
    _arrivals(scene, others, ways.head)
    for j in range(m):
        if stages[0] == 0:
            ways.head[j] = 0.0
    ways.needs[:, :] = 0
    for a in range(ways.head.size):
        part = a // m
        source = (part % 2) * times.num_cells + stages[part // 2] * m + a % m
        others.end[:] = -np.inf
        others.clock[:] = -np.inf
        others.end[source] = 0.0
        ways.tail[a] = _run(scene, others)
        _arrivals(scene, others, ways.lag[a])
        for b in range(ways.head.size):
            if ways.lag[a, b] > -np.inf:
                ways.needs[b, part] = a % m + 1


@lean
def _line_up(scene: Scene, others: Others) -> None:
    """List all other devices' actions, each behind those it waits for."""
    times, cells = scene.times, scene.times.num_cells
    size = 0
    others.place[:] = 0
    others.known[:] = False
    moved = True
    while moved:
        moved = False
        for d in range(scene.counts.size):
            while d != scene.device and others.place[d] < scene.counts[d]:
                code = scene.actions[d, others.place[d]]
                kind = code // cells
                source, _ = _source(kind, code - kind * cells, times)
                if source >= 0 and not others.known[source]:
                    there = times.device_of[source % cells // times.num_microbatches]
                    if there != scene.device:
                        break
                others.known[_slot(kind, code - kind * cells, cells)] = True
                others.sequence[size] = code
                others.place[d] += 1
                size += 1
                moved = True
    others.size[0] = size


@lean
def _source(kind: int, cell: int, times: TimeArrays) -> tuple[int, float]:
    """Return the end an action waits for, -1 for none, and the transit from there."""
    if kind in (FORWARD, BACKWARD_INPUT, FULL_BACKWARD):
        return input_of(kind, cell, cell // times.num_microbatches, times)
    return -1, 0.0


@lean
def _slot(kind: int, cell: int, cells: int) -> int:
    """Return where an F's or a backward's end stands; of a W, where its backward's would."""
    return cell if kind == FORWARD else cells + cell


@lean
def _run(scene: Scene, others: Others) -> float:
    """Let the others' longest paths grow from what is set; return the longest to the objective."""
    times = scene.times
    cells, m = times.num_cells, times.num_microbatches
    others.synced[:] = -np.inf
    for i in range(others.size[0]):
        code = others.sequence[i]
        kind = code // cells
        cell = code - kind * cells
        stage = cell // m
        d = times.device_of[stage]
        start = others.clock[d]
        source, transit = _source(kind, cell, times)
        if source >= 0:
            start = max(start, others.end[source] + transit)
        done = start + times.duration[code]
        others.clock[d] = done
        if kind in (FORWARD, BACKWARD_INPUT, FULL_BACKWARD):
            others.end[_slot(kind, cell, cells)] = done
        if kind in (BACKWARD_WEIGHT, FULL_BACKWARD) and times.grad_sync[stage] > 0.0:
            others.synced[d] = done + times.grad_sync[stage]
    longest = -np.inf
    for d in range(others.clock.size):
        if d != scene.device:
            longest = max(longest, max(others.clock[d], others.synced[d]) - scene.begins[d])
    return longest


@lean
def _arrivals(scene: Scene, others: Others, found: Floats) -> None:
    """Write down when what each pass of the device waits for is there."""
    times, stages = scene.times, scene.stages
    m = times.num_microbatches
    for part in range(2 * stages.size):
        stage = stages[part // 2]
        kind = FORWARD if part % 2 == 0 else BACKWARD_INPUT
        for j in range(m):
            source, transit = input_of(kind, stage * m + j, stage, times)
            found[part * m + j] = others.end[source] + transit if source >= 0 else -np.inf


# --- Where the search over one device's programs stands: labels by how many passes are done.


class Chores(NamedTuple):
    """What a device has to do; all by its own stages, numbered from 0.

    ``duration`` (ms), ``delta`` (bytes) and ``rise`` (the most held above what was there before)
    are by kind (F, I, W, B) and stage,
    ``limit`` is the device's bytes, ``sync`` a stage's gradient reduction (ms), ``may_fuse`` flags
    stages where a B can be of use. ``begin`` is what the device's end is counted from (ms),
    ``most_per_state`` how many labels with the same counts are kept.
    """

    num_stages: int
    num_microbatches: int
    duration: Floats
    delta: Ints
    rise: Ints
    limit: int
    sync: Floats
    may_fuse: Flags
    begin: float
    most_per_state: int


class Labels(NamedTuple):
    """Labels of three layers in turn, by layer and row; layer n holds those with n passes done.

    A label is counts of F, backwards and weight gradients per stage (``counts``, packed in
    ``key``), when the device is free (``time``), when each pass still to come can start for the
    others (``ready``, see `Ways`; 0 = done), the largest end plus tail so far (``worst``), all
    in ms, and where its last action stands in the trail. ``next`` links labels with keys of the
    same hash from ``first`` on; ``alive`` is False where a better one was found.

    ``parent`` and ``action`` (4 x stage + kind) are the trail of all labels ever made. ``sizes``
    are its length and whether anything was left out for want of room. ``trial`` is scratch.
    """

    size: Ints
    counts: Ints
    key: Ints
    time: Floats
    ready: Floats
    worst: Floats
    trail: Ints
    next: Ints
    first: Ints
    alive: Flags
    parent: Ints
    action: Ints
    sizes: Ints
    trial: Floats
    trial_counts: Ints


def labels_for(num_stages: int, num_microbatches: int, width: int, most: int) -> Labels:
    """Return room for ``width`` labels per layer and ``most`` in all."""
    passes = 2 * num_stages * num_microbatches
    hashes = 1 << max(4, width.bit_length())
    return Labels(
        size=np.zeros(3, dtype=np.int64),
        counts=np.zeros((3, width, 3 * num_stages), dtype=np.int64),
        key=np.zeros((3, width), dtype=np.int64),
        time=np.zeros((3, width)),
        ready=np.zeros((3, width, passes)),
        worst=np.zeros((3, width)),
        trail=np.zeros((3, width), dtype=np.int64),
        next=np.zeros((3, width), dtype=np.int64),
        first=np.full((3, hashes), -1, dtype=np.int64),
        alive=np.zeros((3, width), dtype=np.bool_),
        parent=np.zeros(most, dtype=np.int64),
        action=np.zeros(most, dtype=np.int64),
        sizes=np.zeros(2, dtype=np.int64),
        trial=np.zeros(passes),
        trial_counts=np.zeros(3 * num_stages, dtype=np.int64),
    )


LEFT_OUT = 1
"""Entry of `Labels.sizes` that says whether labels were left out."""


class DeviceQuestion(NamedTuple):
    """Whether a program of the device makes the schedule take at most ``most_ms``."""

    chores: Chores
    ways: Ways
    labels: Labels
    most_ms: float


class _Step(NamedTuple):
    """An action more: when it ends, the largest end plus tail (ms), the trail before, and which."""

    done: float
    worst: float
    parent: int
    action: int


@lean
def search(question: DeviceQuestion) -> int:
    """Return the trail's end of a program that is good enough, -1 if none was found.

    Where no label was left out, -1 says that there is none.
    """
    chores, ways, labels, most_ms = question
    labels.sizes[0], labels.sizes[LEFT_OUT] = 0, 0
    labels.size[:] = 0
    labels.first[:, :] = -1
    if ways.floor[0] > most_ms:
        return -1
    _plant(ways, labels)
    whole = 3 * chores.num_stages * chores.num_microbatches
    for done in range(whole):
        layer = done % 3
        for row in range(labels.size[layer]):
            if labels.alive[layer, row]:
                _expand(question, layer, row)
        labels.size[layer] = 0
        labels.first[layer, :] = -1
    return _best(chores, labels, whole % 3)


@lean
def _plant(ways: Ways, labels: Labels) -> None:
    """Set the first label: nothing is done."""
    labels.size[0] = 1
    labels.counts[0, 0, :] = 0
    labels.key[0, 0] = 0
    labels.time[0, 0] = 0.0
    labels.worst[0, 0] = ways.floor[0]
    labels.trail[0, 0] = -1
    labels.next[0, 0] = -1
    labels.alive[0, 0] = True
    for a in range(ways.head.size):
        labels.ready[0, 0, a] = max(0.0, ways.head[a])


@lean
def _best(chores: Chores, labels: Labels, layer: int) -> int:
    """Return the trail's end of the complete label with the least objective, -1 for none."""
    best, least = -1, np.inf
    for row in range(labels.size[layer]):
        objective = max(labels.worst[layer, row], labels.time[layer, row] - chores.begin)
        if labels.alive[layer, row] and objective < least:
            best, least = labels.trail[layer, row], objective
    return best


@lean
def _expand(question: DeviceQuestion, layer: int, row: int) -> None:
    """Try every action that may come next."""
    chores, ways, labels, _ = question
    m = chores.num_microbatches
    counts = labels.counts[layer, row]
    held_bytes = _held(chores, counts)
    if _do_weight_at_once(question, layer, row, held_bytes):
        return
    for k in range(chores.num_stages):
        forwards, backwards, weights = counts[3 * k], counts[3 * k + 1], counts[3 * k + 2]
        due = (2 * k + 1) * m + backwards
        if forwards < m and _has_all(chores, ways, counts, 2 * k * m + forwards):
            _extend(question, layer, row, 4 * k + FORWARD, held_bytes)
        if backwards < forwards and _has_all(chores, ways, counts, due):
            _extend(question, layer, row, 4 * k + BACKWARD_INPUT, held_bytes)
            if chores.may_fuse[k]:
                _extend(question, layer, row, 4 * k + FULL_BACKWARD, held_bytes)
        if weights < backwards:
            _extend(question, layer, row, 4 * k + BACKWARD_WEIGHT, held_bytes)


@lean
def _has_all(chores: Chores, ways: Ways, counts: Ints, a: int) -> bool:
    """Whether all that a pass waits for, directly or through other devices, is done."""
    for part in range(2 * chores.num_stages):
        if counts[3 * (part // 2) + part % 2] < ways.needs[a, part]:
            return False
    return True


@lean
def _do_weight_at_once(question: DeviceQuestion, layer: int, row: int, held_bytes: int) -> bool:
    """Do a W that is in nobody's way; whether there is one."""
    chores, labels = question.chores, question.labels
    counts = labels.counts[layer, row]
    soonest, found, open_stages = np.inf, -1, 0
    for k in range(chores.num_stages):
        if counts[3 * k + 2] < counts[3 * k + 1]:
            found, open_stages = k, open_stages + 1
        if counts[3 * k] < chores.num_microbatches:
            soonest = min(soonest, _ready(question, layer, row, 4 * k + FORWARD))
        if counts[3 * k + 1] < counts[3 * k]:
            soonest = min(soonest, _ready(question, layer, row, 4 * k + BACKWARD_INPUT))
    if open_stages != 1:
        return False
    done = labels.time[layer, row] + chores.duration[BACKWARD_WEIGHT, found]
    peak = held_bytes + chores.rise[BACKWARD_WEIGHT, found]
    if done > soonest or peak > chores.limit:
        return False
    _extend(question, layer, row, 4 * found + BACKWARD_WEIGHT, held_bytes)
    return True


@lean
def _ready(question: DeviceQuestion, layer: int, row: int, action: int) -> float:
    """Return when a stage's next pass of a kind can start, in ms."""
    labels, m = question.labels, question.chores.num_microbatches
    k, kind = action // 4, action % 4
    if kind == BACKWARD_WEIGHT:
        return labels.time[layer, row]
    part = 0 if kind == FORWARD else 1
    next_one = labels.counts[layer, row, 3 * k + part]
    return labels.ready[layer, row, (2 * k + part) * m + next_one]


@lean
def _held(chores: Chores, counts: Ints) -> int:
    """Return the bytes on the device, by counts."""
    held_bytes = 0
    for k in range(chores.num_stages):
        held_bytes += counts[3 * k] * chores.delta[FORWARD, k]
        held_bytes += counts[3 * k + 1] * chores.delta[BACKWARD_INPUT, k]
        held_bytes += counts[3 * k + 2] * chores.delta[BACKWARD_WEIGHT, k]
    return held_bytes


@lean
def _extend(question: DeviceQuestion, layer: int, row: int, action: int, held_bytes: int) -> None:
    """Make the label behind one more action, if it fits and can end in time."""
    chores, ways, labels, most_ms = question
    k, kind = action // 4, action % 4
    if held_bytes + chores.rise[kind, k] > chores.limit:
        return
    counts = labels.trial_counts
    for i in range(3 * chores.num_stages):
        counts[i] = labels.counts[layer, row, i]
    done = _ready(question, layer, row, action) + chores.duration[kind, k]
    worst = labels.worst[layer, row]
    pass_number = _count_in(chores, counts, action)
    if pass_number >= 0:
        worst = max(worst, done + ways.tail[pass_number])
    if counts[3 * k + 2] == chores.num_microbatches and kind in (BACKWARD_WEIGHT, FULL_BACKWARD):
        worst = max(worst, done + chores.sync[k] - chores.begin)
    if worst > most_ms or done + _rest(chores, counts) - chores.begin > most_ms:
        return
    if _look_ahead(question, layer, row, pass_number, done):
        later = (layer + (2 if kind == FULL_BACKWARD else 1)) % 3
        _insert(chores, labels, later, _Step(done, worst, labels.trail[layer, row], action))


@lean
def _count_in(chores: Chores, counts: Ints, action: int) -> int:
    """Count an action; return the number of the pass the others see, -1 for none."""
    m = chores.num_microbatches
    k, kind = action // 4, action % 4
    pass_number = -1
    if kind == FORWARD:
        pass_number = 2 * k * m + counts[3 * k]
        counts[3 * k] += 1
    elif kind != BACKWARD_WEIGHT:
        pass_number = (2 * k + 1) * m + counts[3 * k + 1]
        counts[3 * k + 1] += 1
    if kind in (BACKWARD_WEIGHT, FULL_BACKWARD):
        counts[3 * k + 2] += 1
    return pass_number


@lean
def _rest(chores: Chores, counts: Ints) -> float:
    """Return the least time the device still has to work, in ms."""
    m = chores.num_microbatches
    rest = 0.0
    for k in range(chores.num_stages):
        left = m - counts[3 * k + 1]
        split = chores.duration[BACKWARD_INPUT, k] + chores.duration[BACKWARD_WEIGHT, k]
        rest += (m - counts[3 * k]) * chores.duration[FORWARD, k]
        rest += left * min(split, chores.duration[FULL_BACKWARD, k])
        rest += (counts[3 * k + 1] - counts[3 * k + 2]) * chores.duration[BACKWARD_WEIGHT, k]
    return rest


@lean
def _look_ahead(
    question: DeviceQuestion, layer: int, row: int, pass_number: int, done: float
) -> bool:
    """Work out when passes to come can start at best; whether all can be in time."""
    chores, ways, labels, most_ms = question
    m = chores.num_microbatches
    ready, before = labels.trial, labels.ready[layer, row]
    for part in range(2 * chores.num_stages):
        k = part // 2
        length = chores.duration[FORWARD, k]
        if part % 2 == 1:
            length = min(chores.duration[BACKWARD_INPUT, k], chores.duration[FULL_BACKWARD, k])
        low = done
        first = part * m + labels.trial_counts[3 * k + part % 2]
        for a in range(part * m, first):
            ready[a] = 0.0
        for a in range(first, part * m + m):
            low = max(low, before[a])
            if pass_number >= 0:
                low = max(low, done + ways.lag[pass_number, a])
            if part % 2 == 1 and ready[a - m] > 0.0:
                low = max(low, ready[a - m] + chores.duration[FORWARD, k] + ways.lag[a - m, a])
            ready[a] = low
            low += length
            if low + ways.tail[a] > most_ms:
                return False
    return True


@lean
def _insert(chores: Chores, labels: Labels, layer: int, step: _Step) -> None:
    """Put the trial among its layer's labels, unless one of them is at least as good."""
    key = 0
    for i in range(3 * chores.num_stages):
        key = key * (chores.num_microbatches + 1) + labels.trial_counts[i]
    hashed = (key * 2654435761) % labels.first.shape[1]
    alike = 0
    other = labels.first[layer, hashed]
    while other >= 0:
        if labels.key[layer, other] == key and labels.alive[layer, other]:
            if _is_covered(labels, layer, other, step.done):
                return
            if _covers(labels, layer, other, step.done):
                labels.alive[layer, other] = False
            else:
                alike += 1
        other = labels.next[layer, other]
    full = labels.size[layer] == labels.key.shape[1] or labels.sizes[0] == labels.parent.size
    if full or alike >= chores.most_per_state:
        labels.sizes[LEFT_OUT] = 1
        return
    row = labels.size[layer]
    labels.key[layer, row] = key
    labels.next[layer, row] = labels.first[layer, hashed]
    labels.first[layer, hashed] = row
    _write(labels, layer, row, step)


@lean
def _write(labels: Labels, layer: int, row: int, step: _Step) -> None:
    """Write the trial down as a layer's next row, with its place in the trail."""
    end = labels.sizes[0]
    labels.size[layer] = row + 1
    labels.sizes[0] = end + 1
    labels.parent[end], labels.action[end] = step.parent, step.action
    for i in range(labels.trial_counts.size):
        labels.counts[layer, row, i] = labels.trial_counts[i]
    for a in range(labels.trial.size):
        labels.ready[layer, row, a] = labels.trial[a]
    labels.time[layer, row], labels.worst[layer, row] = step.done, step.worst
    labels.trail[layer, row] = end
    labels.alive[layer, row] = True


@lean
def _is_covered(labels: Labels, layer: int, row: int, done: float) -> bool:
    """Whether a label is at least as good as the trial."""
    if labels.time[layer, row] > done:
        return False
    ready = labels.ready[layer, row]
    for a in range(labels.trial.size):  # noqa: SIM110 - compiled
        if ready[a] > labels.trial[a]:
            return False
    return True


@lean
def _covers(labels: Labels, layer: int, row: int, done: float) -> bool:
    """Whether the trial is at least as good as a label."""
    if labels.time[layer, row] < done:
        return False
    ready = labels.ready[layer, row]
    for a in range(labels.trial.size):  # noqa: SIM110 - compiled
        if ready[a] < labels.trial[a]:
            return False
    return True


# --- What it works on, and what a board gains by it.


_LEAST_GAIN = 1e-9
"""What counts as better, as a fraction of the objective: above rounding."""


class OneDeviceOutcome(NamedTuple):
    """Programs and their objective in ms, no worse than before; see the module for ``is_exact``.

    ``work`` counts the labels made.
    """

    rows: Rows
    objective_ms: float
    is_exact: bool
    work: int


def can_reoptimise(problem: Problem) -> bool:
    """Whether what the module asks of a problem holds, and counts fit an integer.

    Micro-batches must be equal, in a free order, and no passes may pair.
    """
    most_held = max(len(stages) for stages in problem.stages_of)
    fits = (problem.num_microbatches + 1) ** (3 * most_held) < 2**62
    synced = [stage.device for stage in problem.stages if stage.grad_sync_ms > 0]
    alone = len(synced) == len(set(synced))
    if problem.pairs or not problem.is_even:
        return False
    return fits and alone and (problem.objective == "makespan" or _first_starts_stay(problem))


def _first_starts_stay(problem: Problem) -> bool:
    lowest = [min(stages) for stages in problem.stages_of if stages]
    return sorted(lowest) == list(range(len(lowest)))


class OneDevice:
    """Re-optimises devices of one problem, in memory that is used again.

    Parameters
    ----------
    compiled
        A problem for which `can_reoptimise` holds.
    width
        Most labels in a layer.
    most
        Most labels in all.
    most_per_state
        Most labels with the same counts.
    """

    def __init__(
        self, compiled: CompiledProblem, *, width: int, most: int, most_per_state: int
    ) -> None:
        refuse_unless(
            can_reoptimise(compiled.problem),
            "OneDevice",
            compiled.problem,
            "equal micro-batches in a free order, no pairs, one gradient reduction a device, and "
            "few enough stages on each",
        )
        self.compiled = compiled
        self.most_per_state = most_per_state
        self.sizes = (width, most)
        self.by_span = compiled.problem.objective == "span"
        self.others = others_for(compiled.times, len(compiled.problem.devices))
        self.times = compiled.times
        self.work = simulate.workspace_for(compiled.times, len(compiled.problem.devices))
        self.labels: dict[int, Labels] = {}

    def reoptimise(self, rows: Rows, device: int) -> OneDeviceOutcome:
        """Return the best program of a device beside the others'; the rest of the rows stays.

        The rows must be compute programs in order (`in_order`), and not wait in a circle.
        """
        self.times = self.compiled.times._replace(duration=self.compiled.durations(rows))
        objective = self._length(rows)
        stages = self.compiled.problem.stages_of[device]
        if not stages or objective <= 0.0:
            return OneDeviceOutcome(rows, objective, True, 0)
        begins = self.work.first.copy() if self.by_span else np.zeros(rows.lengths.size)
        chores = self._chores(rows, stages, device, float(begins[device]))
        labels = self._labels(len(stages))
        times = self.times
        ways = ways_for(len(stages), times.num_microbatches)
        own = np.array(stages, dtype=np.int64)
        scene = Scene(rows.actions, rows.lengths, times, begins, device, own)
        find_ways(scene, self.others, ways)
        work = 0
        while True:
            end = search(DeviceQuestion(chores, ways, labels, objective * (1 - _LEAST_GAIN)))
            work += int(labels.sizes[0])
            if end < 0:
                return OneDeviceOutcome(rows, objective, not labels.sizes[LEFT_OUT], work)
            found = self._replaced(rows, device, stages, labels, end)
            length = self._length(found)
            if length >= objective:
                return OneDeviceOutcome(rows, objective, objective <= 0.0, work)
            rows, objective = found, length

    def _length(self, rows: Rows) -> float:
        makespan, span, _ = simulate.length(rows.actions, rows.lengths, self.times, self.work)
        return float(span if self.by_span else makespan)

    def _labels(self, num_stages: int) -> Labels:
        if num_stages not in self.labels:
            m = self.compiled.times.num_microbatches
            self.labels[num_stages] = labels_for(num_stages, m, *self.sizes)
        return self.labels[num_stages]

    def _chores(self, rows: Rows, stages: tuple[int, ...], device: int, begin: float) -> Chores:
        times, memory = self.times, self.compiled.memory
        own = list(stages)
        m = times.num_microbatches
        duration = times.duration.reshape(8, times.num_stages, m)[:4, own, 0].copy()
        modes = rows.modes.reshape(times.num_stages, m)[own, 0]
        # Rows after rows, whatever numpy makes of an index: other strides are compiled for anew.
        delta, rise = (
            np.ascontiguousarray(table[:4, own, modes]) for table in (memory.adds, memory.rises)
        )
        return Chores(
            num_stages=len(own),
            num_microbatches=m,
            duration=duration,
            delta=delta,
            rise=rise,
            limit=int(memory.limit[device]),
            sync=times.grad_sync[own].copy(),
            may_fuse=_may_fuse(duration, delta, rise - np.maximum(delta, 0)),
            begin=begin,
            most_per_state=self.most_per_state,
        )

    def _replaced(
        self, rows: Rows, device: int, stages: tuple[int, ...], labels: Labels, end: int
    ) -> Rows:
        """Return the rows with the device's program read from the trail."""
        found = []
        while end >= 0:
            found.append(int(labels.action[end]))
            end = int(labels.parent[end])
        actions, lengths = rows.actions.copy(), rows.lengths.copy()
        codes = _named(found[::-1], stages, self.compiled.times)
        actions[device, : len(codes)] = codes
        lengths[device] = len(codes)
        return Rows(actions, lengths, rows.modes)


def _may_fuse(duration: Floats, delta: Ints, workspace: Ints) -> Flags:
    """Flag stages where B is shorter than I and W, or needs less room at any moment.

    Elsewhere I and W back to back stand wherever a B could.
    """
    i, w, b = simulate.BACKWARD_INPUT, simulate.BACKWARD_WEIGHT, simulate.FULL_BACKWARD
    shorter = duration[b] < duration[i] + duration[w]
    smaller = (workspace[b] < workspace[i]) | (workspace[b] < workspace[w]) | (delta[i] > 0)
    return np.asarray(shorter | smaller)


def _named(found: list[int], stages: tuple[int, ...], times: simulate.TimeArrays) -> list[int]:
    """Return action numbers for 4 x stage + kind, micro-batches in order."""
    m, cells = times.num_microbatches, times.num_cells
    done = [[0, 0] for _ in stages]
    waiting: list[list[int]] = [[] for _ in stages]
    codes = []
    for entry in found:
        k, kind = divmod(entry, 4)
        if kind == simulate.BACKWARD_WEIGHT:
            j = waiting[k].pop(0)
        else:
            part = min(kind, 1)
            j = done[k][part]
            done[k][part] += 1
            if kind == simulate.BACKWARD_INPUT:
                waiting[k].append(j)
        codes.append(kind * cells + stages[k] * m + j)
    return codes


# --- Device after device re-optimised until none gets better: a local optimum of whole programs.

_LABELS, _ALIKE = 1_000, 20
"""Most labels per layer and per state: far more than are needed where a schedule is good."""

_LAYERS = 60
"""Layers' worth of labels remembered for the way back."""

_WAY_SHARE, _LABEL_WORK = 8, 16
"""Steps along ways that cost as much as an action simulated, and what a label costs."""

_MOST_WORK = 1_000_000
"""Largest cost of looking at every device once, in actions simulated."""


def _treats_alike(compiled: CompiledProblem, rows: Rows) -> bool:
    """Whether programs have compute passes alone, and each stage one mode."""
    modes = rows.modes.reshape(compiled.times.num_stages, -1)
    return bool((modes == modes[:, :1]).all()) and compiled.is_compute_only(rows)


class Polish:
    """Re-optimises the devices of one problem in turn.

    Where it does not apply (`can_reoptimise`, or the problem is too large) rows come back as they
    are.
    """

    def __init__(self, compiled: CompiledProblem) -> None:
        self.compiled = compiled
        times = compiled.times
        passes = 2 * times.num_cells
        self.sweep_work = passes * 3 * times.num_cells // _WAY_SHARE
        self.applies = self.sweep_work <= _MOST_WORK and can_reoptimise(compiled.problem)
        if self.applies:
            self.device = OneDevice(
                compiled, width=_LABELS, most=_LAYERS * _LABELS, most_per_state=_ALIKE
            )

    def polish(self, rows: Rows, objective_ms: float) -> OneDeviceOutcome:
        """Return legal programs no worse than the given ones, and what it took.

        ``objective_ms`` is that of the rows; ``is_exact`` says that no device's program alone can
        be better.
        """
        if not self.applies or not _treats_alike(self.compiled, rows):
            return OneDeviceOutcome(rows, objective_ms, False, 0)
        best = OneDeviceOutcome(in_order(rows, self.compiled.times), objective_ms, True, 0)
        num_devices = int(rows.lengths.size)
        work, device, idle = 0, 0, 0
        proven = [False] * num_devices
        while idle < num_devices:
            found = self.device.reoptimise(best.rows, device)
            work += self.sweep_work // num_devices + found.work * _LABEL_WORK
            proven[device] = found.is_exact
            idle = 0 if found.objective_ms < best.objective_ms else idle + 1
            best = found
            device = (device + 1) % num_devices
        return best._replace(is_exact=all(proven), work=work)


# --- Micro-batches renamed so that every stage runs every pass in their order.


def in_order(rows: Rows, times: TimeArrays) -> Rows:
    """Return compute programs with each stage's k-th F, k-th backward and k-th W renamed to k's.

    W go to those of split backwards in turn. Nothing ends later, and no program holds more: when
    the k-th pass of a stage starts, k inputs have arrived, and in the renamed programs, by
    induction along the schedule, the k-th of them has; bytes depend on counts alone.
    """
    renamed = Rows(rows.actions.copy(), rows.lengths.copy(), rows.modes)
    for codes in renamed.programs():
        kinds, stages = codes // times.num_cells, codes % times.num_cells // times.num_microbatches
        for stage in np.unique(stages):
            _rename(codes, kinds, stages == stage, int(stage) * times.num_microbatches, times)
    return renamed


def _rename(
    codes: Ints,
    kinds: Ints,
    here: Flags,
    first: int,
    times: TimeArrays,
) -> None:
    """Rename one stage's passes in place; ``first`` is its first cell."""
    forwards = np.flatnonzero(here & (kinds == FORWARD))
    backwards = np.flatnonzero(here & ((kinds == BACKWARD_INPUT) | (kinds == FULL_BACKWARD)))
    weights = np.flatnonzero(here & (kinds == BACKWARD_WEIGHT))
    split = np.flatnonzero(kinds[backwards] == BACKWARD_INPUT)
    for places, labels in (
        (forwards, np.arange(forwards.size)),
        (backwards, np.arange(backwards.size)),
        (weights, split),
    ):
        codes[places] = kinds[places] * times.num_cells + first + labels
