"""Compiled sweep of `fit`: one device's program, from top to bottom, under a limit.

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
)
from optpipe_solver.jit import jitted, lean

if TYPE_CHECKING:
    from optpipe_solver.arrays import Flags, Floats, Ints

__all__ = ["FARTHEST", "HIDDEN", "OLDEST", "DeviceProgram", "Rule", "SweepResult", "sweep"]


_EXACT = 1e-9
"""Times closer than this, in ms, are the same."""


class DeviceProgram(NamedTuple):
    """One device's compute program and what depends on it, by position or by the device's cells.

    A cell is a (stage, micro-batch) of this device; ``weight_at`` is -1 if it has no W.
    """

    kind: Ints
    cell: Ints
    duration: Floats
    arrival: Floats
    delta: Ints
    workspace: Ints
    backward_at: Ints
    weight_at: Ints
    offload_bytes: Ints
    offload_ms: Floats
    reload_ms: Floats
    may_offload: Flags
    saved_bytes: Ints
    recompute_ms: Floats
    recompute_workspace: Ints
    may_recompute: Flags
    half_duplex: bool


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


class _Wanted(NamedTuple):
    """Bytes that must be free: for the action itself, or (``for_cell`` >= 0) also for a reload."""

    num_bytes: int
    for_cell: int
    limit: int
    host_limit: int


class SweepResult(NamedTuple):
    """Result of a sweep: ``codes[:num_codes]`` are ``kind * num_cells + cell`` of the device.

    ``ok`` is False if an action could not fit. ``stalled_ms`` is the sum of waits for transfers.
    """

    ok: bool
    codes: Ints
    num_codes: int
    stalled_ms: float
    peak: int


class _FitState(NamedTuple):
    """The mutable state; scalars are in ``now`` (floats) and ``num`` (integers)."""

    mode: Ints
    forward_end: Floats
    back: Floats
    out_start: Floats
    out_at: Ints
    kept: Ints
    away: Ints
    pending: Ints
    busy_from: Floats
    busy_to: Floats
    boundary: Floats
    done_early: Flags
    ahead: Floats
    work: Floats
    codes: Ints
    now: Floats
    num: Ints


_CLOCK, _IN_FREE, _STALLED = 0, 1, 2
"""Places in `_FitState.now`, in ms."""

_HELD, _PEAK, _ON_HOST, _NUM_KEPT, _NUM_AWAY, _NUM_PENDING, _NUM_BUSY, _NUM_DONE, _COUNT = range(9)
"""Places in `_FitState.num`: bytes, and how many each list holds."""


@lean
def _expected(st: _FitState, at: int, later: int) -> float:
    """Return when a later position is expected to start."""
    start: float = max(st.ahead[later], st.now[_CLOCK] + st.work[later] - st.work[at])
    return start


@lean
def _emit(st: _FitState, code: int) -> None:
    """Append an action to the program, as ``kind * num_cells + cell``."""
    st.codes[st.num[_COUNT]] = code
    st.num[_COUNT] += 1


@lean
def _take(st: _FitState, num_bytes: int) -> None:
    """Add to the bytes held, and update the peak."""
    st.num[_HELD] += num_bytes
    st.num[_PEAK] = max(st.num[_PEAK], st.num[_HELD])


@lean
def _free_from(st: _FitState, earliest: float, length: float) -> float:
    """Return the first start from ``earliest`` on at which the lane is free for ``length``."""
    first = np.searchsorted(st.busy_to[: st.num[_NUM_BUSY]], earliest, "right")
    start = earliest
    for index in range(first, st.num[_NUM_BUSY]):
        if st.busy_from[index] - start >= length - _EXACT:
            return start
        start = max(start, st.busy_to[index])
    return start


@lean
def _book(st: _FitState, start: float, end: float) -> None:
    """Occupy the lane; touching bookings become one."""
    place = st.num[_NUM_BUSY]
    while place > 0 and st.busy_from[place - 1] > start:
        place -= 1
    if place > 0 and start - st.busy_to[place - 1] <= _EXACT:
        st.busy_to[place - 1] = end
        place -= 1
    else:
        for index in range(st.num[_NUM_BUSY], place, -1):
            st.busy_from[index] = st.busy_from[index - 1]
            st.busy_to[index] = st.busy_to[index - 1]
        st.busy_from[place], st.busy_to[place] = start, end
        st.num[_NUM_BUSY] += 1
    if place + 1 < st.num[_NUM_BUSY] and st.busy_from[place + 1] - end <= _EXACT:
        st.busy_to[place] = st.busy_to[place + 1]
        for index in range(place + 1, st.num[_NUM_BUSY] - 1):
            st.busy_from[index] = st.busy_from[index + 1]
            st.busy_to[index] = st.busy_to[index + 1]
        st.num[_NUM_BUSY] -= 1


@lean
def _insert(job: DeviceProgram, cells: Ints, num: Ints, which: int, cell: int) -> None:
    """Add a cell to a list that is ordered by the positions of the backwards."""
    place = num[which]
    while place > 0 and job.backward_at[cells[place - 1]] > job.backward_at[cell]:
        cells[place] = cells[place - 1]
        place -= 1
    cells[place] = cell
    num[which] += 1


@lean
def _remove(cells: Ints, num: Ints, which: int, cell: int) -> None:
    """Remove a cell from a short list, keeping its order."""
    last = num[which] - 1
    place = 0
    while cells[place] != cell:
        place += 1
    for index in range(place, last):
        cells[index] = cells[index + 1]
    num[which] = last


HIDDEN, FARTHEST, OLDEST = 0, 1, 2
"""Victim rules: least stall, then farthest backward; farthest alone; least stall, then oldest."""

_KEPT, _AWAY, _BACK, _GONE, _AGAIN = 1, 2, 3, 4, 5
_LEAVE, _REPEAT, _WEIGHT, _SELF = 1, 2, 3, 4
_LOOKED_AT = 64


@jitted
def sweep(job: DeviceProgram, rule: Rule, limit: int, host_limit: int) -> SweepResult:
    """Return the program with what must be offloaded or recomputed to stay within a limit."""
    n, cells = job.kind.size, job.backward_at.size
    ahead, work, clock, spent = np.empty(n), np.empty(n), 0.0, 0.0
    for at in range(n):
        # When each position starts if nothing waits for a transfer, and the work before it, in ms.
        ahead[at], work[at] = max(clock, job.arrival[at]), spent
        clock = ahead[at] + job.duration[at]
        spent += job.duration[at]
    st = _FitState(
        mode=np.zeros(cells, dtype=np.int64),
        forward_end=np.zeros(cells),
        back=np.zeros(cells),
        out_start=np.full(cells, np.inf),
        out_at=np.zeros(cells, dtype=np.int64),
        kept=np.empty(cells, dtype=np.int64),
        away=np.empty(cells, dtype=np.int64),
        pending=np.empty(cells, dtype=np.int64),
        busy_from=np.empty(2 * cells),
        busy_to=np.empty(2 * cells),
        boundary=np.zeros(n + 1),
        done_early=np.zeros(n, dtype=np.bool_),
        ahead=ahead,
        work=work,
        codes=np.empty(n + 3 * cells, dtype=np.int64),
        now=np.zeros(3),
        num=np.zeros(9, dtype=np.int64),
    )
    ok = _sweep(job, rule, st, limit, host_limit)
    leaving = np.argsort(st.out_start, kind="mergesort")
    codes = np.empty(st.num[_COUNT] + leaving.size, dtype=np.int64)
    count = _weave(job, st, leaving, codes)
    return SweepResult(ok, codes, count, st.now[_STALLED], st.num[_PEAK])


@lean
def _sweep(job: DeviceProgram, rule: Rule, st: _FitState, limit: int, host_limit: int) -> bool:
    """Run all actions, freeing memory before each; return whether all fit."""
    for at in range(job.kind.size):
        if st.done_early[at]:
            continue
        cell, kind = job.cell[at], job.kind[at]
        is_backward = kind not in (FORWARD, BACKWARD_WEIGHT)
        need = max(0, job.delta[at]) + job.workspace[at]
        if is_backward:
            if st.mode[cell] == _AWAY:
                wanted = _Wanted(need + job.offload_bytes[cell], cell, limit, host_limit)
                ok, _ = _make_room(job, rule, st, at, wanted)
                if not ok:
                    return False
                _reload(job, rule, st, cell)
            elif st.mode[cell] == _AGAIN:
                need = job.saved_bytes[cell] + max(need, job.recompute_workspace[cell])
        ok, need = _make_room(job, rule, st, at, _Wanted(need, -1, limit, host_limit))
        if not ok:
            return False
        _prefetch(job, rule, st, at, _Wanted(need, -1, limit, host_limit))
        _run(job, st, at)
    return True


@lean
def _run(job: DeviceProgram, st: _FitState, at: int) -> None:
    """Run the action at a position, after what it waits for."""
    cell, kind = job.cell[at], job.kind[at]
    cells = job.backward_at.size
    delta = job.delta[at]
    before = st.now[_CLOCK]
    start = max(before, job.arrival[at])
    if kind == FORWARD:
        if st.mode[cell] == _AGAIN:
            delta -= job.saved_bytes[cell]
        else:
            st.mode[cell] = _KEPT
        _insert(job, st.kept, st.num, _NUM_KEPT, cell)
    elif kind != BACKWARD_WEIGHT:
        if st.mode[cell] == _AGAIN:
            _emit(st, RECOMPUTE * cells + cell)
            _take(st, job.saved_bytes[cell])
            start = max(start, before + job.recompute_ms[cell])
        elif st.mode[cell] == _BACK:
            start = max(start, st.back[cell])
            st.num[_ON_HOST] -= job.offload_bytes[cell]
        _remove(st.kept, st.num, _NUM_KEPT, cell)
        st.mode[cell] = _GONE
        if job.weight_at[cell] >= 0:
            _insert(job, st.pending, st.num, _NUM_PENDING, cell)
    else:
        _remove(st.pending, st.num, _NUM_PENDING, cell)
    st.now[_STALLED] += start - max(before, job.arrival[at])
    st.now[_CLOCK] = start + job.duration[at]
    st.num[_PEAK] = max(st.num[_PEAK], st.num[_HELD] + max(0, delta) + job.workspace[at])
    st.num[_HELD] += delta
    _emit(st, kind * cells + cell)
    st.num[_NUM_DONE] += 1
    st.boundary[st.num[_NUM_DONE]] = st.now[_CLOCK]
    if kind == FORWARD:
        st.forward_end[cell] = st.now[_CLOCK]


@lean
def _make_room(
    job: DeviceProgram, rule: Rule, st: _FitState, at: int, wanted: _Wanted
) -> tuple[bool, int]:
    """Free bytes until the wanted ones fit; return whether they do, and how many are needed."""
    need = wanted.num_bytes
    while st.num[_HELD] + need > wanted.limit:
        option, cell, _ = _cheapest(job, rule, st, at, wanted)
        if option == 0:
            return False, need
        if option == _LEAVE:
            _release(job, rule, st, cell)
        elif option == _REPEAT:
            st.mode[cell] = _AGAIN
            st.num[_HELD] -= job.saved_bytes[cell]
        elif option == _SELF:
            st.mode[cell] = _AGAIN
            need -= job.saved_bytes[cell]
        else:
            _weight_first(job, st, cell)
    return True, need


@lean
def _weight_first(job: DeviceProgram, st: _FitState, cell: int) -> None:
    """Run a waiting weight gradient here instead of later."""
    position = job.weight_at[cell]
    _run(job, st, position)
    st.done_early[position] = True


@lean
def _cheapest(
    job: DeviceProgram, rule: Rule, st: _FitState, at: int, wanted: _Wanted
) -> tuple[int, int, float]:
    """Return the option that frees bytes at the smallest estimated cost (ms), ties by the rule."""
    victim, leaving_ms = _cheapest_to_leave(job, rule, st, at, wanted)
    option, best = (_LEAVE if victim >= 0 else 0), leaving_ms
    own = job.cell[at]
    for index in range(st.num[_NUM_KEPT] - 1, -1, -1):
        cell = st.kept[index]
        if cell == own or st.mode[cell] != _KEPT:
            continue
        if job.may_recompute[cell] and job.saved_bytes[cell] > 0 and job.recompute_ms[cell] < best:
            best, option, victim = job.recompute_ms[cell], _REPEAT, cell
    is_new = job.kind[at] == FORWARD and st.mode[own] == 0
    saves = job.may_recompute[own] and job.saved_bytes[own] > 0
    if is_new and saves and job.recompute_ms[own] < best:
        best, option, victim = job.recompute_ms[own], _SELF, own
    for index in range(st.num[_NUM_PENDING]):
        position = job.weight_at[st.pending[index]]
        fits = st.num[_HELD] + job.workspace[position] <= wanted.limit
        cost = rule.weight_cost * job.duration[position]
        if position != at and fits and job.delta[position] < 0 and cost <= best:
            return _WEIGHT, st.pending[index], cost
    return option, victim, best


@lean
def _cheapest_to_leave(
    job: DeviceProgram, rule: Rule, st: _FitState, at: int, wanted: _Wanted
) -> tuple[int, float]:
    """Return the cell whose offload is estimated to cost least, and that cost (ms); -1 for none."""
    victim, best, best_end = -1, np.inf, np.inf
    for index in range(st.num[_NUM_KEPT] - 1, -1, -1):
        cell = st.kept[index]
        on_host = st.num[_ON_HOST] + job.offload_bytes[cell]
        if cell == job.cell[at] or st.mode[cell] != _KEPT or not job.may_offload[cell]:
            continue
        if on_host > wanted.host_limit:
            continue
        cost = 0.0
        if rule.victim != FARTHEST:
            cost = _leaving_costs(job, rule, st, at, cell, wanted.for_cell)
        oldest = rule.victim == OLDEST and cost == best and st.forward_end[cell] < best_end
        if cost < best or oldest:
            victim, best, best_end = cell, cost, st.forward_end[cell]
        if best == 0.0 and rule.victim != OLDEST:
            break
    return victim, best


@lean
def _leaving_costs(  # noqa: PLR0917 - compiled code takes its arguments by position
    job: DeviceProgram, rule: Rule, st: _FitState, at: int, cell: int, for_cell: int
) -> float:
    """Estimate the delay of the action here, of the reload wanted, and of the cell's own return."""
    length = rule.lane_share * job.offload_ms[cell]
    clock = st.now[_CLOCK]
    lag = rule.lag * job.offload_ms[cell]
    ready = max(clock, _free_from(st, st.forward_end[cell], length) + length + lag)
    delay = max(0.0, ready - max(clock, job.arrival[at]))
    if for_cell >= 0:
        home = max(ready, st.now[_IN_FREE]) + _return_ms(job, rule, for_cell)
        late = max(0.0, home - _expected(st, at, job.backward_at[for_cell]))
        delay = late if for_cell == job.cell[at] else max(delay, late)
    home = max(ready, job.arrival[at]) + _return_ms(job, rule, cell)
    late = max(0.0, home - _expected(st, at, job.backward_at[cell]))
    cost: float = delay + late
    return cost if cost > _EXACT else 0.0


