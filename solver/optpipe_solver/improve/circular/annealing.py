"""Compiled annealing on circular orders (Kirkpatrick et al. 1983)."""

# Compiled code knows numpy's old generator only, and takes no keywords.
# ruff: noqa: NPY002, PLR0917

from __future__ import annotations

from typing import TYPE_CHECKING

import numba
import numpy as np

from optpipe_solver.improve.circular.kernel import (
    OFFLOADED,
    RECOMPUTED,
    cells_in_order,
    excess,
    host_peak,
    period,
    way,
)
from optpipe_solver.improve.circular.moves import move, set_mode, some_mode

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe_solver.improve.circular.kernel import Circle, Graph, Rules

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

__all__ = ["anneal", "charged", "copy_to", "shrink"]

_MODE_MOVES = 0.2


@numba.njit(cache=True, nogil=True)
def copy_to(circle: Circle, other: Circle) -> None:
    """Make another circle the same."""
    other.rows[:], other.counts[:] = circle.rows, circle.counts
    other.turn[:], other.mode[:] = circle.turn, circle.mode


@numba.njit(cache=True, nogil=True)
def _share_over(circle: Circle, rules: Rules, device: int) -> float:
    """Return by what share of its limit a device is over it, and a little more; 0 within."""
    over = excess(circle, rules, device)
    return 0.0 if over <= 0 else 0.02 + over / max(1.0, float(rules.limit[device]))


@numba.njit(cache=True, nogil=True)
def _hosts_over(rules: Rules, hosted: Ints) -> float:
    """Return the same for hosts, of what each device needs there."""
    found = 0.0
    for host in range(rules.host_limit.size):
        if rules.host_limit[host] >= 0:
            held = hosted[rules.host == host].sum() - rules.host_limit[host]
            if held > 0:
                found += 0.02 + held / max(1.0, float(rules.host_limit[host]))
    return found


@numba.njit(cache=True, nogil=True)
def _timed(circle: Circle, rules: Rules, graph: Graph, share: float) -> tuple[float, float]:
    """Return the period, and the period with a share of the way beyond it."""
    found = period(circle, rules, graph)
    if share == 0.0 or found == np.inf:
        return found, found
    return found, found + share * max(0.0, way(circle, rules, graph, found) - found)


@numba.njit(cache=True, nogil=True)
def charged(circle: Circle, rules: Rules, graph: Graph, share: float) -> float:
    """Return what a circle is judged in ms; inf where a cell's items are out of order.

    Its period, ``share`` of the way beyond it, and a charge where memory is exceeded: the least
    period times the shares of the limits exceeded.
    """
    over = 0.0
    hosted = np.zeros(circle.counts.size, np.int64)
    for device in range(circle.counts.size):
        if not cells_in_order(circle, rules, device):
            return np.inf
        over += _share_over(circle, rules, device)
        hosted[device] = host_peak(circle, rules, device)
    over += _hosts_over(rules, hosted)
    return _timed(circle, rules, graph, share)[1] + rules.least * over


@numba.njit(cache=True, nogil=True)
def shrink(circle: Circle, spare: Circle, rules: Rules, graph: Graph, seed: int) -> None:
    """Offload or recompute cells, one after another, where the circle is charged less for it.

    ``spare`` is a circle to work in.
    """
    np.random.seed(seed)
    current = charged(circle, rules, graph, 0.0)
    for cell in range(circle.mode.size):
        for mode in (OFFLOADED, RECOMPUTED):
            trial = period(circle, rules, graph)
            if not rules.may[cell, mode] or circle.mode[cell] == mode or trial == np.inf:
                continue
            copy_to(circle, spare)
            set_mode(spare, rules, cell, mode, graph.start.copy(), trial)
            judged = charged(spare, rules, graph, 0.0)
            if judged < current:
                current = judged
                copy_to(spare, circle)


@numba.njit(cache=True, nogil=True)
def anneal(
    circle: Circle,
    best: Circle,
    rules: Rules,
    graph: Graph,
    share: float,
    hot: float,
    cold: float,
    num_moves: int,
    seed: int,
) -> float:
    """Move items and change modes, cooling from ``hot`` to ``cold`` (ms); fill ``best``.

    Returns what the best is judged, as `charged`.
    """
    np.random.seed(seed)
    devices = circle.counts.size
    over = np.zeros(devices)
    hosted = np.zeros(devices, np.int64)
    for device in range(devices):
        over[device] = _share_over(circle, rules, device)
        hosted[device] = host_peak(circle, rules, device)
    free = np.flatnonzero(rules.may[:, 1] | rules.may[:, 2])
    current = charged(circle, rules, graph, share)
    trial = period(circle, rules, graph)
    top = current
    copy_to(circle, best)
    start = graph.start.copy()
    kept_row = np.empty(circle.rows.shape[1], np.int64)
    kept_turn, kept_mode = circle.turn.copy(), circle.mode.copy()
    ratio = (cold / hot) ** (1.0 / max(1, num_moves))
    temperature = hot
    for _ in range(num_moves):
        temperature *= ratio
        if top <= rules.least:
            break
        choose = free.size > 0 and trial < np.inf and np.random.random() < _MODE_MOVES
        cell = free[np.random.randint(free.size)] if choose else 0
        device = rules.device[cell] if choose else np.random.randint(devices)
        size = circle.counts[device]
        if size < 2:
            continue
        kept_row[:], kept_over, kept_hosted = circle.rows[device], over[device], hosted[device]
        kept_turn[:], kept_mode[:] = circle.turn, circle.mode
        if choose:
            set_mode(circle, rules, cell, some_mode(circle, rules, cell), start, trial)
        else:
            move(circle, device)
        over[device] = _share_over(circle, rules, device)
        hosted[device] = host_peak(circle, rules, device)
        judged, found = np.inf, np.inf
        if over[device] <= kept_over + 0.5 and cells_in_order(circle, rules, device):
            found, judged = _timed(circle, rules, graph, share)
            judged += rules.least * (over.sum() + _hosts_over(rules, hosted))
        if judged <= current or np.random.random() < np.exp((current - judged) / temperature):
            current, trial = judged, found
            start[:] = graph.start
            if current < top * (1.0 - 1e-12):
                top = current
                copy_to(circle, best)
            continue
        circle.rows[device], circle.counts[device] = kept_row, size
        circle.turn[:], circle.mode[:] = kept_turn, kept_mode
        over[device], hosted[device] = kept_over, kept_hosted
    return top
