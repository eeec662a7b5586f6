"""Passes executed one after the other, compiled: the state of a schedule that is being built.

`squeeze_kernel` and `list_kernel` choose what a device does next; this does it. An action is one
integer, ``(kind * num_stages + stage) * m + microbatch``, kinds F, I (or B) and W.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numba
import numpy as np

from optpipe_solver.lean import lean

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

__all__ = [
    "BACKWARD",
    "FORWARD",
    "WEIGHT",
    "Rules",
    "State",
    "announce",
    "begin",
    "execute",
    "fits",
    "has_all",
]

FORWARD, BACKWARD, WEIGHT = 0, 1, 2


class Rules(NamedTuple):
    """What a problem asks; ``[kind, stage]`` tables hold F, I (or B) and W.

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


class State(NamedTuple):
    """What was done: programs, and what depends on them, by (kind, stage) or by device.

    ``in_flight`` is memory with every W right behind its I; ``ready`` when a pass's input arrives.
    """

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


@numba.njit(cache=True, nogil=True)
def begin(rules: Rules, m: int) -> State:
    """Return the state before the first of m micro-batches."""
    num_stages, num_devices = rules.device_of.size, rules.num_held.size
    state = State(
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
    return state


@lean
def has_all(rules: Rules, state: State) -> bool:
    """Whether every pass of every micro-batch was executed."""
    m = state.ready.shape[2]
    for kind in range(2 + rules.split):
        for stage in range(rules.device_of.size):
            if state.done[kind, stage] < m:
                return False
    return True


@lean
def fits(device: int, kind: int, stage: int, rules: Rules, state: State) -> bool:
    """Whether a device has room for a pass now."""
    return bool(state.memory[device] + rules.peak[kind, stage] <= rules.limit[device])


@lean
def execute(kind: int, stage: int, now: float, rules: Rules, state: State) -> float:
    """Append the pass to its device's program; return when it ends."""
    device = rules.device_of[stage]
    m = state.ready.shape[2]
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


@lean
def announce(kind: int, stage: int, end: float, rules: Rules, state: State) -> tuple[int, float]:
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