@lean
def _return_ms(job: DeviceProgram, rule: Rule, cell: int) -> float:
    """Return the duration of a reload from the moment the device can use its lane."""
    total: float = (rule.lane_share + rule.lag) * job.reload_ms[cell]
    return total


@lean
def _release(job: DeviceProgram, rule: Rule, st: _FitState, cell: int) -> None:
    """Offload a cell as early as its lane allows, and wait here until the copy has ended."""
    length = rule.lane_share * job.offload_ms[cell]
    start = _free_from(st, st.forward_end[cell], length)
    _book(st, start, start + length)
    st.out_start[cell] = start
    st.out_at[cell] = (
        np.searchsorted(st.boundary[: st.num[_NUM_DONE] + 1], start + _EXACT, "right") - 1
    )
    wait = start + length + rule.lag * job.offload_ms[cell] - st.now[_CLOCK]
    if wait > _EXACT:
        st.now[_CLOCK] += wait
        st.now[_STALLED] += wait
    st.mode[cell] = _AWAY
    st.num[_HELD] -= job.offload_bytes[cell]
    st.num[_ON_HOST] += job.offload_bytes[cell]
    _remove(st.kept, st.num, _NUM_KEPT, cell)
    _emit(st, RELEASE * job.backward_at.size + cell)
    _insert(job, st.away, st.num, _NUM_AWAY, cell)


