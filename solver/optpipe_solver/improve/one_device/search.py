"""Compiled: all orders of one device's passes that can end in time, by counts.

Labels with the same counts hold the same bytes and have the same passes to come. Of two such labels
the one that is free no later and whose passes are ready no later does whatever the other does, no
later (every release is a maximum of what is known now and of ends to come, so it grows with them):
the other is dropped. A label is dropped too when a pass to come cannot reach the objective in time,
even if nothing but what its release says, the order of its stage's own passes, and the device's
remaining work is in its way.

Where only one stage has W to do, and one fits and ends before any F or backward could start,
nothing else is tried: put first in whatever follows, it delays nothing and only frees bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.improve.compiled.kernel import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
)
from optpipe_solver.lean import lean

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe_solver.improve.one_device.labels import Chores, Labels
    from optpipe_solver.improve.one_device.ways import Ways

__all__ = ["LEFT_OUT", "Question", "search"]

LEFT_OUT = 1
"""Entry of `Labels.sizes` that says whether labels were left out."""


class Question(NamedTuple):
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
def search(question: Question) -> int:
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
def _expand(question: Question, layer: int, row: int) -> None:
    """Try every action that may come next."""
    chores, ways, labels, _ = question
    m = chores.num_microbatches
    counts = labels.counts[layer, row]
    held = _held(chores, counts)
    if _do_weight_at_once(question, layer, row, held):
        return
    for k in range(chores.num_stages):
        forwards, backwards, weights = counts[3 * k], counts[3 * k + 1], counts[3 * k + 2]
        due = (2 * k + 1) * m + backwards
        if forwards < m and _has_all(chores, ways, counts, 2 * k * m + forwards):
            _extend(question, layer, row, 4 * k + FORWARD, held)
        if backwards < forwards and _has_all(chores, ways, counts, due):
            _extend(question, layer, row, 4 * k + BACKWARD_INPUT, held)
            if chores.may_fuse[k]:
                _extend(question, layer, row, 4 * k + FULL_BACKWARD, held)
        if weights < backwards:
            _extend(question, layer, row, 4 * k + BACKWARD_WEIGHT, held)


@lean
def _has_all(chores: Chores, ways: Ways, counts: NDArray[np.int64], a: int) -> bool:
    """Whether all that a pass waits for, directly or through other devices, is done."""
    for part in range(2 * chores.num_stages):
        if counts[3 * (part // 2) + part % 2] < ways.needs[a, part]:
            return False
    return True


@lean
def _do_weight_at_once(question: Question, layer: int, row: int, held: int) -> bool:
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
    peak = held + chores.workspace[BACKWARD_WEIGHT, found]
    if done > soonest or peak > chores.limit:
        return False
    _extend(question, layer, row, 4 * found + BACKWARD_WEIGHT, held)
    return True


@lean
def _ready(question: Question, layer: int, row: int, action: int) -> float:
    """Return when a stage's next pass of a kind can start, in ms."""
    labels, m = question.labels, question.chores.num_microbatches
    k, kind = action // 4, action % 4
    if kind == BACKWARD_WEIGHT:
        return labels.time[layer, row]
    part = 0 if kind == FORWARD else 1
    next_one = labels.counts[layer, row, 3 * k + part]
    return labels.ready[layer, row, (2 * k + part) * m + next_one]


@lean
def _held(chores: Chores, counts: NDArray[np.int64]) -> int:
    """Return the bytes on the device, by counts."""
    held = 0
    for k in range(chores.num_stages):
        held += counts[3 * k] * chores.delta[FORWARD, k]
        held += counts[3 * k + 1] * chores.delta[BACKWARD_INPUT, k]
        held += counts[3 * k + 2] * chores.delta[BACKWARD_WEIGHT, k]
    return held


@lean
def _extend(question: Question, layer: int, row: int, action: int, held: int) -> None:
    """Make the label behind one more action, if it fits and can end in time."""
    chores, ways, labels, most_ms = question
    k, kind = action // 4, action % 4
    peak = max(held, held + chores.delta[kind, k]) + chores.workspace[kind, k]
    if peak > chores.limit:
        return
    counts = labels.trial_counts
    for i in range(3 * chores.num_stages):
        counts[i] = labels.counts[layer, row, i]
    done = _ready(question, layer, row, action) + chores.duration[kind, k]
    worst = labels.worst[layer, row]
    made = _count_in(chores, counts, action)
    if made >= 0:
        worst = max(worst, done + ways.tail[made])
    if counts[3 * k + 2] == chores.num_microbatches and kind in (BACKWARD_WEIGHT, FULL_BACKWARD):
        worst = max(worst, done + chores.sync[k] - chores.begin)
    if worst > most_ms or done + _rest(chores, counts) - chores.begin > most_ms:
        return
    if _look_ahead(question, layer, row, made, done):
        later = (layer + (2 if kind == FULL_BACKWARD else 1)) % 3
        _insert(chores, labels, later, _Step(done, worst, labels.trail[layer, row], action))


@lean
def _count_in(chores: Chores, counts: NDArray[np.int64], action: int) -> int:
    """Count an action; return the number of the pass the others see, -1 for none."""
    m = chores.num_microbatches
    k, kind = action // 4, action % 4
    made = -1
    if kind == FORWARD:
        made = 2 * k * m + counts[3 * k]
        counts[3 * k] += 1
    elif kind != BACKWARD_WEIGHT:
        made = (2 * k + 1) * m + counts[3 * k + 1]
        counts[3 * k + 1] += 1
    if kind in (BACKWARD_WEIGHT, FULL_BACKWARD):
        counts[3 * k + 2] += 1
    return made


@lean
def _rest(chores: Chores, counts: NDArray[np.int64]) -> float:
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
def _look_ahead(question: Question, layer: int, row: int, made: int, done: float) -> bool:
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
            if made >= 0:
                low = max(low, done + ways.lag[made, a])
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
