"""Times after a move, recomputed only where they change; exactly those of `kernel.length`.

A move changes the predecessors of a few actions. Each end time is a maximum of earlier ends plus
a duration, so the times of legal programs are the one solution of these equations. From the old
solution, `propagate` re-evaluates every equation whose inputs changed until all hold again: what it
ends with is that solution, to the last bit, because each equation is evaluated as `kernel` does.

A cyclic wait has no solution as long as every pass takes time (each action on the cycle would end
after itself), so ends only grow until they pass the cutoff or the budget is spent, and the move is
refused. Where a pass takes no time, or devices compete for lanes, `can_propagate` says no.
"""
# ruff: noqa: PLR0917 - compiled code takes its arguments by position

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optpipe_solver.improve.compiled.kernel import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OFFLOAD,
    RECOMPUTE,
    RELEASE,
    RELOAD,
)
from optpipe_solver.lean import lean

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe_solver.improve.board.board import Agenda, Board, Undo
    from optpipe_solver.improve.compiled.kernel import Times

__all__ = ["can_propagate", "last_end", "list_device", "propagate", "roll_back", "schedule_all"]

_REFUSED = -1
_NEVER = np.inf


def can_propagate(times: Times) -> bool:
    """Whether every pass takes time and no device shares a transfer lane."""
    passes = times.duration[[FORWARD * times.num_cells]]
    for kind in (FORWARD, BACKWARD_INPUT, FULL_BACKWARD):
        first = kind * times.num_cells
        passes = np.append(passes, times.duration[first : first + times.num_cells])
    return bool((passes > 0).all()) and not bool(times.shared.any())


@lean
def schedule_all(board: Board, agenda: Agenda) -> None:
    """Put every device on the agenda from its first action to its last."""
    for device in range(board.counts.size):
        if board.counts[device] > 0:
            list_device(agenda, device, 0, 0.0)
            agenda.until[device] = board.counts[device]


@lean
def list_device(agenda: Agenda, device: int, place: int, time: float) -> None:
    """Look at a device again from a place on; earlier places of it on the agenda stay."""
    known = agenda.place[device]
    if known < 0:
        agenda.active[agenda.size[0]] = device
        agenda.size[0] += 1
        agenda.place[device] = place
        agenda.until[device] = max(agenda.until[device], place)
        agenda.time[device] = time
        return
    agenda.until[device] = max(agenda.until[device], known, place)
    agenda.place[device] = min(known, place)
    agenda.time[device] = min(agenda.time[device], time)


@lean
def propagate(
    board: Board,
    undo: Undo,
    agenda: Agenda,
    times: Times,
    tails: NDArray[np.float64],
    cutoff: float,
    budget: int,
) -> int:
    """Bring all times up to date after a move; return the actions looked at.

    Returns the negative of that where the move is refused: the makespan would exceed ``cutoff``
    ms, the programs wait in a circle, or ``budget`` (at most twice the number of action codes) did
    not do. The log then holds what `roll_back` needs. ``tails`` is the least time after an
    action's end by kind and stage.
    """
    done = 0
    while agenda.size[0] > 0:
        device, horizon = _take(agenda)
        looked = _sweep(board, undo, agenda, times, tails, device, horizon, cutoff)
        done += abs(looked)
        if looked < 0 or done > budget:
            _clear(agenda)
            return -done - 1
    return done


@lean
def _take(agenda: Agenda) -> tuple[int, float]:
    """Take the earliest device off the agenda; also return when the next one comes."""
    best, soonest, second = 0, _NEVER, _NEVER
    for i in range(agenda.size[0]):
        time = agenda.time[agenda.active[i]]
        if time < soonest:
            second = soonest
            best, soonest = i, time
        elif time < second:
            second = time
    device = agenda.active[best]
    agenda.size[0] -= 1
    agenda.active[best] = agenda.active[agenda.size[0]]
    return device, second


@lean
def _clear(agenda: Agenda) -> None:
    for i in range(agenda.size[0]):
        device = agenda.active[i]
        agenda.place[device] = -1
    agenda.size[0] = 0
    for device in range(agenda.until.size):
        agenda.until[device] = -1


@lean
def _sweep(
    board: Board,
    undo: Undo,
    agenda: Agenda,
    times: Times,
    tails: NDArray[np.float64],
    device: int,
    horizon: float,
    cutoff: float,
) -> int:
    """Run along a device until nothing changes any more, or another device comes first.

    Returns the actions looked at, negative where refused.
    """
    cells, m = times.num_cells, times.num_microbatches
    row, count = board.actions[device], board.counts[device]
    begun = place = agenda.place[device]
    until = agenda.until[device]
    agenda.place[device] = -1
    agenda.until[device] = -1
    agenda.changed[device] = True
    clock = out = back = 0.0
    if place > 0:
        before = row[place - 1]
        clock, out, back = board.clock[before], board.out[before], board.back[before]
    moved = undo.high[device]
    while place < count:
        code = row[place]
        kind = code // cells
        cell = code - kind * cells
        stage = cell // m
        start, done, clock, out, back = _run(board, times, kind, cell, clock, out, back)
        late = place >= moved and start + board.tail[code] > cutoff
        if late or done + tails[kind, stage] > cutoff:
            return begun - place - 1
        if place == 0:
            board.first[device] = start
        slot = cells + cell if kind == FULL_BACKWARD else code
        moves_on = done != board.end[slot]
        if moves_on or _differs(board, code, clock, out, back):
            _write(board, undo, code, slot, clock, out, back, done)
            if moves_on:
                waiting = _tell(board, agenda, times, kind, cell, stage, device, done)
                if 0 <= waiting <= place:
                    return begun - place - 1
                until = max(until, waiting)
        elif place >= until:
            return place - begun + 1
        place += 1
        if clock > horizon and place < count:
            list_device(agenda, device, place, clock)
            agenda.until[device] = max(agenda.until[device], until)
            return place - begun
    board.last[device] = clock
    return place - begun


