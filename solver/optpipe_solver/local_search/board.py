"""The state of a local search: programs, times, memory and an undo log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optpipe_solver.arrays.encoding import Rows
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
from optpipe_solver.jit import lean

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe_solver.arrays import Flags, Floats, Ints
    from optpipe_solver.arrays.encoding import CompiledProblem
    from optpipe_solver.arrays.simulate import MemoryArrays, SimulationScratch, TimeArrays

__all__ = [
    "Agenda",
    "Board",
    "MoveShares",
    "SearchRules",
    "Table",
    "Undo",
    "agenda_for",
    "backward_of",
    "begin",
    "board_of",
    "ceiling",
    "consumer_of",
    "copy",
    "floor",
    "insert",
    "is_ordered",
    "note",
    "put_back",
    "remove",
    "rows_on",
    "slide",
    "undo_for",
]


class Board(NamedTuple):
    """Programs with what is known of each action, by action number unless said otherwise.

    ``at`` is an action's place in its program, -1 where it is in none. ``clock``, ``out`` and
    ``back`` are when (ms) the compute lane and the two transfer lanes of the device become free
    after the action. ``end`` is when a pass or transfer ends (ms). If outputs queue on a link, it
    is when a pass's output departs. The entry of a full backward is at its I. ``held_bytes`` is the
    device's bytes after the action. ``tail`` is about how long all takes from its start to the very
    end (ms; see `times.refresh_tails`).

    By device: ``first`` start and ``last`` end (ms), ``hosts`` = host bytes at the peak. By cell:
    ``mode`` is its mode (see `Rows`), ``away`` is scratch, False throughout.
    """

    actions: Ints
    counts: Ints
    at: Ints
    clock: Floats
    out: Floats
    back: Floats
    end: Floats
    held_bytes: Ints
    tail: Floats
    first: Floats
    last: Floats
    hosts: Ints
    mode: Ints
    away: Flags


class Undo(NamedTuple):
    """The data that a move has overwritten.

    ``touched[:sizes[0]]`` are the devices whose programs changed, with the old program in ``rows``
    and its length in ``counts``; places ``low`` .. ``high - 1`` may differ from it. Times are in a
    log of ``sizes[1]`` entries: an action, and clock, out, back and end before. It can hold three
    times as many entries as there can be actions. ``turned[:sizes[2]]`` has a cell, and its mode
    before, for each change of mode; its capacity is four times all cells. ``sizes[3]`` counts those
    cells with an action that stays and holds other bytes.
    """

    sizes: Ints
    touched: Ints
    rows: Ints
    counts: Ints
    low: Ints
    high: Ints
    turned: Ints
    codes: Ints
    values: Floats
    first: Floats
    last: Floats
    hosts: Ints


class Agenda(NamedTuple):
    """Devices to check again: from which place, and at least up to which.

    ``active[:size[0]]`` lists them; ``time`` is about when (ms), ``place`` -1 = not listed.
    ``changed`` flags devices whose times changed, ``stage_end`` (by stage) and ``cursor`` (by
    device) are scratch.
    """

    size: Ints
    active: Ints
    place: Ints
    until: Ints
    time: Floats
    changed: Flags
    stage_end: Floats
    cursor: Ints


class MoveShares(NamedTuple):
    """Shares of the kinds of moves, each a share of all.

    ``on_path``: any move around a longest path. ``relabels``: two different micro-batches swap
    places on all devices, where their order is a choice. ``modes``: the mode of an activation
    changes. ``waves``: many modes change, or many passes move; in long batches that costs as much
    as hundreds of other moves. ``backwards``: whole backwards move or are swapped. The rest moves
    single actions, or some of them.
    """

    on_path: float = 0.5
    relabels: float = 0.15
    modes: float = 0.12
    waves: float = 0.03
    backwards: float = 0.10


class SearchRules(NamedTuple):
    """Facts of a problem that decide how its search works.

    ``incremental``: times are kept up to date move by move (see `times.can_propagate`), else
    simulated from the start. ``fused``: stages whose fused backward may save time or bytes.
    ``tails``: see `least_tails`. ``mean_pass_ms``: the mean duration of F, I and W over all stages;
    1 where all are 0. ``offloads``: devices with a stage that can be offloaded. ``relabels``:
    whether the order of micro-batches is a choice. ``in_turn``: whether some must keep a turn. Then
    ``turns`` has four rows by micro-batch, -1 for none. Rows 0 and 1 are its neighbours with the F
    before and after its own. Rows 2 and 3 are those with the backward after and before.
    """

    by_span: bool
    incremental: bool
    has_sync: bool
    hosts_limited: bool
    fused: Flags
    tails: Floats
    mean_pass_ms: float
    offloads: Flags
    relabels: bool
    in_turn: bool
    turns: Ints
    shares: MoveShares


class Table(NamedTuple):
    """All arrays of one search. ``path`` is scratch; ``best_*`` is the best board seen.

    ``times.duration`` is the table's own: it follows the modes of the cells. ``focus`` says where
    moves are made (see `propose`). ``stale`` flags devices whose program may differ from the best
    one; ``load``, by place, is scratch.
    """

    board: Board
    undo: Undo
    agenda: Agenda
    work: SimulationScratch
    times: TimeArrays
    memory: MemoryArrays
    rules: SearchRules
    path: Ints
    focus: Ints
    best_actions: Ints
    best_counts: Ints
    best_modes: Ints
    stale: Flags
    load: Ints


def board_of(compiled: CompiledProblem, rows: Rows) -> Board:
    """Return a board with the programs set out; times and memory are still to be computed."""
    cells = compiled.times.num_cells
    num_actions, num_devices = 8 * cells, rows.lengths.size
    at = np.full(num_actions, -1, dtype=np.int64)
    for codes in rows.programs():
        at[codes] = np.arange(codes.size)
    return Board(
        actions=rows.actions.copy(),
        counts=rows.lengths.copy(),
        at=at,
        clock=np.zeros(num_actions),
        out=np.zeros(num_actions),
        back=np.zeros(num_actions),
        end=np.zeros(num_actions),
        held_bytes=np.zeros(num_actions, dtype=np.int64),
        tail=np.zeros(num_actions),
        first=np.zeros(num_devices),
        last=np.zeros(num_devices),
        hosts=np.zeros(num_devices, dtype=np.int64),
        mode=rows.modes.copy(),
        away=np.zeros(cells, dtype=np.bool_),
    )


def rows_on(board: Board) -> Rows:
    """Return the programs of a board, as views that change with it."""
    return Rows(board.actions, board.counts, board.mode)


def undo_for(board: Board) -> Undo:
    """Return an empty undo log for boards of this size."""
    num_devices, longest = board.actions.shape
    most = 3 * board.at.size
    return Undo(
        sizes=np.zeros(4, dtype=np.int64),
        touched=np.zeros(num_devices, dtype=np.int64),
        rows=np.zeros((num_devices, longest), dtype=np.int64),
        counts=np.zeros(num_devices, dtype=np.int64),
        low=np.zeros(num_devices, dtype=np.int64),
        high=np.full(num_devices, -1, dtype=np.int64),
        turned=np.zeros((4 * board.mode.size + 8, 2), dtype=np.int64),
        codes=np.zeros(most, dtype=np.int64),
        values=np.zeros((most, 4)),
        first=np.zeros(num_devices),
        last=np.zeros(num_devices),
        hosts=np.zeros(num_devices, dtype=np.int64),
    )


def agenda_for(board: Board, num_stages: int) -> Agenda:
    """Return an empty agenda."""
    num_devices = board.counts.size
    return Agenda(
        size=np.zeros(1, dtype=np.int64),
        active=np.zeros(num_devices, dtype=np.int64),
        place=np.full(num_devices, -1, dtype=np.int64),
        until=np.full(num_devices, -1, dtype=np.int64),
        time=np.zeros(num_devices),
        changed=np.zeros(num_devices, dtype=np.bool_),
        stage_end=np.zeros(num_stages),
        cursor=np.zeros(num_devices, dtype=np.int64),
    )


@lean
def copy(target: NDArray[Any], source: NDArray[Any], count: int) -> None:
    """Copy the first entries of one array to another; unlike numpy's, allocates nothing."""
    for k in range(count):
        target[k] = source[k]


