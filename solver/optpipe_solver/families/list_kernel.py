"""Compiled list scheduling: what `list_scheduler` explains, on integers."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numba
import numpy as np

from optpipe_solver.families.execution import (
    BACKWARD,
    FORWARD,
    WEIGHT,
    Rules,
    State,
    announce,
    begin,
    execute,
    fits,
    has_all,
)
from optpipe_solver.lean import lean

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

__all__ = ["schedule"]

_WAIT = -1


@numba.njit(cache=True, nogil=True)
def schedule(
    rules: Rules, most: NDArray[np.int64], patience: float, m: int
) -> tuple[bool, Ints, Ints]:
    """Return (whether it got to the end, programs, their lengths) for m micro-batches.

    ``most[s]`` is how many micro-batches stage s may have between F and I.
    """
    num_stages, num_devices = rules.device_of.size, rules.num_held.size
    state = begin(rules, m)
    wakes = [(0.0, 0)]
    for device in range(1, num_devices):
        wakes.append((0.0, device))  # noqa: PERF401 - numba types the list by its first item
    while len(wakes) > 0:
        now, device = heapq.heappop(wakes)
        if state.free_at[device] > now:
            continue
        choice = _choose(device, now, rules, most, state, patience)
        if choice != _WAIT:
            kind, stage = choice // num_stages, choice % num_stages
            end = execute(kind, stage, now, rules, state)
            heapq.heappush(wakes, (end, device))
            target, arrival = announce(kind, stage, end, rules, state)
            if target >= 0:
                heapq.heappush(wakes, (arrival, target))
    return has_all(rules, state), state.programs, state.lengths


@lean
def _choose(  # noqa: PLR0917 - compiled code takes its arguments by position
    device: int, now: float, rules: Rules, most: Ints, state: State, patience: float
) -> int:
    """Return what an idle device does now, kind and stage in one number, or wait."""
    num_stages, m = rules.device_of.size, state.ready.shape[2]
    later = np.inf
    for at in range(rules.num_held[device]):
        s = rules.held[device, at]
        j = state.done[BACKWARD, s]
        if j < m and state.memory[device] + rules.finish[BACKWARD, s] <= rules.limit[device]:
            ready = state.ready[BACKWARD, s, j]
            if ready <= now:
                return int(BACKWARD * num_stages + s)
            later = min(later, ready)
    for at in range(rules.num_held[device] - 1, -1, -1):
        s = rules.held[device, at]
        j = state.done[FORWARD, s]
        if j < m and state.ready[FORWARD, s, j] < np.inf and _admits(device, s, rules, most, state):
            ready = state.ready[FORWARD, s, j]
            if ready <= now:
                return int(FORWARD * num_stages + s)
            later = min(later, ready)
    return _filling_weight(device, later - now, rules, state, patience)


@lean
def _filling_weight(device: int, wait: float, rules: Rules, state: State, patience: float) -> int:
    """Return the oldest waiting W if the wait is long enough for the patience, else wait."""
    oldest, stage = state.ready.shape[2], -1
    for at in range(rules.num_held[device]):
        s = rules.held[device, at]
        j = state.done[WEIGHT, s]
        if rules.split == 1 and j < state.done[BACKWARD, s] and j <= oldest:
            oldest, stage = j, s
    if stage < 0 or wait < patience * rules.duration[WEIGHT, stage]:
        return _WAIT
    return int(WEIGHT * rules.device_of.size + stage)


@lean
def _admits(device: int, s: int, rules: Rules, most: Ints, state: State) -> bool:
    if not fits(device, FORWARD, s, rules, state):
        return False
    if state.done[FORWARD, s] - state.done[BACKWARD, s] >= most[s]:
        return False
    return _is_safe(device, s, rules, state)


@lean
def _is_safe(device: int, admitted: int, rules: Rules, state: State) -> bool:
    """Banker's rule: what is in flight can be finished, oldest first, after this forward."""
    room = rules.limit[device] - state.memory[device] - rules.delta[FORWARD, admitted]
    first, last, ample = state.ready.shape[2], 0, 0
    for at in range(rules.num_held[device]):
        s = rules.held[device, at]
        first = min(first, state.done[WEIGHT if rules.split == 1 else BACKWARD, s])
        last = max(last, state.done[FORWARD, s] + (1 if s == admitted else 0))
        ample += rules.peak[FORWARD, s] + max(0, rules.finish[BACKWARD, s])
    if room >= ample:
        return True
    for j in range(first, last):
        held, needed = _to_finish(device, j, admitted, rules, state)
        if needed > room:
            return False
        room += held
        if rules.num_held[device] == 1 and held > 0:
            return True
    return True


@lean
def _to_finish(device: int, j: int, admitted: int, rules: Rules, state: State) -> tuple[int, int]:
    """Return the bytes micro-batch j holds on a device, and the most it adds until it is done."""
    held, extra, needed = 0, 0, 0
    for at in range(rules.num_held[device]):
        s = rules.held[device, at]
        if j >= state.done[FORWARD, s] + (1 if s == admitted else 0):
            needed = max(needed, extra + rules.peak[FORWARD, s])
            extra += rules.delta[FORWARD, s]
        elif j >= state.done[BACKWARD, s]:
            held += rules.delta[FORWARD, s]
        elif rules.split == 1 and j >= state.done[WEIGHT, s]:
            held -= rules.delta[WEIGHT, s]
    for at in range(rules.num_held[device] - 1, -1, -1):
        s = rules.held[device, at]
        if j >= state.done[BACKWARD, s]:
            needed = max(needed, extra + rules.finish[BACKWARD, s])
            extra -= rules.delta[FORWARD, s]
    return held, needed
