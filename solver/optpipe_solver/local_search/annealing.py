"""Compiled simulated annealing on programs: one random move at a time.

The search undoes a move that breaks memory (after a few repairs) or causes a cyclic wait. It keeps
any other move that is no worse, and a worse one by chance (Kirkpatrick et al. 1983). It draws the
chance before it times the move, so that timing stops as soon as the move is known to be too long.
The cost is the objective plus a small share of the mean of the devices' last ends, which breaks
ties on plateaus.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.arrays import simulate
from optpipe_solver.arrays.encoding import Rows
from optpipe_solver.jit import below, lean, unit
from optpipe_solver.local_search import moves
from optpipe_solver.local_search.board import (
    Table,
    agenda_for,
    backward_of,
    begin,
    board_of,
    copy,
    note,
    put_back,
    undo_for,
)
from optpipe_solver.local_search.propose import everywhere, propose, rules_of
from optpipe_solver.local_search.room import (
    Stretch,
    commit,
    hosts_fit,
    make_room,
    offload_farthest,
    overflow,
    relax,
    settle,
    trim,
)
from optpipe_solver.local_search.times import (
    last_end,
    list_device,
    longest_path,
    propagate,
    refresh_tails,
    roll_back,
    schedule_all,
    set_out,
    tail_along,
    with_least_passes,
)

if TYPE_CHECKING:
    from optpipe_solver.arrays import Floats, Ints
    from optpipe_solver.arrays.encoding import CompiledProblem
    from optpipe_solver.jit import Draw
    from optpipe_solver.local_search.board import Undo

__all__ = [
    "Course",
    "accept",
    "anneal",
    "best_rows",
    "course_of",
    "look_around",
    "make_fit",
    "measure",
    "table_for",
    "take_back",
    "try_move",
]


_PLATEAU = 0.01
_MEAN_FALLS = 2.0
"""By how many mean passes a move is expected to lower the mean of the last ends, at most."""

_LEAST_AGE, _AGE_SHARE = 8, 200
"""Moves taken before the longest path and all tails are looked up again: at least, and by size."""

_STEP = 256
"""Actions simulated between two changes of the temperature."""

_MOVE_WORK, _ROW_SHARE = 10, 128
"""A move's own cost, in actions simulated: fixed, and a share of what a program can hold."""

_EDIT_SHARE = 8
"""Places changed that cost as much as an action simulated."""

_SETTLE, _LEAST_REACH, _LEADS = 0.7, 4, 6
"""Share of moves after which transfers settle, how far around at least, and how they may.

The least reach is in places; it is doubled up to three times. RELOADs first move up by none, one,
... passes, or as far as they can.
"""


class Course(NamedTuple):
    """The progress of one cooling; cutting it into slices makes no difference.

    ``values`` are the cost and the objective of the board and the best objective seen (ms).
    ``counts`` are the actions simulated, the moves tried, the moves taken since the last search for
    the longest path, and that path's length.
    """

    values: Floats
    counts: Ints


def course_of(table: Table, best: float) -> Course:
    """Return the beginning of a cooling; ``best`` is the objective of the table's best board."""
    objective, judged = _standing(table)
    values = np.array([judged, objective, best])
    return Course(values, np.array([0, 0, table.board.at.size, 0], dtype=np.int64))


