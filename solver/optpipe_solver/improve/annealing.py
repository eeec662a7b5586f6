"""Compiled simulated annealing on programs: one random move on one device at a time.

A move that breaks memory or waits in a circle is undone; else it is taken if it is no worse, or
by chance if it is (Kirkpatrick et al. 1983). Judged is the objective plus a little of the mean of
the devices' last ends, which tells plateaus apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numba
import numpy as np

from optpipe_solver.improve import kernel, moves

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe_solver.improve.kernel import Memory, Times, Work

__all__ = ["State", "anneal"]

_PLATEAU = 0.01


class State(NamedTuple):
    """Where the search stands, and the best it has seen.

    ``hosts`` holds each device's host peak in bytes; ``again`` flags recomputed cells.
    """

    actions: NDArray[np.int64]
    lengths: NDArray[np.int64]
    best_actions: NDArray[np.int64]
    best_lengths: NDArray[np.int64]
    again: NDArray[np.bool_]
    away: NDArray[np.bool_]
    hosts: NDArray[np.int64]
    backup: NDArray[np.int64]
    fused: NDArray[np.bool_]


@numba.njit(cache=True)
def _judged(makespan: float, span: float, mean: float, by_span: bool) -> float:
    objective = span if by_span else makespan
    return objective + _PLATEAU * mean


@numba.njit(cache=True)
def anneal(
    state: State,
    times: Times,
    memory: Memory,
    work: Work,
    by_span: bool,
    best: float,
    hot: float,
    cold: float,
    num_moves: int,
    seed: int,
) -> float:
    """Make random moves, cooling from ``hot`` to ``cold`` (ms); return the best objective seen.

    ``best`` is the objective of ``state.best_actions``.
    """
    np.random.seed(seed)
    num_devices = state.lengths.size
    makespan, span, mean = kernel.length(state.actions, state.lengths, times, work)
    current = _judged(makespan, span, mean, by_span)
    ratio = (cold / hot) ** (1.0 / max(1, num_moves))
    temperature = hot
    for _ in range(num_moves):
        temperature *= ratio
        device = np.random.randint(num_devices)
        count = state.lengths[device]
        if count < 2:
            continue
        row = state.actions[device]
        state.backup[:count] = row[:count]
        at = np.random.randint(count)
        cell = row[at] % times.num_cells
        was_again = state.again[cell]
        changed = _change(state, times, memory, device, at, cell)
        if changed < 0:
            continue
        state.lengths[device] = changed
        old_host = state.hosts[device]
        taken = False
        if _fits(state, times, memory, device):
            makespan, span, mean = kernel.length(state.actions, state.lengths, times, work)
            judged = _judged(makespan, span, mean, by_span)
            taken = judged <= current or (
                judged < np.inf and np.random.random() < np.exp((current - judged) / temperature)
            )
        if not taken:
            row[:count] = state.backup[:count]
            state.lengths[device] = count
            state.again[cell] = was_again
            state.hosts[device] = old_host
            continue
        current = judged
        objective = span if by_span else makespan
        if objective < best * (1.0 - 1e-12):
            best = objective
            state.best_actions[:] = state.actions
            state.best_lengths[:] = state.lengths
    return best


@numba.njit(cache=True)
def _fits(state: State, times: Times, memory: Memory, device: int) -> bool:
    row, count = state.actions[device], state.lengths[device]
    if not kernel.device_fits(device, row, count, times, memory, state.again):
        return False
    state.hosts[device] = kernel.host_peak(row, count, times, memory, state.away)
    host = memory.host_of[device]
    held = 0
    for other in range(state.lengths.size):
        if memory.host_of[other] == host:
            held += state.hosts[other]
    return held <= memory.host_limit[host]


@numba.njit(cache=True)
def _change(state: State, times: Times, memory: Memory, device: int, at: int, cell: int) -> int:
    """Apply a random move around a position; return the new length, -1 where nothing moved."""
    row, count = state.actions[device], state.lengths[device]
    cells = times.num_cells
    stage = cell // times.num_microbatches
    draw = np.random.random()
    offloaded = moves.find(row, count, kernel.OFFLOAD * cells + cell) >= 0
    if draw < 0.06 and memory.may_offload[stage] and not state.again[cell]:
        early, late = np.random.randint(0, 12), np.random.randint(0, 12)
        return moves.toggle_offload(row, count, cell, cells, early, late)
    if 0.06 <= draw < 0.09 and memory.may_recompute[stage] and not offloaded:
        late = np.random.randint(0, 6)
        return moves.toggle_recompute(row, count, cell, cells, state.again, late)
    if 0.09 <= draw < 0.11 and state.fused[stage]:
        return moves.toggle_fused(row, count, cell, cells)
    width = 1
    if draw > 0.85:
        width = np.random.randint(2, 5)
    reach = 1 << np.random.randint(0, 6)
    distance = np.random.randint(1, reach + 1)
    if np.random.random() < 0.5:
        distance = -distance
    return count if moves.shift(row, count, at, width, distance, cells) else -1
