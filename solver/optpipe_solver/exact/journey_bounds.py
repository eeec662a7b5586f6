"""Compiled: how long every schedule through a state of `journeys` is at least."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.exact.journey_kernel import (
    FUSED,
    GRADIENT,
    WEIGHT,
    position_of,
    ready_at,
    survey,
)
from optpipe_solver.lean import lean

if TYPE_CHECKING:
    from optpipe_solver.exact.journey_kernel import Desk, State
    from optpipe_solver.exact.road import Road

__all__ = ["least_end", "least_end_by"]

_NEVER = 1 << 60


@lean
def least_end(road: Road, state: State, desk: Desk) -> int:
    """Return a lower bound of the end of all schedules through a state; the desk is written to.

    The greatest of: the way each micro-batch still has; the next pass at every position, and what
    must follow it; the next W of every stage; what every device has left to run; the RELOADs that
    every device has to make.
    """
    survey(road, state, desk)
    least = max(_by_journeys(road, state, desk), _by_positions(road, state, desk))
    return max(least, _by_load(road, state, desk))


@lean
def least_end_by(
    road: Road, state: State, desk: Desk, event: tuple[int, int, int], start: int
) -> int:
    """Return a lower bound of the end if an event starts then: what must follow it, by number.

    ``desk`` is that of the state before. After the k-th F of a stage m - k are to come, so its
    tail is at least that of the k-th from the end; likewise I and W.
    """
    kind, _, s = event
    left_i = road.num_microbatches - 1 - desk.gradients[s]
    left_w = road.num_microbatches - 1 - state.weights[s]
    if kind < GRADIENT:
        left_f = road.num_microbatches - 1 - desk.forwards[s]
        return int(start + road.forward[s] + road.last_f[left_f, s])
    if kind == WEIGHT:
        return int(start + road.split_w[s] + road.last_w[left_w, s])
    if kind == GRADIENT:
        return int(start + road.split_i[s] + road.last_i[left_i, s])
    if kind == FUSED:
        end = start + road.fused[s] + road.last_w[left_w, s]
        return int(max(end, start + road.gradient[s] + road.last_i[left_i, s]))
    return int(start)


@lean
def _by_journeys(road: Road, state: State, desk: Desk) -> int:
    """The way of each micro-batch; note how many are where, and the first to be ready."""
    num_stages, least = len(road.forward), 0
    last = 2 * num_stages - 1
    for q in range(last + 2):
        desk.num_at[q] = 0
        desk.ready[q] = _NEVER
    for j in range(len(state.codes)):
        q = position_of(state.codes[j])
        desk.num_at[q] += 1
        if q > last:
            continue
        s = q if q < num_stages else last - q
        ready = max(ready_at(road, state, j, s), state.times[1 + road.device[s]])
        desk.ready[q] = min(desk.ready[q], ready)
        least = max(least, ready + road.rest[q])
    return int(least)


@lean
def _by_positions(road: Road, state: State, desk: Desk) -> int:
    """The next pass at every position, whoever makes it, and what must follow by number."""
    num_stages, least, left, before = len(road.forward), 0, 0, 0
    m = road.num_microbatches
    for q in range(2 * num_stages):
        is_forward = q < num_stages
        s = q if is_forward else 2 * num_stages - 1 - q
        free = state.times[1 + road.device[s]]
        ready = desk.ready[q]
        if left > 0:
            come = road.there[min(q - 1, s)] if q <= num_stages else road.back[s]
            ready = min(ready, before + come)
        left += desk.num_at[q]
        if left > 0:
            begin = max(ready, free)
            before = begin + (road.forward[s] if is_forward else road.gradient[s])
            tails = road.last_f if is_forward else road.last_i
            least = max(least, before + tails[left - 1, s])
        if not is_forward and state.weights[s] < m:
            begin = free if state.weights[s] < desk.gradients[s] else before
            least = max(least, begin + road.weight[s] + road.last_w[m - 1 - state.weights[s], s])
    return int(least)


@lean
def _by_load(road: Road, state: State, desk: Desk) -> int:
    """All that each device has left, one after the other; its RELOADs, one after the other."""
    m, least, num_stages = road.num_microbatches, 0, len(road.forward)
    for device in range(len(road.room)):
        end = state.times[1 + device] + desk.owed[device]
        tail, weights, is_over = _NEVER, 0, True
        for s in range(num_stages):
            if road.device[s] != device:
                continue
            end += (m - desk.forwards[s]) * road.forward[s]
            end += (m - desk.gradients[s]) * road.gradient[s]
            weights += (m - state.weights[s]) * road.weight[s]
            if desk.gradients[s] < m:
                is_over = False
                tail = min(tail, road.last_i[0, s])
        least = max(least, end + weights, 0 if is_over else end + tail)
        least = max(least, _by_reloads(road, state, desk, device))
    return int(least)


@lean
def _by_reloads(road: Road, state: State, desk: Desk, device: int) -> int:
    """Behind the k-th last RELOAD of what is AWAY, k of its I start; no copy ends after the end."""
    sent, num_stages, devices = desk.sent[device], len(road.forward), len(road.room)
    away, lane = state.times[1 + devices + device], state.times[1 + 2 * devices + device]
    least = max(away, lane)
    at = max(state.times[1 + device], lane)
    for n in range(sent if road.waits[device] else 0):
        tail = _NEVER
        for s in range(num_stages):
            if road.device[s] == device and road.may_leave[s]:
                k = min(sent - 1 - n, road.num_microbatches - 1) if _is_only(road, s) else 0
                tail = min(tail, road.gradient[s] + road.last_i[k, s])
        least = max(least, at + (n + 1) * road.home[device] + tail)
    return int(least)


@lean
def _is_only(road: Road, s: int) -> bool:
    """Whether a stage is alone on its device."""
    for other in range(len(road.forward)):
        if other != s and road.device[other] == road.device[s]:
            return False
    return True
