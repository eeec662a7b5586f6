"""How long everything takes from an action's start to the very end, in the programs as they stand.

With exact starts a tail tells at once that a move makes the schedule too long: no need to follow
the delay to the end (Taillard 1994 estimates job-shop moves so). Transfer lanes are left out, so a
fresh tail is a lower bound; after further moves it is an estimate, and a move may be refused that
would have been just good enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.improve.board.edit import backward_of
from optpipe_solver.improve.compiled.kernel import (
    BACKWARD_INPUT,
    FORWARD,
    FULL_BACKWARD,
    OFFLOAD,
    RELOAD,
)
from optpipe_solver.lean import lean

if TYPE_CHECKING:
    from optpipe_solver.improve.board.board import Agenda, Board
    from optpipe_solver.improve.compiled.kernel import Times

__all__ = ["refresh_tails", "tail_along"]


@lean
def tail_along(board: Board, times: Times, device: int, low: int, high: int) -> None:
    """Recompute the tails of places high - 1 down to low of a device from those they lead to."""
    row = board.actions[device]
    onward = board.tail[row[high]] if high < board.counts[device] else 0.0
    for place in range(min(high, board.counts[device]) - 1, low - 1, -1):
        code = row[place]
        kind = code // times.num_cells
        if kind not in (OFFLOAD, RELOAD):
            onward = max(onward, _elsewhere(board, times, kind, code)) + times.duration[code]
        board.tail[code] = onward


@lean
def _elsewhere(board: Board, times: Times, kind: int, code: int) -> float:
    """Return the time from an action's end to the end of all through the pass that needs it."""
    cells, m = times.num_cells, times.num_microbatches
    cell = code - kind * cells
    stage = cell // m
    if kind == FORWARD:
        if stage < times.num_stages - 1:
            return times.there[stage] + board.tail[cell + m]
        needed, transit = cell, 0.0
    elif kind in (BACKWARD_INPUT, FULL_BACKWARD) and stage > 0:
        needed, transit = cell - m, times.back[stage - 1]
    else:
        return 0.0
    device = times.device_of[needed // m]
    return transit + board.tail[board.actions[device, backward_of(board, cells, needed)]]


@lean
def refresh_tails(board: Board, times: Times, agenda: Agenda) -> None:
    """Recompute all tails, latest actions first; what an action leads to ends after it."""
    for device in range(board.counts.size):
        agenda.cursor[device] = board.counts[device]
    while True:
        device, low = _latest(board, agenda)
        if device < 0:
            return
        tail_along(board, times, device, low, agenda.cursor[device])
        agenda.cursor[device] = low


@lean
def _latest(board: Board, agenda: Agenda) -> tuple[int, int]:
    """Return the device whose next action ends last, and down to which place it stays so."""
    best, latest, second = -1, -1.0, -1.0
    for device in range(board.counts.size):
        if agenda.cursor[device] > 0:
            ends = board.clock[board.actions[device, agenda.cursor[device] - 1]]
            if ends > latest:
                best, latest, second = device, ends, latest
            elif ends > second:
                second = ends
    if best < 0:
        return -1, 0
    low = agenda.cursor[best] - 1
    while low > 0 and board.clock[board.actions[best, low - 1]] > second:
        low -= 1
    return best, low
