"""Compiled annealing on circular orders (Kirkpatrick et al. 1983)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optpipe_solver.jit import jitted
from optpipe_solver.milp.periodic.circular_kernel import (
    BACKWARD,
    FORWARD,
    OFFLOADED,
    RECOMPUTE,
    RECOMPUTED,
    RELEASE,
    RELOAD,
    cells_in_order,
    excess,
    host_peak,
    period,
    way,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe_solver.milp.periodic.circular_kernel import Circle, CircularRules, Graph

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

__all__ = ["anneal", "charged", "copy_to", "move", "set_mode", "shrink", "some_mode"]


# Compiled code knows numpy's old generator only, and takes no keywords.
# ruff: noqa: NPY002, PLR0917


_MODE_MOVES = 0.2


@jitted
def copy_to(circle: Circle, other: Circle) -> None:
    """Make another circle the same."""
    other.rows[:], other.counts[:] = circle.rows, circle.counts
    other.turn[:], other.mode[:] = circle.turn, circle.mode


@jitted
def _share_over(circle: Circle, rules: CircularRules, device: int) -> float:
    """Return by what share of its limit a device is over it, and a little more; 0 within."""
    over = excess(circle, rules, device)
    return 0.0 if over <= 0 else 0.02 + over / max(1.0, float(rules.limit[device]))


@jitted
def _hosts_over(rules: CircularRules, hosted: Ints) -> float:
    """Return the same for hosts, of what each device needs there."""
    found = 0.0
    for host in range(rules.host_limit.size):
        if rules.host_limit[host] >= 0:
            held = hosted[rules.host == host].sum() - rules.host_limit[host]
            if held > 0:
                found += 0.02 + held / max(1.0, float(rules.host_limit[host]))
    return found


@jitted
def _timed(circle: Circle, rules: CircularRules, graph: Graph, share: float) -> tuple[float, float]:
    """Return the period, and the period with a share of the way beyond it."""
    found = period(circle, rules, graph)
    if share == 0.0 or found == np.inf:
        return found, found
    return found, found + share * max(0.0, way(circle, rules, graph, found) - found)


@jitted
def charged(circle: Circle, rules: CircularRules, graph: Graph, share: float) -> float:
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


@jitted
def shrink(circle: Circle, spare: Circle, rules: CircularRules, graph: Graph, seed: int) -> None:
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


@jitted
def anneal(
    circle: Circle,
    best: Circle,
    rules: CircularRules,
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


# --- Compiled moves on circular orders: an item along its circle, a cell's mode.
# Nothing is judged here: a move may leave a circle without a period, or over its memory.

# Compiled code knows numpy's old generator only, and takes no keywords.
# ruff: noqa: NPY002, PLR0917


@jitted
def move(circle: Circle, device: int) -> None:
    """Move one item some places up or down its circle; over the cut it changes its index."""
    size = circle.counts[device]
    at = np.random.randint(size)
    places = np.random.randint(1, 1 + (1 << np.random.randint(0, 3)))
    step = 1 if np.random.random() < 0.5 else -1
    row = circle.rows[device]
    for _ in range(places):
        other = at + step
        if other in {-1, size}:
            # Round the cut: everything else keeps its place relative to the others.
            item = row[at]
            other = 0 if step > 0 else size - 1
            while at != other:
                row[at] = row[at - step]
                at -= step
            row[other] = item
            circle.turn[item] += step
        else:
            row[at], row[other] = row[other], row[at]
        at = other


@jitted
def some_mode(circle: Circle, rules: CircularRules, cell: int) -> int:
    """Return a mode that a cell may have: another one, or offloaded once more (other places)."""
    mode = np.random.randint(3)
    while not rules.may[cell, mode] or (mode == circle.mode[cell] and mode != OFFLOADED):
        mode = np.random.randint(3)
    return mode


@jitted
def set_mode(
    circle: Circle, rules: CircularRules, cell: int, mode: int, start: Floats, trial: float
) -> None:
    """Keep, offload or recompute a cell; ``start`` and ``trial`` are times its circle had.

    RELEASE goes where the copy out has ended by those times, RELOAD where the copy back still
    arrives in time, each a little later or earlier by chance; RECOMPUTE right before its backward.
    """
    device = rules.device[cell]
    for role in (RELEASE, RELOAD, RECOMPUTE):
        if rules.item[cell, role] >= 0:
            _take_out(circle, device, rules.item[cell, role])
    circle.mode[cell] = mode
    back = rules.item[cell, BACKWARD]
    if mode == RECOMPUTED:
        row = circle.rows[device]
        at = 0
        while row[at] != back:
            at += 1
        _put_in(circle, device, rules.item[cell, RECOMPUTE], at, circle.turn[back])
    if mode == OFFLOADED:
        forward = rules.item[cell, FORWARD]
        gone = start[forward] + trial * circle.turn[forward]
        gone += rules.duration[forward] + rules.away[cell] * (1.0 + _some())
        needed = start[back] + trial * circle.turn[back] - rules.home[cell] * (1.0 + _some())
        _put_at(circle, rules, rules.item[cell, RELEASE], gone, start, trial)
        _put_at(circle, rules, rules.item[cell, RELOAD], max(gone, needed), start, trial)


@jitted
def _some() -> float:
    """Return nothing half of the time, else up to one."""
    return max(0.0, 2.0 * np.random.random() - 1.0)


@jitted
def _take_out(circle: Circle, device: int, item: int) -> None:
    row, size = circle.rows[device], circle.counts[device]
    for at in range(size):
        if row[at] == item:
            row[at : size - 1] = row[at + 1 : size].copy()
            circle.counts[device] -= 1
            return


@jitted
def _put_in(circle: Circle, device: int, item: int, at: int, turn: int) -> None:
    row, size = circle.rows[device], circle.counts[device]
    row[at + 1 : size + 1] = row[at:size].copy()
    row[at] = item
    circle.turn[item] = turn
    circle.counts[device] += 1


@jitted
def _put_at(
    circle: Circle, rules: CircularRules, item: int, when: float, start: Floats, trial: float
) -> None:
    """Put an item that takes no time behind all that has started by then."""
    device = rules.device[rules.cell[item]]
    row, size = circle.rows[device], circle.counts[device]
    cut = np.inf
    for at in range(size):
        cut = min(cut, start[row[at]])
    turn = int(np.floor((when - cut) / trial + 1e-9))
    phase = when - turn * trial
    at = 0
    while at < size and start[row[at]] <= phase + 1e-9 * trial:
        at += 1
    start[item] = phase
    _put_in(circle, device, item, at, turn)
