"""Compiled simulated annealing on programs: one random move at a time.

A move that breaks memory (after a few repairs) or waits in a circle is undone; else it is taken if
it is no worse, or by chance if it is (Kirkpatrick et al. 1983). The chance is drawn before the move
is timed, so that timing can stop as soon as it is known to be too long. Judged is the objective
plus a little of the mean of the devices' last ends, which tells plateaus apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.improve import draws, kernel
from optpipe_solver.improve.board import copy
from optpipe_solver.improve.edit import put_back
from optpipe_solver.improve.longest_path import longest_path
from optpipe_solver.improve.propagate import last_end, list_device, propagate, roll_back
from optpipe_solver.improve.propose import propose
from optpipe_solver.improve.room import commit, hosts_fit, make_room
from optpipe_solver.improve.tails import refresh_tails, tail_along
from optpipe_solver.lean import lean

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe_solver.improve.board import Agenda, Board, Undo
    from optpipe_solver.improve.kernel import Memory, Times, Work
    from optpipe_solver.improve.rules import Rules

__all__ = ["Table", "accept", "anneal", "measure", "take_back", "try_move"]

_PLATEAU = 0.01
_MEAN_FALLS = 2.0
"""By how many mean passes a move is expected to lower the mean of the last ends, at most."""

_LEAST_AGE, _AGE_SHARE = 24, 200
"""Moves taken before the longest path and all tails are looked up again: at least, and by size."""

_MOVE_WORK, _ROW_SHARE = 10, 128
"""A move's own cost, in actions simulated: fixed, and a share of what a program can hold."""


class Table(NamedTuple):
    """All that one search works on. ``path`` is scratch; ``best_*`` is the best board seen.

    ``stale`` flags devices whose program may differ from the best one.
    """

    board: Board
    undo: Undo
    agenda: Agenda
    work: Work
    times: Times
    memory: Memory
    rules: Rules
    path: NDArray[np.int64]
    best_actions: NDArray[np.int64]
    best_counts: NDArray[np.int64]
    stale: NDArray[np.bool_]