@lean
def _run(
    board: Board, times: Times, kind: int, cell: int, clock: float, out: float, back: float
) -> tuple[float, float, float, float, float]:
    """Return an action's start and end, and until when the three lanes are taken behind it."""
    length = times.duration[kind * times.num_cells + cell]
    if kind == OFFLOAD:
        out = max(clock, out) + length
        return clock, out, clock, out, back
    if kind == RELOAD:
        back = max(clock, back) + length
        return clock, back, clock, out, back
    start = _start(board, times, kind, cell, cell // times.num_microbatches, clock)
    return start, start + length, start + length, out, back


@lean
def _differs(board: Board, code: int, clock: float, out: float, back: float) -> bool:
    return clock != board.clock[code] or out != board.out[code] or back != board.back[code]


@lean
def _start(board: Board, times: Times, kind: int, cell: int, stage: int, clock: float) -> float:
    """Return when an action of the compute lane starts, given when the lane is free."""
    cells, m = times.num_cells, times.num_microbatches
    if kind == FORWARD:
        if stage == 0:
            return clock
        return max(clock, board.end[cell - m] + times.there[stage - 1])
    if kind == RELEASE:
        return max(clock, board.end[OFFLOAD * cells + cell])
    if kind in (BACKWARD_WEIGHT, RECOMPUTE):
        return clock
    if stage == times.num_stages - 1:
        start = max(clock, board.end[cell])
    else:
        start = max(clock, board.end[cells + cell + m] + times.back[stage])
    if board.at[RELOAD * cells + cell] >= 0:
        start = max(start, board.end[RELOAD * cells + cell])
    return start


@lean
def _write(
    board: Board,
    undo: Undo,
    code: int,
    slot: int,
    clock: float,
    out: float,
    back: float,
    done: float,
) -> None:
    """Put down an action's new times and log the old ones."""
    size = undo.sizes[1]
    undo.codes[size] = code
    undo.values[size, 0] = board.clock[code]
    undo.values[size, 1] = board.out[code]
    undo.values[size, 2] = board.back[code]
    undo.values[size, 3] = board.end[slot]
    undo.sizes[1] = size + 1
    board.clock[code] = clock
    board.out[code] = out
    board.back[code] = back
    board.end[slot] = done


@lean
def _tell(
    board: Board,
    agenda: Agenda,
    times: Times,
    kind: int,
    cell: int,
    stage: int,
    device: int,
    done: float,
) -> int:
    """List the device that waits for this end; return the place, where it is the same device."""
    cells, m = times.num_cells, times.num_microbatches
    if kind == FORWARD:
        if stage == times.num_stages - 1:
            return _backward_place(board, cells, cell)
        place, other = board.at[cell + m], times.device_of[stage + 1]
    elif kind in (BACKWARD_INPUT, FULL_BACKWARD):
        if stage == 0:
            return -1
        place, other = _backward_place(board, cells, cell - m), times.device_of[stage - 1]
    elif kind == OFFLOAD:
        return board.at[RELEASE * cells + cell]
    elif kind == RELOAD:
        return _backward_place(board, cells, cell)
    else:
        return -1
    if other == device:
        return place
    list_device(agenda, other, place, done)
    return -1


@lean
def _backward_place(board: Board, cells: int, cell: int) -> int:
    place = board.at[BACKWARD_INPUT * cells + cell]
    return place if place >= 0 else board.at[FULL_BACKWARD * cells + cell]


@lean
def roll_back(board: Board, undo: Undo, cells: int) -> None:
    """Restore the times that the log holds, newest first."""
    for entry in range(undo.sizes[1] - 1, -1, -1):
        code = undo.codes[entry]
        kind = code // cells
        slot = code - 2 * cells if kind == FULL_BACKWARD else code
        board.clock[code] = undo.values[entry, 0]
        board.out[code] = undo.values[entry, 1]
        board.back[code] = undo.values[entry, 2]
        board.end[slot] = undo.values[entry, 3]
    undo.sizes[1] = 0


@lean
def last_end(board: Board, agenda: Agenda, times: Times, device: int) -> float:
    """Return a device's last end with its gradient reductions, in ms.

    As the reference does: they queue in the order of their stages' last W or B.
    """
    cells, m = times.num_cells, times.num_microbatches
    row, count = board.actions[device], board.counts[device]
    if count == 0:
        return 0.0
    waiting = 0
    for stage in range(times.num_stages):
        agenda.stage_end[stage] = -1.0
        if times.device_of[stage] == device and times.grad_sync[stage] > 0.0:
            waiting += 1
    free = 0.0
    place = count - 1
    last = board.clock[row[count - 1]]
    while waiting > 0:
        # The earliest of the stages still to come: from the end of the program backwards.
        code = row[place]
        kind = code // cells
        stage = (code - kind * cells) // m
        weight = kind in (BACKWARD_WEIGHT, FULL_BACKWARD)
        if weight and times.grad_sync[stage] > 0.0 and agenda.stage_end[stage] < 0.0:
            agenda.stage_end[stage] = board.clock[code]
            waiting -= 1
        place -= 1
    while True:
        best = -1
        for stage in range(times.num_stages):
            end = agenda.stage_end[stage]
            if end >= 0.0 and (best < 0 or end < agenda.stage_end[best]):
                best = stage
        if best < 0:
            return last
        free = max(free, agenda.stage_end[best]) + times.grad_sync[best]
        last = max(last, free)
        agenda.stage_end[best] = -1.0
