"""Heads: how early the k-th F, I and W of every stage can start, by counting events.

Write F_k(s) for the k-th forward of stage s in the order in which this stage runs them, whichever
micro-batch that is; likewise I_k, W_k (pieces, see `relaxation`). Times below are starts; k from
1. Nothing is assumed about the order of micro-batches, which is why first in, first out is not
needed.

1. *Devices take turns*: F_k(s) >= F_{k-1}(s) + F, and so for I and W.
2. *Data*: when F_k(s) starts, k micro-batches have arrived, so stage s - 1 has ended k forwards,
   and its k-th end is at most F_k(s) - transfer. Hence F_k(s) >= F_k(s-1) + F(s-1) + there(s-1).
   In the same way I_k(s) >= I_k(s+1) + I(s+1) + back(s), on the last stage I_k >= F_k + F, and
   W_k(s) >= I_k(s) + I(s): whoever counts k things made from k other things counts those too.
3. *Load*: when the k-th I of s has ended, its device has ended the first k forwards of all its
   stages (each of the k micro-batches passed through them) and the first k I of its stages from s
   on. For every i, those from the i-th on start no earlier than F_i of the device's first stage,
   one after the other. So I_k(s) + I(s) >= F_i(first) + (k - i + 1) (sum of F + sum of I from s
   on); the same with the I alone, from I_i(last) on, and for F_k(s) with the forwards of the
   stages up to s.
4. *Memory*: when F_k(s) starts, the stage holds at least k keep - i (keep - context) - w context -
   n moved, where i, w count its I and W ended by then and n <= the host's room its micro-batches
   away. Transfers of the stage use a lane one after the other and start after its first F: n <= (t
   - F_1 - F) / out. This must be at most the room. Each count only grows with t, and i, w, n by
   time t are at most what the heads of earlier events allow; so F_k starts no earlier than the
   moment at which enough of them can have happened. `turnover.refill` adds the work that must be
   done between an earlier I and F_k.

All right-hand sides come from smaller k, or from the same k and stages already done, so one sweep
over k gives all heads. The clock starts with the schedule (makespan), or with the first action of
one device (span): then other devices may have begun arbitrarily early, which `ANYTIME` stands for;
their later events are still tied to this device's by data and memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numba
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe_solver.bounds.relaxation import Floats, Relaxed
    from optpipe_solver.bounds.turnover import Turnover

    Grid = NDArray[np.float64]

__all__ = ["ANYTIME", "Events", "heads"]

ANYTIME = -1e18
"""No lower bound, in ms: far below any sum of durations."""


class Events(NamedTuple):
    """Times in ms of the k-th F, I, W of stage s at ``[k, s]``, k from 0; nondecreasing in k."""

    forward: Grid
    gradient: Grid
    weight: Grid


class _Loads(NamedTuple):
    """Per stage, in ms: the origin, and the ends of the loads of rule 3 so far.

    ``forwards`` is that of the forwards, ``both`` that of forwards and gradient pieces,
    ``gradients`` that of gradient pieces alone. ``refilled`` is what `turnover.refill` gives.
    """

    origin: Floats
    forwards: Floats
    both: Floats
    gradients: Floats
    turnover: Turnover
    refilled: Floats


class _Relief(NamedTuple):
    """Per stage: I, W and transfers used so far to make room, the bytes, and when the last was."""

    gradients: Floats
    weights: Floats
    transfers: Floats
    freed: Floats
    time: Floats


@numba.njit(cache=True, nogil=True)
def heads(model: Relaxed, turnover: Turnover, origin: Floats) -> Events:
    """Return the earliest starts; ``origin[s]`` is the earliest start of anything on stage s."""
    m, num_stages = model.num_microbatches, len(model.forward)
    events = Events(np.zeros((m, num_stages)), np.zeros((m, num_stages)), np.zeros((m, num_stages)))
    relief = _Relief(
        np.zeros(num_stages),
        np.zeros(num_stages),
        np.zeros(num_stages),
        np.zeros(num_stages),
        np.full(num_stages, ANYTIME),
    )
    loads = _Loads(
        origin,
        np.full(num_stages, ANYTIME),
        np.full(num_stages, ANYTIME),
        np.full(num_stages, ANYTIME),
        turnover,
        np.full(num_stages, ANYTIME),
    )
    for k in range(m):
        for s in range(num_stages):
            _forward(model, events, loads, k, s)
            _wait_for_memory(model, events, relief, k, s)
            _refill(events, loads, k, s)
        for s in range(num_stages - 1, -1, -1):
            _gradient(model, events, loads, k, s)
    return events


@numba.njit(cache=True, inline="always")
def _forward(model: Relaxed, events: Events, loads: _Loads, k: int, s: int) -> None:
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


@numba.njit(cache=True, inline="always")
def _wait_for_memory(model: Relaxed, events: Events, relief: _Relief, k: int, s: int) -> None:
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


@numba.njit(cache=True, inline="always")
def _refill(events: Events, loads: _Loads, k: int, s: int) -> None:
    """Rule 4, `turnover.refill`."""
    fits = loads.turnover.fits[s]
    if k >= fits:
        since = events.gradient[k - fits, s] + loads.turnover.lag[s]
        loads.refilled[s] = max(loads.refilled[s] + loads.turnover.pace[s], since)
        events.forward[k, s] = max(events.forward[k, s], loads.refilled[s])


@numba.njit(cache=True, inline="always")
def _gradient(model: Relaxed, events: Events, loads: _Loads, k: int, s: int) -> None:
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
