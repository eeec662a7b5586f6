"""The constraints of the model on counts, one function per family; numbers as in docs/milp.md."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.milp.counts.variables import Count, CountSum

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from optpipe_solver.arrays import Ints
    from optpipe_solver.milp.counts.variables import CountVariables, ModeCounts
    from optpipe_solver.milp.highs import Variable

__all__ = ["FAMILIES_OF_ROWS", "CountRow", "all_rows"]


class CountRow(NamedTuple):
    """``left`` is at most ``right``, a whole number."""

    left: CountSum
    right: int


def grows(v: CountVariables) -> Iterator[CountRow]:
    """What has started stays started (1)."""
    for count in _all_counts(v):
        steps = range(count.first, count.first + len(count.values))
        for step in steps:
            yield CountRow(CountSum().add(count, step).add(count, step + 1, -1), 0)


def adds_up(v: CountVariables) -> Iterator[CountRow]:
    """Every micro-batch has one mode, and in it one kind of backward (2)."""
    for none in v.absent:
        yield CountRow(CountSum().add(none, 0), 0)
    for s, modes in enumerate(v.stages):
        yield from _equal([(total, 1) for total in v.totals[s]], v.m)
        for mode, total in zip(modes, v.totals[s], strict=True):
            if mode.fused is not None:
                parts = [(mode.gradient.whole, 1), (mode.fused.whole, 1), (total, -1)]
                yield from _equal(parts, 0)
        if v.given.problem.stages[s].uniform_modes and len(modes) > 1:
            for k, total in enumerate(v.totals[s]):
                used = v.model.binary(f"u{s}_{k}")
                yield from _equal([(total, 1), (used, -v.m)], 0)


def _equal(parts: Sequence[tuple[Variable | int, int]], right: int) -> Iterator[CountRow]:
    for sign in (1, -1):
        left = CountSum()
        for part, factor in parts:
            left.add(part, 0, sign * factor)
        yield CountRow(left, sign * right)


def in_windows(v: CountVariables) -> Iterator[CountRow]:
    """The k-th start of a stage, whatever its mode, lies in its window (3)."""
    for s, modes in enumerate(v.stages):
        forward, gradient, weight = v.windows[s]
        forwards = [(mode.forward, 0) for mode in modes]
        backwards = [(count, 0) for mode in modes for count in mode.backwards]
        yield from _late(forwards, forward.latest)
        yield from _late(backwards, gradient.latest)
        least = v.given.steps(v.given.gradient_ms(s))
        pieces = [(mode.weight, 0) for mode in modes]
        pieces += [(mode.fused, least) for mode in modes if mode.fused is not None]
        yield from _late(pieces, weight.latest)
        if len(forwards) > 1:
            yield from _early(forwards, forward.earliest)
        if len(backwards) > 1:
            yield from _early(backwards, gradient.earliest)


def _late(counts: Sequence[tuple[Count, int]], latest: Ints) -> Iterator[CountRow]:
    for step in np.unique(latest):
        done = int(np.searchsorted(latest, step, side="right"))
        yield CountRow(_sum(counts, int(step), -1), -done)


def _early(counts: Sequence[tuple[Count, int]], earliest: Ints) -> Iterator[CountRow]:
    for step in np.unique(earliest):
        begun = int(np.searchsorted(earliest, step, side="left"))
        yield CountRow(_sum(counts, int(step) - 1), begun)


def _sum(counts: Iterable[tuple[Count, int]], step: int, factor: int = 1) -> CountSum:
    """Return the sum of counts, each so many steps earlier."""
    left = CountSum()
    for count, lag in counts:
        left.add(count, step - lag, factor)
    return left


def _after(later: Sequence[Count], earlier: Sequence[tuple[Count, int]]) -> Iterator[CountRow]:
    """No more of the later have started than of the earlier so many steps before."""
    first = min(count.first for count in later)
    last = max(count.first + len(count.values) for count in later)
    last = max(last, *(count.first + len(count.values) + lag for count, lag in earlier))
    for step in range(first, last + 1):
        left = _sum([(count, 0) for count in later], step)
        for count, lag in earlier:
            left.add(count, step - lag, -1)
        yield CountRow(left, 0)


def cells_go_on(v: CountVariables) -> Iterator[CountRow]:
    """A cell's actions follow each other: F, copies, RECOMPUTE, I or B, W (4)."""
    for modes in v.stages:
        for mode in modes:
            steps: list[tuple[Count, ...]] = [(mode.forward,)]
            lags = [mode.forward.length]
            if mode.out is not None and mode.issue is not None and mode.home is not None:
                steps += [(mode.out,), (mode.issue,), (mode.home,)]
                lags += [mode.out.length, 0, mode.home.length]
            if mode.again is not None:
                steps.append((mode.again,))
                lags.append(mode.again.length)
            steps.append(mode.backwards)
            for (earlier, later), lag in zip(pairwise(steps), lags, strict=True):
                yield from _after(later, [(count, lag) for count in earlier])
            yield from _after(mode.backwards, [(mode.forward, mode.mode.trip)])
            yield from _after([mode.weight], [(mode.gradient, mode.gradient.length)])


