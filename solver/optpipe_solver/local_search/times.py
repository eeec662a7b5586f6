"""Times after a move, recomputed only where they change; exactly those of `simulate.length`.

A move changes the predecessors of a few actions. Each end time is a maximum of earlier ends plus a
duration, so the times of legal programs are the one solution of these equations. From the old
solution, `propagate` re-evaluates every equation whose inputs changed until all hold again. The
result is that solution, to the last bit, because each equation is evaluated as in `simulate`.

A cyclic wait has no solution as long as every pass takes time: each action on the cycle would end
after itself. So ends only grow until they pass the cutoff or the budget is spent, and the search
refuses the move. The search therefore gives every pass some time (`with_least_passes`). If devices
compete for lanes, `can_propagate` is False.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optpipe_solver.arrays.simulate import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OFFLOAD,
    RECOMPUTE,
    RELEASE,
    RELOAD,
    end_with_syncs,
    input_of,
    lane_of,
    output_of,
)
from optpipe_solver.jit import lean
from optpipe_solver.local_search.board import consumer_of

if TYPE_CHECKING:
    from optpipe_solver.arrays import Ints
    from optpipe_solver.arrays.simulate import TimeArrays
    from optpipe_solver.local_search.board import Agenda, Board, Table

__all__ = [
    "can_propagate",
    "last_end",
    "list_device",
    "longest_path",
    "propagate",
    "refresh_tails",
    "roll_back",
    "schedule_all",
    "set_out",
    "tail_along",
    "with_least_passes",
]


# ruff: noqa: PLR0917 - compiled code takes its arguments by position


_NEVER = np.inf


_LEAST_SHARE = 1e-9
"""Share of the mean pass that a pass without a duration takes in the search."""


def can_propagate(times: TimeArrays) -> bool:
    """Whether no device shares a transfer lane."""
    return not bool(times.shared.any())


def with_least_passes(times: TimeArrays, mean_pass_ms: float) -> TimeArrays:
    """Return times in which every pass takes some, so that a cyclic wait has no solution.

    Schedules then take longer, by less than a thousand-millionth of their passes' time.
    """
    passes = [FORWARD, BACKWARD_INPUT, FULL_BACKWARD]
    if (times.mode_ms[passes] > 0).all():
        return times
    mode_ms = times.mode_ms.copy()
    mode_ms[passes] = np.maximum(mode_ms[passes], _LEAST_SHARE * mean_pass_ms)
    return times._replace(mode_ms=mode_ms)


@lean
def schedule_all(board: Board, agenda: Agenda) -> None:
    """Put every device on the agenda from its first action to its last."""
    for device in range(board.counts.size):
        if board.counts[device] > 0:
            list_device(agenda, device, 0, 0.0)
            agenda.until[device] = board.counts[device]


@lean
def list_device(agenda: Agenda, device: int, place: int, time: float) -> None:
    """Add a device to the agenda from a place on; earlier places of it stay there."""
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
def propagate(table: Table, cutoff: float, budget: int) -> int:
    """Bring all times up to date after a move; return the actions recomputed.

    Returns a negative number if the move is refused. Then the makespan would exceed ``cutoff`` ms,
    the programs have a cyclic wait, or ``budget`` (at most twice the number of action codes) is
    spent. The log then holds what `roll_back` needs. ``tails`` is the minimum time after an
    action's end by kind and stage.
    """
    agenda = table.agenda
    done = 0
    while agenda.size[0] > 0:
        device, horizon = _take(agenda)
        looked = _sweep(table, device, horizon, cutoff)
        done += abs(looked)
        if looked < 0 or done > budget:
            for i in range(agenda.size[0]):
                agenda.place[agenda.active[i]] = -1
            agenda.size[0] = 0
            agenda.until[:] = -1
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
def _sweep(table: Table, device: int, horizon: float, cutoff: float) -> int:
    """Run along a device until nothing changes any more, or another device comes first.

    Returns the number of actions recomputed, negative where refused.
    """
    board, undo, agenda, times = table.board, table.undo, table.agenda, table.times
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
        if late or done + table.rules.tails[kind, stage] > cutoff:
            return begun - place - 1
        if place == 0:
            board.first[device] = start
        slot = cells + cell if kind == FULL_BACKWARD else code
        done, following = _sent(board, times, row, place, count, slot, done, place < moved)
        until = max(until, following)
        moves_on = done != board.end[slot]
        lanes_differ = (
            clock != board.clock[code] or out != board.out[code] or back != board.back[code]
        )
        if moves_on or lanes_differ:
            size = undo.sizes[1]
            undo.codes[size] = code
            undo.values[size, 0] = board.clock[code]
            undo.values[size, 1] = board.out[code]
            undo.values[size, 2] = board.back[code]
            undo.values[size, 3] = board.end[slot]
            undo.sizes[1] = size + 1
            board.clock[code], board.out[code], board.back[code] = clock, out, back
            board.end[slot] = done
            if moves_on:
                waiting = _tell(table, kind, cell, device, done)
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
def _sent(
    board: Board,
    times: TimeArrays,
    row: Ints,
    place: int,
    count: int,
    slot: int,
    done: float,
    is_new: bool,
) -> tuple[float, int]:
    """Return when the output of an action ending at ``done`` departs, and the place it affects.

    That is the place of the next message on the same link, -1 where nothing changes for it.
    """
    lane, _ = _lane(times, row[place])
    if lane < 0:
        return done, -1
    before = _message(times, row, place, -1, -1, lane)
    if before >= 0:
        code = row[before]
        cells = times.num_cells
        ahead = code - 2 * cells if code // cells == FULL_BACKWARD else code
        done = max(done, board.end[ahead] + _lane(times, code)[1])
    if not is_new and done == board.end[slot]:
        return done, -1
    return done, _message(times, row, place, count, 1, lane)


@lean
def _lane(times: TimeArrays, code: int) -> tuple[int, float]:
    """Return the link that the output of an action occupies, -1 for none, and for how many ms."""
    kind = code // times.num_cells
    if times.num_links == 0 or kind > FULL_BACKWARD or kind == BACKWARD_WEIGHT:
        return -1, 0.0
    return lane_of(kind, code - kind * times.num_cells, times)


@lean
def _message(times: TimeArrays, row: Ints, place: int, stop: int, step: int, lane: int) -> int:
    """Return the nearest other place on the way to ``stop`` that sends over a link, or -1."""
    for k in range(place + step, stop, step):
        if _lane(times, row[k])[0] == lane:
            return k
    return -1


@lean
def _run(
    board: Board, times: TimeArrays, kind: int, cell: int, clock: float, out: float, back: float
) -> tuple[float, float, float, float, float]:
    """Return an action's start and end, and when the three lanes become free after it."""
    cells = times.num_cells
    length, start = times.duration[kind * cells + cell], clock
    if kind == OFFLOAD:
        out = max(clock, out) + length
        return clock, out, clock, out, back
    if kind == RELOAD:
        back = max(clock, back) + length
        return clock, back, clock, out, back
    if kind == RELEASE:
        start = max(clock, board.end[OFFLOAD * cells + cell])
    elif kind not in (BACKWARD_WEIGHT, RECOMPUTE):
        source, transit = input_of(kind, cell, cell // times.num_microbatches, times)
        if source >= 0:
            start = max(clock, board.end[source] + transit)
    if kind in (BACKWARD_INPUT, FULL_BACKWARD, RECOMPUTE) and board.at[RELOAD * cells + cell] >= 0:
        start = max(start, board.end[RELOAD * cells + cell])
    return start, start + length, start + length, out, back


@lean
def _tell(table: Table, kind: int, cell: int, device: int, done: float) -> int:
    """List the device that waits for this end; return the place, where it is the same device."""
    board, times, cells = table.board, table.times, table.times.num_cells
    if kind == OFFLOAD:
        return board.at[RELEASE * cells + cell]
    if kind == RELOAD:
        return consumer_of(board, cells, cell)
    needed, _ = _receiver(board, times, kind, cell)
    if needed < 0:
        return -1
    place, other = board.at[needed], _device(times, needed)
    if other == device:
        return place
    list_device(table.agenda, other, place, done)
    return -1


@lean
def roll_back(table: Table) -> None:
    """Restore the times that the log holds, newest first."""
    board, undo, cells = table.board, table.undo, table.times.num_cells
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
def last_end(table: Table, device: int) -> float:
    """Return a device's last end with its gradient reductions, in ms."""
    board, agenda, times = table.board, table.agenda, table.times
    cells, m = times.num_cells, times.num_microbatches
    row, count = board.actions[device], board.counts[device]
    if count == 0:
        return 0.0
    waiting = 0
    for stage in range(times.num_stages):
        agenda.stage_end[stage] = -1.0
        if times.device_of[stage] == device and times.grad_sync[stage] > 0.0:
            waiting += 1
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
    return end_with_syncs(device, last, agenda.stage_end, times)


# --- The actions that a schedule's length is made of: only changing them, or room for them, helps.
# A longest path runs from the last end backwards through whatever each action waited for last
# (Balas 1969; the critical path of job-shop local search). Moves that leave all of it alone cannot
# shorten the schedule.


@lean
def longest_path(table: Table) -> int:
    """Write the actions of a longest path into ``path``, last one first; return how many.

    ``by_span``: from the device whose last end minus first start is largest. Ties go to the
    predecessor in the same program.
    """
    board, times, path = table.board, table.times, table.path
    device = 0
    longest = -1.0
    for d in range(board.counts.size):
        taken = board.last[d] - (board.first[d] if table.rules.by_span else 0.0)
        if board.counts[d] > 0 and taken > longest:
            device, longest = d, taken
    code = board.actions[device, board.counts[device] - 1]
    size = 0
    while code >= 0 and size < path.size:
        path[size] = code
        size += 1
        after = code
        code = _waited_for(board, times, code)
        if times.num_links > 0 and code >= 0 and _device(times, code) != _device(times, after):
            size = _queue(table, code, size)
            code = path[size - 1]
            size -= 1
    return size


@lean
def _device(times: TimeArrays, code: int) -> int:
    return times.device_of[code % times.num_cells // times.num_microbatches]


@lean
def _queue(table: Table, code: int, size: int) -> int:
    """Record a pass and those whose outputs its own waited for on its link, last one first."""
    board, times, path = table.board, table.times, table.path
    cells = times.num_cells
    row = board.actions[_device(times, code)]
    lane, _ = _lane(times, code)
    place = board.at[code]
    while place >= 0 and size < path.size:
        code = row[place]
        path[size] = code
        size += 1
        slot = code - 2 * cells if code // cells == FULL_BACKWARD else code
        if lane < 0 or board.end[slot] == board.clock[code]:
            break
        place = _message(times, row, place, -1, -1, lane)
    return size


@lean
def _waited_for(board: Board, times: TimeArrays, code: int) -> int:
    """Return the action whose end this one waited for last, -1 for none."""
    cells = times.num_cells
    kind = code // cells
    cell = code - kind * cells
    device = _device(times, code)
    place = board.at[code]
    before = board.actions[device, place - 1] if place > 0 else -1
    ready = board.clock[before] if before >= 0 else 0.0
    if kind in (OFFLOAD, RELOAD):
        lane = 0.0
        if before >= 0:
            lane = board.out[before] if kind == OFFLOAD else board.back[before]
        if lane <= ready:
            return before
        row = board.actions[device]
        for k in range(place - 1, -1, -1):
            if row[k] // cells == kind:
                return row[k]
        return -1
    if kind == RELEASE:
        transfer = OFFLOAD * cells + cell
        return transfer if board.end[transfer] > ready else before
    best = before
    source, arrived = _source(board, times, kind, cell)
    if arrived > ready:
        best, ready = source, arrived
    if kind in (RECOMPUTE, BACKWARD_INPUT, FULL_BACKWARD):
        reload = RELOAD * cells + cell
        if board.at[reload] >= 0 and board.end[reload] > ready:
            best = reload
    return best


@lean
def _source(board: Board, times: TimeArrays, kind: int, cell: int) -> tuple[int, float]:
    """Return the pass whose output an action needs, -1 for none, and when it arrives."""
    if kind not in (FORWARD, BACKWARD_INPUT, FULL_BACKWARD):
        return -1, -1.0
    source, transit = input_of(kind, cell, cell // times.num_microbatches, times)
    if source < 0:
        return -1, -1.0
    arrived = board.end[source] + transit
    cells = times.num_cells
    return source if source < cells else _backward(board, times, source - cells), arrived


@lean
def _receiver(board: Board, times: TimeArrays, kind: int, cell: int) -> tuple[int, float]:
    """Return the pass that needs the output of an action, -1 for none, and the transit."""
    if kind not in (FORWARD, BACKWARD_INPUT, FULL_BACKWARD):
        return -1, 0.0
    needed, transit = output_of(kind, cell, times)
    if needed < 0 or (kind == FORWARD and needed != cell):
        return needed, transit
    return _backward(board, times, needed), transit


@lean
def _backward(board: Board, times: TimeArrays, cell: int) -> int:
    """Return the I or B of a cell."""
    code = BACKWARD_INPUT * times.num_cells + cell
    return code if board.at[code] >= 0 else FULL_BACKWARD * times.num_cells + cell


@lean
def set_out(table: Table) -> None:
    """Write the times of a whole simulation on the board, where none are kept move by move."""
    board, times, work = table.board, table.times, table.work
    cells = times.num_cells
    for device in range(board.counts.size):
        row = board.actions[device]
        clock = out = back = 0.0
        for place in range(board.counts[device]):
            code = row[place]
            kind = code // cells
            cell = code - kind * cells
            if kind == OFFLOAD:
                out = board.end[code] = work.end[2 * cells + cell]
            elif kind == RELOAD:
                back = board.end[code] = work.end[3 * cells + cell]
            elif kind == RELEASE:
                clock = max(clock, work.end[2 * cells + cell])
            else:
                if kind in (FORWARD, BACKWARD_INPUT, FULL_BACKWARD):
                    slot = cell if kind == FORWARD else cells + cell
                    board.end[slot] = work.end[slot]
                    source, transit = input_of(kind, cell, cell // times.num_microbatches, times)
                    if source >= 0:
                        clock = max(clock, work.end[source] + transit)
                if kind not in (FORWARD, BACKWARD_WEIGHT) and board.at[RELOAD * cells + cell] >= 0:
                    clock = max(clock, work.end[3 * cells + cell])
                clock += times.duration[code]
            board.clock[code], board.out[code], board.back[code] = clock, out, back
        board.first[device], board.last[device] = work.first[device], work.last[device]


# --- How long everything takes from an action's start to the very end, in the present programs.
# With exact starts a tail shows that a move makes the schedule too long, without following the
# delay to the end (Taillard 1994 estimates job-shop moves so). Transfer lanes are left out, so a
# fresh tail is a lower bound. After further moves it is an estimate, and the search may refuse a
# move that would have been just good enough.


@lean
def tail_along(board: Board, times: TimeArrays, device: int, low: int, high: int) -> None:
    """Recompute the tails of places high - 1 down to low of a device from those they lead to."""
    row = board.actions[device]
    onward = board.tail[row[high]] if high < board.counts[device] else 0.0
    for place in range(min(high, board.counts[device]) - 1, low - 1, -1):
        code = row[place]
        kind = code // times.num_cells
        needed, transit = _receiver(board, times, kind, code - kind * times.num_cells)
        onward = _tail(board, times, code, onward, needed, transit)
        board.tail[code] = onward


@lean
def _tail(
    board: Board, times: TimeArrays, code: int, onward: float, needed: int, transit: float
) -> float:
    """Return an action's tail in ms, given that of the next one and which pass it leads to."""
    if code // times.num_cells in (OFFLOAD, RELOAD):
        return onward
    if needed >= 0:
        onward = max(onward, transit + board.tail[needed])
    return onward + times.duration[code]


@lean
def refresh_tails(table: Table) -> None:
    """Recompute all tails: each device in turn from its end, as far as the others' are known."""
    board, agenda = table.board, table.agenda
    for device in range(board.counts.size):
        agenda.cursor[device] = board.counts[device]
    moves_on = True
    while moves_on:
        moves_on = False
        for device in range(board.counts.size):
            before = agenda.cursor[device]
            if before > 0:
                agenda.cursor[device] = _tails_down(table, device)
                moves_on = moves_on or agenda.cursor[device] < before


@lean
def _tails_down(table: Table, device: int) -> int:
    """Recompute a device's tails downwards until one leads to another's that is to come.

    Return the place above it, 0 where all are known.
    """
    board, times, agenda = table.board, table.times, table.agenda
    row, place = board.actions[device], agenda.cursor[device]
    onward = board.tail[row[place]] if place < board.counts[device] else 0.0
    while place > 0:
        code = row[place - 1]
        kind = code // times.num_cells
        needed, transit = _receiver(board, times, kind, code - kind * times.num_cells)
        if needed >= 0:
            there = _device(times, needed)
            if there != device and board.at[needed] < agenda.cursor[there]:
                break
        onward = _tail(board, times, code, onward, needed, transit)
        board.tail[code] = onward
        place -= 1
    return place
