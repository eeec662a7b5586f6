"""Heads and tails: how early the k-th F, I and W of each stage can start, and what must follow.

F_k(s) is the k-th forward of stage s in the order in which this stage runs its forwards, of any
micro-batch. I_k and W_k are likewise the pieces of `relaxation`. The rules are 1 turns of devices,
2 data, 3 load, and 4 memory, with `refill` and `drain` (docs/bounds.md). A head is a start. A tail
is the time from an end to the end of all, k counted from the last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.jit import jitted

if TYPE_CHECKING:
    from optpipe_solver.arrays import Floats, Ints
    from optpipe_solver.bounds.relaxation import Relaxed

__all__ = ["ANYTIME", "Events", "Turnover", "drain", "heads", "refill", "tails"]


# --- What a device must do between two events when its memory is full: load and memory together.


class Turnover(NamedTuple):
    """Per stage: how many micro-batches fit (m where this argument says nothing), lag and pace."""

    fits: Ints
    lag: Floats
    pace: Floats


def refill(model: Relaxed) -> Turnover:
    """Return the rule for heads."""
    rows = [_refill_of_stage(model, s) for s in range(len(model.keep))]
    return _as_arrays(rows)


def drain(model: Relaxed) -> Turnover:
    """Return the rule for tails."""
    rows = [_drain_of_stage(model, s) for s in range(len(model.keep))]
    return _as_arrays(rows)


def _as_arrays(rows: list[tuple[int, float, float]]) -> Turnover:
    return Turnover(
        np.array([fits for fits, _, _ in rows], dtype=np.int64),
        np.array([lag for _, lag, _ in rows]),
        np.array([pace for _, _, pace in rows]),
    )


def _fits(model: Relaxed, s: int, room: float) -> int:
    m = model.num_microbatches
    if model.moved[s] > 0 or model.keep[s] == 0 or room < model.keep[s]:
        return m
    return min(m, int(room // model.keep[s]))


def _refill_of_stage(model: Relaxed, s: int) -> tuple[int, float, float]:
    keep, room = float(model.keep[s]), float(model.room_forward[s])
    fits = _fits(model, s, room)
    if fits == model.num_microbatches:
        return fits, 0.0, 0.0
    gradient, weight = float(model.gradient[s]), float(model.weight[s])
    per_byte = (gradient + weight) / keep
    freed = keep - float(model.context[s])
    if freed > 0:
        per_byte = min(per_byte, gradient / freed)
    lag = ((fits + 1) * keep - room) * per_byte
    return fits, lag, float(model.forward[s]) + keep * per_byte


def _drain_of_stage(model: Relaxed, s: int) -> tuple[int, float, float]:
    keep = float(model.keep[s])
    room = float(min(model.room_forward[s], max(model.room_gradient[s], model.room_weight[s])))
    fits = _fits(model, s, room)
    if fits == model.num_microbatches:
        return fits, 0.0, 0.0
    forward, gradient = float(model.forward[s]), float(model.gradient[s])
    weight, context = float(model.weight[s]), float(model.context[s])
    per_byte = (gradient + weight) / keep
    if weight > 0:
        per_byte = max(per_byte, weight / context if context > 0 else np.inf)
    lag = forward + fits * gradient + (fits + 1) * weight - room * per_byte
    return fits, lag, forward + gradient + weight


# --- Heads, then tails: rules ask for smaller k, or the same k and stages already done: one sweep.
# The clock starts with the schedule (makespan), or with the first action of one device (span): then
# other devices may have begun arbitrarily early; data and memory still tie their later events.

ANYTIME = -1e18
"""No lower bound, in ms: far below any sum of durations."""


class Events(NamedTuple):
    """Times in ms of the k-th F, I, W of stage s at ``[k, s]``, k from 0; nondecreasing in k."""

    forward: Floats
    gradient: Floats
    weight: Floats


class _HeadLoads(NamedTuple):
    """Per stage, in ms: the origin, what is known, and the ends of the loads of rule 3 so far.

    ``forwards`` is that of the forwards, ``both`` that of forwards and gradient pieces,
    ``gradients`` that of gradient pieces alone. ``refilled`` is what `refill` gives.
    """

    origin: Floats
    known: Events
    forwards: Floats
    both: Floats
    gradients: Floats
    turnover: Turnover
    refilled: Floats


class _HeadRelief(NamedTuple):
    """Per stage: I, W and transfers used so far to free memory, their bytes, and the last time."""

    gradients: Floats
    weights: Floats
    transfers: Floats
    freed: Floats
    time: Floats


def heads(model: Relaxed, turnover: Turnover, origin: Floats) -> Events:
    """Return the earliest starts; ``origin[s]`` is the earliest start of anything on stage s."""
    return heads_beside(model, turnover, origin, nothing_known(model))


def nothing_known(model: Relaxed) -> Events:
    """Return starts that say nothing."""
    shape = model.num_microbatches, len(model.forward)
    return Events(*(np.full(shape, ANYTIME) for _ in range(3)))


@jitted
def heads_beside(model: Relaxed, turnover: Turnover, origin: Floats, known: Events) -> Events:
    """Return the earliest starts where no F and I can start before what is ``known`` of it."""
    m, num_stages = model.num_microbatches, len(model.forward)
    events = Events(np.zeros((m, num_stages)), np.zeros((m, num_stages)), np.zeros((m, num_stages)))
    relief = _HeadRelief(
        np.zeros(num_stages),
        np.zeros(num_stages),
        np.zeros(num_stages),
        np.zeros(num_stages),
        np.full(num_stages, ANYTIME),
    )
    loads = _HeadLoads(
        origin,
        known,
        np.full(num_stages, ANYTIME),
        np.full(num_stages, ANYTIME),
        np.full(num_stages, ANYTIME),
        turnover,
        np.full(num_stages, ANYTIME),
    )
    for k in range(m):
        for s in range(num_stages):
            _head_of_forward(model, events, loads, k, s)
            _wait_for_memory(model, events, relief, k, s)
            _head_of_refill(events, loads, k, s)
        for s in range(num_stages - 1, -1, -1):
            _head_of_gradient(model, events, loads, k, s)
    return events


@jitted
def _head_of_forward(model: Relaxed, events: Events, loads: _HeadLoads, k: int, s: int) -> None:
    """Rules 1 to 3 for F_k(s)."""
    at = max(loads.origin[s], loads.known.forward[k, s])
    if k > 0:
        at = max(at, events.forward[k - 1, s] + model.forward[s])
    if s > 0:
        at = max(at, events.forward[k, s - 1] + model.forward[s - 1] + model.there[s - 1])
    first = model.first[s]
    began = at if first == s else events.forward[k, first]
    loads.forwards[s] = max(loads.forwards[s], began) + model.forward_to[s]
    events.forward[k, s] = max(at, loads.forwards[s] - model.forward[s])


@jitted
def _wait_for_memory(model: Relaxed, events: Events, relief: _HeadRelief, k: int, s: int) -> None:
    """Rule 4: collect I, W and transfers in the order of time until F_k(s) fits."""
    need = (k + 1) * model.keep[s] - model.room_forward[s]
    moving = events.forward[0, s] + model.forward[s]
    while relief.freed[s] < need:
        i, w = int(relief.gradients[s]), int(relief.weights[s])
        n = int(relief.transfers[s])
        by_i = events.gradient[i, s] + model.gradient[s] if i < k else np.inf
        by_w = events.weight[w, s] + model.weight[s] if w < k else np.inf
        by_n = (
            moving + (n + model.lag[s]) * model.out[s] if n < min(k, model.most_away[s]) else np.inf
        )
        soonest = min(by_i, by_w, by_n)
        if soonest == np.inf:
            break
        relief.time[s] = max(relief.time[s], soonest)
        if by_n == soonest:
            relief.transfers[s] += 1
            relief.freed[s] += model.moved[s]
        elif by_i == soonest:
            relief.gradients[s] += 1
            relief.freed[s] += model.keep[s] - model.context[s]
        else:
            relief.weights[s] += 1
            relief.freed[s] += model.context[s]
    events.forward[k, s] = max(events.forward[k, s], relief.time[s])


@jitted
def _head_of_refill(events: Events, loads: _HeadLoads, k: int, s: int) -> None:
    """Rule 4, `refill`."""
    fits = loads.turnover.fits[s]
    if k >= fits:
        since = events.gradient[k - fits, s] + loads.turnover.lag[s]
        loads.refilled[s] = max(loads.refilled[s] + loads.turnover.pace[s], since)
        events.forward[k, s] = max(events.forward[k, s], loads.refilled[s])


@jitted
def _head_of_gradient(model: Relaxed, events: Events, loads: _HeadLoads, k: int, s: int) -> None:
    """Rules 1 to 3 for I_k(s) and W_k(s)."""
    first, last = model.first[s], model.last[s]
    at = events.forward[k, s] + model.forward[s] + model.there[s]
    at = max(at, loads.known.gradient[k, s])
    if s + 1 < len(model.forward):
        at = max(at, events.gradient[k, s + 1] + model.gradient[s + 1] + model.back[s])
    if k > 0:
        at = max(at, events.gradient[k - 1, s] + model.gradient[s])
    all_forward = model.forward_to[last]
    both = all_forward + model.gradient_from[s]
    loads.both[s] = max(loads.both[s], events.forward[k, first]) + both
    began = at if last == s else events.gradient[k, last]
    loads.gradients[s] = max(loads.gradients[s], began) + model.gradient_from[s]
    at = max(at, max(loads.both[s], loads.gradients[s]) - model.gradient[s])
    events.gradient[k, s] = at
    done = at + model.gradient[s]
    if k > 0:
        done = max(done, events.weight[k - 1, s] + model.weight[s])
    events.weight[k, s] = done


class _TailLoads(NamedTuple):
    """Per stage, in ms: the tails of everything (origin), and those of the loads of rule 3 so far.

    ``backwards`` is for gradient and weight pieces up to s, ``gradients`` for gradient pieces up to
    s. ``all`` is for all pieces but the forwards before s, ``forwards`` for forwards from s on.
    ``least``, at the device's first stage, is the minimum tail of W_k over its stages so far.
    ``drained`` is the result of `drain`.
    """

    origin: Floats
    backwards: Floats
    gradients: Floats
    all: Floats
    forwards: Floats
    least: Floats
    turnover: Turnover
    drained: Floats


class _TailRelief(NamedTuple):
    """Per stage: the bytes of k micro-batches, the limit, and the bytes freed so far.

    ``size`` bytes each, in ``room``; a forward that has not begun gives back ``size``, a RELOAD to
    come ``away``. ``forwards`` and ``transfers`` count those used so far, ``freed`` is their bytes,
    ``time`` the tail of the last.
    """

    size: Floats
    room: Floats
    away: Floats
    forwards: Floats
    transfers: Floats
    freed: Floats
    time: Floats


@jitted
def tails(model: Relaxed, turnover: Turnover, origin: Floats) -> Events:
    """Return the minimum times after each end; ``origin[s]`` is that of anything on stage s."""
    m, num_stages = model.num_microbatches, len(model.forward)
    events = Events(np.zeros((m, num_stages)), np.zeros((m, num_stages)), np.zeros((m, num_stages)))
    loads = _TailLoads(
        origin,
        np.full(num_stages, ANYTIME),
        np.full(num_stages, ANYTIME),
        np.full(num_stages, ANYTIME),
        np.full(num_stages, ANYTIME),
        np.full(num_stages, np.inf),
        turnover,
        np.full(num_stages, ANYTIME),
    )
    of_i = _no_relief(model.keep, model.room_gradient, model.moved)
    # Of transfers of several sizes the small ones may save all they move.
    moved = np.where(model.lag > 0.0, np.minimum(model.context, model.moved), model.moved)
    of_w = _no_relief(model.context, model.room_weight, moved)
    for k in range(m):
        for s in range(num_stages):
            _weight(model, events, origin, k, s)
            waited = _memory(model, events, of_w, k, s)
            events.weight[k, s] = max(events.weight[k, s], waited)
        for s in range(num_stages):
            _tail_of_gradient(model, events, loads, k, s)
            waited = _memory(model, events, of_i, k, s)
            events.gradient[k, s] = max(events.gradient[k, s], waited)
            _tail_of_drain(events, loads, k, s)
        for s in range(num_stages - 1, -1, -1):
            _tail_of_forward(model, events, loads, k, s)
    return events


@jitted
def _no_relief(size: Floats, room: Floats, away: Floats) -> _TailRelief:
    num_stages = len(size)
    return _TailRelief(
        size,
        room,
        away,
        np.zeros(num_stages),
        np.zeros(num_stages),
        np.zeros(num_stages),
        np.full(num_stages, ANYTIME),
    )


@jitted
def _weight(model: Relaxed, events: Events, origin: Floats, k: int, s: int) -> None:
    """Rules 1 and 2 for W_k(s)."""
    at = origin[s] + model.sync[s]
    if k > 0:
        at = max(at, events.weight[k - 1, s] + model.weight[s])
    events.weight[k, s] = at


@jitted
def _tail_of_gradient(model: Relaxed, events: Events, loads: _TailLoads, k: int, s: int) -> None:
    """Rules 1 to 3 for I_k(s)."""
    first = model.first[s]
    at = events.weight[k, s] + model.weight[s]
    if s > 0:
        at = max(at, events.gradient[k, s - 1] + model.gradient[s - 1] + model.back[s - 1])
    if k > 0:
        at = max(at, events.gradient[k - 1, s] + model.gradient[s])
    if first == s:
        loads.least[first] = events.weight[k, s]
    loads.least[first] = min(loads.least[first], events.weight[k, s])
    loads.backwards[s] = max(loads.backwards[s], loads.least[first]) + model.backward_to[s]
    began = at if first == s else events.gradient[k, first]
    loads.gradients[s] = max(loads.gradients[s], began) + model.gradient_to[s]
    at = max(at, max(loads.backwards[s], loads.gradients[s]) - model.gradient[s])
    events.gradient[k, s] = at


@jitted
def _tail_of_drain(events: Events, loads: _TailLoads, k: int, s: int) -> None:
    """Rule 4, `drain`."""
    fits = loads.turnover.fits[s]
    if k >= fits:
        since = events.forward[k - fits, s] + loads.turnover.lag[s]
        loads.drained[s] = max(loads.drained[s] + loads.turnover.pace[s], since)
        events.gradient[k, s] = max(events.gradient[k, s], loads.drained[s])


@jitted
def _tail_of_forward(model: Relaxed, events: Events, loads: _TailLoads, k: int, s: int) -> None:
    """Rules 1 to 3 for F_k(s)."""
    at = events.gradient[k, s] + model.gradient[s] + model.there[s]
    if s + 1 < len(model.forward):
        at = max(at, events.forward[k, s + 1] + model.forward[s + 1] + model.there[s])
    if k > 0:
        at = max(at, events.forward[k - 1, s] + model.forward[s])
    last, began = model.last[s], loads.least[model.first[s]]
    loads.all[s] = max(loads.all[s], began) + model.backward_to[last] + model.forward_from[s]
    began = at if last == s else events.forward[k, last]
    loads.forwards[s] = max(loads.forwards[s], began) + model.forward_from[s]
    events.forward[k, s] = max(at, max(loads.all[s], loads.forwards[s]) - model.forward[s])


@jitted
def _memory(model: Relaxed, events: Events, relief: _TailRelief, k: int, s: int) -> float:
    """Rule 4: collect forwards and reloads in the order of their tails until k + 1 fit."""
    need = (k + 1) * relief.size[s] - relief.room[s]
    moving = events.gradient[0, s] + model.gradient[s]
    while relief.freed[s] < need:
        f, n = int(relief.forwards[s]), int(relief.transfers[s])
        by_f = events.forward[f, s] + model.forward[s] if f < k else np.inf
        by_n = (
            moving + (n + model.lag[s]) * model.home[s]
            if n < min(k, model.most_away[s])
            else np.inf
        )
        soonest = min(by_f, by_n)
        if soonest == np.inf:
            break
        relief.time[s] = max(relief.time[s], soonest)
        if by_n == soonest:
            relief.transfers[s] += 1
            relief.freed[s] += relief.away[s]
        else:
            relief.forwards[s] += 1
            relief.freed[s] += relief.size[s]
    return float(relief.time[s])
