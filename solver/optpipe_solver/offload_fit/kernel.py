"""Compiled sweep of `fit`: each device's program, from top to bottom, under a limit.

The sweep keeps a clock of its own: a given run defines when inputs arrive, and transfers occupy
their lane. If an action does not fit, the sweep frees memory at the smallest cost, estimated with
this clock. `fit` judges the result by simulation. The lists of cells in the state are short and
ordered by the positions of the backwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.arrays.simulate import (
    BACKWARD_WEIGHT,
    FORWARD,
    OFFLOAD,
    RECOMPUTE,
    RELEASE,
    RELOAD,
    backward_rise,
    input_of,
)
from optpipe_solver.jit import lean

if TYPE_CHECKING:
    from optpipe_solver.arrays import Floats, Ints
    from optpipe_solver.arrays.encoding import Rows
    from optpipe_solver.arrays.simulate import MemoryArrays, TimeArrays

__all__ = ["FARTHEST", "HIDDEN", "OLDEST", "FitRun", "Rule", "fit_run_for", "sweep"]


_EXACT = 1e-9
"""Times closer than this, in ms, are the same."""


class Rule(NamedTuple):
    """The choices of one sweep.

    ``slack``: how many of its durations before the last moment a reload is issued.
    ``weight_cost``: cost of a W that runs earlier, as a fraction of its duration.
    ``lane_share``: on shared lanes, a transfer occupies its lane for this many times its duration.
    ``lag``: on shared lanes, a transfer then waits for others for this many durations.
    """

    victim: int
    slack: float
    weight_cost: float
    lane_share: float = 1.0
    lag: float = 0.0


class FitRun(NamedTuple):
    """A problem, compute programs that must fit, and a partial schedule of one device.

    ``given[d, :lengths[d]]`` is the compute program of device d. ``away`` and ``again`` have by row
    the mode of a cell that is offloaded or recomputed, -1 if it may not be. ``ends`` are those of a
    run of all devices, as in `SimulationScratch`; it defines when inputs arrive. ``limit`` and
    ``host_limit`` are bytes by device.

    The rest is the partial schedule: by cell until ``out_start``, by position in the compute
    program until ``work``. ``backward_at`` and ``weight_at`` are positions, -1 if a cell has no W.
    ``mode`` is by cell as in `Rows`. ``left`` are the cells that left, by the starts of their
    copies. The result is ``actions`` and ``counts`` by device. Scalars are in ``now`` (floats) and
    ``num`` (integers).
    """

    times: TimeArrays
    memory: MemoryArrays
    given: Ints
    lengths: Ints
    away: Ints
    again: Ints
    ends: Floats
    limit: Ints
    host_limit: Ints
    rule: Rule
    backward_at: Ints
    weight_at: Ints
    state: Ints
    mode: Ints
    out_at: Ints
    forward_end: Floats
    back: Floats
    out_start: Floats
    kept: Ints
    far: Ints
    pending: Ints
    left: Ints
    done_early: Ints
    busy_from: Floats
    busy_to: Floats
    boundary: Floats
    arrival: Floats
    ahead: Floats
    work: Floats
    codes: Ints
    now: Floats
    num: Ints
    actions: Ints
    counts: Ints


_CLOCK, _IN_FREE, _STALLED = 0, 1, 2
"""Places in `FitRun.now`, in ms."""

_HELD, _ON_HOST, _NUM_KEPT, _NUM_FAR, _NUM_PENDING, _NUM_LEFT, _NUM_BUSY = range(7)
_NUM_DONE, _COUNT = 7, 8
"""Places in `FitRun.num`: bytes, and how many each list holds."""


def fit_run_for(
    times: TimeArrays, memory: MemoryArrays, rows: Rows, away: Ints, again: Ints
) -> FitRun:
    """Return the arrays of a sweep through programs; a caller replaces the run, rule and limits."""
    cells, places = times.num_cells, int(rows.lengths.max(initial=0)) + 1
    return FitRun._make((
        times, memory, rows.actions, rows.lengths, away, again,
        np.zeros(0), memory.limit, memory.limit, Rule(HIDDEN, 0.0, 0.0),
        *np.zeros((5, cells), dtype=np.int64), *np.zeros((3, cells)),
        *np.zeros((5, places), dtype=np.int64), *np.zeros((6, places)),
        np.zeros(3 * places, dtype=np.int64), np.zeros(3), np.zeros(9, dtype=np.int64),
        np.zeros_like(rows.actions), np.zeros_like(rows.lengths),
    ))  # fmt: skip


@lean
def _offload_bytes(run: FitRun, cell: int) -> int:
    """Return the bytes of a cell that may leave."""
    row = run.times.row[cell]
    return int(run.memory.adds[RELOAD, row, run.away[row]])


@lean
def _saved_bytes(run: FitRun, cell: int) -> int:
    """Return the bytes that recomputing a cell frees, 0 if it may not be recomputed."""
    row = run.times.row[cell]
    return int(run.memory.adds[RECOMPUTE, row, run.again[row]]) if run.again[row] >= 0 else 0


@lean
def _ms(run: FitRun, kind: int, cell: int) -> float:
    """Return how long an action takes."""
    return float(run.times.duration[kind * run.times.num_cells + cell])


@lean
def _expected(run: FitRun, at: int, later: int) -> float:
    """Return when a later position is expected to start."""
    start: float = max(run.ahead[later], run.now[_CLOCK] + run.work[later] - run.work[at])
    return start


@lean
def _emit(run: FitRun, kind: int, cell: int) -> None:
    """Append an action to the program."""
    run.codes[run.num[_COUNT]] = kind * run.times.num_cells + cell
    run.num[_COUNT] += 1


@lean
def _free_from(run: FitRun, earliest: float, length: float) -> float:
    """Return the first start from ``earliest`` on at which the lane is free for ``length``."""
    first = np.searchsorted(run.busy_to[: run.num[_NUM_BUSY]], earliest, "right")
    start = earliest
    for index in range(first, run.num[_NUM_BUSY]):
        if run.busy_from[index] - start >= length - _EXACT:
            return start
        start = max(start, run.busy_to[index])
    return start


@lean
def _book(run: FitRun, start: float, end: float) -> None:
    """Occupy the lane; touching bookings become one."""
    place = run.num[_NUM_BUSY]
    while place > 0 and run.busy_from[place - 1] > start:
        place -= 1
    if place > 0 and start - run.busy_to[place - 1] <= _EXACT:
        run.busy_to[place - 1] = end
        place -= 1
    else:
        for index in range(run.num[_NUM_BUSY], place, -1):
            run.busy_from[index] = run.busy_from[index - 1]
            run.busy_to[index] = run.busy_to[index - 1]
        run.busy_from[place], run.busy_to[place] = start, end
        run.num[_NUM_BUSY] += 1
    if place + 1 < run.num[_NUM_BUSY] and run.busy_from[place + 1] - end <= _EXACT:
        run.busy_to[place] = run.busy_to[place + 1]
        for index in range(place + 1, run.num[_NUM_BUSY] - 1):
            run.busy_from[index] = run.busy_from[index + 1]
            run.busy_to[index] = run.busy_to[index + 1]
        run.num[_NUM_BUSY] -= 1


@lean
def _insert(run: FitRun, cells: Ints, which: int, cell: int) -> None:
    """Add a cell to a list that is ordered by the positions of the backwards."""
    place = run.num[which]
    while place > 0 and run.backward_at[cells[place - 1]] > run.backward_at[cell]:
        cells[place] = cells[place - 1]
        place -= 1
    cells[place] = cell
    run.num[which] += 1


@lean
def _remove(run: FitRun, cells: Ints, which: int, cell: int) -> None:
    """Remove a cell from a short list, keeping its order."""
    last = run.num[which] - 1
    place = 0
    while cells[place] != cell:
        place += 1
    for index in range(place, last):
        cells[index] = cells[index + 1]
    run.num[which] = last


HIDDEN, FARTHEST, OLDEST = 0, 1, 2
"""Victim rules: least stall, then farthest backward; farthest alone; least stall, then oldest."""

_KEPT, _AWAY, _BACK, _GONE, _AGAIN = 1, 2, 3, 4, 5
_LEAVE, _REPEAT, _WEIGHT, _SELF = 1, 2, 3, 4
_LOOKED_AT = 64


@lean
def sweep(run: FitRun, first: int, last: int) -> tuple[bool, float]:
    """Add what devices first .. last - 1 must offload or recompute to stay within their limits.

    Returns whether all fit, and the sum of their waits for transfers, in ms.
    """
    stalled_ms = 0.0
    for device in range(first, last):
        _begin(run, device)
        if not _sweep(run, device):
            return False, stalled_ms
        _weave(run, device)
        stalled_ms += run.now[_STALLED]
    return True, stalled_ms


@lean
def _begin(run: FitRun, device: int) -> None:
    """Set the state for a device, and when its positions start if nothing waits for a transfer."""
    times = run.times
    cells = times.num_cells
    run.now[:] = 0.0
    run.num[:] = 0
    clock, spent = 0.0, 0.0
    for at in range(run.lengths[device]):
        code = run.given[device, at]
        kind = code // cells
        cell = code - kind * cells
        run.arrival[at] = 0.0
        if kind == BACKWARD_WEIGHT:
            run.weight_at[cell] = at
        else:
            if kind == FORWARD:
                run.state[cell] = run.mode[cell] = 0
            else:
                run.backward_at[cell], run.weight_at[cell] = at, -1
            source, transit = input_of(kind, cell, cell // times.num_microbatches, times)
            # The cell's own F is in this program: its end is known.
            if source >= 0 and source != cell:
                run.arrival[at] = run.ends[source] + transit
        run.ahead[at], run.work[at] = max(clock, run.arrival[at]), spent
        run.done_early[at] = 0
        clock = run.ahead[at] + times.duration[code]
        spent += times.duration[code]


@lean
def _sweep(run: FitRun, device: int) -> bool:
    """Run all actions, freeing memory before each; return whether all fit."""
    memory, cells = run.memory, run.times.num_cells
    for at in range(run.lengths[device]):
        if run.done_early[at] > 0:
            continue
        kind = run.given[device, at] // cells
        cell = run.given[device, at] - kind * cells
        row = run.times.row[cell]
        need = memory.rises[kind, row, run.mode[cell]]
        if kind not in (FORWARD, BACKWARD_WEIGHT):
            if run.state[cell] == _AWAY:
                ok, _ = _make_room(run, device, at, need + _offload_bytes(run, cell), cell)
                if not ok:
                    return False
                _reload(run, device, cell)
            elif run.state[cell] == _AGAIN:
                need = backward_rise(kind, row, run.mode[cell], memory)
        ok, need = _make_room(run, device, at, need, -1)
        if not ok:
            return False
        _prefetch(run, device, at, need)
        _run(run, device, at)
    return True


@lean
def _run(run: FitRun, device: int, at: int) -> None:
    """Run the action at a position, after what it waits for."""
    code = run.given[device, at]
    kind = code // run.times.num_cells
    cell = code - kind * run.times.num_cells
    row, mode = run.times.row[cell], run.mode[cell]
    before = run.now[_CLOCK]
    start = max(before, run.arrival[at])
    if kind == FORWARD:
        if run.state[cell] != _AGAIN:
            run.state[cell] = _KEPT
        _insert(run, run.kept, _NUM_KEPT, cell)
    elif kind != BACKWARD_WEIGHT:
        if run.state[cell] == _AGAIN:
            _emit(run, RECOMPUTE, cell)
            run.num[_HELD] += run.memory.adds[RECOMPUTE, row, mode]
            start = max(start, before + _ms(run, RECOMPUTE, cell))
        elif run.state[cell] == _BACK:
            start = max(start, run.back[cell])
            run.num[_ON_HOST] -= _offload_bytes(run, cell)
        _remove(run, run.kept, _NUM_KEPT, cell)
        run.state[cell] = _GONE
        if run.weight_at[cell] >= 0:
            _insert(run, run.pending, _NUM_PENDING, cell)
    else:
        _remove(run, run.pending, _NUM_PENDING, cell)
    run.now[_STALLED] += start - max(before, run.arrival[at])
    run.now[_CLOCK] = start + run.times.duration[code]
    run.num[_HELD] += run.memory.adds[kind, row, mode]
    _emit(run, kind, cell)
    run.num[_NUM_DONE] += 1
    run.boundary[run.num[_NUM_DONE]] = run.now[_CLOCK]
    if kind == FORWARD:
        run.forward_end[cell] = run.now[_CLOCK]


@lean
def _make_room(run: FitRun, device: int, at: int, needed: int, for_cell: int) -> tuple[bool, int]:
    """Free bytes until the needed ones fit; return whether they do, and how many are needed.

    They are for the action, or, if ``for_cell`` >= 0, also for the reload of that cell.
    """
    need = needed
    while run.num[_HELD] + need > run.limit[device]:
        option, cell, _ = _cheapest(run, device, at, for_cell)
        if option == 0:
            return False, need
        if option == _LEAVE:
            _release(run, cell)
        elif option == _WEIGHT:
            _weight_first(run, device, cell)
        else:
            run.state[cell] = _AGAIN
            run.mode[cell] = run.again[run.times.row[cell]]
            if option == _SELF:
                need -= _saved_bytes(run, cell)
            else:
                run.num[_HELD] -= _saved_bytes(run, cell)
    return True, need


@lean
def _weight_first(run: FitRun, device: int, cell: int) -> None:
    """Run a waiting weight gradient here instead of later."""
    position = run.weight_at[cell]
    _run(run, device, position)
    run.done_early[position] = 1


@lean
def _cheapest(run: FitRun, device: int, at: int, for_cell: int) -> tuple[int, int, float]:
    """Return the option that frees bytes at the smallest estimated cost (ms), ties by the rule."""
    memory, cells = run.memory, run.times.num_cells
    kind = run.given[device, at] // cells
    own = run.given[device, at] - kind * cells
    victim, best = _cheapest_to_leave(run, device, at, own, for_cell)
    option = _LEAVE if victim >= 0 else 0
    for index in range(run.num[_NUM_KEPT] - 1, -1, -1):
        cell = run.kept[index]
        if cell == own or run.state[cell] != _KEPT or _saved_bytes(run, cell) <= 0:
            continue
        if _ms(run, RECOMPUTE, cell) < best:
            best, option, victim = _ms(run, RECOMPUTE, cell), _REPEAT, cell
    is_new = kind == FORWARD and run.state[own] == 0
    if is_new and _saved_bytes(run, own) > 0 and _ms(run, RECOMPUTE, own) < best:
        best, option, victim = _ms(run, RECOMPUTE, own), _SELF, own
    for index in range(run.num[_NUM_PENDING]):
        cell = run.pending[index]
        row, mode = run.times.row[cell], run.mode[cell]
        fits = run.num[_HELD] + memory.rises[BACKWARD_WEIGHT, row, mode] <= run.limit[device]
        cost = run.rule.weight_cost * _ms(run, BACKWARD_WEIGHT, cell)
        frees = memory.adds[BACKWARD_WEIGHT, row, mode] < 0
        if run.weight_at[cell] != at and fits and frees and cost <= best:
            return _WEIGHT, cell, cost
    return option, victim, best


@lean
def _cheapest_to_leave(
    run: FitRun, device: int, at: int, own: int, for_cell: int
) -> tuple[int, float]:
    """Return the cell whose offload is estimated to cost least, and that cost (ms); -1 for none."""
    victim, best, best_end = -1, np.inf, np.inf
    for index in range(run.num[_NUM_KEPT] - 1, -1, -1):
        cell = run.kept[index]
        may_leave = run.state[cell] == _KEPT and run.away[run.times.row[cell]] >= 0
        if cell == own or not may_leave:
            continue
        if run.num[_ON_HOST] + _offload_bytes(run, cell) > run.host_limit[device]:
            continue
        cost = 0.0
        if run.rule.victim != FARTHEST:
            cost = _leaving_costs(run, at, own, cell, for_cell)
        oldest = run.rule.victim == OLDEST and cost == best and run.forward_end[cell] < best_end
        if cost < best or oldest:
            victim, best, best_end = cell, cost, run.forward_end[cell]
        if best == 0.0 and run.rule.victim != OLDEST:
            break
    return victim, best


@lean
def _leaving_costs(run: FitRun, at: int, own: int, cell: int, for_cell: int) -> float:
    """Estimate the delay of the action here, of the reload wanted, and of the cell's own return."""
    length = run.rule.lane_share * _ms(run, OFFLOAD, cell)
    clock = run.now[_CLOCK]
    lag = run.rule.lag * _ms(run, OFFLOAD, cell)
    ready = max(clock, _free_from(run, run.forward_end[cell], length) + length + lag)
    delay = max(0.0, ready - max(clock, run.arrival[at]))
    if for_cell >= 0:
        home = max(ready, run.now[_IN_FREE]) + _return_ms(run, for_cell)
        late = max(0.0, home - _expected(run, at, run.backward_at[for_cell]))
        delay = late if for_cell == own else max(delay, late)
    home = max(ready, run.arrival[at]) + _return_ms(run, cell)
    late = max(0.0, home - _expected(run, at, run.backward_at[cell]))
    cost: float = delay + late
    return cost if cost > _EXACT else 0.0


