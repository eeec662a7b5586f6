"""One device alone, its work released by heads and followed by tails.

Jackson's preemptive schedule: of the released jobs always run the one with the longest tail. Among
all preemptive schedules of one machine it has the least max(end + tail), which equals the greatest,
over sets of jobs, of least head + total work + least tail (Carlier, "The one-machine sequencing
problem", European Journal of Operational Research 11, 1982). A real device does its jobs one after
the other, each after its head (`heads`) and before its tail (`tails`), so it is no faster.

The jobs are the F, I and W pieces of the device's stages. The k-th F of a stage is also the
(m + 1 - k)-th from the end: it has the head of the one and the tail of the other.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numba
import numpy as np

if TYPE_CHECKING:
    from optpipe_solver.bounds.heads import Events
    from optpipe_solver.bounds.relaxation import Floats, Ints, Relaxed

__all__ = ["jackson", "single_device_ms"]


@numba.njit(cache=True, nogil=True)
def single_device_ms(model: Relaxed, held: Ints, heads: Events, tails: Events) -> float:
    """Return the least time in which a device with the stages ``held`` can be through."""
    m, num = model.num_microbatches, 3 * model.num_microbatches
    head, work, tail = (
        np.empty(len(held) * num),
        np.empty(len(held) * num),
        np.empty(len(held) * num),
    )
    at = 0
    for s in held:
        for k in range(m):
            head[at], work[at] = heads.forward[k, s], model.forward[s]
            tail[at] = tails.forward[m - 1 - k, s]
            head[at + 1], work[at + 1] = heads.gradient[k, s], model.gradient[s]
            tail[at + 1] = tails.gradient[m - 1 - k, s]
            head[at + 2], work[at + 2] = heads.weight[k, s], model.weight[s]
            tail[at + 2] = tails.weight[m - 1 - k, s]
            at += 3
    return jackson(head, work, tail)


@numba.njit(cache=True, nogil=True)
def jackson(head: Floats, work: Floats, tail: Floats) -> float:
    """Return max(end + tail) of Jackson's preemptive schedule; all in ms."""
    order = np.argsort(head, kind="mergesort")
    left = work.copy()
    ready = [(0.0, 0)]
    ready.clear()
    now, latest, at = head[order[0]], -np.inf, 0
    while at < len(order) or len(ready) > 0:
        if len(ready) == 0:
            now = max(now, head[order[at]])
        while at < len(order) and head[order[at]] <= now:
            heapq.heappush(ready, (-tail[order[at]], order[at]))
            at += 1
        job = ready[0][1]
        stop = head[order[at]] if at < len(order) else np.inf
        if now + left[job] <= stop:
            now += left[job]
            heapq.heappop(ready)
            latest = max(latest, now + tail[job])
        else:
            left[job] -= stop - now
            now = stop
    return latest