@lean
def begin(board: Board, undo: Undo, device: int) -> None:
    """Remember a device's program before it changes."""
    if undo.high[device] >= 0:
        return
    count = board.counts[device]
    copy(undo.rows[device], board.actions[device], count)
    undo.counts[device] = count
    undo.low[device] = count
    undo.high[device] = 0
    undo.touched[undo.sizes[0]] = device
    undo.sizes[0] += 1


@lean
def note(undo: Undo, device: int, low: int, high: int) -> None:
    """Record that places low .. high - 1 of a device's program have changed."""
    undo.low[device] = min(undo.low[device], low)
    undo.high[device] = max(undo.high[device], high)


# --- The three changes of a program that all moves are made of; each keeps places and undo right.

_CHAIN = (
    FORWARD,
    OFFLOAD,
    RELEASE,
    RELOAD,
    RECOMPUTE,
    BACKWARD_INPUT,
    FULL_BACKWARD,
    BACKWARD_WEIGHT,
)
"""The order of a cell's own actions."""


@lean
def slide(board: Board, undo: Undo, device: int, source: int, target: int) -> None:
    """Move the action at a place to another place; those between shift."""
    begin(board, undo, device)
    row = board.actions[device]
    code = row[source]
    step = 1 if target > source else -1
    for place in range(source, target, step):
        row[place] = row[place + step]
        board.at[row[place]] = place
    row[target] = code
    board.at[code] = target
    note(undo, device, min(source, target), max(source, target) + 1)