def data_arrives(v: CountVariables) -> Iterator[CountRow]:
    """A pass waits for that of its neighbour and its message, which may wait for its link (5)."""
    for s, (this, following) in enumerate(pairwise(v.stages)):
        there, back = v.given.problem.boundary_ms[s]
        steps = v.given.steps
        down = [(m.forward, steps(m.forward.ms + there)) for m in this]
        up = [(c, steps(c.ms + back)) for m in following for c in m.backwards]
        forwards = [mode.forward for mode in following]
        backwards = [count for mode in this for count in mode.backwards]
        for message, made, taken, ms in (
            (v.sent[s], down, forwards, there),
            (v.returned[s], up, backwards, back),
        ):
            yield from _after(taken, made)
            if message is not None:
                yield from _after([message], [(count, count.length) for count, _ in made])
                yield from _after(taken, [(message, v.given.steps(ms))])


def one_at_a_time(v: CountVariables) -> Iterator[CountRow]:
    """A device's compute lane runs one action, and RELOADs are issued between two of them (6)."""
    for device, held in enumerate(v.given.problem.stages_of):
        modes = [mode for s in held for mode in v.stages[s]]
        lane = [count for mode in modes for count in mode.computes]
        yield from _taking_turns(lane)
        if v.given.binds[device]:
            yield from _issued_between(v, device, modes, lane)


def _taking_turns(lane: Sequence[Count]) -> Iterator[CountRow]:
    lane = [count for count in lane if count.length > 0]
    if not lane:
        return
    last = max(count.first + len(count.values) + count.length for count in lane)
    for step in range(min(count.first for count in lane), last + 1):
        yield CountRow(_running(lane, step), 1)


def _running(lane: Iterable[Count], step: int) -> CountSum:
    left = CountSum()
    for count in lane:
        left.add(count, step).add(count, step - count.length, -1)
    return left


