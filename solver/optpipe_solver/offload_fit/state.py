"""What a sweep of `kernel` knows and keeps: one device's job, the rule, and the state.

Everything here is compiled; the lists of cells are short and ordered by where the backwards stand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.jit import jitted, lean

if TYPE_CHECKING:
    from optpipe_solver.arrays import Flags, Floats, Ints

__all__ = [
    "CLOCK",
    "COUNT",
    "EXACT",
    "HELD",
    "IN_FREE",
    "NUM_AWAY",
    "NUM_BUSY",
    "NUM_DONE",
    "NUM_KEPT",
    "NUM_PENDING",
    "ON_HOST",
    "PEAK",
    "STALLED",
    "DeviceProgram",
    "FitState",
    "Rule",
    "SweepResult",
    "Wanted",
    "begin",
    "book",
    "emit",
    "expected",
    "free_from",
    "insert",
    "remove",
    "take",
]


EXACT = 1e-9
"""Times closer than this, in ms, are the same."""


class DeviceProgram(NamedTuple):
    """One device's compute program and what depends on it, by position or by the device's cells.

    A cell is a (stage, micro-batch) of this device; ``weight_at`` is -1 where it has no W.
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

    ``slack``: how many of its durations before the last moment a copy back is issued.
    ``weight_cost``: what a W moved forward costs, as a fraction of its duration.
    Where lanes are shared, ``lane_share``: a transfer is taken to occupy its lane for this many
    times its duration; ``lag``: and then to wait for others for this many more.
    """

    victim: int
    slack: float
    weight_cost: float
    lane_share: float = 1.0
    lag: float = 0.0


class Wanted(NamedTuple):
    """Bytes that must be free: for the action itself, or (``for_cell`` >= 0) also for a reload."""

    num_bytes: int
    for_cell: int
    limit: int
    host_limit: int


class SweepResult(NamedTuple):
    """What a sweep made: ``codes[:num_codes]`` are ``kind * num_cells + cell`` of the device.

    ``ok`` is False where nothing could make room. ``stalled_ms`` sums up the waits for transfers.
    """

    ok: bool
    codes: Ints
    num_codes: int
    stalled_ms: float
    peak: int


class FitState(NamedTuple):
    """Everything that changes; scalars live in ``now`` (floats) and ``num`` (integers)."""

    mode: Ints
    made: Floats
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


CLOCK, IN_FREE, STALLED = 0, 1, 2
"""Places in `State.now`, in ms."""

HELD, PEAK, ON_HOST, NUM_KEPT, NUM_AWAY, NUM_PENDING, NUM_BUSY, NUM_DONE, COUNT = range(9)
"""Places in `State.num`: bytes, and how many each list holds."""


@jitted
def begin(job: DeviceProgram) -> FitState:
    """Return the state before the first action."""
    n, cells = job.kind.size, job.backward_at.size
    ahead, work = np.empty(n), np.empty(n)
    _look_ahead(job, ahead, work)
    return FitState(
        mode=np.zeros(cells, dtype=np.int64),
        made=np.zeros(cells),
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


@lean
def _look_ahead(job: DeviceProgram, ahead: Floats, work: Floats) -> None:
    """Write down when each position starts if nothing waits for a transfer, and what is before."""
    clock = spent = 0.0
    for at in range(job.kind.size):
        ahead[at] = max(clock, job.arrival[at])
        work[at] = spent
        clock = ahead[at] + job.duration[at]
        spent += job.duration[at]


@lean
def expected(st: FitState, at: int, later: int) -> float:
    """Return when a later position is expected to start."""
    start: float = max(st.ahead[later], st.now[CLOCK] + st.work[later] - st.work[at])
    return start


@lean
def emit(st: FitState, code: int) -> None:
    """Write down an action, as ``kind * num_cells + cell``."""
    st.codes[st.num[COUNT]] = code
    st.num[COUNT] += 1


@lean
def take(st: FitState, num_bytes: int) -> None:
    """Hold so many bytes more."""
    st.num[HELD] += num_bytes
    st.num[PEAK] = max(st.num[PEAK], st.num[HELD])


@lean
def free_from(st: FitState, earliest: float, length: float) -> float:
    """Return the first start from ``earliest`` on at which the lane is free for ``length``."""
    first = np.searchsorted(st.busy_to[: st.num[NUM_BUSY]], earliest, "right")
    start = earliest
    for index in range(first, st.num[NUM_BUSY]):
        if st.busy_from[index] - start >= length - EXACT:
            return start
        start = max(start, st.busy_to[index])
    return start


@lean
def book(st: FitState, start: float, end: float) -> None:
    """Occupy the lane; touching bookings become one."""
    place = st.num[NUM_BUSY]
    while place > 0 and st.busy_from[place - 1] > start:
        place -= 1
    if place > 0 and start - st.busy_to[place - 1] <= EXACT:
        st.busy_to[place - 1] = end
        place -= 1
    else:
        for index in range(st.num[NUM_BUSY], place, -1):
            st.busy_from[index] = st.busy_from[index - 1]
            st.busy_to[index] = st.busy_to[index - 1]
        st.busy_from[place], st.busy_to[place] = start, end
        st.num[NUM_BUSY] += 1
    if place + 1 < st.num[NUM_BUSY] and st.busy_from[place + 1] - end <= EXACT:
        st.busy_to[place] = st.busy_to[place + 1]
        for index in range(place + 1, st.num[NUM_BUSY] - 1):
            st.busy_from[index] = st.busy_from[index + 1]
            st.busy_to[index] = st.busy_to[index + 1]
        st.num[NUM_BUSY] -= 1


@lean
def insert(job: DeviceProgram, cells: Ints, num: Ints, which: int, cell: int) -> None:
    """Add a cell to a list that is ordered by where the backwards stand."""
    place = num[which]
    while place > 0 and job.backward_at[cells[place - 1]] > job.backward_at[cell]:
        cells[place] = cells[place - 1]
        place -= 1
    cells[place] = cell
    num[which] += 1


@lean
def remove(cells: Ints, num: Ints, which: int, cell: int) -> None:
    """Take a cell out of a short list, keeping its order."""
    last = num[which] - 1
    place = 0
    while cells[place] != cell:
        place += 1
    for index in range(place, last):
        cells[index] = cells[index + 1]
    num[which] = last
