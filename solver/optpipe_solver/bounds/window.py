"""Idle time that memory forces on a device before some moment u and after some moment T - v.

Let D(u, v) be an upper bound of the work a device can do before u and after T - v together, and P
all its work. If D(u, v) < P, some work is done in between, so u <= T - v, and all that is missing:

    T >= u + v + P - D(u, v).

Before u: at most those I and W pieces whose heads are before u, and F pieces. Of these, no more of
each stage than heads allow, and all together no more bytes than the room of the device, plus what I
and W that can have ended gave back, plus what its D2H lane can have carried away. After T - v, the
mirror image: F pieces with tails below v; and when that time begins, some micro-batches have had F
but not I, some I but not W; what they hold must fit, so of the I and W of micro-batches whose F is
done before, a W takes context and an I, whose W must follow, keep - context more. Those whose F is
done after T - v are paid for by it, keep each, and what the H2D lane can bring back by itself.

No piece is done twice, so for each stage and kind the two together are at most m: the limits of the
one are lowered by what is granted to the other. The most work for so many bytes is at most that of
the fractional knapsack, by work per byte, the last in part; for F pieces of a single stage, whole.

One stage's limits are in its heads and tails already; here the stages of a device share its memory,
and so do I and W. Any moments will do: the best ones of `_MOST` equal shares of all heads, and of
all tails, are tried in pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numba
import numpy as np

from optpipe_solver.bounds.heads import Events

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from optpipe_solver.bounds.relaxation import Floats, Ints, Relaxed

    Counts = NDArray[np.int64]
    Flags = NDArray[np.bool_]
    Grid = NDArray[np.float64]

__all__ = ["window_ms"]

_MOST = 96


class _Slots(NamedTuple):
    """Pieces by work per byte: ms, bytes, index of the stage on its device, 0 F, 1 I, 2 W."""

    work: Floats
    size: Floats
    stage: Ints
    kind: Ints


class _Device(NamedTuple):
    """One device: pieces per stage in ms and bytes, as in `Relaxed`, its room, and its lanes.

    ``rate`` is the D2H and H2D bandwidth in bytes per ms, ``carried`` the most bytes that can be
    away, ``moves`` tells which stages can be offloaded.
    """

    num_microbatches: int
    forward: Floats
    gradient: Floats
    weight: Floats
    keep: Floats
    context: Floats
    moves: Flags
    carried: float
    rate: Floats
    room_before: float
    room_after: float
    first: _Slots
    last: _Slots


class _Side(NamedTuple):
    """Moments in ms; per moment and stage how many F, I, W are possible; bytes for the knapsack."""

    time: Floats
    forwards: Counts
    gradients: Counts
    weights: Counts
    free: Floats


def window_ms(
    model: Relaxed, held: Sequence[int], heads: Events, tails: Events, rate: Floats
) -> float:
    """Return the bound of one device with the stages ``held``; ``rate`` as in `_Device`."""
    chosen = np.array(held, dtype=np.int64)
    device = _device(model, chosen, rate)
    return float(_best_pair(device, _part(heads, chosen), _part(tails, chosen)))


def _part(events: Events, held: Ints) -> Events:
    return Events(events.forward[:, held], events.gradient[:, held], events.weight[:, held])


def _device(model: Relaxed, held: Ints, rate: Floats) -> _Device:
    backward_rooms = np.maximum(model.room_gradient[held], model.room_weight[held])
    return _Device(
        num_microbatches=model.num_microbatches,
        forward=model.forward[held],
        gradient=model.gradient[held],
        weight=model.weight[held],
        keep=model.keep[held],
        context=model.context[held],
        moves=model.moved[held] > 0,
        carried=float(np.sum(model.moved[held] * model.most_away[held])),
        rate=rate,
        room_before=float(np.max(model.room_forward[held])),
        room_after=float(np.max(backward_rooms)),
        first=_forward_slots(model, held),
        last=_backward_slots(model, held),
    )


def _forward_slots(model: Relaxed, held: Ints) -> _Slots:
    index = np.arange(len(held))
    return _by_density(model.forward[held], model.keep[held], index, np.zeros_like(index))


def _backward_slots(model: Relaxed, held: Ints) -> _Slots:
    """Return the slots of I and W; where I is worth more per byte, of pairs and of W alone.

    An I needs its W afterwards. Where W is worth more per byte, it comes first in the knapsack
    anyway; otherwise the best use of bytes is pairs, then W without I.
    """
    gradient, weight = model.gradient[held], model.weight[held]
    keep, context = model.keep[held], model.context[held]
    paired = gradient * context > weight * (keep - context)
    index = np.arange(len(held))
    return _by_density(
        np.concatenate([gradient + np.where(paired, weight, 0.0), weight]),
        np.concatenate([np.where(paired, keep, keep - context), context]),
        np.concatenate([index, index]),
        np.concatenate([np.ones_like(index), np.where(paired, 3, 2)]),
    )


def _by_density(work: Floats, size: Floats, stage: Ints, kind: Ints) -> _Slots:
    """Sort slots by work per byte, those without bytes first."""
    density = np.divide(work, size, out=np.full(len(work), np.inf), where=size > 0)
    order = np.argsort(-density, kind="stable")
    return _Slots(work[order], size[order], stage[order], kind[order])


@numba.njit(cache=True, nogil=True)
def _best_pair(device: _Device, heads: Events, tails: Events) -> float:
    per_microbatch = np.sum(device.forward + device.gradient + device.weight)
    total = device.num_microbatches * per_microbatch
    before = _before(device, heads)
    after = _after(device, tails)
    # Less than a billionth of the total is taken for rounding, not for work.
    least = total * (1 - 1e-9)
    best = total
    chosen = _thinned(device, after, False)
    for u in _thinned(device, before, True):
        for v in chosen:
            length = before.time[u] + after.time[v] + total
            # Even if nothing could be done, it would be no better than the best.
            if length > best:
                done = _done(device, before, u, after, v)
                if done < least:
                    best = max(best, length - done)
    return best


@numba.njit(cache=True, nogil=True)
def _thinned(device: _Device, side: _Side, is_before: bool) -> Ints:
    """Return the moment with the most idle time of each of `_MOST` equal shares."""
    num = len(side.time)
    nothing = _nothing(len(device.forward))
    chosen = np.empty(min(num, _MOST), np.int64)
    for share in range(len(chosen)):
        best = -np.inf
        for at in range(share * num // len(chosen), (share + 1) * num // len(chosen)):
            if is_before:
                idle = side.time[at] - _done(device, side, at, nothing, 0)
            else:
                idle = side.time[at] - _done(device, nothing, 0, side, at)
            if idle > best:
                best, chosen[share] = idle, at
    return chosen


@numba.njit(cache=True, nogil=True)
def _nothing(num: int) -> _Side:
    """Return a side with one moment at which nothing has been possible yet."""
    return _Side(
        np.zeros(1),
        np.zeros((1, num), np.int64),
        np.zeros((1, num), np.int64),
        np.zeros((1, num), np.int64),
        np.zeros(1),
    )


@numba.njit(cache=True, nogil=True)
def _done(device: _Device, before: _Side, u: int, after: _Side, v: int) -> float:
    """Return D for the u-th and v-th moments."""
    m, num = device.num_microbatches, len(device.forward)
    work, room = 0.0, before.free[u]
    for n in range(num):
        work += before.gradients[u, n] * device.gradient[n]
        work += before.weights[u, n] * device.weight[n]
        work += after.forwards[v, n] * device.forward[n]
    for slot in range(num):
        n = device.first.stage[slot]
        most = float(min(before.forwards[u, n], m - after.forwards[v, n]))
        fits = _fitting(most, room, device.first.size[slot])
        if num == 1:
            fits = np.floor(fits)
        work += fits * device.first.work[slot]
        room -= fits * device.first.size[slot]
    room = after.free[v]
    for slot in range(2 * num):
        n, kind = device.last.stage[slot], device.last.kind[slot]
        weights = min(after.weights[v, n], m - before.weights[u, n])
        gradients = min(after.gradients[v, n], m - before.gradients[u, n], weights)
        most = float(gradients if kind == 1 else weights - (gradients if kind == 3 else 0))
        fits = _fitting(most, room, device.last.size[slot])
        work += fits * device.last.work[slot]
        room -= fits * device.last.size[slot]
    return work


@numba.njit(cache=True, nogil=True)
def _fitting(most: float, room: float, size: float) -> float:
    return min(most, max(0.0, room) / size) if size > 0 else most


@numba.njit(cache=True, nogil=True)
def _moments(events: Events) -> Floats:
    """Return all times at which a piece of the device becomes possible, in order."""
    return np.unique(
        np.concatenate((events.forward.ravel(), events.gradient.ravel(), events.weight.ravel()))
    )


@numba.njit(cache=True, nogil=True)
def _counts(times: Grid, delay: Floats, moments: Floats) -> Counts:
    """Return, per moment and stage, how many of the times plus delay are before it."""
    counts = np.zeros((len(moments), times.shape[1]), np.int64)
    for n in range(times.shape[1]):
        count = 0
        for at in range(len(moments)):
            while count < len(times) and times[count, n] + delay[n] < moments[at]:
                count += 1
            counts[at, n] = count
    return counts


@numba.njit(cache=True, nogil=True)
def _carried(device: _Device, begins: Floats, rate: float, moments: Floats) -> Floats:
    """Return the bytes the lane can have carried: it starts when some stage's transfer can."""
    earliest = np.inf
    for n in range(len(begins)):
        if device.moves[n]:
            earliest = min(earliest, begins[n])
    return np.minimum(device.carried, rate * np.maximum(0.0, moments - earliest))