@lean
def _reload(job: DeviceProgram, rule: Rule, st: _FitState, cell: int) -> None:
    """Reload a cell, starting now."""
    length = rule.lane_share * job.reload_ms[cell]
    start = max(st.now[_CLOCK], st.now[_IN_FREE])
    if job.half_duplex:
        start = _free_from(st, start, length)
        _book(st, start, start + length)
    st.now[_IN_FREE] = start + length
    st.back[cell] = start + _return_ms(job, rule, cell)
    st.mode[cell] = _BACK
    _take(st, job.offload_bytes[cell])
    _remove(st.away, st.num, _NUM_AWAY, cell)
    _insert(job, st.kept, st.num, _NUM_KEPT, cell)
    _emit(st, RELOAD * job.backward_at.size + cell)


@lean
def _prefetch(job: DeviceProgram, rule: Rule, st: _FitState, at: int, wanted: _Wanted) -> None:
    """Issue the reloads that would be too late at the next boundary.

    If they do not fit in addition to the action, other cells leave, unless that costs more than
    waiting for the next boundary.
    """
    while st.num[_NUM_AWAY] > 0:
        following = max(st.now[_CLOCK], job.arrival[at]) + job.duration[at]
        if st.now[_IN_FREE] >= following or not _is_urgent(job, rule, st, at, following):
            return
        cell = st.away[0]
        need = job.offload_bytes[cell] + wanted.num_bytes
        due = _expected(st, at, job.backward_at[cell])
        tolerated = max(0.0, following + _return_ms(job, rule, cell) - due)
        more = _Wanted(need, cell, wanted.limit, wanted.host_limit)
        while st.num[_HELD] + need > wanted.limit:
            option, victim, cost = _cheapest(job, rule, st, at, more)
            if cost > tolerated:
                return
            if option == _WEIGHT:
                _weight_first(job, st, victim)
            elif option == _LEAVE and job.backward_at[victim] > job.backward_at[cell]:
                _release(job, rule, st, victim)
            else:
                return
        _reload(job, rule, st, cell)


@lean
def _is_urgent(job: DeviceProgram, rule: Rule, st: _FitState, at: int, following: float) -> bool:
    """Whether some cell would be late if the first reload started at the next boundary."""
    lane = 0.0
    for index in range(min(st.num[_NUM_AWAY], _LOOKED_AT)):
        cell = st.away[index]
        length = rule.lane_share * job.reload_ms[cell]
        lane += length
        due = _expected(st, at, job.backward_at[cell])
        if due - rule.slack * length - rule.lag * job.reload_ms[cell] - lane < following - _EXACT:
            return True
    return False


@lean
def _weave(job: DeviceProgram, st: _FitState, leaving: Ints, codes: Ints) -> int:
    """Insert the offloads, in the order of their starts; return the number of actions."""
    cells = job.backward_at.size
    count, done, following = 0, 0, 0
    for index in range(st.num[_COUNT]):
        code = st.codes[index]
        codes[count] = code
        count += 1
        if code < OFFLOAD * cells:
            done += 1
            while following < cells and st.out_start[leaving[following]] < np.inf:
                cell = leaving[following]
                if st.out_at[cell] > done:
                    break
                codes[count] = OFFLOAD * cells + cell
                count += 1
                following += 1
    return count
