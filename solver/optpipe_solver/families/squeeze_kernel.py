"""Compiled squeeze: executes a repeated building block as soon as possible, on integers.

`optpipe_solver.families.repeat_and_squeeze` explains the rule and prepares the arrays.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

import numba
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

__all__ = ["BACKWARD", "FORWARD", "WEIGHT", "Order", "Rules", "squeeze"]

FORWARD, BACKWARD, WEIGHT = 0, 1, 2
_WAIT, _STUCK = -1, -2


class Rules(NamedTuple):
    """What a problem asks of the squeeze; ``[kind, stage]`` tables hold F, I (or B) and W.

    ``delta`` is what a pass adds to its device's memory for good, ``peak`` the most it holds above
    what was there before, ``finish`` the same with its W right behind it. ``split`` is 0 where the
    backward is fused and there is no W. Device d holds ``held[d, :num_held[d]]``.
    """

    device_of: Ints
    held: Ints
    num_held: Ints
    duration: Floats
    delta: Ints
    peak: Ints
    finish: Ints
    there: Floats
    back: Floats
    limit: Ints
    split: int


class Order(NamedTuple):
    """The unrolled block: ``sequence[d]`` lists F and I of device d as ``2 * stage + kind``.

    ``place[code, j]`` is the index in it of the code's j-th occurrence, i.e. of micro-batch j.
    """

    sequence: Ints
    length: Ints
    place: Ints
    num_microbatches: int


class _State(NamedTuple):
    done: Ints
    ready: Floats
    memory: Ints
    in_flight: Ints
    free_at: Floats
    head: Ints
    programs: Ints
    lengths: Ints
    first: Floats
    last: Floats


@numba.njit(cache=True)
def squeeze(
    rules: Rules, order: Order, early: int, patience: float
) -> tuple[bool, Ints, Ints, float, float]:
    """Return (whether it got to the end, programs, their lengths, makespan, span).

    Actions are ``(kind * num_stages + stage) * m + microbatch``.
    """
    num_stages, num_devices = rules.device_of.size, rules.num_held.size
    m = order.num_microbatches
    state = _State(
        np.zeros((3, num_stages), np.int64),
        np.full((2, num_stages, m), np.inf),
        np.zeros(num_devices, np.int64),
        np.zeros(num_devices, np.int64),
        np.zeros(num_devices),
        np.zeros(num_devices, np.int64),
        np.zeros((num_devices, 3 * m * rules.held.shape[1]), np.int64),
        np.zeros(num_devices, np.int64),
        np.full(num_devices, np.inf),
        np.zeros(num_devices),
    )
    state.ready[FORWARD, 0, :] = 0.0
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
            end = _execute(kind, stage, now, rules, order, state)
            heapq.heappush(wakes, (end, device))
            target, arrival = _announce(kind, stage, end, rules, state)
            if target >= 0:
                heapq.heappush(wakes, (arrival, target))
    passes = state.done[:2] if rules.split == 0 else state.done
    begun, span = np.inf, 0.0
    for device in range(num_devices):
        if state.lengths[device] > 0:
            begun = min(begun, state.first[device])
            span = max(span, state.last[device] - state.first[device])
    makespan = state.last.max() - begun
    return bool(passes.min() == m), state.programs, state.lengths, makespan, span


@numba.njit(cache=True)
def _choose(
    device: int,
    now: float,
    rules: Rules,
    order: Order,
    state: _State,
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
        if _fits(device, kind, stage, rules, state):
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


@numba.njit(cache=True)
def _next_in_order(device: int, order: Order, state: _State) -> int:
    """Return the code of the device's first F or I in block order that has not run; -1: none."""
    while state.head[device] < order.length[device]:
        at = state.head[device]
        code = order.sequence[device, at]
        if order.place[code, state.done[code % 2, code // 2]] == at:
            return int(code)
        state.head[device] += 1
    return -1


@numba.njit(cache=True)
def _fits(device: int, kind: int, stage: int, rules: Rules, state: _State) -> bool:
    return bool(state.memory[device] + rules.peak[kind, stage] <= rules.limit[device])


@numba.njit(cache=True)
def _oldest_weight(device: int, rules: Rules, state: _State) -> int:
    """Return the waiting W of the oldest micro-batch that memory admits, or wait."""
    return _filling_weight(device, np.inf, rules, state, 0.0)


@numba.njit(cache=True)
def _filling_weight(device: int, gap: float, rules: Rules, state: _State, patience: float) -> int:
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
            and _fits(device, WEIGHT, stage, rules, state)
        ):
            best, choice = oldest, WEIGHT * rules.device_of.size + stage
    return choice


@numba.njit(cache=True)
def _early(
    device: int,
    now: float,
    gap: float,
    rules: Rules,
    order: Order,
    state: _State,
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
                and _fits(device, kind, stage, rules, state)
                and _leaves_room(device, kind, stage, place, rules, order, state)
            ):
                best, choice = place, kind * rules.device_of.size + stage
    return choice


@numba.njit(cache=True)
def _leaves_room(
    device: int, kind: int, stage: int, place: int, rules: Rules, order: Order, state: _State
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


@numba.njit(cache=True)
def _execute(kind: int, stage: int, now: float, rules: Rules, order: Order, state: _State) -> float:
    """Append the pass to its device's program; return when it ends."""
    device = rules.device_of[stage]
    m = order.num_microbatches
    state.programs[device, state.lengths[device]] = (
        kind * rules.device_of.size + stage
    ) * m + state.done[kind, stage]
    state.lengths[device] += 1
    state.done[kind, stage] += 1
    state.memory[device] += rules.delta[kind, stage]
    if kind == FORWARD:
        state.in_flight[device] += rules.delta[FORWARD, stage]
    elif kind == BACKWARD:
        state.in_flight[device] -= rules.delta[FORWARD, stage]
    end = now + rules.duration[kind, stage]
    state.free_at[device] = end
    state.first[device] = min(state.first[device], now)
    state.last[device] = end
    return float(end)


@numba.njit(cache=True)
def _announce(kind: int, stage: int, end: float, rules: Rules, state: _State) -> tuple[int, float]:
    """Tell the consumer of a pass when its input arrives; return its device (-1: none), when."""
    last = rules.device_of.size - 1
    j = state.done[kind, stage] - 1
    if kind == FORWARD and stage == last:
        state.ready[BACKWARD, last, j] = end
        return rules.device_of[last], end
    if kind == FORWARD:
        arrival = end + rules.there[stage]
        state.ready[FORWARD, stage + 1, j] = arrival
        return rules.device_of[stage + 1], arrival
    if kind == BACKWARD and stage > 0:
        arrival = end + rules.back[stage - 1]
        state.ready[BACKWARD, stage - 1, j] = arrival
        return rules.device_of[stage - 1], arrival
    return -1, end
