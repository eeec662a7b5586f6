"""Free memory around a changed place, for transfers and for passes.

Around a changed place, transfers use the memory that is left. Early RELOADs and late RELEASEs cost
less time, but hold bytes for longer. Moved one by one, they block each other, and every pass that
needs the bytes. So after a move they first go where they hold the fewest bytes. If all fits then,
RELOADs move up and RELEASEs move back as far as the limit allows. If not, moves that free memory
try to repair the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from optpipe_solver.arrays import simulate
from optpipe_solver.arrays.simulate import BACKWARD_WEIGHT, OFFLOAD, RELEASE, RELOAD
from optpipe_solver.jit import below, lean
from optpipe_solver.local_search.board import backward_of, ceiling, consumer_of, floor, slide
from optpipe_solver.local_search.moves import place_mode

if TYPE_CHECKING:
    from optpipe_solver.arrays import Ints
    from optpipe_solver.arrays.simulate import MemoryArrays, TimeArrays
    from optpipe_solver.jit import Draw
    from optpipe_solver.local_search.board import Board, Table, Undo

__all__ = [
    "Stretch",
    "commit",
    "hosts_fit",
    "make_room",
    "offload_farthest",
    "overflow",
    "relax",
    "settle",
    "trim",
]


class Stretch(NamedTuple):
    """Places low .. high - 1 of a device's program, within which transfers may move.

    They must include every change since the last `commit` of the bytes held. ``load`` is scratch by
    place.
    """

    board: Board
    undo: Undo
    times: TimeArrays
    memory: MemoryArrays
    load: Ints
    device: int
    low: int
    high: int


@lean
def relax(given: Stretch) -> None:
    """Move every RELEASE as early and every RELOAD as late as its own cell allows."""
    board, cells = given.board, given.times.num_cells
    row = board.actions[given.device]
    for place in range(given.high - 1, given.low - 1, -1):
        if row[place] // cells == RELOAD:
            target = min(consumer_of(board, cells, row[place] % cells), given.high) - 1
            if target > place:
                slide(board, given.undo, given.device, place, target)
    for place in range(given.low, given.high):
        if row[place] // cells == RELEASE:
            target = max(board.at[OFFLOAD * cells + row[place] % cells] + 1, given.low)
            if target < place:
                slide(board, given.undo, given.device, place, target)


@lean
def settle(given: Stretch, lead: int) -> None:
    """Move RELOADs up by at most ``lead`` passes, RELEASEs back, and RELOADs up, while all fits.

    RELOADs keep the order in which they are needed. The programs must fit before.
    """
    _weigh(given)
    _pull_reloads(given, lead)
    _push_releases(given)
    _pull_reloads(given, given.high)


@lean
def _weigh(given: Stretch) -> None:
    """Record the maximum bytes held during each action."""
    board, row = given.board, given.board.actions[given.device]
    held_bytes = board.held_bytes[row[given.low - 1]] if given.low > 0 else 0
    for place in range(given.low, given.high):
        rises, adds = _bytes_of(board, given.times, given.memory, row[place])
        given.load[place] = held_bytes + rises
        held_bytes += adds


@lean
def _bytes_of(board: Board, times: TimeArrays, memory: MemoryArrays, code: int) -> tuple[int, int]:
    """Return the most bytes that an action holds above those before it, and the bytes it adds."""
    kind = code // times.num_cells
    cell = code - kind * times.num_cells
    row, mode = times.row[cell], board.mode[cell]
    return memory.rises[kind, row, mode], memory.adds[kind, row, mode]


@lean
def _pull_reloads(given: Stretch, lead: int) -> None:
    cells, load = given.times.num_cells, given.load
    row, limit = given.board.actions[given.device], given.memory.limit[given.device]
    for place in range(given.low + 1, given.high):
        if row[place] // cells != RELOAD:
            continue
        size = _size(given, row[place] % cells)
        target, passed = place, 0
        while (
            target > given.low
            and passed < lead
            and load[target - 1] + size <= limit
            and _may_pass(given, row[place] % cells, row[target - 1])
        ):
            passed += row[target - 1] // cells < OFFLOAD
            target -= 1
        if target < place:
            slide(given.board, given.undo, given.device, place, target)
            for k in range(place, target, -1):
                load[k] = load[k - 1] + size
            load[target] = load[target + 1]


@lean
def _may_pass(given: Stretch, cell: int, code: int) -> bool:
    """Whether a cell's RELOAD may be issued before an action."""
    cells = given.times.num_cells
    kind, other = code // cells, code % cells
    if other == cell:
        return False
    needed = consumer_of(given.board, cells, cell)
    return kind != RELOAD or consumer_of(given.board, cells, other) > needed


@lean
def _push_releases(given: Stretch) -> None:
    cells, load = given.times.num_cells, given.load
    row, limit = given.board.actions[given.device], given.memory.limit[given.device]
    for place in range(given.high - 2, given.low - 1, -1):
        if row[place] // cells != RELEASE:
            continue
        cell = row[place] % cells
        size = _size(given, cell)
        target = place + 1
        while target < given.high and row[target] % cells != cell and load[target] + size <= limit:
            target += 1
        target -= 1
        if target > place:
            slide(given.board, given.undo, given.device, place, target)
            for k in range(place, target):
                load[k] = load[k + 1] + size
            load[target] = load[target - 1]


@lean
def _size(given: Stretch, cell: int) -> int:
    """Return the bytes that go and come back."""
    stage = given.times.row[cell]
    return given.memory.adds[RELOAD, stage, given.board.mode[cell]]


