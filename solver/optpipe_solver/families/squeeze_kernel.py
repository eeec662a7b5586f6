"""Compiled squeeze: executes a repeated building block as soon as possible, on integers.

`optpipe_solver.families.repeat_and_squeeze` explains the rule and prepares the arrays.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

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
    Floats = NDArray[np.float64]

__all__ = ["Order", "squeeze"]

_WAIT, _STUCK = -1, -2


class Order(NamedTuple):
    """The unrolled block: ``sequence[d]`` lists F and I of device d as ``2 * stage + kind``.

    ``place[code, j]`` is the index in it of the code's j-th occurrence, i.e. of micro-batch j.
    """

    sequence: Ints
    length: Ints
    place: Ints
    num_microbatches: int


@numba.njit(cache=True, nogil=True)
def squeeze(
    rules: Rules, order: Order, early: int, patience: float
) -> tuple[bool, Ints, Ints, float, float]:
    """Return (whether it got to the end, programs, their lengths, makespan, span).

    Actions are ``(kind * num_stages + stage) * m + microbatch``.
    """
    num_stages, num_devices = rules.device_of.size, rules.num_held.size
    state = begin(rules, order.num_microbatches)
    wakes = [(0.0, 0)]
    for device in range(1, num_devices):
        wakes.append((0.0, device))  # noqa: PERF401 - numba types the list by its first item
    while len(wakes) > 0:
        now, device = heapq.heappop(wakes)
        if state.free_at[device] > now:
            continue
        choice = _choose(device, now, rules, order, state, early, patience)
        if choice == _STUCK:
            return False, state.programs, state.lengths, np.inf, np.inf
        if choice != _WAIT:
            kind, stage = choice // num_stages, choice % num_stages
            end = execute(kind, stage, now, rules, state)
            heapq.heappush(wakes, (end, device))
            target, arrival = announce(kind, stage, end, rules, state)
            if target >= 0:
                heapq.heappush(wakes, (arrival, target))
    begun, span = np.inf, 0.0
    for device in range(num_devices):
        if state.lengths[device] > 0:
            begun = min(begun, state.first[device])
            span = max(span, state.last[device] - state.first[device])
    makespan = state.last.max() - begun
    return has_all(rules, state), state.programs, state.lengths, makespan, span


@lean
def _choose(
    device: int,
    now: float,
    rules: Rules,
    order: Order,
    state: State,
    early: int,
    patience: float,
) -> int:
    """Return what an idle device does now: kind and stage in one number, or wait, or stuck."""
    if patience < 0.0:
        urgent = _oldest_weight(device, rules, state)
        if urgent >= 0:
            return urgent
    following = _next_in_order(device, order, state)
    if following < 0:
        return _oldest_weight(device, rules, state)
    stage, kind = following // 2, following % 2
    gap = state.ready[kind, stage, state.done[kind, stage]] - now
    if gap <= 0.0:
        if fits(device, kind, stage, rules, state):
            return kind * rules.device_of.size + stage
        urgent = _oldest_weight(device, rules, state)
        return urgent if urgent >= 0 else _STUCK
    choice = _WAIT
    if early == 2:
        choice = _early(device, now, gap, rules, order, state, patience)
    if choice == _WAIT:
        choice = _filling_weight(device, gap, rules, state, patience)
    if choice == _WAIT and early == 1:
        choice = _early(device, now, gap, rules, order, state, patience)
    return choice


@lean
def _next_in_order(device: int, order: Order, state: State) -> int:
    """Return the code of the device's first F or I in block order that has not run; -1: none."""
    while state.head[device] < order.length[device]:
        at = state.head[device]
        code = order.sequence[device, at]
        if order.place[code, state.done[code % 2, code // 2]] == at:
            return int(code)
        state.head[device] += 1
    return -1


@lean
def _oldest_weight(device: int, rules: Rules, state: State) -> int:
    """Return the waiting W of the oldest micro-batch that memory admits, or wait."""
    return _filling_weight(device, np.inf, rules, state, 0.0)


@lean
def _filling_weight(device: int, gap: float, rules: Rules, state: State, patience: float) -> int:
    """Return the waiting W of the oldest micro-batch for which the gap is long enough."""
    best, choice = np.inf, _WAIT
    if rules.split == 0:
        return choice
    for at in range(rules.num_held[device]):
        stage = rules.held[device, at]
        oldest = state.done[WEIGHT, stage]
        if (
            oldest < state.done[BACKWARD, stage]
            and oldest < best
            and patience * rules.duration[WEIGHT, stage] <= gap
            and fits(device, WEIGHT, stage, rules, state)
        ):
            best, choice = oldest, WEIGHT * rules.device_of.size + stage
    return choice


@lean
def _early(
    device: int,
    now: float,
    gap: float,
    rules: Rules,
    order: Order,
    state: State,
    patience: float,
) -> int:
    """Return the first F or I in block order that can run now without blocking those before it."""
    best, choice = order.sequence.shape[1], _WAIT
    for at in range(rules.num_held[device]):
        stage = rules.held[device, at]
        for kind in range(2):
            j = state.done[kind, stage]
            if j >= order.num_microbatches or state.ready[kind, stage, j] > now:
                continue
            place = order.place[2 * stage + kind, j]
            if (
                place < best
                and patience * rules.duration[kind, stage] <= gap
                and fits(device, kind, stage, rules, state)
                and _leaves_room(device, kind, stage, place, rules, order, state)
            ):
                best, choice = place, kind * rules.device_of.size + stage
    return choice


@lean
def _leaves_room(
    device: int, kind: int, stage: int, place: int, rules: Rules, order: Order, state: State
) -> bool:
    """Whether all passes before ``place`` still fit after this one, each W right behind its I."""
    if kind == BACKWARD:
        return True
    held = state.in_flight[device] + rules.delta[FORWARD, stage]
    for at in range(state.head[device], place):
        code = order.sequence[device, at]
        before, which = code // 2, code % 2
        if order.place[code, state.done[which, before]] > at:
            continue
        if held + rules.finish[which, before] > rules.limit[device]:
            return False
        held += rules.delta[FORWARD, before] if which == FORWARD else -rules.delta[FORWARD, before]
    return True