@lean
def insert(board: Board, undo: Undo, device: int, place: int, code: int) -> None:
    """Put an action at a place; those from there on move up."""
    begin(board, undo, device)
    row, count = board.actions[device], board.counts[device]
    for k in range(count, place, -1):
        row[k] = row[k - 1]
        board.at[row[k]] = k
    row[place] = code
    board.at[code] = place
    board.counts[device] = count + 1
    high = undo.high[device]
    note(undo, device, place, high + 1 if high > place else place + 1)


@lean
def remove(board: Board, undo: Undo, device: int, place: int) -> None:
    """Take the action at a place out."""
    begin(board, undo, device)
    row, count = board.actions[device], board.counts[device]
    board.at[row[place]] = -1
    for k in range(place, count - 1):
        row[k] = row[k + 1]
        board.at[row[k]] = k
    board.counts[device] = count - 1
    high = undo.high[device]
    undo.high[device] = max(high - 1, place) if high > place else place
    undo.low[device] = min(undo.low[device], place)


@lean
def put_back(board: Board, undo: Undo, device: int) -> None:
    """Restore the program that `begin` remembered."""
    row, count, old = board.actions[device], board.counts[device], undo.counts[device]
    stop = undo.high[device] if count == old else max(count, old)
    for place in range(undo.low[device], min(stop, count)):
        board.at[row[place]] = -1
    for place in range(undo.low[device], min(stop, old)):
        row[place] = undo.rows[device, place]
        board.at[row[place]] = place
    board.counts[device] = old


@lean
def backward_of(board: Board, cells: int, cell: int) -> int:
    """Return the place of the I or B of a cell."""
    place = board.at[BACKWARD_INPUT * cells + cell]
    return place if place >= 0 else board.at[FULL_BACKWARD * cells + cell]


@lean
def consumer_of(board: Board, cells: int, cell: int) -> int:
    """Return the place of the action that needs a cell's RELOAD: its RECOMPUTE, else its I or B."""
    place = board.at[RECOMPUTE * cells + cell]
    return place if place >= 0 else backward_of(board, cells, cell)


@lean
def floor(board: Board, cells: int, code: int) -> int:
    """Return the first place an action may move to: right after the previous action of its cell."""
    kind = code // cells
    cell = code - kind * cells
    found = -1
    for other in _CHAIN:
        if other == kind:
            return found + 1
        place = board.at[other * cells + cell]
        if place >= 0:
            found = place
    return found + 1


@lean
def ceiling(board: Board, cells: int, code: int, count: int) -> int:
    """Return the last place an action may move to: right before the next action of its cell."""
    kind = code // cells
    cell = code - kind * cells
    behind = False
    for other in _CHAIN:
        if other == kind:
            behind = True
        elif behind:
            place = board.at[other * cells + cell]
            if place >= 0:
                return place - 1
    return count - 1


@lean
def is_ordered(board: Board, cells: int, cell: int) -> bool:
    """Whether a cell's actions are in their order."""
    found = -1
    for kind in _CHAIN:
        place = board.at[kind * cells + cell]
        if place >= 0:
            if place < found:
                return False
            found = place
    return True
