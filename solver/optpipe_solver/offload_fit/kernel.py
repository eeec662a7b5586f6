"""Compiled sweep of `fit`: one device's program, from top to bottom, under a limit.

The sweep keeps a clock of its own: inputs arrive when a given run says, transfers take their lane.
Where an action does not fit, something waiting makes room; what it costs is estimated from that
clock, and `fit` judges what comes of it by simulation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from optpipe_solver.offload_fit.state import (
    CLOCK,
    COUNT,
    EXACT,
    HELD,
    IN_FREE,
    NUM_AWAY,
    NUM_DONE,
    NUM_KEPT,
    NUM_PENDING,
    ON_HOST,
    PEAK,
    STALLED,
    DeviceProgram,
    FitState,
    Rule,
    SweepResult,
    Wanted,
    begin,
    book,
    emit,
    expected,
    free_from,
    insert,
    remove,
    take,
)

if TYPE_CHECKING:
    from optpipe_solver.arrays import Ints

__all__ = ["FARTHEST", "HIDDEN", "OLDEST", "sweep"]


HIDDEN, FARTHEST, OLDEST = 0, 1, 2
"""Victim rules: least stall, then farthest backward; farthest alone; least stall, then oldest."""

_KEPT, _AWAY, _BACK, _GONE, _AGAIN = 1, 2, 3, 4, 5
_LEAVE, _REPEAT, _WEIGHT, _SELF = 1, 2, 3, 4
_LOOKED_AT = 64


@jitted
def sweep(job: DeviceProgram, rule: Rule, limit: int, host_limit: int) -> SweepResult:
    """Return the program with what must be offloaded or recomputed to stay within a limit."""
    st = begin(job)
    ok = _sweep(job, rule, st, limit, host_limit)
    leaving = np.argsort(st.out_start, kind="mergesort")
    codes = np.empty(st.num[COUNT] + leaving.size, dtype=np.int64)
    count = _weave(job, st, leaving, codes)
    return SweepResult(ok, codes, count, st.now[STALLED], st.num[PEAK])


@lean
def _sweep(job: DeviceProgram, rule: Rule, st: FitState, limit: int, host_limit: int) -> bool:
    """Run all actions, making room before each; return whether that could be done."""
    for at in range(job.kind.size):
        if st.done_early[at]:
            continue
        cell, kind = job.cell[at], job.kind[at]
        is_backward = kind not in (FORWARD, BACKWARD_WEIGHT)
        need = max(0, job.delta[at]) + job.workspace[at]
        if is_backward:
            if st.mode[cell] == _AWAY:
                wanted = Wanted(need + job.offload_bytes[cell], cell, limit, host_limit)
                ok, _ = _make_room(job, rule, st, at, wanted)
                if not ok:
                    return False
                _reload(job, rule, st, cell)
            elif st.mode[cell] == _AGAIN:
                need = job.saved_bytes[cell] + max(need, job.recompute_workspace[cell])
        ok, need = _make_room(job, rule, st, at, Wanted(need, -1, limit, host_limit))
        if not ok:
            return False
        _prefetch(job, rule, st, at, Wanted(need, -1, limit, host_limit))
        _run(job, st, at)
    return True


@lean
def _run(job: DeviceProgram, st: FitState, at: int) -> None:
    """Run the action at a position, after what it waits for."""
    cell, kind = job.cell[at], job.kind[at]
    cells = job.backward_at.size
    delta = job.delta[at]
    before = st.now[CLOCK]
    start = max(before, job.arrival[at])
    if kind == FORWARD:
        if st.mode[cell] == _AGAIN:
            delta -= job.saved_bytes[cell]
        else:
            st.mode[cell] = _KEPT
        insert(job, st.kept, st.num, NUM_KEPT, cell)
    elif kind != BACKWARD_WEIGHT:
        if st.mode[cell] == _AGAIN:
            emit(st, RECOMPUTE * cells + cell)
            take(st, job.saved_bytes[cell])
            start = max(start, before + job.recompute_ms[cell])
        elif st.mode[cell] == _BACK:
            start = max(start, st.back[cell])
            st.num[ON_HOST] -= job.offload_bytes[cell]
        remove(st.kept, st.num, NUM_KEPT, cell)
        st.mode[cell] = _GONE
        if job.weight_at[cell] >= 0:
            insert(job, st.pending, st.num, NUM_PENDING, cell)
    else:
        remove(st.pending, st.num, NUM_PENDING, cell)
    st.now[STALLED] += start - max(before, job.arrival[at])
    st.now[CLOCK] = start + job.duration[at]
    st.num[PEAK] = max(st.num[PEAK], st.num[HELD] + max(0, delta) + job.workspace[at])
    st.num[HELD] += delta
    emit(st, kind * cells + cell)
    st.num[NUM_DONE] += 1
    st.boundary[st.num[NUM_DONE]] = st.now[CLOCK]
    if kind == FORWARD:
        st.made[cell] = st.now[CLOCK]


@lean
def _make_room(
    job: DeviceProgram, rule: Rule, st: FitState, at: int, wanted: Wanted
) -> tuple[bool, int]:
    """Free bytes until the wanted ones fit; return whether they do, and how many that then are."""
    need = wanted.num_bytes
    while st.num[HELD] + need > wanted.limit:
        option, cell, _ = _cheapest(job, rule, st, at, wanted)
        if option == 0:
            return False, need
        if option == _LEAVE:
            _release(job, rule, st, cell)
        elif option == _REPEAT:
            st.mode[cell] = _AGAIN
            st.num[HELD] -= job.saved_bytes[cell]
        elif option == _SELF:
            st.mode[cell] = _AGAIN
            need -= job.saved_bytes[cell]
        else:
            _weight_first(job, st, cell)
    return True, need


@lean
def _weight_first(job: DeviceProgram, st: FitState, cell: int) -> None:
    """Run a waiting weight gradient here instead of later."""
    position = job.weight_at[cell]
    _run(job, st, position)
    st.done_early[position] = True


@lean
def _cheapest(
    job: DeviceProgram, rule: Rule, st: FitState, at: int, wanted: Wanted
) -> tuple[int, int, float]:
    """Return the option that frees bytes at the least estimated cost (ms), ties by the rule."""
    victim, leaving_ms = _cheapest_to_leave(job, rule, st, at, wanted)
    option, best = (_LEAVE if victim >= 0 else 0), leaving_ms
    own = job.cell[at]
    for index in range(st.num[NUM_KEPT] - 1, -1, -1):
        cell = st.kept[index]
        if cell == own or st.mode[cell] != _KEPT:
            continue
        if job.may_recompute[cell] and job.saved_bytes[cell] > 0 and job.recompute_ms[cell] < best:
            best, option, victim = job.recompute_ms[cell], _REPEAT, cell
    is_new = job.kind[at] == FORWARD and st.mode[own] == 0
    saves = job.may_recompute[own] and job.saved_bytes[own] > 0
    if is_new and saves and job.recompute_ms[own] < best:
        best, option, victim = job.recompute_ms[own], _SELF, own
    for index in range(st.num[NUM_PENDING]):
        position = job.weight_at[st.pending[index]]
        fits = st.num[HELD] + job.workspace[position] <= wanted.limit
        cost = rule.weight_cost * job.duration[position]
        if position != at and fits and job.delta[position] < 0 and cost <= best:
            return _WEIGHT, st.pending[index], cost
    return option, victim, best


@lean
def _cheapest_to_leave(
    job: DeviceProgram, rule: Rule, st: FitState, at: int, wanted: Wanted
) -> tuple[int, float]:
    """Return the cell whose offload is estimated to cost least, and that cost (ms); -1 for none."""
    victim, best, best_made = -1, np.inf, np.inf
    for index in range(st.num[NUM_KEPT] - 1, -1, -1):
        cell = st.kept[index]
        on_host = st.num[ON_HOST] + job.offload_bytes[cell]
        if cell == job.cell[at] or st.mode[cell] != _KEPT or not job.may_offload[cell]:
            continue
        if on_host > wanted.host_limit:
            continue
        cost = 0.0
        if rule.victim != FARTHEST:
            cost = _leaving_costs(job, rule, st, at, cell, wanted.for_cell)
        oldest = rule.victim == OLDEST and cost == best and st.made[cell] < best_made
        if cost < best or oldest:
            victim, best, best_made = cell, cost, st.made[cell]
        if best == 0.0 and rule.victim != OLDEST:
            break
    return victim, best


@lean
def _leaving_costs(  # noqa: PLR0917 - compiled code takes its arguments by position
    job: DeviceProgram, rule: Rule, st: FitState, at: int, cell: int, for_cell: int
) -> float:
    """Estimate the delay of the action here, of the reload wanted, and of the cell's own return."""
    length = rule.lane_share * job.offload_ms[cell]
    clock = st.now[CLOCK]
    lag = rule.lag * job.offload_ms[cell]
    ready = max(clock, free_from(st, st.made[cell], length) + length + lag)
    delay = max(0.0, ready - max(clock, job.arrival[at]))
    if for_cell >= 0:
        home = max(ready, st.now[IN_FREE]) + _return_ms(job, rule, for_cell)
        late = max(0.0, home - expected(st, at, job.backward_at[for_cell]))
        delay = late if for_cell == job.cell[at] else max(delay, late)
    home = max(ready, job.arrival[at]) + _return_ms(job, rule, cell)
    late = max(0.0, home - expected(st, at, job.backward_at[cell]))
    cost: float = delay + late
    return cost if cost > EXACT else 0.0


