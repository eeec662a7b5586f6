"""Compiled time and memory of programs: `optpipe.simulate` and `optpipe.memory` on integers.

Those two define the results; a property test compares both to the last bit. Nothing here allocates,
so that it can do without reference counts (`lean`) and take about 20 ns per action.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.jit import lean

if TYPE_CHECKING:
    from optpipe_solver.arrays import Flags, Floats, Ints

__all__ = [
    "BACKWARD_INPUT",
    "BACKWARD_WEIGHT",
    "FORWARD",
    "FULL_BACKWARD",
    "OFFLOAD",
    "PAIRED_BACKWARD",
    "PAIRED_INPUT",
    "RECOMPUTE",
    "RELEASE",
    "RELOAD",
    "MemoryArrays",
    "SimulationScratch",
    "TimeArrays",
    "backward_rise",
    "depart",
    "end_with_syncs",
    "host_peak",
    "input_of",
    "lane_of",
    "length",
    "output_of",
    "pair_ms",
    "workspace_for",
]


FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FULL_BACKWARD = 0, 1, 2, 3
OFFLOAD, RELEASE, RELOAD, RECOMPUTE = 4, 5, 6, 7
PAIRED_INPUT, PAIRED_BACKWARD = 8, 9
"""The I or B that runs together with the F before it."""
_UNKNOWN = -1.0
_QUEUED = -2.0


class TimeArrays(NamedTuple):
    """The inputs of times. ``duration`` is in ms by action number, others are by stage or device.

    ``row`` has, by cell, its row of tables: cost * num_stages + stage. If micro-batches are equal,
    a row is a stage. If not, tables by stage are by row here, except ``device_of`` and
    ``grad_sync``. ``mode_ms`` is in ms by kind, stage and mode. ``varies`` flags stages where a
    cell's mode says how long its actions take. There ``duration`` is that of keep, unless the
    caller replaced it. ``owned[d]`` lists the stages of device d in model order, -1 after them.
    ``lane_there[s]`` is the link of the output of F(s), -1 if messages do not queue. The output
    occupies it for ``fill_there[s]`` ms. ``lane_back[s]`` and ``fill_back[s]`` are those of the
    backward of s + 1. ``noise`` has for each pass (as ``end`` of the scratch) what multiplies its
    message's time; it is empty where nothing does. Only `length` uses it. ``hidden`` has the ms
    that a pair hides, by (0 for I, 1 for B), stage of F and stage of the backward. It is NaN where
    they may not pair, and empty if no passes may. ``forward`` is the time of F that it goes with,
    by stage.
    """

    num_stages: int
    num_microbatches: int
    num_cells: int
    row: Ints
    duration: Floats
    mode_ms: Floats
    varies: Flags
    there: Floats
    back: Floats
    device_of: Ints
    owned: Ints
    grad_sync: Floats
    shared: Flags
    half_duplex: Flags
    group: Ints
    num_links: int
    lane_there: Ints
    lane_back: Ints
    fill_there: Floats
    fill_back: Floats
    noise: Floats
    hidden: Floats
    forward: Floats


class MemoryArrays(NamedTuple):
    """The data that memory depends on: bytes by device, by host, and of an action.

    ``adds`` is the lasting change by an action, ``rises`` the maximum it holds above the bytes
    before, both by kind, stage and mode. By stage and mode: ``may`` flags modes that may be used,
    ``again`` those with a RECOMPUTE. A stage is a row (see `TimeArrays`). By stage: ``num_modes``
    is how many numbers of modes there are, ``uniform`` flags stages that use one for all
    micro-batches.
    """

    adds: Ints
    rises: Ints
    may: Flags
    again: Flags
    num_modes: Ints
    uniform: Flags
    limit: Ints
    host_of: Ints
    host_limit: Ints


class SimulationScratch(NamedTuple):
    """Scratch of `length`, reused between calls.

    ``end`` is of passes, then transfers; of a pass whose output queues on a link, when it departs.
    """

    end: Floats
    waiter: Ints
    clock: Floats
    first: Floats
    last: Floats
    head: Ints
    stack: Ints
    lane_free: Floats
    group_free: Floats
    queue: Ints
    queue_issue: Floats
    queue_place: Ints
    queue_head: Ints
    queue_tail: Ints
    stage_end: Floats
    link_free: Floats


def workspace_for(times: TimeArrays, num_devices: int) -> SimulationScratch:
    """Return scratch for problems of this size."""
    most_held = int(np.bincount(times.device_of).max(initial=0))
    queued = most_held * times.num_microbatches if bool(times.shared.any()) else 1
    return SimulationScratch(
        end=np.empty(4 * times.num_cells),
        waiter=np.empty(2 * times.num_cells, dtype=np.int64),
        clock=np.empty(num_devices),
        first=np.empty(num_devices),
        last=np.empty(num_devices),
        head=np.empty(num_devices, dtype=np.int64),
        stack=np.empty(4 * num_devices + 4, dtype=np.int64),
        lane_free=np.empty(2 * num_devices),
        group_free=np.empty(2 * (num_devices + 1)),
        queue=np.empty((2 * num_devices, queued), dtype=np.int64),
        queue_issue=np.empty((2 * num_devices, queued)),
        queue_place=np.empty((2 * num_devices, queued), dtype=np.int64),
        queue_head=np.empty(2 * num_devices, dtype=np.int64),
        queue_tail=np.empty(2 * num_devices, dtype=np.int64),
        stage_end=np.empty(times.num_stages),
        link_free=np.empty(times.num_links),
    )


@lean
def length(
    actions: Ints,
    lengths: Ints,
    times: TimeArrays,
    work: SimulationScratch,
) -> tuple[float, float, float]:
    """Return makespan, span and the mean of the devices' last ends, in ms; inf where stuck."""
    num_devices = lengths.size
    work.end[:] = _UNKNOWN
    work.waiter[:] = -1
    work.clock[:] = 0.0
    work.head[:] = 0
    work.lane_free[:] = 0.0
    work.group_free[:] = 0.0
    work.queue_head[:] = 0
    work.queue_tail[:] = 0
    work.stage_end[:] = _UNKNOWN
    work.link_free[:] = 0.0
    size = 0
    for device in range(num_devices):
        work.stack[size] = device
        size += 1
    while size > 0:
        while size > 0:
            size -= 1
            device = work.stack[size]
            woken = _advance(device, actions[device], lengths[device], times, work, size)
            size = woken
        lane = _next_transfer(times, work, num_devices)
        if lane >= 0:
            _start(lane, times, work)
            work.stack[0] = lane // 2
            size = 1
    for device in range(num_devices):
        if work.head[device] < lengths[device]:
            return np.inf, np.inf, np.inf
    return _measure(lengths, times, work, num_devices)