@lean
def anneal(
    table: Table, course: Course, hot: float, cold: float, whole: int, until: int, draw: Draw
) -> None:
    """Make random moves until ``until`` actions were simulated in this cooling.

    The temperature falls from ``hot`` to ``cold`` (ms) while ``whole`` actions are simulated.
    """
    board, rules = table.board, table.rules
    current, length, best = course.values
    work, tried, age, path_size = course.counts
    allowance = _MEAN_FALLS * _PLATEAU * rules.mean_pass_ms
    own = _MOVE_WORK + board.actions.shape[1] // _ROW_SHARE
    oldest = max(_LEAST_AGE, board.at.size // _AGE_SHARE)
    temperature = _temperature(hot, cold, work - work % _STEP, whole)
    cooled = work - work % _STEP + _STEP
    while work < until:
        tried += 1
        if work >= cooled:
            temperature = _temperature(hot, cold, work - work % _STEP, whole)
            cooled = work - work % _STEP + _STEP
        if age >= oldest:
            path_size = look_around(table)
            work += board.at.size // 8
            age = 0
        limit = current - temperature * np.log(max(1e-300, unit(draw)))
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
    course.values[0], course.values[1], course.values[2] = current, length, best
    course.counts[0], course.counts[1] = work, tried
    course.counts[2], course.counts[3] = age, path_size


@lean
def _temperature(hot: float, cold: float, work: int, whole: int) -> float:
    return hot * (cold / hot) ** min(1.0, work / whole)


@lean
def look_around(table: Table) -> int:
    """Find a longest path, and the tails where they are of use; return the path's size."""
    if table.rules.incremental:
        refresh_tails(table)
    else:
        simulate.length(table.board.actions, table.board.counts, table.times, table.work)
        set_out(table)
    return longest_path(table)


@lean
def try_move(table: Table, path_size: int, cutoff: float, draw: Draw) -> tuple[int, float, float]:
    """Change the board by a random move and time it: actions simulated, cost, objective.

    The cost is inf where the move is illegal, and may be where the makespan exceeds ``cutoff`` ms.
    For spans the limit is ``cutoff`` and the latest first start together. Call `take_back` or
    `accept` next.
    """
    board, undo, rules = table.board, table.undo, table.rules
    undo.sizes[:] = 0
    num_devices = board.counts.size
    copy(undo.hosts, board.hosts, num_devices)
    copy(undo.first, board.first, num_devices)
    copy(undo.last, board.last, num_devices)
    changed = propose(table, path_size, draw)
    edited = _edited(undo)
    if not changed or not _fits(table, draw):
        return edited, np.inf, np.inf
    if not rules.incremental:
        makespan, span, mean = simulate.length(board.actions, board.counts, table.times, table.work)
        objective = span if rules.by_span else makespan
        return edited + table.times.num_cells * 4, objective + _PLATEAU * mean, objective
    for i in range(undo.sizes[0]):
        device = undo.touched[i]
        low = undo.low[device]
        if low >= undo.high[device] and board.counts[device] == undo.counts[device]:
            continue
        since = board.clock[board.actions[device, low - 1]] if low > 0 else 0.0
        list_device(table.agenda, device, low, since)
        table.agenda.until[device] = max(table.agenda.until[device], undo.high[device])
    if rules.by_span:
        cutoff += _latest_first(undo, num_devices)
    budget = board.at.size
    looked = propagate(table, cutoff, budget)
    if looked < 0:
        return edited - looked, np.inf, np.inf
    objective = measure(table)
    return edited + looked, _judged(table, objective), objective


@lean
def _latest_first(undo: Undo, num_devices: int) -> float:
    """Return the latest first start of the devices (ms): each ends at most its span after that."""
    latest = 0.0
    for device in range(num_devices):
        latest = max(latest, undo.first[device])
    return latest


@lean
def _edited(undo: Undo) -> int:
    """Return about what the edits cost, in actions simulated."""
    places = 0
    for i in range(undo.sizes[0]):
        places += max(0, undo.high[undo.touched[i]] - undo.low[undo.touched[i]])
    return places // _EDIT_SHARE


@lean
def _fits(table: Table, draw: Draw) -> bool:
    undo = table.undo
    for i in range(undo.sizes[0]):
        device = undo.touched[i]
        if table.rules.in_turn and not _is_in_turn(table, device):
            return False
        if table.rules.offloads[device] and unit(draw) < _SETTLE:
            fits = _settled(table, device, draw)
        else:
            fits = make_room(table, device, draw)
        if not fits:
            return False
        if table.rules.hosts_limited and not hosts_fit(table, device):
            return False
    return True


@lean
def _is_in_turn(table: Table, device: int) -> bool:
    """Whether the passes of a changed stretch keep the turn that an order or samples require."""
    board, undo, turns = table.board, table.undo, table.rules.turns
    cells, m = table.times.num_cells, table.times.num_microbatches
    for place in range(undo.low[device], undo.high[device]):
        code = board.actions[device, place]
        kind = code // cells
        cell = code - kind * cells
        j = cell % m
        if kind == simulate.FORWARD:
            before, behind = turns[0, j], turns[1, j]
            if before >= 0 and board.at[code - j + before] > place:
                return False
            if behind >= 0 and board.at[code - j + behind] < place:
                return False
        elif kind in (simulate.BACKWARD_INPUT, simulate.FULL_BACKWARD):
            behind, before = turns[2, j], turns[3, j]
            if behind >= 0 and backward_of(board, cells, cell - j + behind) < place:
                return False
            if before >= 0 and backward_of(board, cells, cell - j + before) > place:
                return False
    return True


@lean
def _settled(table: Table, device: int, draw: Draw) -> bool:
    """Whether a changed program fits, once the transfers around the change have made way."""
    board, undo, times, memory = table.board, table.undo, table.times, table.memory
    reach = _LEAST_REACH << below(draw, 4)
    low = max(0, undo.low[device] - reach)
    high = min(board.counts[device], undo.high[device] + reach)
    relax(Stretch(board, undo, times, memory, table.load, device, low, high))
    if not make_room(table, device, draw):
        return False
    low, high = min(low, undo.low[device]), max(high, undo.high[device])
    lead = below(draw, _LEADS)
    if lead == _LEADS - 1:
        lead = high
    settle(Stretch(board, undo, times, memory, table.load, device, low, high), lead)
    trim(board, undo, device)
    return True


@lean
def measure(table: Table) -> float:
    """Return the objective in ms, as `simulate.length` has it; inf where stuck."""
    board, agenda, rules = table.board, table.agenda, table.rules
    if not rules.incremental:
        makespan, span, _ = simulate.length(board.actions, board.counts, table.times, table.work)
        return span if rules.by_span else makespan
    if rules.has_sync:
        for device in range(board.counts.size):
            if agenda.changed[device]:
                board.last[device] = last_end(table, device)
                agenda.changed[device] = False
    begun, ended, span = np.inf, 0.0, 0.0
    for device in range(board.counts.size):
        if board.counts[device] > 0:
            begun = min(begun, board.first[device])
            ended = max(ended, board.last[device])
            span = max(span, board.last[device] - board.first[device])
    return span if rules.by_span else ended - begun


@lean
def _standing(table: Table) -> tuple[float, float]:
    """Return the objective and the cost of the present board, in ms."""
    objective = measure(table)
    return objective, _judged(table, objective)


@lean
def _judged(table: Table, objective: float) -> float:
    board = table.board
    if not table.rules.incremental:
        _, _, mean = simulate.length(board.actions, board.counts, table.times, table.work)
        return objective + _PLATEAU * mean
    mean = 0.0
    for device in range(board.counts.size):
        mean += board.last[device]
    return objective + _PLATEAU * mean / board.counts.size


@lean
def take_back(table: Table) -> None:
    """Undo the last move."""
    board, undo = table.board, table.undo
    roll_back(table)
    for i in range(undo.sizes[0]):
        device = undo.touched[i]
        put_back(board, undo, device)
        undo.high[device] = -1
    moves.turn_back(table)
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
        commit(table, device, low, high)
        if table.rules.incremental:
            tail_along(board, table.times, device, low, high)
        table.stale[device] = True
        undo.high[device] = -1


def best_rows(table: Table) -> Rows:
    """Return the best programs that a table has seen; they change with it."""
    return Rows(table.best_actions, table.best_counts, table.best_modes)


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
    copy(table.best_modes, board.mode, board.mode.size)


@lean
def make_fit(table: Table, draw: Draw) -> float:
    """Offload until all programs fit; return the objective in ms, inf where they do not.

    The only use of a table whose programs exceed memory. Hosts are not looked at.
    """
    for device in range(table.board.counts.size):
        fits = _offload_until_it_fits(table, device, draw)
        table.undo.sizes[:] = 0
        table.undo.high[device] = -1
        if not fits:
            return np.inf
    _compute(table)
    table.stale[:] = True
    _keep(table)
    return measure(table)


@lean
def _offload_until_it_fits(table: Table, device: int, draw: Draw) -> bool:
    board, undo = table.board, table.undo
    begin(board, undo, device)
    note(undo, device, 0, board.counts[device])
    while not make_room(table, device, draw):
        at = overflow(table, device, 0, board.counts[device])
        if not offload_farthest(table, device, at):
            return False
    return True


# --- Set up the arrays of one search, with the times and memory of the programs it starts from.

_ENDS = (simulate.FORWARD, simulate.BACKWARD_INPUT, simulate.OFFLOAD, simulate.RELOAD)
"""The kinds of action in the four parts of `SimulationScratch.end`."""


def table_for(compiled: CompiledProblem, rows: Rows, like: Table | None = None) -> Table:
    """Return a table with legal programs set out.

    ``like``: a table of the same problem whose rules and scratch may be used again.
    """
    rules = rules_of(compiled) if like is None else like.rules
    times, memory = with_least_passes(compiled.times, rules.mean_pass_ms), compiled.memory
    times = times._replace(duration=times.mode_ms[:, times.row, rows.modes].reshape(-1))
    num_devices = rows.lengths.size
    board = board_of(compiled, rows)
    table = Table(
        board=board,
        undo=undo_for(board) if like is None else like.undo,
        agenda=agenda_for(board, times.num_stages) if like is None else like.agenda,
        work=simulate.workspace_for(times, num_devices) if like is None else like.work,
        times=times,
        memory=memory,
        rules=rules,
        path=np.zeros(board.at.size, dtype=np.int64) if like is None else like.path,
        focus=everywhere(rows),
        best_actions=rows.actions.copy(),
        best_counts=rows.lengths.copy(),
        best_modes=rows.modes.copy(),
        stale=np.zeros(num_devices, dtype=np.bool_),
        load=np.zeros(rows.actions.shape[1], dtype=np.int64),
    )
    _compute(table)
    return table


@lean
def _compute(table: Table) -> None:
    """Compute times, bytes and the remaining compute time."""
    board, times, memory, work = table.board, table.times, table.memory, table.work
    cells = times.num_cells
    for device in range(board.counts.size):
        count = board.counts[device]
        commit(table, device, 0, count)
        row = board.actions[device]
        board.hosts[device] = simulate.host_peak(row, count, times, memory, board.mode, board.away)
    if not table.rules.incremental:
        return
    simulate.length(board.actions, board.counts, times, work)
    for slot in range(len(_ENDS)):
        kind = _ENDS[slot]
        for cell in range(cells):
            board.end[kind * cells + cell] = work.end[slot * cells + cell]
    schedule_all(board, table.agenda)
    table.undo.high[:] = -1
    table.undo.sizes[:] = 0
    budget = 2 * board.at.size
    propagate(table, np.inf, budget)
    table.undo.sizes[:] = 0
    measure(table)