@lean
def _return_ms(job: DeviceProgram, rule: Rule, cell: int) -> float:
    """Return how long a copy back takes from the moment its lane is the device's to use."""
    total: float = (rule.lane_share + rule.lag) * job.reload_ms[cell]
    return total


@lean
def _release(job: DeviceProgram, rule: Rule, st: FitState, cell: int) -> None:
    """Send a cell away as early as its lane allows, and wait here until it is gone."""
    length = rule.lane_share * job.offload_ms[cell]
    start = free_from(st, st.made[cell], length)
    book(st, start, start + length)
    st.out_start[cell] = start
    st.out_at[cell] = (
        np.searchsorted(st.boundary[: st.num[NUM_DONE] + 1], start + EXACT, "right") - 1
    )
    wait = start + length + rule.lag * job.offload_ms[cell] - st.now[CLOCK]
    if wait > EXACT:
        st.now[CLOCK] += wait
        st.now[STALLED] += wait
    st.mode[cell] = _AWAY
    st.num[HELD] -= job.offload_bytes[cell]
    st.num[ON_HOST] += job.offload_bytes[cell]
    remove(st.kept, st.num, NUM_KEPT, cell)
    emit(st, RELEASE * job.backward_at.size + cell)
    insert(job, st.away, st.num, NUM_AWAY, cell)