@lean
def _advance(
    device: int, row: Ints, count: int, times: TimeArrays, work: SimulationScratch, size: int
) -> int:
    """Run a device until it waits for an unknown time; push the devices it wakes on the stack."""
    cells = times.num_cells
    while work.head[device] < count:
        at = work.head[device]
        code = row[at]
        kind = code // cells
        cell = code - kind * cells
        if kind in (OFFLOAD, RELOAD):
            _issue(device, kind, cell, at, times, work)
        else:
            start = _start_of(device, kind, cell, times, work)
            if start < 0.0:
                return size
            # Only an F can be followed by the backward of its pair.
            pair = -1
            if kind == FORWARD and at + 1 < count and row[at + 1] >= PAIRED_INPUT * cells:
                pair = row[at + 1]
                other = BACKWARD_INPUT if pair < PAIRED_BACKWARD * cells else FULL_BACKWARD
                ready = _start_of(device, other, pair % cells, times, work)
                if ready < 0.0:
                    return size
                start = max(start, ready)
                done = start + pair_ms(code, pair, times)
            else:
                done = start + times.duration[code]
            work.clock[device] = done
            if at == 0:
                work.first[device] = start
            waiter = _note_end(kind, cell, done, times, work)
            if waiter >= 0:
                work.stack[size] = waiter
                size += 1
            if pair >= 0:
                waiter = _note_end(other, pair % cells, done, times, work)
                if waiter >= 0:
                    work.stack[size] = waiter
                    size += 1
                work.head[device] = at + 1
                at += 1
        work.head[device] = at + 1
    return size


@lean
def pair_ms(forward: int, backward: int, times: TimeArrays) -> float:
    """Return how long a pair runs, in ms, by its two codes; as `optpipe.simulate` says."""
    cells = times.num_cells
    kind = 1 if backward >= PAIRED_BACKWARD * cells else 0
    cell = backward % cells
    alone = FULL_BACKWARD if kind == 1 else BACKWARD_INPUT
    length, other = times.duration[forward], times.duration[alone * cells + cell]
    s = times.row[forward]
    hidden = times.hidden[kind, s, times.row[cell]]
    if hidden > 0.0:
        hidden *= length / times.forward[s]
    return length + other - min(hidden, other)


