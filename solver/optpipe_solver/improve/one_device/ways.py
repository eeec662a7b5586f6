"""Compiled: what the other devices, their orders fixed, mean to the passes of one device.

Without the device's own program the other programs and the transfers make a graph without circles.
Every path of the whole schedule's graph is cut by the device's passes into pieces that lie in it:
before the first pass a *head*, from a pass to another a *lag* (Balas, Lenstra and Vazacopoulos 1995
call it a delayed precedence), behind the last a *tail*. So with all of them known, the others need
not be looked at again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.improve.compiled.kernel import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    input_of,
)
from optpipe_solver.lean import lean

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe_solver.improve.compiled.kernel import Times

__all__ = ["Others", "Scene", "Ways", "find_ways", "others_for", "ways_for"]


class Scene(NamedTuple):
    """Programs that transfer nothing and do not wait in a circle, and the device looked at.

    ``stages`` are the device's own, at least one; ``begins`` is by device what its last end is
    counted from (ms).
    """

    actions: NDArray[np.int64]
    counts: NDArray[np.int64]
    times: Times
    begins: NDArray[np.float64]
    device: int
    stages: NDArray[np.int64]


class Ways(NamedTuple):
    """Longest paths (ms) around the passes of a device, -inf where there is none.

    Passes are numbered ``(2 * stage + kind) * m + microbatch``: stages of the device from 0, kind 0
    = F, 1 = I or B. ``head`` leads to a pass's start, ``lag[a, b]`` from the end of a to the start
    of b, ``tail`` from a pass's end to the objective, ``floor[0]`` past the device. ``needs[b, p]``
    is how many passes of part p (those with ``a // m == p``) have a way to b: they must come before
    it, or the programs wait in a circle.
    """

    head: NDArray[np.float64]
    lag: NDArray[np.float64]
    tail: NDArray[np.float64]
    floor: NDArray[np.float64]
    needs: NDArray[np.int64]


class Others(NamedTuple):
    """Scratch: the other devices' actions in an order in which each follows what it waits for.

    ``sequence[:size[0]]`` are they; ``place`` and ``clock`` are by device, ``end`` and ``known`` by
    F, then by backward of each cell; ``synced`` is when a device's reduction ends (ms).
    """

    sequence: NDArray[np.int64]
    size: NDArray[np.int64]
    place: NDArray[np.int64]
    clock: NDArray[np.float64]
    synced: NDArray[np.float64]
    end: NDArray[np.float64]
    known: NDArray[np.bool_]


def ways_for(num_stages: int, num_microbatches: int) -> Ways:
    """Return room for the ways of a device with so many stages."""
    num_passes = 2 * num_stages * num_microbatches
    return Ways(
        head=np.zeros(num_passes),
        lag=np.zeros((num_passes, num_passes)),
        tail=np.zeros(num_passes),
        floor=np.zeros(1),
        needs=np.zeros((num_passes, 2 * num_stages), dtype=np.int64),
    )


def others_for(times: Times, num_devices: int) -> Others:
    """Return scratch for a problem."""
    return Others(
        sequence=np.zeros(3 * times.num_cells, dtype=np.int64),
        size=np.zeros(1, dtype=np.int64),
        place=np.zeros(num_devices, dtype=np.int64),
        clock=np.zeros(num_devices),
        synced=np.zeros(num_devices),
        end=np.zeros(2 * times.num_cells),
        known=np.zeros(2 * times.num_cells, dtype=np.bool_),
    )


@lean
def find_ways(scene: Scene, others: Others, ways: Ways) -> None:
    """Fill in the ways of a device."""
    times, stages = scene.times, scene.stages
    m = times.num_microbatches
    _line_up(scene, others)
    others.end[:] = -np.inf
    others.clock[:] = 0.0
    ways.floor[0] = _run(scene, others)
    _arrivals(scene, others, ways.head)
    for j in range(m):
        if stages[0] == 0:
            ways.head[j] = 0.0
    ways.needs[:, :] = 0
    for a in range(ways.head.size):
        part = a // m
        source = (part % 2) * times.num_cells + stages[part // 2] * m + a % m
        others.end[:] = -np.inf
        others.clock[:] = -np.inf
        others.end[source] = 0.0
        ways.tail[a] = _run(scene, others)
        _arrivals(scene, others, ways.lag[a])
        for b in range(ways.head.size):
            if ways.lag[a, b] > -np.inf:
                ways.needs[b, part] = a % m + 1


@lean
def _line_up(scene: Scene, others: Others) -> None:
    """List all other devices' actions, each behind those it waits for."""
    times, cells = scene.times, scene.times.num_cells
    size = 0
    others.place[:] = 0
    others.known[:] = False
    moved = True
    while moved:
        moved = False
        for d in range(scene.counts.size):
            while d != scene.device and others.place[d] < scene.counts[d]:
                code = scene.actions[d, others.place[d]]
                kind = code // cells
                source, _ = _source(kind, code - kind * cells, times)
                if source >= 0 and not others.known[source]:
                    there = times.device_of[source % cells // times.num_microbatches]
                    if there != scene.device:
                        break
                others.known[_slot(kind, code - kind * cells, cells)] = True
                others.sequence[size] = code
                others.place[d] += 1
                size += 1
                moved = True
    others.size[0] = size


@lean
def _source(kind: int, cell: int, times: Times) -> tuple[int, float]:
    """Return the end an action waits for, -1 for none, and the transit from there."""
    if kind in (FORWARD, BACKWARD_INPUT, FULL_BACKWARD):
        return input_of(kind, cell, cell // times.num_microbatches, times)
    return -1, 0.0


@lean
def _slot(kind: int, cell: int, cells: int) -> int:
    """Return where an F's or a backward's end stands; of a W, where its backward's would."""
    return cell if kind == FORWARD else cells + cell


@lean
def _run(scene: Scene, others: Others) -> float:
    """Let the others' longest paths grow from what is set; return the longest to the objective."""
    times = scene.times
    cells, m = times.num_cells, times.num_microbatches
    others.synced[:] = -np.inf
    for i in range(others.size[0]):
        code = others.sequence[i]
        kind = code // cells
        cell = code - kind * cells
        stage = cell // m
        d = times.device_of[stage]
        start = others.clock[d]
        source, transit = _source(kind, cell, times)
        if source >= 0:
            start = max(start, others.end[source] + transit)
        done = start + times.duration[code]
        others.clock[d] = done
        if kind in (FORWARD, BACKWARD_INPUT, FULL_BACKWARD):
            others.end[_slot(kind, cell, cells)] = done
        if kind in (BACKWARD_WEIGHT, FULL_BACKWARD) and times.grad_sync[stage] > 0.0:
            others.synced[d] = done + times.grad_sync[stage]
    longest = -np.inf
    for d in range(others.clock.size):
        if d != scene.device:
            longest = max(longest, max(others.clock[d], others.synced[d]) - scene.begins[d])
    return longest


@lean
def _arrivals(scene: Scene, others: Others, found: NDArray[np.float64]) -> None:
    """Write down when what each pass of the device waits for is there."""
    times, stages = scene.times, scene.stages
    m = times.num_microbatches
    for part in range(2 * stages.size):
        stage = stages[part // 2]
        kind = FORWARD if part % 2 == 0 else BACKWARD_INPUT
        for j in range(m):
            source, transit = input_of(kind, stage * m + j, stage, times)
            found[part * m + j] = others.end[source] + transit if source >= 0 else -np.inf
