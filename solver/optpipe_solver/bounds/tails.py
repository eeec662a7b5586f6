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
   min(context, moved) for at most n that are away. `turnover.drain` adds the work that must be done
   between this I and a later F.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numba
import numpy as np

from optpipe_solver.bounds.heads import ANYTIME, Events

if TYPE_CHECKING:
    from optpipe_solver.bounds.relaxation import Floats, Relaxed
    from optpipe_solver.bounds.turnover import Turnover

__all__ = ["tails"]


class _Loads(NamedTuple):
    """Per stage, in ms: the tails of everything (origin), and those of the loads of rule 3 so far.

    ``backwards``: gradient and weight pieces up to s; ``gradients``: gradient pieces up to s;
    ``all``: all pieces but the forwards before s; ``forwards``: forwards from s on. ``least``, at
    the device's first stage: the least tail of W_k over its stages done so far. ``drained`` is what
    `turnover.drain` gives.
    """

    origin: Floats
    backwards: Floats
    gradients: Floats
    all: Floats
    forwards: Floats
    least: Floats
    turnover: Turnover
    drained: Floats


class _Relief(NamedTuple):
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


@numba.njit(cache=True, nogil=True)
def tails(model: Relaxed, turnover: Turnover, origin: Floats) -> Events:
    """Return the least times after each end; ``origin[s]`` is that of anything on stage s."""
    m, num_stages = model.num_microbatches, len(model.forward)
    events = Events(np.zeros((m, num_stages)), np.zeros((m, num_stages)), np.zeros((m, num_stages)))
    loads = _Loads(
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
            _gradient(model, events, loads, k, s)
            waited = _memory(model, events, of_i, k, s)
            events.gradient[k, s] = max(events.gradient[k, s], waited)
            _drain(events, loads, k, s)
        for s in range(num_stages - 1, -1, -1):
            _forward(model, events, loads, k, s)
    return events


@numba.njit(cache=True, inline="always")
def _no_relief(held: Floats, room: Floats, away: Floats) -> _Relief:
    num_stages = len(held)
    return _Relief(
        held,
        room,
        away,
        np.zeros(num_stages),
        np.zeros(num_stages),
        np.zeros(num_stages),
        np.full(num_stages, ANYTIME),
    )


@numba.njit(cache=True, inline="always")
def _weight(model: Relaxed, events: Events, origin: Floats, k: int, s: int) -> None:
    """Rules 1 and 2 for W_k(s)."""
    at = origin[s] + model.sync[s]
    if k > 0:
        at = max(at, events.weight[k - 1, s] + model.weight[s])
    events.weight[k, s] = at


@numba.njit(cache=True, inline="always")
def _gradient(model: Relaxed, events: Events, loads: _Loads, k: int, s: int) -> None:
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


@numba.njit(cache=True, inline="always")
def _drain(events: Events, loads: _Loads, k: int, s: int) -> None:
    """Rule 4, `turnover.drain`."""
    fits = loads.turnover.fits[s]
    if k >= fits:
        since = events.forward[k - fits, s] + loads.turnover.lag[s]
        loads.drained[s] = max(loads.drained[s] + loads.turnover.pace[s], since)
        events.gradient[k, s] = max(events.gradient[k, s], loads.drained[s])


@numba.njit(cache=True, inline="always")
def _forward(model: Relaxed, events: Events, loads: _Loads, k: int, s: int) -> None:
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


@numba.njit(cache=True, inline="always")
def _memory(model: Relaxed, events: Events, relief: _Relief, k: int, s: int) -> float:
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