@lean
def _return_ms(run: FitRun, cell: int) -> float:
    """Return the duration of a reload from the moment the device can use its lane."""
    total: float = (run.rule.lane_share + run.rule.lag) * _ms(run, RELOAD, cell)
    return total


@lean
def _release(run: FitRun, cell: int) -> None:
    """Offload a cell as early as its lane allows, and wait here until the copy has ended."""
    length = run.rule.lane_share * _ms(run, OFFLOAD, cell)
    start = _free_from(run, run.forward_end[cell], length)
    _book(run, start, start + length)
    run.out_start[cell] = start
    run.out_at[cell] = (
        np.searchsorted(run.boundary[: run.num[_NUM_DONE] + 1], start + _EXACT, "right") - 1
    )
    place = run.num[_NUM_LEFT]
    run.num[_NUM_LEFT] += 1
    while place > 0 and (start, cell) < (run.out_start[run.left[place - 1]], run.left[place - 1]):
        run.left[place] = run.left[place - 1]
        place -= 1
    run.left[place] = cell
    wait = start + length + run.rule.lag * _ms(run, OFFLOAD, cell) - run.now[_CLOCK]
    if wait > _EXACT:
        run.now[_CLOCK] += wait
        run.now[_STALLED] += wait
    run.state[cell], run.mode[cell] = _AWAY, run.away[run.times.row[cell]]
    run.num[_HELD] -= _offload_bytes(run, cell)
    run.num[_ON_HOST] += _offload_bytes(run, cell)
    _remove(run, run.kept, _NUM_KEPT, cell)
    _emit(run, RELEASE, cell)
    _insert(run, run.far, _NUM_FAR, cell)