@lean
def _issue(
    device: int, kind: int, cell: int, at: int, times: TimeArrays, work: SimulationScratch
) -> None:
    """Start a transfer whose lane is the device's own, or let it wait for its turn."""
    lane = 2 * device + (1 if kind == RELOAD else 0)
    if times.shared[device]:
        tail = work.queue_tail[lane]
        work.queue[lane, tail] = cell
        work.queue_issue[lane, tail] = work.clock[device]
        work.queue_place[lane, tail] = at
        work.queue_tail[lane] = tail + 1
        work.end[(2 + lane % 2) * times.num_cells + cell] = _QUEUED
        return
    begin = max(work.clock[device], work.lane_free[lane])
    done = begin + times.duration[kind * times.num_cells + cell]
    work.lane_free[lane] = done
    work.end[(2 + lane % 2) * times.num_cells + cell] = done


@lean
def _start_of(
    device: int, kind: int, cell: int, times: TimeArrays, work: SimulationScratch
) -> float:
    """Return when an action of the compute lane starts; negative while that is unknown."""
    cells = times.num_cells
    start = work.clock[device]
    if kind == RELEASE:
        away = work.end[2 * cells + cell]
        return away if away < 0.0 else max(start, away)
    if kind == BACKWARD_WEIGHT:
        return start
    if kind != RECOMPUTE:
        source, transit = input_of(kind, cell, cell // times.num_microbatches, times)
        if source >= 0:
            departs = work.end[source]
            if departs < 0.0:
                work.waiter[source] = device
                return _UNKNOWN
            if times.noise.size > 0:
                transit *= times.noise[source]
            start = max(start, departs + transit)
    if kind != FORWARD:
        returned = work.end[3 * cells + cell]
        if returned >= 0.0:
            return max(start, returned)
        if returned == _QUEUED:
            return _UNKNOWN
    return start


@lean
def input_of(kind: int, cell: int, stage: int, times: TimeArrays) -> tuple[int, float]:
    """Return the pass a forward or backward needs, as an index into ``end``, and its transit."""
    m = times.num_microbatches
    if kind == FORWARD:
        if stage == 0:
            return -1, 0.0
        return cell - m, times.there[times.row[cell - m]]
    if stage == times.num_stages - 1:
        return cell, 0.0
    return times.num_cells + cell + m, times.back[times.row[cell]]


@lean
def output_of(kind: int, cell: int, times: TimeArrays) -> tuple[int, float]:
    """Return the cell that needs the output of an F or backward, -1 for none, and the transit.

    The F of that cell needs the output of an F. The backward needs that of a backward, and on the
    last stage that of its own F.
    """
    m = times.num_microbatches
    if kind == FORWARD:
        if cell >= times.num_cells - m:
            return cell, 0.0
        return cell + m, times.there[times.row[cell]]
    if cell >= m:
        return cell - m, times.back[times.row[cell - m]]
    return -1, 0.0


@lean
def _note_end(kind: int, cell: int, done: float, times: TimeArrays, work: SimulationScratch) -> int:
    """Record the end of a pass; return the device that waited for it, -1 for none."""
    if kind in (BACKWARD_WEIGHT, FULL_BACKWARD):
        stage = cell // times.num_microbatches
        work.stage_end[stage] = max(work.stage_end[stage], done)
    if kind in (FORWARD, BACKWARD_INPUT, FULL_BACKWARD):
        pass_number = cell if kind == FORWARD else times.num_cells + cell
        factor = times.noise[pass_number] if times.noise.size > 0 else 1.0
        work.end[pass_number] = depart(kind, cell, done, factor, times, work.link_free)
        return work.waiter[pass_number]
    return -1


@lean
def depart(
    kind: int, cell: int, done: float, factor: float, times: TimeArrays, link_free: Floats
) -> float:
    """Return when the output of a pass that ends at ``done`` departs, and occupy its link.

    ``factor`` multiplies the time of the message; ``link_free`` is by link.
    """
    lane, fill = lane_of(kind, cell, times)
    if lane < 0:
        return done
    done = max(done, link_free[lane])
    link_free[lane] = done + fill * factor
    return done


@lean
def lane_of(kind: int, cell: int, times: TimeArrays) -> tuple[int, float]:
    """Return the link that the output of a pass occupies, -1 for none, and for how many ms."""
    if times.num_links == 0:
        return -1, 0.0
    if kind == FORWARD:
        row = times.row[cell]
        return times.lane_there[row], times.fill_there[row]
    if cell < times.num_microbatches:
        return -1, 0.0
    row = times.row[cell - times.num_microbatches]
    return times.lane_back[row], times.fill_back[row]


@lean
def _can_start(lane: int, times: TimeArrays, work: SimulationScratch) -> float:
    """Return when the first waiting transfer of a lane can start."""
    device = lane // 2
    start = max(work.queue_issue[lane, work.queue_head[lane]], work.lane_free[lane])
    if times.half_duplex[device]:
        start = max(start, work.lane_free[lane ^ 1])
    if times.group[device] >= 0:
        start = max(start, work.group_free[2 * times.group[device] + lane % 2])
    return start


@lean
def _next_transfer(times: TimeArrays, work: SimulationScratch, num_devices: int) -> int:
    """Return the lane that starts next, -1 for none; ties go by issue, device, program."""
    best = -1
    best_rank = (np.inf, np.inf, 0, 0)
    for lane in range(2 * num_devices):
        head = work.queue_head[lane]
        if head < work.queue_tail[lane]:
            issue, place = work.queue_issue[lane, head], work.queue_place[lane, head]
            rank = (_can_start(lane, times, work), issue, lane // 2, place)
            if rank < best_rank:
                best, best_rank = lane, rank
    return best


@lean
def _start(lane: int, times: TimeArrays, work: SimulationScratch) -> None:
    device = lane // 2
    cells = times.num_cells
    start = _can_start(lane, times, work)
    at = work.queue_head[lane]
    work.queue_head[lane] = at + 1
    cell = work.queue[lane, at]
    kind = RELOAD if lane % 2 == 1 else OFFLOAD
    done = start + times.duration[kind * cells + cell]
    work.lane_free[lane] = done
    if times.group[device] >= 0:
        work.group_free[2 * times.group[device] + lane % 2] = done
    work.end[(2 + lane % 2) * cells + cell] = done


@lean
def _measure(
    lengths: Ints, times: TimeArrays, work: SimulationScratch, num_devices: int
) -> tuple[float, float, float]:
    begun = np.inf
    ended = 0.0
    span = 0.0
    mean = 0.0
    for device in range(num_devices):
        work.last[device] = work.clock[device]
    for device in range(num_devices):
        if lengths[device] == 0:
            continue
        work.last[device] = end_with_syncs(device, work.last[device], work.stage_end, times)
        begun = min(begun, work.first[device])
        ended = max(ended, work.last[device])
        span = max(span, work.last[device] - work.first[device])
        mean += work.last[device] / num_devices
    return ended - begun, span, mean


@lean
def end_with_syncs(device: int, last: float, stage_end: Floats, times: TimeArrays) -> float:
    """Return a device's last end with its gradient reductions, which queue by when they are ready.

    ``stage_end`` is when each stage's last W or B ended, negative where there is none; those of the
    device are used up.
    """
    free = 0.0
    while True:
        best = -1
        for stage in range(times.num_stages):
            if (
                times.device_of[stage] == device
                and times.grad_sync[stage] > 0.0
                and stage_end[stage] >= 0.0
                and (best < 0 or stage_end[stage] < stage_end[best])
            ):
                best = stage
        if best < 0:
            return last
        free = max(free, stage_end[best]) + times.grad_sync[best]
        last = max(last, free)
        stage_end[best] = _UNKNOWN


@lean
def backward_rise(kind: int, row: int, mode: int, memory: MemoryArrays) -> int:
    """Return the most bytes above what is held while a backward, or what it needs again, runs."""
    rise = memory.rises[kind, row, mode]
    if memory.again[row, mode]:
        rise = max(memory.rises[RECOMPUTE, row, mode], memory.adds[RECOMPUTE, row, mode] + rise)
    return int(rise)


@lean
def host_peak(
    row: Ints, count: int, times: TimeArrays, memory: MemoryArrays, modes: Ints, away: Flags
) -> int:
    """Return the most host bytes of a program; ``away`` is scratch by cell, False throughout."""
    host_bytes = 0
    peak = 0
    for at in range(count):
        code = row[at]
        kind = code // times.num_cells
        cell = code - kind * times.num_cells
        if kind == OFFLOAD:
            away[cell] = True
            host_bytes += memory.adds[RELOAD, times.row[cell], modes[cell]]
            peak = max(peak, host_bytes)
        elif (
            kind in (BACKWARD_INPUT, FULL_BACKWARD, RECOMPUTE, PAIRED_INPUT, PAIRED_BACKWARD)
            and away[cell]
        ):
            away[cell] = False
            host_bytes -= memory.adds[RELOAD, times.row[cell], modes[cell]]
    return peak