@lean
def anneal(
    table: Table,
    best: float,
    hot: float,
    cold: float,
    budget: int,
    draw: NDArray[np.uint64],
) -> tuple[float, int, int]:
    """Make random moves until ``budget`` actions were simulated, cooling from ``hot`` to ``cold``.

    ``best`` is the objective of the best board so far, in ms as the temperatures are. Returns the
    best objective seen, the actions simulated and the moves tried.
    """
    board, rules = table.board, table.rules
    length = measure(table)
    current = _judged(table, length)
    allowance = _MEAN_FALLS * _PLATEAU * rules.mean_pass_ms
    work = tried = path_size = 0
    own = _MOVE_WORK + board.actions.shape[1] // _ROW_SHARE
    oldest = age = max(_LEAST_AGE, board.at.size // _AGE_SHARE)
    temperature = hot
    while work < budget:
        tried += 1
        if tried % 32 == 0:
            temperature = hot * (cold / hot) ** (work / budget)
        if age >= oldest and rules.incremental:
            path_size = longest_path(board, table.times, rules.by_span, table.path)
            refresh_tails(board, table.times, table.agenda)
            work += board.at.size // 8
            age = 0
        limit = current - temperature * np.log(max(1e-300, draws.unit(draw)))
        cutoff = limit - (current - length) + allowance
        looked, judged, objective = try_move(table, path_size, cutoff, draw)
        work += looked + own
        if judged > limit:
            take_back(table)
            continue
        accept(table)
        age += 1
        current, length = judged, objective
        if objective < best * (1.0 - 1e-12):
            best = objective
            age = oldest
            _keep(table)
    return best, work, tried


@lean
def try_move(
    table: Table, path_size: int, cutoff: float, draw: NDArray[np.uint64]
) -> tuple[int, float, float]:
    """Change the board by a random move and time it: actions simulated, judgement, objective.

    The judgement is inf where the move is illegal, and may be where the makespan exceeds
    ``cutoff`` ms. Either
    `take_back` or `accept` must follow.
    """
    board, undo, rules = table.board, table.undo, table.rules
    undo.sizes[0] = undo.sizes[1] = undo.sizes[2] = 0
    num_devices = board.counts.size
    copy(undo.hosts, board.hosts, num_devices)
    copy(undo.first, board.first, num_devices)
    copy(undo.last, board.last, num_devices)
    changed = propose(board, undo, table.times, table.memory, rules, table.path, path_size, draw)
    if not changed or not _fits(table, draw):
        return 0, np.inf, np.inf
    if not rules.incremental:
        makespan, span, mean = kernel.length(board.actions, board.counts, table.times, table.work)
        objective = span if rules.by_span else makespan
        return table.times.num_cells * 4, objective + _PLATEAU * mean, objective
    for i in range(undo.sizes[0]):
        device = undo.touched[i]
        low = undo.low[device]
        since = board.clock[board.actions[device, low - 1]] if low > 0 else 0.0
        list_device(table.agenda, device, low, since)
        table.agenda.until[device] = max(table.agenda.until[device], undo.high[device])
    if rules.by_span:
        cutoff = np.inf
    budget = 2 * board.at.size
    looked = propagate(board, undo, table.agenda, table.times, rules.tails, cutoff, budget)
    if looked < 0:
        return -looked, np.inf, np.inf
    objective = measure(table)
    return looked, _judged(table, objective), objective


@lean
def _fits(table: Table, draw: NDArray[np.uint64]) -> bool:
    board, undo = table.board, table.undo
    for i in range(undo.sizes[0]):
        device = undo.touched[i]
        if not make_room(board, undo, table.times, table.memory, device, draw):
            return False
        if table.rules.hosts_limited and not hosts_fit(board, table.times, table.memory, device):
            return False
    return True


@lean
def measure(table: Table) -> float:
    """Return the objective in ms, as `kernel.length` has it; inf where stuck."""
    board, agenda, rules = table.board, table.agenda, table.rules
    if not rules.incremental:
        makespan, span, _ = kernel.length(board.actions, board.counts, table.times, table.work)
        return span if rules.by_span else makespan
    if rules.has_sync:
        for device in range(board.counts.size):
            if agenda.changed[device]:
                board.last[device] = last_end(board, agenda, table.times, device)
                agenda.changed[device] = False
    begun, ended, span = np.inf, 0.0, 0.0
    for device in range(board.counts.size):
        if board.counts[device] > 0:
            begun = min(begun, board.first[device])
            ended = max(ended, board.last[device])
            span = max(span, board.last[device] - board.first[device])
    return span if rules.by_span else ended - begun


@lean
def _judged(table: Table, objective: float) -> float:
    board = table.board
    if not table.rules.incremental:
        _, _, mean = kernel.length(board.actions, board.counts, table.times, table.work)
        return objective + _PLATEAU * mean
    mean = 0.0
    for device in range(board.counts.size):
        mean += board.last[device]
    return objective + _PLATEAU * mean / board.counts.size


@lean
def take_back(table: Table) -> None:
    """Undo the last move."""
    board, undo = table.board, table.undo
    roll_back(board, undo, table.times.num_cells)
    for i in range(undo.sizes[0]):
        device = undo.touched[i]
        put_back(board, undo, device)
        undo.high[device] = -1
    if undo.sizes[2] > 0:
        cell = undo.sizes[2] - 1
        board.again[cell] = not board.again[cell]
    num_devices = board.counts.size
    copy(board.hosts, undo.hosts, num_devices)
    copy(board.first, undo.first, num_devices)
    copy(board.last, undo.last, num_devices)
    for device in range(num_devices):
        table.agenda.changed[device] = False


@lean
def accept(table: Table) -> None:
    """Keep the last move."""
    board, undo = table.board, table.undo
    for i in range(undo.sizes[0]):
        device = undo.touched[i]
        low, high = undo.low[device], undo.high[device]
        commit(board, table.times, table.memory, device, low, high)
        if table.rules.incremental:
            tail_along(board, table.times, device, low, high)
        table.stale[device] = True
        undo.high[device] = -1


@lean
def _keep(table: Table) -> None:
    """Remember the board as the best."""
    board = table.board
    for device in range(board.counts.size):
        if table.stale[device]:
            count = board.counts[device]
            copy(table.best_actions[device], board.actions[device], count)
            table.best_counts[device] = count
            table.stale[device] = False