@lean
def _reload(run: FitRun, device: int, cell: int) -> None:
    """Reload a cell, starting now."""
    length = run.rule.lane_share * _ms(run, RELOAD, cell)
    start = max(run.now[_CLOCK], run.now[_IN_FREE])
    if run.times.half_duplex[device]:
        start = _free_from(run, start, length)
        _book(run, start, start + length)
    run.now[_IN_FREE] = start + length
    run.back[cell] = start + _return_ms(run, cell)
    run.state[cell] = _BACK
    run.num[_HELD] += _offload_bytes(run, cell)
    _remove(run, run.far, _NUM_FAR, cell)
    _insert(run, run.kept, _NUM_KEPT, cell)
    _emit(run, RELOAD, cell)


@lean
def _prefetch(run: FitRun, device: int, at: int, action_bytes: int) -> None:
    """Issue the reloads that would be too late at the next boundary.

    If they do not fit in addition to the action, other cells leave, unless that costs more than
    waiting for the next boundary.
    """
    duration_ms = run.times.duration[run.given[device, at]]
    while run.num[_NUM_FAR] > 0:
        following = max(run.now[_CLOCK], run.arrival[at]) + duration_ms
        if run.now[_IN_FREE] >= following or not _is_urgent(run, at, following):
            return
        cell = run.far[0]
        need = _offload_bytes(run, cell) + action_bytes
        due = _expected(run, at, run.backward_at[cell])
        tolerated = max(0.0, following + _return_ms(run, cell) - due)
        while run.num[_HELD] + need > run.limit[device]:
            option, victim, cost = _cheapest(run, device, at, cell)
            if cost > tolerated:
                return
            if option == _WEIGHT:
                _weight_first(run, device, victim)
            elif option == _LEAVE and run.backward_at[victim] > run.backward_at[cell]:
                _release(run, victim)
            else:
                return
        _reload(run, device, cell)


@lean
def _is_urgent(run: FitRun, at: int, following: float) -> bool:
    """Whether some cell would be late if the first reload started at the next boundary."""
    lane = 0.0
    for index in range(min(run.num[_NUM_FAR], _LOOKED_AT)):
        cell = run.far[index]
        reload_ms = _ms(run, RELOAD, cell)
        length = run.rule.lane_share * reload_ms
        lane += length
        due = _expected(run, at, run.backward_at[cell])
        if due - run.rule.slack * length - run.rule.lag * reload_ms - lane < following - _EXACT:
            return True
    return False


@lean
def _weave(run: FitRun, device: int) -> None:
    """Write the program with the offloads inserted, in the order of their starts."""
    cells, row = run.times.num_cells, run.actions[device]
    count, done, following = 0, 0, 0
    for index in range(run.num[_COUNT]):
        row[count] = run.codes[index]
        count += 1
        if run.codes[index] < OFFLOAD * cells:
            done += 1
            while following < run.num[_NUM_LEFT] and run.out_at[run.left[following]] <= done:
                row[count] = OFFLOAD * cells + run.left[following]
                count += 1
                following += 1
    run.counts[device] = count
