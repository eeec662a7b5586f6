"""Set up the arrays of one search, with the times and memory of the programs it starts from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optpipe_solver.improve.board.board import agenda_for, board_of, undo_for
from optpipe_solver.improve.compiled import kernel
from optpipe_solver.improve.moves.room import commit
from optpipe_solver.improve.search.annealing import Table, measure
from optpipe_solver.improve.search.focus import everywhere
from optpipe_solver.improve.search.rules import rules_of
from optpipe_solver.improve.times.propagate import propagate, schedule_all

if TYPE_CHECKING:
    from optpipe_solver.improve.compiled.problem import CompiledProblem, Rows

__all__ = ["table_for"]

_ENDS = (kernel.FORWARD, kernel.BACKWARD_INPUT, kernel.OFFLOAD, kernel.RELOAD)
"""What the four parts of `kernel.Work.end` are the ends of."""


def table_for(compiled: CompiledProblem, rows: Rows, like: Table | None = None) -> Table:
    """Return a table with legal programs set out.

    ``like``: a table of the same problem whose rules and scratch may be used again.
    """
    times, memory = compiled.times, compiled.memory
    num_devices = rows.lengths.size
    board = board_of(compiled, rows)
    table = Table(
        board=board,
        undo=undo_for(board) if like is None else like.undo,
        agenda=agenda_for(board, times.num_stages) if like is None else like.agenda,
        work=kernel.workspace_for(times, num_devices) if like is None else like.work,
        times=times,
        memory=memory,
        rules=rules_of(compiled) if like is None else like.rules,
        path=np.zeros(board.at.size, dtype=np.int64) if like is None else like.path,
        focus=everywhere(rows),
        best_actions=rows.actions.copy(),
        best_counts=rows.lengths.copy(),
        stale=np.zeros(num_devices, dtype=np.bool_),
        load=np.zeros(rows.actions.shape[1], dtype=np.int64),
    )
    _compute(table)
    return table


def _compute(table: Table) -> None:
    """Fill in times, bytes and the compute time to come."""
    board, times, memory, work = table.board, table.times, table.memory, table.work
    cells = times.num_cells
    for device, (row, count) in enumerate(zip(board.actions, board.counts, strict=True)):
        commit(board, times, memory, device, 0, int(count))
        board.hosts[device] = kernel.host_peak(row, count, times, memory, board.away)
    if not table.rules.incremental:
        return
    kernel.length(board.actions, board.counts, times, work)
    ends, known = board.end.reshape(8, cells), work.end.reshape(4, cells)
    for slot, kind in enumerate(_ENDS):
        ends[kind] = known[slot]
    schedule_all(board, table.agenda)
    table.undo.high[:] = -1
    table.undo.sizes[:] = 0
    budget = 2 * board.at.size
    propagate(board, table.undo, table.agenda, times, table.rules.tails, np.inf, budget)
    table.undo.sizes[:] = 0
    measure(table)