@lean
def _reload(job: DeviceProgram, rule: Rule, st: FitState, cell: int) -> None:
    """Bring a cell back, from now on."""
    length = rule.lane_share * job.reload_ms[cell]
    start = max(st.now[CLOCK], st.now[IN_FREE])
    if job.half_duplex:
        start = free_from(st, start, length)
        book(st, start, start + length)
    st.now[IN_FREE] = start + length
    st.back[cell] = start + _return_ms(job, rule, cell)
    st.mode[cell] = _BACK
    take(st, job.offload_bytes[cell])
    remove(st.away, st.num, NUM_AWAY, cell)
    insert(job, st.kept, st.num, NUM_KEPT, cell)
    emit(st, RELOAD * job.backward_at.size + cell)


@lean
def _prefetch(job: DeviceProgram, rule: Rule, st: FitState, at: int, wanted: Wanted) -> None:
    """Issue the copies back that the next boundary would be too late for.

    Where they do not fit beside the action, others leave for them, if that costs no more than to
    wait for the next boundary.
    """
    while st.num[NUM_AWAY] > 0:
        following = max(st.now[CLOCK], job.arrival[at]) + job.duration[at]
        if st.now[IN_FREE] >= following or not _is_urgent(job, rule, st, at, following):
            return
        cell = st.away[0]
        need = job.offload_bytes[cell] + wanted.num_bytes
        due = expected(st, at, job.backward_at[cell])
        tolerated = max(0.0, following + _return_ms(job, rule, cell) - due)
        more = Wanted(need, cell, wanted.limit, wanted.host_limit)
        while st.num[HELD] + need > wanted.limit:
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
def _is_urgent(job: DeviceProgram, rule: Rule, st: FitState, at: int, following: float) -> bool:
    """Whether some cell would come too late if the first copy back started at the next boundary."""
    lane = 0.0
    for index in range(min(st.num[NUM_AWAY], _LOOKED_AT)):
        cell = st.away[index]
        length = rule.lane_share * job.reload_ms[cell]
        lane += length
        due = expected(st, at, job.backward_at[cell])
        if due - rule.slack * length - rule.lag * job.reload_ms[cell] - lane < following - EXACT:
            return True
    return False


@lean
def _weave(job: DeviceProgram, st: FitState, leaving: Ints, codes: Ints) -> int:
    """Weave the offloads in, in the order of their starts; return how many actions that makes."""
    cells = job.backward_at.size
    count, done, following = 0, 0, 0
    for index in range(st.num[COUNT]):
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
