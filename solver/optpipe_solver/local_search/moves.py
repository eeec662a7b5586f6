"""Compiled moves on programs; each says whether it changed anything.

A move keeps the order of a cell's own actions (F, OFFLOAD, RELEASE, RELOAD or RECOMPUTE, I, W). The
caller must check that the result fits memory and has no cyclic wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_solver.arrays.simulate import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OFFLOAD,
    RECOMPUTE,
    RELEASE,
    RELOAD,
)
from optpipe_solver.jit import below, lean
from optpipe_solver.local_search.board import (
    backward_of,
    begin,
    ceiling,
    consumer_of,
    floor,
    insert,
    is_ordered,
    note,
    remove,
    slide,
)

if TYPE_CHECKING:
    from optpipe_solver.arrays.simulate import MemoryArrays, TimeArrays
    from optpipe_solver.jit import Draw
    from optpipe_solver.local_search.board import Board, Table

__all__ = [
    "exchange",
    "fill_idle",
    "mode_wave",
    "park",
    "place_mode",
    "relabel",
    "reverse",
    "ripple",
    "shift",
    "shift_block",
    "some_distance",
    "swap",
    "toggle_fused",
    "trade_backwards",
    "turn_back",
    "wave",
]


@lean
def some_distance(draw: Draw, most: int) -> int:
    """Return a distance of 1 or more, small ones likelier: each size class 1, 2-3, ... alike."""
    classes = 1
    while (1 << classes) <= most:
        classes += 1
    size = 1 << below(draw, classes)
    return size + below(draw, size)


@lean
def shift(table: Table, device: int, place: int, distance: int) -> bool:
    """Move one action by a distance, as far as its own cell allows."""
    board, cells = table.board, table.times.num_cells
    count = board.counts[device]
    code = board.actions[device, place]
    if distance > 0:
        target = min(place + distance, ceiling(board, cells, code, count))
    else:
        target = max(place + distance, floor(board, cells, code))
    if target == place:
        return False
    slide(board, table.undo, device, place, target)
    return True


@lean
def shift_block(table: Table, device: int, place: int, width: int, distance: int) -> bool:
    """Move ``width`` actions at a place by a distance, until a cell's own order is in the way."""
    board, undo, cells = table.board, table.undo, table.times.num_cells
    count = board.counts[device]
    row = board.actions[device]
    if place + width > count:
        return False
    moved = 0
    if distance > 0:
        while moved < distance and place + width < count:
            if floor(board, cells, row[place + width]) > place:
                break
            slide(board, undo, device, place + width, place)
            place += 1
            moved += 1
    else:
        while moved < -distance and place > 0:
            if ceiling(board, cells, row[place - 1], count) < place + width - 1:
                break
            slide(board, undo, device, place - 1, place + width - 1)
            place -= 1
            moved += 1
    return moved > 0


@lean
def swap(table: Table, device: int, place: int, distance: int) -> bool:
    """Swap an action and the one ``distance`` places after it."""
    board, undo, cells = table.board, table.undo, table.times.num_cells
    count = board.counts[device]
    other = place + distance
    if other >= count:
        return False
    row = board.actions[device]
    if ceiling(board, cells, row[place], count) < other or floor(board, cells, row[other]) > place:
        return False
    slide(board, undo, device, place, other)
    if distance > 1:
        slide(board, undo, device, other - 1, place)
    return True