def _issued_between(
    v: CountVariables, device: int, modes: Sequence[ModeCounts], lane: Sequence[Count]
) -> Iterator[CountRow]:
    room = v.given.room(device)
    lane = [count for count in lane if count.length > 1]
    for mode in modes:
        issue = mode.issue
        if issue is None:
            continue
        size = mode.mode.by_issue
        most = min(v.m, room // size) if size > 0 else v.m
        for step in range(issue.first, issue.first + len(issue.values) + 1):
            left = CountSum().add(issue, step).add(issue, step - 1, -1)
            for count in lane:
                left.add(count, step - 1, most).add(count, step - count.length, -most)
            yield CountRow(left, most)


def transfers_take_turns(v: CountVariables) -> Iterator[CountRow]:
    """A direction of a device, a half-duplex device and a group's direction carry one copy (7)."""
    lanes: defaultdict[tuple[object, ...], list[Count]] = defaultdict(list)
    for device, held in enumerate(v.given.problem.stages_of):
        own = v.given.problem.devices[device]
        for mode in (mode for s in held for mode in v.stages[s]):
            for way, count in (("out", mode.out), ("home", mode.home)):
                if count is not None:
                    lanes[
                        ("device", device) if own.half_duplex else ("device", device, way)
                    ].append(count)
                    if own.pcie_group is not None:
                        lanes["group", own.pcie_group, way].append(count)
    for s, lane in enumerate(v.given.problem.boundary_lanes):
        for link, message in zip(lane, (v.sent[s], v.returned[s]), strict=True):
            if message is not None:
                lanes["link", link.link].append(message)
    for counts in lanes.values():
        yield from _taking_turns(counts)


def fits_device_memory(v: CountVariables) -> Iterator[CountRow]:
    """What has started has taken its bytes, only what can have ended has given back (8)."""
    for device, held in enumerate(v.given.problem.stages_of):
        if not v.given.binds[device]:
            continue
        parts = [part for s in held for mode in v.stages[s] for part in _bytes(mode)]
        first = min((count.first for count, _, _ in parts), default=0)
        for step in range(first, v.given.ends[device] + 1):
            left = CountSum()
            for count, lag, factor in parts:
                left.add(count, step - lag, factor)
            yield CountRow(left, v.given.room(device))


def _bytes(counts: ModeCounts) -> Iterator[tuple[Count, int, int]]:
    """Yield count, lag and units of memory: at the start, at the end, and while it runs."""
    mode = counts.mode
    for count, at_start, at_end, meanwhile in (
        (counts.forward, mode.by_forward, 0, mode.while_forward),
        (counts.out, 0, mode.by_out, 0),
        (counts.issue, mode.by_issue, 0, 0),
        (counts.again, mode.by_again, 0, mode.while_again),
        (counts.gradient, 0, mode.by_gradient, mode.while_gradient),
        (counts.fused, 0, mode.by_fused, mode.while_fused),
        (counts.weight, 0, mode.by_weight, mode.while_weight),
    ):
        if count is not None:
            yield count, 0, at_start + meanwhile
            yield count, count.length, at_end - meanwhile


def fits_host_memory(v: CountVariables) -> Iterator[CountRow]:
    """A host holds the peaks of its devices together (9)."""
    problem = v.given.problem
    for number, host in enumerate(problem.hosts):
        if host.memory_bytes is None:
            continue
        devices = [d for d, held in enumerate(problem.devices) if held.host == host.name]
        parts = {
            d: [m for s in problem.stages_of[d] for m in v.stages[s] if m.mode.moves]
            for d in devices
        }
        sizes = [mode.mode.moved_bytes for modes in parts.values() for mode in modes]
        if v.m * sum(sizes) <= host.memory_bytes:
            continue
        unit = max(int(np.gcd.reduce(sizes)), host.memory_bytes // 2**20, 1)
        peaks = CountSum()
        for device, modes in parts.items():
            if not modes:
                continue
            peak = v.model.whole(f"p{number}_{device}", 0, host.memory_bytes // unit)
            peaks.add(peak, 0)
            for step in range(v.given.ends[device] + 1):
                left = CountSum().add(peak, 0, -1)
                for mode in modes:
                    size = mode.mode.moved_bytes // unit
                    if mode.out is not None:
                        left.add(mode.out, step, size)
                    for count in mode.consumers:
                        left.add(count, step, -size)
                yield CountRow(left, 0)
        yield CountRow(peaks, host.memory_bytes // unit)


def ends_in_time(v: CountVariables) -> Iterator[CountRow]:
    """All ends by the horizon, gradient reductions too, each device by its own clock (10)."""
    problem = v.given.problem
    for s, modes in enumerate(v.stages):
        device = problem.stages[s].device
        end = v.given.ends[device]
        sync = v.given.steps(problem.stages[s].grad_sync_ms)
        for mode in modes:
            for count in mode.computes:
                left = CountSum().add(count.whole, 0).add(count, end - count.length, -1)
                yield CountRow(left, 0)
        ended = [
            (count, count.length) for mode in modes for count in (mode.weight, mode.fused) if count
        ]
        yield CountRow(_sum(ended, end - sync, -1), -v.m)
        if s in v.reduced:
            yield from _reduced(v, s, ended)
        if device in v.begun:
            yield from _own_clock(v, s, ended, sync)
    for held in problem.stages_of:
        yield from _taking_turns([v.reduced[s] for s in held if s in v.reduced])


def _reduced(v: CountVariables, s: int, ended: Sequence[tuple[Count, int]]) -> Iterator[CountRow]:
    """A reduction starts when every W and B has ended, and ends by the horizon."""
    sync = v.reduced[s]
    for step in range(sync.first, sync.first + len(sync.values) + 1):
        left = CountSum().add(sync, step, v.m)
        for count, lag in ended:
            left.add(count, step - lag, -1)
        yield CountRow(left, 0)


def _own_clock(
    v: CountVariables, s: int, ended: Sequence[tuple[Count, int]], sync: int
) -> Iterator[CountRow]:
    """Under span nothing runs before the device has begun, and all ends so much later."""
    device = v.given.problem.stages[s].device
    begun = v.begun[device]
    for step in range(begun.first + len(begun.values) + 1):
        left = CountSum().add(begun, step, -v.m)
        for mode in v.stages[s]:
            left.add(mode.forward, step)
        yield CountRow(left, 0)
        left = CountSum().add(begun, step, v.m)
        for count, lag in ended:
            left.add(count, step + v.given.length + v.given.slack - sync - lag, -1)
        yield CountRow(left, 0)


def _all_counts(v: CountVariables) -> Iterator[Count]:
    for mode in chain.from_iterable(v.stages):
        yield from mode.computes
        yield from (count for count in (mode.out, mode.issue, mode.home) if count is not None)
    yield from (message for message in (*v.sent, *v.returned) if message is not None)
    yield from v.begun.values()
    yield from v.reduced.values()


FAMILIES_OF_ROWS = (
    adds_up,
    grows,
    in_windows,
    cells_go_on,
    data_arrives,
    one_at_a_time,
    transfers_take_turns,
    fits_device_memory,
    fits_host_memory,
    ends_in_time,
)


def all_rows(v: CountVariables) -> Iterator[CountRow]:
    """Yield the rows of every family, in order; some hold whatever the variables are."""
    for family in FAMILIES_OF_ROWS:
        yield from family(v)