@lean
def trim(board: Board, undo: Undo, device: int) -> None:
    """Drop unchanged places from the ends of the changed range.

    Does nothing if a cell's mode changed so that an F in its old place holds other bytes.
    """
    if undo.sizes[3] > 0:
        return
    row, old = board.actions[device], undo.rows[device]
    low, high = undo.low[device], undo.high[device]
    while low < high and row[low] == old[low]:
        low += 1
    if board.counts[device] == undo.counts[device]:
        while high > low and row[high - 1] == old[high - 1]:
            high -= 1
    undo.low[device], undo.high[device] = low, high


# --- Memory after a move, checked only where the program changed; and moves that free memory.
# After the changed places a program holds what it held before, because a move keeps the sum of what
# its actions add and free: moving keeps the actions, and each toggle adds as much as it frees. If a
# cell's mode changes, the places of all its actions with other bytes count as changed.


_REPAIRS = 4
_REACH = 60
"""Places searched for an action that frees memory."""

_LEEWAY = 10
"""Places that a transfer gets where memory is short: about as long as it takes."""


@lean
def overflow(table: Table, device: int, low: int, high: int) -> int:
    """Return the first of places low .. high - 1 whose action exceeds the limit, -1 for none."""
    board, memory, row = table.board, table.memory, table.board.actions[device]
    held_bytes = board.held_bytes[row[low - 1]] if low > 0 else 0
    for place in range(low, high):
        rises, adds = _bytes_of(board, table.times, memory, row[place])
        if held_bytes + rises > memory.limit[device]:
            return place
        held_bytes += adds
    return -1


@lean
def commit(table: Table, device: int, low: int, high: int) -> None:
    """Record the bytes held after the changed places."""
    board, row = table.board, table.board.actions[device]
    held_bytes = board.held_bytes[row[low - 1]] if low > 0 else 0
    for place in range(low, high):
        held_bytes += _bytes_of(board, table.times, table.memory, row[place])[1]
        board.held_bytes[row[place]] = held_bytes


@lean
def make_room(table: Table, device: int, draw: Draw) -> bool:
    """Whether a changed program fits, after a few repairs if need be.

    A repair brings the next RELEASE or W forward to where memory runs out, or delays the last
    RELOAD before that place until after it.
    """
    undo = table.undo
    for _ in range(_REPAIRS):
        at = overflow(table, device, undo.low[device], undo.high[device])
        if at < 0:
            return True
        first, repaired = below(draw, 3), False
        for turn in range(3):
            choice = (first + turn) % 3
            if choice == 2:
                repaired = _put_off(table, device, at)
            else:
                kind = RELEASE if choice == 0 else BACKWARD_WEIGHT
                repaired = _bring_forward(table, device, at, kind)
            if repaired:
                break
        if not repaired:
            return False
    return overflow(table, device, undo.low[device], undo.high[device]) < 0


@lean
def _bring_forward(table: Table, device: int, at: int, kind: int) -> bool:
    board = table.board
    row, cells = board.actions[device], table.times.num_cells
    for place in range(at + 1, min(board.counts[device], at + 1 + _REACH)):
        if row[place] // cells == kind and floor(board, cells, row[place]) <= at:
            slide(board, table.undo, device, place, at)
            return True
    return False


@lean
def _put_off(table: Table, device: int, at: int) -> bool:
    board = table.board
    row, cells = board.actions[device], table.times.num_cells
    for place in range(at - 1, max(-1, at - 1 - _REACH), -1):
        if row[place] // cells == RELOAD and (
            ceiling(board, cells, row[place], board.counts[device]) >= at
        ):
            slide(board, table.undo, device, place, at)
            return True
    return False


@lean
def offload_farthest(table: Table, device: int, at: int) -> bool:
    """Offload the cell with the farthest backward of those kept at a place; return whether one is.

    A cache of known requests drops that one (Belady 1966). A cell whose forward is near cannot
    leave in time. It counts as if its backward were three times as far as its forward.
    """
    board, times, memory = table.board, table.times, table.memory
    cells, row = times.num_cells, board.actions[device]
    chosen, farthest = -1, 0
    for place in range(at + 1):
        cell = row[place]
        if cell >= cells or board.mode[cell] != 0:
            continue
        far = min(backward_of(board, cells, cell) - at, 3 * (at - place))
        if far > farthest and _offloaded(memory, times.row[cell]) > 0:
            chosen, farthest = cell, far
    if chosen < 0:
        return False
    early = min(_LEEWAY, at - board.at[chosen] - 1)
    late = min(_LEEWAY, backward_of(board, cells, chosen) - at - 2)
    mode = _offloaded(memory, times.row[chosen])
    return place_mode(table, chosen, mode, max(0, early), max(0, late))


@lean
def _offloaded(memory: MemoryArrays, stage: int) -> int:
    """Return the first mode of a stage's cells that offloads, 0 where one alone may not."""
    if not memory.uniform[stage]:
        for mode in range(1, memory.num_modes[stage]):
            if memory.may[stage, mode] and memory.adds[RELOAD, stage, mode] > 0:
                return mode
    return 0


@lean
def hosts_fit(table: Table, device: int) -> bool:
    """Whether the device's host still holds what its devices send there; keeps ``hosts``."""
    board, memory = table.board, table.memory
    board.hosts[device] = simulate.host_peak(
        board.actions[device], board.counts[device], table.times, memory, board.mode, board.away
    )
    host = memory.host_of[device]
    host_bytes = 0
    for other in range(board.counts.size):
        if memory.host_of[other] == host:
            host_bytes += board.hosts[other]
    return host_bytes <= memory.host_limit[host]