@lean
def reverse(table: Table, device: int, place: int, width: int, in_turn: bool) -> bool:
    """Reverse up to ``width`` actions from a place on, until a cell would come twice.

    ``in_turn``: reverse only the kinds and stages of the passes; the micro-batches of each pass of
    a stage keep their order.
    """
    board, undo, times = table.board, table.undo, table.times
    m, count = times.num_microbatches, board.counts[device]
    row, stop = board.actions[device], place + 1
    while stop < min(count, place + width) and floor(board, times.num_cells, row[stop]) <= place:
        stop += 1
    if stop - place < 2:
        return False
    begin(board, undo, device)
    for i in range((stop - place) // 2):
        row[place + i], row[stop - 1 - i] = row[stop - 1 - i], row[place + i]
    if in_turn:
        _back_in_turn(board, m, device, place, stop)
    changed = False
    for k in range(place, stop):
        changed = changed or board.at[row[k]] != k
    for k in range(place, stop):
        board.at[row[k]] = k
    note(undo, device, place, stop)
    return changed


@lean
def _back_in_turn(board: Board, m: int, device: int, place: int, stop: int) -> None:
    """Sort the actions of each pass of a stage among themselves by their earlier places."""
    row = board.actions[device]
    for k in range(place, stop):
        first = k
        for other in range(k + 1, stop):
            if row[other] // m == row[k] // m and board.at[row[other]] < board.at[row[first]]:
                first = other
        row[k], row[first] = row[first], row[k]


@lean
def trade_backwards(table: Table, device: int, cell: int, other: int) -> bool:
    """Swap two cells of a device, from what brings them back to their W.

    Both must be kept, offloaded or recomputed alike, and fused or split alike.
    """
    board, undo, cells = table.board, table.undo, table.times.num_cells
    if cell == other:
        return False
    begin(board, undo, device)
    row = board.actions[device]
    for kind in (RELOAD, RECOMPUTE, BACKWARD_INPUT, FULL_BACKWARD, BACKWARD_WEIGHT):
        one, two = kind * cells + cell, kind * cells + other
        here, there = board.at[one], board.at[two]
        if (here < 0) != (there < 0):
            return False
        if here >= 0:
            row[here], row[there] = two, one
            board.at[one], board.at[two] = there, here
            note(undo, device, min(here, there), max(here, there) + 1)
    return is_ordered(board, cells, cell) and is_ordered(board, cells, other)


@lean
def relabel(table: Table, one: int, other: int) -> bool:
    """Swap the places and modes of two micro-batches, in all programs.

    Nothing changes if one has a mode that the other lacks, or that needs other actions there.
    """
    board, undo, times, memory = table.board, table.undo, table.times, table.memory
    cells, m = times.num_cells, times.num_microbatches
    for stage in range(times.num_stages):
        here, there = stage * m + one, stage * m + other
        if not (
            _fits_mode(times, memory, here, there, board.mode[there])
            and _fits_mode(times, memory, there, here, board.mode[here])
        ):
            return False
    for stage in range(times.num_stages):
        here, there = stage * m + one, stage * m + other
        device = times.device_of[stage]
        begin(board, undo, device)
        for kind in range(RECOMPUTE + 1):
            first, second = kind * cells + here, kind * cells + there
            at, behind = board.at[first], board.at[second]
            board.at[first], board.at[second] = behind, at
            if at >= 0:
                board.actions[device, at] = second
                note(undo, device, at, at + 1)
            if behind >= 0:
                board.actions[device, behind] = first
                note(undo, device, behind, behind + 1)
        mode, wanted = board.mode[here], board.mode[there]
        _become(table, here, wanted)
        _become(table, there, mode)
    return True


@lean
def _fits_mode(times: TimeArrays, memory: MemoryArrays, cell: int, like: int, mode: int) -> bool:
    """Whether a cell may be treated by the actions with which another cell is in a mode."""
    own, known = times.row[cell], times.row[like]
    if own == known:
        return True
    if mode >= memory.num_modes[own] or not memory.may[own, mode]:
        return False
    if memory.uniform[own]:
        return False
    goes = memory.adds[RELOAD, own, mode] > 0
    return memory.again[own, mode] == memory.again[known, mode] and goes == (
        memory.adds[RELOAD, known, mode] > 0
    )


@lean
def fill_idle(table: Table, device: int, place: int, reach: int) -> bool:
    """Bring the next W after a place, whose I is before it, right before that place."""
    board, cells = table.board, table.times.num_cells
    row, count = board.actions[device], board.counts[device]
    for k in range(place + 1, min(count, place + 1 + reach)):
        if row[k] // cells == BACKWARD_WEIGHT and floor(board, cells, row[k]) <= place:
            slide(board, table.undo, device, k, place)
            return True
    return False


@lean
def park(table: Table, device: int, cell: int, distance: int, late: int) -> bool:
    """Run a cell's whole backward, with what brings it back, earlier or later."""
    board, undo, cells = table.board, table.undo, table.times.num_cells
    count = board.counts[device]
    at = backward_of(board, cells, cell)
    target = min(max(at + distance, 0), count - 1)
    if distance > 0:
        weight = board.at[BACKWARD_WEIGHT * cells + cell]
        if 0 <= weight <= target:
            slide(board, undo, device, weight, target)
            target -= 1
        slide(board, undo, device, at, target)
    first, second = (RECOMPUTE, RELOAD) if distance > 0 else (RELOAD, RECOMPUTE)
    _bring_along(table, device, first * cells + cell, target - late)
    _bring_along(table, device, second * cells + cell, target - late)
    if distance < 0:
        code = board.actions[device, backward_of(board, cells, cell)]
        low = max(target, floor(board, cells, code))
        if low < board.at[code]:
            slide(board, undo, device, board.at[code], low)
        weight = board.at[BACKWARD_WEIGHT * cells + cell]
        if weight > low + 1:
            slide(board, undo, device, weight, low + 1)
    return True


@lean
def _bring_along(table: Table, device: int, code: int, wanted: int) -> None:
    """Move a RELOAD or RECOMPUTE, if there is one, as near to a place as its cell allows."""
    board, cells = table.board, table.times.num_cells
    place = board.at[code]
    if place < 0:
        return
    cell = code % cells
    needed = backward_of(board, cells, cell)
    if code // cells == RELOAD:
        needed = consumer_of(board, cells, cell)
    wanted = min(max(wanted, floor(board, cells, code)), needed)
    if wanted > place:
        wanted -= 1
    if wanted != place:
        slide(board, table.undo, device, place, wanted)


@lean
def ripple(table: Table, code: int, step: int, most: int, distance: int) -> bool:
    """Shift the same pass of a micro-batch on up to ``most`` stages in a row by a distance."""
    times = table.times
    cells, m = times.num_cells, times.num_microbatches
    kind = code // cells
    stage = (code - kind * cells) // m
    changed = False
    for _ in range(most):
        if stage < 0 or stage >= times.num_stages:
            break
        place = table.board.at[code]
        if place >= 0:
            device = times.device_of[stage]
            changed = shift(table, device, place, distance) or changed
        stage += step
        code += step * m
    return changed


# --- Compiled moves on a cell's activation between F and backward (its mode), and on fused
# backwards. As with all moves the order of a cell's own actions holds afterwards. The caller must
# check that the result fits memory and has no cyclic wait.


@lean
def place_mode(table: Table, cell: int, mode: int, early: int, late: int) -> bool:
    """Give a cell a mode, whatever it was; the same mode again means other places.

    RELEASE goes ``early`` places after the OFFLOAD, RELOAD or RECOMPUTE ``late`` places before the
    backward. If a cell has both, RECOMPUTE goes right before the backward.
    """
    board, times, memory = table.board, table.times, table.memory
    cells, stage = times.num_cells, times.row[cell]
    rests = not memory.again[stage, mode] and memory.adds[RELOAD, stage, mode] == 0
    if rests and board.mode[cell] == mode:
        return False
    _clear(table, cell)
    released = board.at[FORWARD * cells + cell] + 1 + early
    returned = backward_of(board, cells, cell) - late
    _set(table, cell, mode, released, returned)
    return True


@lean
def exchange(table: Table, cell: int, other: int) -> bool:
    """Swap the modes of two cells of a device, at about the same places.

    Modes go by number: the caller checks that the other's stage has it.
    """
    board = table.board
    cells = table.times.num_cells
    mode, wanted = board.mode[cell], board.mode[other]
    if mode == wanted:
        return False
    released, returned = _places(board, cells, cell)
    freed, back = _places(board, cells, other)
    _clear(table, cell)
    _clear(table, other)
    _set(table, other, mode, released, returned)
    _set(table, cell, wanted, freed, back)
    return True


@lean
def _places(board: Board, cells: int, cell: int) -> tuple[int, int]:
    """Return where a cell's bytes go and come back, not counting its own actions before."""
    released = board.at[RELEASE * cells + cell]
    if released >= 0:
        return released - 1, board.at[RELOAD * cells + cell] - 2
    return 0, board.at[RECOMPUTE * cells + cell]


@lean
def _clear(table: Table, cell: int) -> None:
    """Keep a cell, whatever it was."""
    board, times = table.board, table.times
    cells = times.num_cells
    device = times.device_of[cell // times.num_microbatches]
    for kind in (RELOAD, RELEASE, OFFLOAD, RECOMPUTE):
        place = board.at[kind * cells + cell]
        if place >= 0:
            remove(board, table.undo, device, place)
    _become(table, cell, 0)


@lean
def _set(table: Table, cell: int, mode: int, released: int, returned: int) -> None:
    """Give a kept cell a mode, as near to the wanted places as its own order allows."""
    board, undo, times, memory = table.board, table.undo, table.times, table.memory
    cells, stage = times.num_cells, times.row[cell]
    device = times.device_of[cell // times.num_microbatches]
    forward_at, needed = board.at[FORWARD * cells + cell], backward_of(board, cells, cell)
    away = memory.adds[RELOAD, stage, mode] > 0
    if memory.again[stage, mode]:
        place = needed if away else min(max(returned, forward_at + 1), needed)
        insert(board, undo, device, place, RECOMPUTE * cells + cell)
    if away:
        released = min(max(released, forward_at + 1), needed)
        returned = min(max(returned, released), needed)
        insert(board, undo, device, returned, RELOAD * cells + cell)
        insert(board, undo, device, released, RELEASE * cells + cell)
        insert(board, undo, device, forward_at + 1, OFFLOAD * cells + cell)
    _become(table, cell, mode)


@lean
def _become(table: Table, cell: int, mode: int) -> None:
    """Set a cell's mode; note the places of F, I, W and B if it changes what they do."""
    board, undo, times, memory = table.board, table.undo, table.times, table.memory
    before = board.mode[cell]
    if before == mode:
        return
    undo.turned[undo.sizes[2], 0], undo.turned[undo.sizes[2], 1] = cell, before
    undo.sizes[2] += 1
    board.mode[cell] = mode
    stage = times.row[cell]
    device = times.device_of[cell // times.num_microbatches]
    first, last = board.at[FORWARD * times.num_cells + cell], -1
    if times.varies[stage]:
        _lengthen(times, cell, mode)
        last = board.at[BACKWARD_WEIGHT * times.num_cells + cell]
        last = max(last, board.at[FULL_BACKWARD * times.num_cells + cell])
    elif memory.again[stage, before] != memory.again[stage, mode]:
        last = first
    if last >= 0:
        undo.sizes[3] += 1
        begin(board, undo, device)
        note(undo, device, first, last + 1)


@lean
def _lengthen(times: TimeArrays, cell: int, mode: int) -> None:
    """Give a cell's actions the durations that they have in a mode."""
    stage = times.row[cell]
    for kind in range(times.mode_ms.shape[0]):
        times.duration[kind * times.num_cells + cell] = times.mode_ms[kind, stage, mode]


@lean
def turn_back(table: Table) -> None:
    """Give all cells whose mode was changed the mode that they had."""
    undo, times = table.undo, table.times
    for i in range(undo.sizes[2] - 1, -1, -1):
        cell, mode = undo.turned[i]
        table.board.mode[cell] = mode
        if times.varies[times.row[cell]]:
            _lengthen(times, cell, mode)


@lean
def toggle_fused(table: Table, device: int, cell: int, late: int) -> bool:
    """Replace I and W by B at the place of I, or B by I with its W ``late`` places after."""
    board, undo, cells = table.board, table.undo, table.times.num_cells
    fused = board.at[FULL_BACKWARD * cells + cell]
    if fused >= 0:
        remove(board, undo, device, fused)
        place = min(fused + late, board.counts[device])
        insert(board, undo, device, place, BACKWARD_WEIGHT * cells + cell)
        insert(board, undo, device, fused, BACKWARD_INPUT * cells + cell)
        return True
    at = board.at[BACKWARD_INPUT * cells + cell]
    remove(board, undo, device, board.at[BACKWARD_WEIGHT * cells + cell])
    remove(board, undo, device, at)
    insert(board, undo, device, at, FULL_BACKWARD * cells + cell)
    return True


# --- Compiled moves on many micro-batches together: the same change all along a repeating pattern.
# In the steady state of a long batch no single move gains anything: the period is as long as
# before. Applied to a run of micro-batches, on one or more stages, it changes the pattern itself.


@lean
def wave(table: Table, code: int, count: int, most: int, width: int, distance: int) -> bool:
    """Shift the same pass of ``count`` micro-batches on up to ``most`` stages by a distance.

    The ``width - 1`` actions after each move too. Actions that move later move last one first, so
    that the micro-batches keep their order.
    """
    times = table.times
    m, cells = times.num_microbatches, times.num_cells
    first = (code % cells) // m
    j = code % m
    count = min(count, m - j)
    changed = False
    for stage in range(first, min(first + most, times.num_stages)):
        device = times.device_of[stage]
        lead = code + (stage - first) * m
        for i in range(count):
            place = table.board.at[lead + (count - 1 - i if distance > 0 else i)]
            if place < 0:
                continue
            if width > 1:
                moved = shift_block(table, device, place, width, distance)
            else:
                moved = shift(table, device, place, distance)
            changed = changed or moved
    return changed


@lean
def mode_wave(
    table: Table, cell: int, count: int, stride: int, mode: int, early: int, late: int
) -> bool:
    """Give every ``stride``-th of ``count`` micro-batches of a stage a mode.

    Micro-batches of another cost have other menus and are left as they are.
    """
    times = table.times
    m = times.num_microbatches
    changed = False
    for i in range(0, min(count, m - cell % m), stride):
        if times.row[cell + i] != times.row[cell]:
            continue
        moved = place_mode(table, cell + i, mode, early, late)
        changed = changed or moved
    return changed
