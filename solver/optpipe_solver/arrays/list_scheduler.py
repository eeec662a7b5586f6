"""One event-driven list scheduler, compiled, with three rules for the next pass of a device.

Devices act in the order of time. A device that is free, or whose input has just arrived, starts the
pass that its rule chooses. Every stage takes micro-batches first in, first out. The rules share the
state and its operations. These tell which passes are ready, whether a pass fits, when it starts and
ends, and when its message arrives (messages of one link queue).

* `ListRule.GREEDY`: a ready backward first, then a forward, then a weight gradient.
* `ListRule.BLOCK`: the passes in a given order; a device that waits may run a later one.
* `ListRule.PAIRS`: as `BLOCK`, and a forward and a backward run as a pair where that hides time.
  Without pairs in the problem it is `BLOCK`.

Ignored: offload, recompute, gradient reductions. Stages use the first mode of their menu.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.arrays.encoding import CODES, KINDS, CompiledProblem, Rows, program_of
from optpipe_solver.arrays.simulate import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    PAIRED_BACKWARD,
    PAIRED_INPUT,
    MemoryArrays,
    TimeArrays,
    depart,
    output_of,
)
from optpipe_solver.budget import check_stop
from optpipe_solver.jit import lean

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe_solver.arrays import Floats, Ints

__all__ = ["Early", "ListRule", "ListSchedule", "ListScheduler", "Order", "Policy", "SplitBackward"]

# ruff: noqa: PLR0917 - compiled code takes its arguments by position


class ListRule(IntEnum):
    """How a device chooses its next pass."""

    GREEDY = 0
    BLOCK = 1
    PAIRS = 2


class Early(IntEnum):
    """Whether a waiting device may run a later F or I of its order, and before or after a W."""

    NEVER = 0
    AFTER_WEIGHT = 1
    BEFORE_WEIGHT = 2


class SplitBackward(IntEnum):
    """When a backward that runs alone is split into I and W."""

    NEVER = 0
    IN_DRAIN = 1
    ALWAYS = 2


class Policy(NamedTuple):
    """The choices of one run.

    Parameters
    ----------
    rule
        A `ListRule`. `BLOCK` and `PAIRS` need an order.
    patience
        A pass fills a wait of at least this fraction of its duration: 1 delays nothing known, 0
        fills any wait. Below 0, `BLOCK` runs every W immediately, which needs the minimum
        memory.
    split
        A `SplitBackward`. With `BLOCK` and `GREEDY`, `IN_DRAIN` means `ALWAYS`.
    early
        An `Early`; `GREEDY` has no order and ignores it.
    in_flight
        Most micro-batches between F and backward on a stage, as a multiple of the stages from it
        to the last (1 = 1F1B's); inf = memory alone decides. Only `GREEDY` reads it.
    wait
        How long a device waits for the other half of a pair, as a share of the time it would hide.
    reach
        Places of the order, from the first that has not run, among which pairs are made.
    """

    rule: int
    patience: float = 1.0
    split: int = int(SplitBackward.ALWAYS)
    early: int = int(Early.AFTER_WEIGHT)
    in_flight: float = inf
    wait: float = 1.0
    reach: int = 1_000_000


class Order(NamedTuple):
    """An order of F and backwards: ``sequence[d]`` lists those of device d as ``2 * stage + kind``.

    ``place[code, j]`` is the index in it of the code's j-th occurrence, i.e. of micro-batch j.
    """

    sequence: Ints
    length: Ints
    place: Ints


# --- The problem and the state.

_GREEDY, _BLOCK, _PAIRS = int(ListRule.GREEDY), int(ListRule.BLOCK), int(ListRule.PAIRS)
_AFTER_WEIGHT, _BEFORE_WEIGHT = int(Early.AFTER_WEIGHT), int(Early.BEFORE_WEIGHT)
_IN_DRAIN, _ALWAYS = int(SplitBackward.IN_DRAIN), int(SplitBackward.ALWAYS)

_BACKWARD = 1
"""The backward, I or B, where only the order of passes counts."""

_WAIT = -1
_NOWHERE = 2**40
_SCANNED = 64
"""Places of the order, from the first that has not run, that a pair may jump."""


class _ListRun(NamedTuple):
    """A problem, an order, a policy, and a partial schedule that grows.

    ``finish`` has by stage the most bytes that a backward and its W need above what the device
    holds before. ``most`` is how many micro-batches a stage may have between F and backward.

    The rest is the partial schedule, by [F or backward, stage], by stage or by device. ``done``
    counts passes. ``ready`` has by pass and micro-batch when its input arrives, in ms.
    ``split[s, :num_split[s]]`` are the micro-batches whose I ran; of their W the first
    ``num_weights[s]`` did. ``in_flight`` is ``held_bytes`` with every waiting W done. ``head`` is
    the place of the first pass of the order that has not run. ``wake_ms`` and ``wake_device`` are a
    binary heap of ``num_wakes[0]`` events: when to run which device.
    """

    times: TimeArrays
    memory: MemoryArrays
    finish: Ints
    most: Ints
    order: Order
    policy: Policy
    done: Ints
    ready: Floats
    split: Ints
    num_split: Ints
    num_weights: Ints
    held_bytes: Ints
    in_flight: Ints
    free: Floats
    link_free: Floats
    head: Ints
    actions: Ints
    counts: Ints
    first: Floats
    last: Floats
    wake_ms: Floats
    wake_device: Ints
    num_wakes: Ints


@lean
def _fits(run: _ListRun, device: int, kind: int, stage: int) -> bool:
    rises = run.memory.rises[kind, stage, 0]
    return bool(run.held_bytes[device] + rises <= run.memory.limit[device])


@lean
def _execute(run: _ListRun, kind: int, stage: int, now: float) -> None:
    """Run a pass of a stage's next micro-batch: F, I, W or B."""
    ms = run.times.mode_ms[kind, stage, 0]
    _append(run, kind, kind, stage, now, now + ms)


@lean
def _append(run: _ListRun, kind: int, code: int, stage: int, start: float, end: float) -> None:
    """Append a pass to its device's program, under the number ``code``, and count its bytes."""
    device, m = run.times.device_of[stage], run.ready.shape[2]
    if kind == BACKWARD_WEIGHT:
        j = run.split[stage, run.num_weights[stage]]
        run.num_weights[stage] += 1
    elif kind == FORWARD:
        j = run.done[FORWARD, stage]
        run.done[FORWARD, stage] += 1
        run.in_flight[device] += run.memory.adds[FORWARD, stage, 0]
    else:
        j = run.done[_BACKWARD, stage]
        run.done[_BACKWARD, stage] += 1
        run.in_flight[device] -= run.memory.adds[FORWARD, stage, 0]
        if kind == BACKWARD_INPUT:
            run.split[stage, run.num_split[stage]] = j
            run.num_split[stage] += 1
    run.actions[device, run.counts[device]] = (code * run.times.num_stages + stage) * m + j
    run.counts[device] += 1
    run.held_bytes[device] += run.memory.adds[kind, stage, 0]
    run.free[device] = end
    run.first[device] = min(run.first[device], start)
    run.last[device] = end


@lean
def _announce(run: _ListRun, kind: int, cell: int, end: float) -> None:
    """Note when the output of an F or backward arrives, and wake its device then."""
    times, m = run.times, run.ready.shape[2]
    needed, transit = output_of(kind, cell, times)
    if needed >= 0:
        stage = needed // m
        which = FORWARD if kind == FORWARD and needed != cell else _BACKWARD
        arrival = depart(kind, cell, end, 1.0, times, run.link_free) + transit
        run.ready[which, stage, needed - stage * m] = arrival
        _push(run, arrival, times.device_of[stage])


@lean
def _fill(run: _ListRun, device: int, now: float, gap: float, patience: float) -> bool:
    """Run the W of the oldest micro-batch that waits, fits and fills the gap, if there is one."""
    oldest, found = np.iinfo(np.int64).max, _WAIT
    for at in range(run.times.owned.shape[1]):
        stage = run.times.owned[device, at]
        if stage < 0 or run.num_weights[stage] == run.num_split[stage]:
            continue
        j = run.split[stage, run.num_weights[stage]]
        if (
            j < oldest
            and patience * run.times.mode_ms[BACKWARD_WEIGHT, stage, 0] <= gap
            and _fits(run, device, BACKWARD_WEIGHT, stage)
        ):
            oldest, found = j, stage
    if found >= 0:
        _execute(run, BACKWARD_WEIGHT, found, now)
    return found >= 0


@lean
def _admits(run: _ListRun, device: int, admitted: int) -> bool:
    """Whether an F fits, and the device can then finish all it holds, oldest micro-batch first.

    This is the banker's rule: no device gets stuck because forwards of one stage fill the memory
    that another stage needs. Every W that waits must fit after the F, and counts as done then.
    """
    memory, owned = run.memory, run.times.owned
    if not _fits(run, device, FORWARD, admitted):
        return False
    after = run.held_bytes[device] + memory.adds[FORWARD, admitted, 0]
    for at in range(owned.shape[1]):
        s = owned[device, at]
        waits = s >= 0 and run.num_weights[s] < run.num_split[s]
        if waits and after + memory.rises[BACKWARD_WEIGHT, s, 0] > memory.limit[device]:
            return False
    free = memory.limit[device] - run.in_flight[device] - memory.adds[FORWARD, admitted, 0]
    first, last, ample = run.ready.shape[2], 0, 0
    for at in range(owned.shape[1]):
        s = owned[device, at]
        if s >= 0:
            first = min(first, run.done[_BACKWARD, s])
            last = max(last, run.done[FORWARD, s] + (1 if s == admitted else 0))
            ample += memory.rises[FORWARD, s, 0] + max(0, run.finish[s])
    if free >= ample:
        return True
    for j in range(first, last):
        freed, needed = _to_finish(run, device, j, admitted)
        if needed > free:
            return False
        free += freed
    return True


@lean
def _to_finish(run: _ListRun, device: int, j: int, admitted: int) -> tuple[int, int]:
    """Return the bytes micro-batch j holds on a device, and the most it adds until it is done."""
    memory, owned = run.memory, run.times.owned
    freed, extra, needed = 0, 0, 0
    for at in range(owned.shape[1]):
        s = owned[device, at]
        if s < 0:
            break
        if j >= run.done[FORWARD, s] + (1 if s == admitted else 0):
            needed = max(needed, extra + memory.rises[FORWARD, s, 0])
            extra += memory.adds[FORWARD, s, 0]
        elif j >= run.done[_BACKWARD, s]:
            freed += memory.adds[FORWARD, s, 0]
    for at in range(owned.shape[1] - 1, -1, -1):
        s = owned[device, at]
        if s >= 0 and j >= run.done[_BACKWARD, s]:
            needed = max(needed, extra + run.finish[s])
            extra -= memory.adds[FORWARD, s, 0]
    return freed, needed


# --- The order of a block.


@lean
def _next_in_order(run: _ListRun, device: int) -> int:
    """Return the device's first pass of the order that has not run, 2 * stage + kind; -1: none."""
    while run.head[device] < run.order.length[device]:
        at = run.head[device]
        code = run.order.sequence[device, at]
        if run.order.place[code, run.done[code % 2, code // 2]] == at:
            return int(code)
        run.head[device] += 1
    return _WAIT


@lean
def _jumped_fit(run: _ListRun, device: int, stage: int, place: int) -> bool:
    """Whether all passes before ``place`` still fit after this F, each W right after its I."""
    memory = run.memory
    held_bytes = run.in_flight[device] + memory.adds[FORWARD, stage, 0]
    for at in range(run.head[device], place):
        code = run.order.sequence[device, at]
        before, which = code // 2, code % 2
        if run.order.place[code, run.done[which, before]] > at:
            continue
        rises = memory.rises[FORWARD, before, 0] if which == FORWARD else run.finish[before]
        if held_bytes + rises > memory.limit[device]:
            return False
        delta = memory.adds[FORWARD, before, 0]
        held_bytes += delta if which == FORWARD else -delta
    return True


_JUMPED_FIT, _ADMITTED, _ANYHOW = 0, 1, 2
"""Conditions for an early F: the passes that it jumps still fit; this and `_admits`; `_admits`."""


@lean
def _early_pass(
    run: _ListRun,
    device: int,
    now: float,
    gap: float,
    backward: int,
    leaves: int,
) -> int:
    """Return the first pass of the order that can run now and fills the gap, 2 * stage + kind."""
    best, found = np.iinfo(np.int64).max, _WAIT
    for at in range(run.times.owned.shape[1]):
        stage = run.times.owned[device, at]
        if stage < 0:
            break
        for kind in range(2):
            j = run.done[kind, stage]
            if j >= run.ready.shape[2] or run.ready[kind, stage, j] > now:
                continue
            place = run.order.place[2 * stage + kind, j]
            number = FORWARD if kind == FORWARD else backward
            # With pairs a backward has to fit unsplit, but only its I has to fill the gap.
            ms = run.times.mode_ms[kind if run.policy.rule == _PAIRS else number, stage, 0]
            if (
                place < best
                and run.policy.patience * ms <= gap
                and _may_jump(run, device, number, stage, place, leaves)
            ):
                best, found = place, 2 * stage + kind
    return found


@lean
def _may_jump(run: _ListRun, device: int, kind: int, stage: int, place: int, leaves: int) -> bool:
    if kind != FORWARD:
        return _fits(run, device, kind, stage)
    if leaves == _JUMPED_FIT:
        fits = _fits(run, device, FORWARD, stage)
        return fits and _jumped_fit(run, device, stage, place)
    if leaves == _ADMITTED and place - run.head[device] > _SCANNED:
        return False
    admitted = _admits(run, device, stage)
    if leaves == _ANYHOW or not admitted:
        return admitted
    return _jumped_fit(run, device, stage, place)


# --- The rules. Each runs at most one pass, pair or W of a device.


@lean
def _act_greedily(run: _ListRun, device: int, now: float) -> None:
    """Run a backward that is ready, else a forward that memory admits, else a W in the wait."""
    times, m = run.times, run.ready.shape[2]
    backward = BACKWARD_INPUT if run.policy.split > 0 else FULL_BACKWARD
    later = np.inf
    for at in range(times.owned.shape[1]):
        s = times.owned[device, at]
        if s < 0:
            break
        j = run.done[_BACKWARD, s]
        fits = run.held_bytes[device] + run.finish[s] <= run.memory.limit[device]
        if j < m and fits:
            if run.ready[_BACKWARD, s, j] <= now:
                _execute(run, backward, s, now)
                return
            later = min(later, run.ready[_BACKWARD, s, j])
    for at in range(times.owned.shape[1] - 1, -1, -1):
        s = times.owned[device, at]
        if s < 0:
            continue
        j = run.done[FORWARD, s]
        if (
            j < m
            and run.ready[FORWARD, s, j] < np.inf
            and j - run.done[_BACKWARD, s] < run.most[s]
            and _admits(run, device, s)
        ):
            if run.ready[FORWARD, s, j] <= now:
                _execute(run, FORWARD, s, now)
                return
            later = min(later, run.ready[FORWARD, s, j])
    _fill(run, device, now, later - now, run.policy.patience)


@lean
def _act_in_order(run: _ListRun, device: int, now: float) -> bool:
    """Run the next pass of the order, or what fills the wait for it; False where it never fits."""
    if run.policy.patience < 0.0 and _fill(run, device, now, np.inf, 0.0):
        return True
    following = _next_in_order(run, device)
    if following < 0:
        _fill(run, device, now, np.inf, 0.0)
        return True
    backward = BACKWARD_INPUT if run.policy.split > 0 else FULL_BACKWARD
    stage, kind = following // 2, following % 2
    gap = run.ready[kind, stage, run.done[kind, stage]] - now
    if gap <= 0.0:
        number = FORWARD if kind == FORWARD else backward
        if not _fits(run, device, number, stage):
            return _fill(run, device, now, np.inf, 0.0)
        _execute(run, number, stage, now)
        return True
    if run.policy.early == _AFTER_WEIGHT and _fill(run, device, now, gap, run.policy.patience):
        return True
    if run.policy.early > 0:
        early = _early_pass(run, device, now, gap, backward, _JUMPED_FIT)
        if early >= 0:
            number = FORWARD if early % 2 == FORWARD else backward
            _execute(run, number, early // 2, now)
            return True
    if run.policy.early != _AFTER_WEIGHT:
        _fill(run, device, now, gap, run.policy.patience)
    return True


@lean
def _act_in_pairs(run: _ListRun, device: int, now: float) -> float:
    """Run a pair, or a pass alone; return when to check again for a pair's other half, else 0."""
    start = _try_pair(run, device, now)
    if start < 0.0:
        return 0.0
    if start < np.inf:
        _fill(run, device, now, start - now, run.policy.patience)
        return start
    _act_alone(run, device, now, False)
    return 0.0


@lean
def _try_pair(run: _ListRun, device: int, now: float) -> float:
    """Run the pair that gains most, if it can start now (-1); else return its start, inf: none."""
    _next_in_order(run, device)
    furthest = run.head[device] + run.policy.reach
    best, begins, sum_of_places = 1e-9, np.inf, 0
    forward, backward, letter = -1, -1, -1
    for at in range(run.times.owned.shape[1]):
        a = run.times.owned[device, at]
        if a < 0:
            break
        place = _place(run, FORWARD, a)
        if place > furthest or not _may_jump(run, device, FORWARD, a, place, _ADMITTED):
            continue
        for other in range(run.times.owned.shape[1]):
            b = run.times.owned[device, other]
            if b < 0:
                break
            places = place + _place(run, _BACKWARD, b)
            if places - place > furthest:
                continue
            ready = run.ready[FORWARD, a, run.done[FORWARD, a]]
            start = max(now, ready, run.ready[_BACKWARD, b, run.done[_BACKWARD, b]])
            for kind in (BACKWARD_INPUT, FULL_BACKWARD):
                gain = _gain(run, device, a, b, kind, start - now, run.policy.wait)
                if gain > best + 1e-9 or (gain > best - 1e-9 and places < sum_of_places):
                    best, begins, sum_of_places = gain, start, places
                    forward, backward, letter = a, b, kind
    if forward < 0 or begins > now:
        return begins
    hidden = run.times.hidden[0 if letter == BACKWARD_INPUT else 1, forward, backward]
    mode_ms = run.times.mode_ms
    end = now + (mode_ms[FORWARD, forward, 0] + mode_ms[letter, backward, 0] - hidden)
    paired = PAIRED_INPUT if letter == BACKWARD_INPUT else PAIRED_BACKWARD
    _append(run, FORWARD, FORWARD, forward, now, end)
    _append(run, letter, paired, backward, now, end)
    return -1.0


@lean
def _place(run: _ListRun, kind: int, stage: int) -> int:
    """Return the place in the order of a stage's next pass; beyond all where it will not come."""
    j = run.done[kind, stage]
    if j >= run.ready.shape[2] or run.ready[kind, stage, j] == np.inf:
        return _NOWHERE
    return int(run.order.place[2 * stage + kind, j])


@lean
def _gain(
    run: _ListRun,
    device: int,
    a: int,
    b: int,
    kind: int,
    wait: float,
    share: float,
) -> float:
    """Return the ms a pair hides minus the wait for it; 0 where it may not run or does not fit."""
    times, memory = run.times, run.memory
    hidden = times.hidden[0 if kind == BACKWARD_INPUT else 1, a, b]
    if np.isnan(hidden) or wait > share * hidden:
        return 0.0
    if kind == BACKWARD_INPUT and times.hidden[1, a, b] >= hidden:
        return 0.0
    # The bytes and the workspace of F, and those that the backward has above them.
    most = memory.rises[FORWARD, a, 0] + memory.rises[kind, b, 0]
    if kind == BACKWARD_INPUT:
        after = memory.adds[FORWARD, a, 0] + memory.adds[kind, b, 0]
        most = max(most, after + memory.rises[BACKWARD_WEIGHT, b, 0])
    if run.held_bytes[device] + most > memory.limit[device]:
        return 0.0
    return float(hidden - wait)


@lean
def _act_alone(run: _ListRun, device: int, now: float, in_any_order: bool) -> None:
    """Run the next pass of the order, or an early one, or a W."""
    following, arrives = _next_in_order(run, device), np.inf
    if following >= 0:
        stage, kind = following // 2, following % 2
        if kind != FORWARD or _admits(run, device, stage):
            arrives = run.ready[kind, stage, run.done[kind, stage]]
    if arrives > now:
        following, gap = _WAIT, arrives - now
        leaves = _ANYHOW if in_any_order else _ADMITTED
        if run.policy.early > 0 or in_any_order:
            following = _early_pass(
                run, device, now, np.inf if in_any_order else gap,
                FULL_BACKWARD, leaves,
            )  # fmt: skip
        after_weight = following < 0 or (run.policy.early < _BEFORE_WEIGHT and not in_any_order)
        if after_weight and _fill(run, device, now, gap, run.policy.patience):
            return
    if following >= 0:
        _run_alone(run, device, following // 2, following % 2, now)


@lean
def _run_alone(run: _ListRun, device: int, stage: int, kind: int, now: float) -> None:
    """Run a pass, a backward split or not as the policy says; a W where it does not fit."""
    number, memory = kind, run.memory
    if kind != FORWARD:
        after = memory.adds[BACKWARD_INPUT, stage, 0] + memory.rises[BACKWARD_WEIGHT, stage, 0]
        most = max(memory.rises[BACKWARD_INPUT, stage, 0], after)
        splits = run.policy.split == _ALWAYS or (
            run.policy.split == _IN_DRAIN and _has_no_forward(run, device)
        )
        fits = most <= memory.limit[device] - run.held_bytes[device]
        number = BACKWARD_INPUT if splits and fits else FULL_BACKWARD
        if not _fits(run, device, number, stage):
            _fill(run, device, now, np.inf, run.policy.patience)
            return
    _execute(run, number, stage, now)


@lean
def _has_no_forward(run: _ListRun, device: int) -> bool:
    for at in range(run.times.owned.shape[1]):
        stage = run.times.owned[device, at]
        if stage >= 0 and run.done[FORWARD, stage] < run.ready.shape[2]:
            return False
    return True


@lean
def _run_any(run: _ListRun, now: float) -> tuple[int, int]:
    """Run a pass in any order on the first device that can; return the device, its old count.

    Only for pairs, where every device may wait for what comes later in its order.
    """
    if run.policy.rule != _PAIRS:
        return _WAIT, 0
    for device in range(run.free.size):
        count = run.counts[device]
        _act_alone(run, device, now, True)
        if run.counts[device] > count:
            return device, count
    return _WAIT, 0


@lean
def _schedule(run: _ListRun) -> tuple[float, float]:
    """Run every device until all passes are done; return makespan and span in ms, inf if stuck.

    Actions are ``(kind * num_stages + stage) * m + microbatch`` for m micro-batches.
    """
    left, clock, goes_on = 2 * run.num_split.size * run.ready.shape[2], 0.0, True
    for device in range(run.free.size):
        _push(run, 0.0, device)
    while goes_on and (left > 0 or run.num_wakes[0] > 0):
        device, count = _WAIT, 0
        if run.num_wakes[0] > 0:
            now, device = _pop(run)
            clock = max(clock, now)
            if run.free[device] > now:
                continue
            count = run.counts[device]
            again = _act(run, device, now)
            if again > now:
                _push(run, again, device)
            goes_on = again >= 0.0
        else:
            device, count = _run_any(run, clock)
            goes_on = device >= 0
        if goes_on and run.counts[device] > count:
            left -= _announce_all(run, device, count)
    if left > 0:
        return np.inf, np.inf
    return _measure(run)


@lean
def _push(run: _ListRun, ms: float, device: int) -> None:
    """Add an event to the heap."""
    at = run.num_wakes[0]
    run.num_wakes[0] = at + 1
    while at > 0:
        parent = (at - 1) // 2
        if not _is_earlier(run, ms, device, parent):
            break
        run.wake_ms[at], run.wake_device[at] = run.wake_ms[parent], run.wake_device[parent]
        at = parent
    run.wake_ms[at], run.wake_device[at] = ms, device


@lean
def _pop(run: _ListRun) -> tuple[float, int]:
    """Remove the earliest event of the heap, the first device's where several are equal."""
    first_ms, first_device = run.wake_ms[0], run.wake_device[0]
    size = run.num_wakes[0] - 1
    run.num_wakes[0] = size
    ms, device, at = run.wake_ms[size], run.wake_device[size], 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and _is_earlier(
            run, run.wake_ms[child + 1], run.wake_device[child + 1], child
        ):
            child += 1
        if _is_earlier(run, ms, device, child):
            break
        run.wake_ms[at], run.wake_device[at] = run.wake_ms[child], run.wake_device[child]
        at = child
    run.wake_ms[at], run.wake_device[at] = ms, device
    return first_ms, first_device


@lean
def _is_earlier(run: _ListRun, ms: float, device: int, at: int) -> bool:
    """Whether an event comes before the one at a place of the heap; ties go by device."""
    other = run.wake_ms[at]
    return ms < other or (ms == other and device < run.wake_device[at])


@lean
def _measure(run: _ListRun) -> tuple[float, float]:
    """Return makespan and span in ms; inf where a W never fitted."""
    begun, ended, span = np.inf, 0.0, 0.0
    for stage in range(run.num_split.size):
        if run.num_weights[stage] < run.num_split[stage]:
            return np.inf, np.inf
    for device in range(run.free.size):
        if run.counts[device] > 0:
            begun = min(begun, run.first[device])
            ended = max(ended, run.last[device])
            span = max(span, run.last[device] - run.first[device])
    return ended - begun, span


@lean
def _act(run: _ListRun, device: int, now: float) -> float:
    """Let a device act by its rule; return when to run again, 0: at the next event, -1: stuck."""
    if run.policy.rule == _GREEDY:
        _act_greedily(run, device, now)
        return 0.0
    if run.policy.rule == _BLOCK:
        return 0.0 if _act_in_order(run, device, now) else -1.0
    return _act_in_pairs(run, device, now)


@lean
def _announce_all(run: _ListRun, device: int, count: int) -> int:
    """Announce what a device ran after its first ``count`` actions; return the number of passes."""
    end, num_cells, passes = run.free[device], run.times.num_cells, 0
    _push(run, end, device)
    for at in range(count, run.counts[device]):
        kind, cell = run.actions[device, at] // num_cells, run.actions[device, at] % num_cells
        if kind != BACKWARD_WEIGHT:
            passes += 1
            _announce(run, kind, cell, end)
    return passes


# --- What Python calls.


@dataclass(frozen=True, slots=True, eq=False)
class ListSchedule:
    """Programs as integers, as `CompiledProblem` has them, and their lengths of time.

    The lengths leave out gradient reductions, and a W may count as later than it has to start where
    memory is tight. ``codes`` are for ``num_microbatches``.
    """

    makespan_ms: float
    span_ms: float
    num_microbatches: int
    num_stages: int
    codes: tuple[Ints, ...]

    def objective_ms(self, objective: str) -> float:
        """Return makespan_ms or span_ms."""
        return self.makespan_ms if objective == "makespan" else self.span_ms

    def rows(self) -> Rows:
        """Return the programs of all devices, with room for a round trip per cell."""
        cells = self.num_stages * self.num_microbatches
        widest = max(np.unique(row % cells).size for row in self.codes)
        actions = np.zeros((len(self.codes), len(KINDS) * widest), dtype=np.int64)
        for device, row in enumerate(self.codes):
            actions[device, : row.size] = row
        lengths = np.array([row.size for row in self.codes], dtype=np.int64)
        return Rows(actions, lengths, np.zeros(cells, dtype=np.int64))

    def programs(self) -> Programs:
        """Return the programs."""
        decoded = []
        for row in self.codes:
            cells, microbatches = np.divmod(row, self.num_microbatches)
            kinds, stages = np.divmod(cells, self.num_stages)
            types = map(CODES.__getitem__, kinds.tolist())
            paired = (kinds >= PAIRED_INPUT).tolist()
            keep = [0] * row.size
            decoded.append(program_of(stages.tolist(), types, microbatches.tolist(), keep, paired))
        return tuple(decoded)


class ListScheduler:
    """Runs policies on one problem of equal micro-batches.

    Parameters
    ----------
    problem
        The limits of its devices are kept, workspaces included.
    limits
        Per device, bytes of activations to keep instead (static and reserved bytes excluded).
    activations
        Keep at most so many activations of one stage on a device instead of bytes, each from its F
        to its W.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        limits: tuple[int, ...] | None = None,
        activations: int | None = None,
    ) -> None:
        compiled = CompiledProblem.of(problem)
        self._times = compiled.times
        self._memory = compiled.memory
        if activations is not None:
            # Each activation counts 1, from its F to its W.
            adds, rises = np.zeros_like(self._memory.adds), np.zeros_like(self._memory.rises)
            adds[FORWARD] = rises[FORWARD] = 1
            adds[[BACKWARD_WEIGHT, FULL_BACKWARD]] = -1
            limit = np.full_like(self._memory.limit, activations)
            self._memory = self._memory._replace(adds=adds, rises=rises, limit=limit)
        if limits is not None:
            self._memory = self._memory._replace(limit=np.array(limits, dtype=np.int64))

    def run(
        self, policy: Policy, order: Order | None = None, num_microbatches: int | None = None
    ) -> ListSchedule | None:
        """Return the schedule of a policy, or None where it gets stuck.

        ``num_microbatches``: fewer than the problem's, for a quick look.
        """
        check_stop()
        if policy.rule == ListRule.PAIRS and not self._times.hidden.size:
            policy = policy._replace(rule=ListRule.BLOCK)
        m = self._times.num_microbatches if num_microbatches is None else num_microbatches
        times, memory, num_stages = self._times, self._memory, self._times.num_stages
        row = times.row.reshape(num_stages, -1)[:, :m].reshape(-1)
        times = times._replace(num_microbatches=m, num_cells=num_stages * m, row=row)
        adds, rises = memory.adds[:, :num_stages, 0], memory.rises[:, :num_stages, 0]
        finish = rises[FULL_BACKWARD].copy()  # contiguous: a kernel for each layout takes 20 s
        if policy.split and policy.rule != ListRule.PAIRS:
            after = adds[BACKWARD_INPUT] + rises[BACKWARD_WEIGHT]
            finish = np.maximum(rises[BACKWARD_INPUT], after)
        most = np.full(num_stages, m)
        if policy.in_flight < inf:
            ahead = np.arange(num_stages, 0, -1)
            most = np.maximum(1, (policy.in_flight * ahead).astype(np.int64))
        num_devices, widest = times.owned.shape
        # At most two events for each of three actions per cell.
        most_wakes = num_devices + 6 * num_stages * m
        ready = np.full((2, num_stages, m), inf)
        ready[FORWARD, 0] = 0.0
        run = _ListRun(
            times=times,
            memory=memory,
            finish=finish,
            most=most,
            order=order or _NO_ORDER,
            policy=Policy(*(kind(one) for kind, one in zip(_POLICY_TYPES, policy, strict=True))),
            done=np.zeros((2, num_stages), dtype=np.int64),
            ready=ready,
            split=np.zeros((num_stages, m), dtype=np.int64),
            num_split=np.zeros(num_stages, dtype=np.int64),
            num_weights=np.zeros(num_stages, dtype=np.int64),
            held_bytes=np.zeros(num_devices, dtype=np.int64),
            in_flight=np.zeros(num_devices, dtype=np.int64),
            free=np.zeros(num_devices),
            link_free=np.zeros(max(1, times.num_links)),
            head=np.zeros(num_devices, dtype=np.int64),
            actions=np.zeros((num_devices, 3 * m * widest), dtype=np.int64),
            counts=np.zeros(num_devices, dtype=np.int64),
            first=np.full(num_devices, inf),
            last=np.zeros(num_devices),
            wake_ms=np.empty(most_wakes),
            wake_device=np.empty(most_wakes, dtype=np.int64),
            num_wakes=np.zeros(1, dtype=np.int64),
        )
        makespan, span = _schedule(run)
        if makespan == inf:
            return None
        codes = tuple(row[:count] for row, count in zip(run.actions, run.counts, strict=True))
        return ListSchedule(float(makespan), float(span), m, num_stages, codes)


_POLICY_TYPES = (int, float, int, int, float, float, int)
"""The types of a policy's fields that `_schedule` is compiled for."""

_NO_ORDER = Order(
    np.zeros((1, 1), dtype=np.int64), np.zeros(1, dtype=np.int64), np.zeros((1, 1), dtype=np.int64)
)
