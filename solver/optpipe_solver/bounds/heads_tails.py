"""Tails: how much time must follow the k-th last F, I and W of every stage, by counting events.

The mirror image of `heads`. F_k(s) is now the k-th forward of stage s from the end; its tail is
the time from its end to the end of the schedule (makespan) or of one device (span). Times below
are tails; k from 1.

1. *Devices take turns*: F_k(s) >= F_{k-1}(s) + F, and so for I and W.
2. *Data*: the k micro-batches whose I on s are the last k have their W after the k-th last I
   ended. So k W start after it, the k-th last W among them: I_k(s) >= W_k(s) + W(s). In the same
   way I_k(s) >= I_k(s-1) + I(s-1) + back(s-1), on the last stage F_k >= I_k + I, and F_k(s) >=
   F_k(s+1) + F(s+1) + there(s). After the last W comes the gradient reduction: W_1(s) >= sync(s).
3. *Load*: after the k-th last I of s started, its device still has the k last I and W of all its
   stages up to s to do. For every i, those from the i-th last on end at least the least tail of a
   W_i among them before the end, one after the other. The same with the I alone, and for F_k(s)
   with everything that follows it: all I and W of the device and the forwards of its stages from s
   on.
4. *Memory of I*: when the k-th last I of s starts, k micro-batches have not had it. All of them
   that have started their F, all but f, hold keep, less moved for at most n of them that are away.
   Those f forwards start later (devices take turns), and those n RELOADs are issued later and end
   one after the other, each before its own I: n <= (t - I_1 - I) / home for t the tail of this I.
   (k - f) keep - n moved must be at most the room, and f, n are at most what the tails allow. *Of
   W*: likewise k micro-batches have not had their W; all but f hold at least context, less
   min(context, moved) for at most n that are away. `drain` adds the work that must be done
   between this I and a later F.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.jit import jitted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe_solver.bounds.relaxation import Floats, Ints, Relaxed

    Grid = NDArray[np.float64]

__all__ = ["ANYTIME", "Events", "Turnover", "drain", "heads", "refill", "tails"]


# --- What a device must do between two events when its memory is full: load and memory together.
# A stage without offload has room for ``fits`` = floor(room / keep) micro-batches between F and I.
#
# *Refill.* Take j <= k - fits. When I_j(s) starts, at most j - 1 micro-batches have had I or W, so
# at most j - 1 + fits have had F. When F_k(s) starts, k of them hold keep less what I and W gave
# back: at least (k keep - room) must be given back, of which at most (j - 1) keep before I_j
# started. What is missing, (k - j + 1) keep - room > 0, takes at least as many ms as the device's I
# and W need per byte at best: I alone, I / (keep - context), or pairs, (I + W) / keep; a W alone
# cannot come before its I. Besides, k - 1 - (j - 1 + fits) forwards are run in between. Hence
#
#     F_k >= I_j + lag + (k - fits - j) pace,
#     lag = ((fits + 1) keep - room) x least ms per byte,  pace = F + keep x least ms per byte.
#
# *Drain*, the mirror image with tails. Take j <= k - fits. Before the k-th last I of s ends, what
# follows the j-th last F of s? After that F started, at most j - 1 + fits micro-batches are without
# I and what is pending fits into the room: I and W worth at most ``most`` ms of it, besides those
# of the j - 1 later micro-batches. After the k-th last I ended, there are k - 1 I, k W, and, of the
# forwards, at least those from the (k - fits)-th last on, since otherwise k would be pending at
# once. So between the two ends at least k - fits - j + 1 forwards and (k - j) I + (k - j + 1) W -
# most are run:
#
#     I_k >= F_j + lag + (k - fits - j) pace,
#     lag = F + fits I + (fits + 1) W - most,  pace = F + I + W,
#
# where F_j is the tail after the end of the j-th last F, and I_k after that of the k-th last I.


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


# --- Heads: how early the k-th F, I and W of every stage can start, by counting events.
# Write F_k(s) for the k-th forward of stage s in the order in which this stage runs them, whichever
# micro-batch that is; likewise I_k, W_k (pieces, see `relaxation`). Times below are starts; k from
# 1. Nothing is assumed about the order of micro-batches, which is why first in, first out is not
# needed.
#
# 1. *Devices take turns*: F_k(s) >= F_{k-1}(s) + F, and so for I and W.
# 2. *Data*: when F_k(s) starts, k micro-batches have arrived, so stage s - 1 has ended k forwards,
#    and its k-th end is at most F_k(s) - transfer. Hence F_k(s) >= F_k(s-1) + F(s-1) + there(s-1).
#    In the same way I_k(s) >= I_k(s+1) + I(s+1) + back(s), on the last stage I_k >= F_k + F, and
#    W_k(s) >= I_k(s) + I(s): whoever counts k things made from k other things counts those too.
# 3. *Load*: when the k-th I of s has ended, its device has ended the first k forwards of all its
#    stages (each of the k micro-batches passed through them) and the first k I of its stages from s
#    on. For every i, those from the i-th on start no earlier than F_i of the device's first stage,
#    one after the other. So I_k(s) + I(s) >= F_i(first) + (k - i + 1) (sum of F + sum of I from s
#    on); the same with the I alone, from I_i(last) on, and for F_k(s) with the forwards of the
#    stages up to s.
# 4. *Memory*: when F_k(s) starts, the stage holds at least k keep - i (keep - context) - w context
#    less n moved, where i, w count its I and W ended by then and n <= the host's room its
#    micro-batches away. Transfers of the stage use a lane one after the other and start after its
#    first F: n <= (t - F_1 - F) / out. This must be at most the room. Each count only grows with
#    t, and i, w, n by time t are at most what the heads of earlier events allow; so F_k starts no
#    earlier than the
#    moment at which enough of them can have happened. `refill` adds the work that must be
#    done between an earlier I and F_k.
#
# All right-hand sides come from smaller k, or from the same k and stages already done, so one sweep
# over k gives all heads. The clock starts with the schedule (makespan), or with the first action of
# one device (span): then other devices may have begun arbitrarily early, which `ANYTIME` stands
# for; their later events are still tied to this device's by data and memory.

ANYTIME = -1e18
"""No lower bound, in ms: far below any sum of durations."""


class Events(NamedTuple):
    """Times in ms of the k-th F, I, W of stage s at ``[k, s]``, k from 0; nondecreasing in k."""

    forward: Grid
    gradient: Grid
    weight: Grid


class _HeadLoads(NamedTuple):
    """Per stage, in ms: the origin, and the ends of the loads of rule 3 so far.

    ``forwards`` is that of the forwards, ``both`` that of forwards and gradient pieces,
    ``gradients`` that of gradient pieces alone. ``refilled`` is what `refill` gives.
    """

    origin: Floats
    forwards: Floats
    both: Floats
    gradients: Floats
    turnover: Turnover
    refilled: Floats


class _HeadRelief(NamedTuple):
    """Per stage: I, W and transfers used so far to make room, the bytes, and when the last was."""

    gradients: Floats
    weights: Floats
    transfers: Floats
    freed: Floats
    time: Floats


@jitted
def heads(model: Relaxed, turnover: Turnover, origin: Floats) -> Events:
    """Return the earliest starts; ``origin[s]`` is the earliest start of anything on stage s."""
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
    at = loads.origin[s]
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
        by_n = moving + (n + 1) * model.out[s] if n < min(k, model.most_away[s]) else np.inf
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
    at = events.forward[k, s] + model.forward[s]
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

    ``backwards``: gradient and weight pieces up to s; ``gradients``: gradient pieces up to s;
    ``all``: all pieces but the forwards before s; ``forwards``: forwards from s on. ``least``, at
    the device's first stage: the least tail of W_k over its stages done so far. ``drained`` is what
    `drain` gives.
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
    """Per stage: what k micro-batches hold against which room, and what made room so far.

    ``held`` bytes each, in ``room``; a forward that has not begun gives back ``held``, a RELOAD to
    come ``away``. ``forwards`` and ``transfers`` count those used so far, ``freed`` is their bytes,
    ``time`` the tail of the last.
    """

    held: Floats
    room: Floats
    away: Floats
    forwards: Floats
    transfers: Floats
    freed: Floats
    time: Floats


@jitted
def tails(model: Relaxed, turnover: Turnover, origin: Floats) -> Events:
    """Return the least times after each end; ``origin[s]`` is that of anything on stage s."""
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
    of_w = _no_relief(model.context, model.room_weight, np.minimum(model.context, model.moved))
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
def _no_relief(held: Floats, room: Floats, away: Floats) -> _TailRelief:
    num_stages = len(held)
    return _TailRelief(
        held,
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
    at = events.gradient[k, s] + model.gradient[s]
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
    need = (k + 1) * relief.held[s] - relief.room[s]
    moving = events.gradient[0, s] + model.gradient[s]
    while relief.freed[s] < need:
        f, n = int(relief.forwards[s]), int(relief.transfers[s])
        by_f = events.forward[f, s] + model.forward[s] if f < k else np.inf
        by_n = moving + (n + 1) * model.home[s] if n < min(k, model.most_away[s]) else np.inf
        soonest = min(by_f, by_n)
        if soonest == np.inf:
            break
        relief.time[s] = max(relief.time[s], soonest)
        if by_n == soonest:
            relief.transfers[s] += 1
            relief.freed[s] += relief.away[s]
        else:
            relief.forwards[s] += 1
            relief.freed[s] += relief.held[s]
    return float(relief.time[s])