@numba.njit(cache=True, nogil=True)
def _before(device: _Device, heads: Events) -> _Side:
    moments, now = _moments(heads), np.zeros(len(device.forward))
    free = np.full(len(moments), device.room_before)
    if device.rate[0] > 0 and np.any(device.moves):
        free += _carried(device, heads.forward[0] + device.forward, device.rate[0], moments)
    freed = _counts(heads.gradient, device.gradient, moments) * (device.keep - device.context)
    freed += _counts(heads.weight, device.weight, moments) * device.context
    return _Side(
        moments,
        _counts(heads.forward, now, moments),
        _counts(heads.gradient, now, moments),
        _counts(heads.weight, now, moments),
        free + np.sum(freed, axis=1),
    )


@numba.njit(cache=True, nogil=True)
def _after(device: _Device, tails: Events) -> _Side:
    moments, now = _moments(tails), np.zeros(len(device.forward))
    free = np.full(len(moments), device.room_after)
    if device.rate[1] > 0 and np.any(device.moves):
        free += _carried(device, tails.gradient[0] + device.gradient, device.rate[1], moments)
    forwards = _counts(tails.forward, now, moments)
    return _Side(
        moments,
        forwards,
        _counts(tails.gradient, now, moments),
        _counts(tails.weight, now, moments),
        free + np.sum(forwards * device.keep, axis=1),
    )
