"""Idle time that memory forces on a device before some moment u and after some moment T - v.

Let D(u, v) be an upper bound of the work a device can do before u and after T - v together, and P
all its work. If D(u, v) < P, some work is done in between, so u <= T - v, and all that is missing:

    T >= u + v + P - D(u, v).

D is what heads and tails allow and the device's memory has room for (docs/bounds.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.bounds.heads_tails import Events
from optpipe_solver.jit import lean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe_solver.arrays import Flags, Floats, Ints
    from optpipe_solver.bounds.relaxation import Relaxed

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
    forwards: Ints
    gradients: Ints
    weights: Ints
    free: Floats


def window_ms(
    model: Relaxed, held: Sequence[int], heads: Events, tails: Events, rate: Floats
) -> float:
    """Return the bound of one device with the stages ``held``; ``rate`` as in `_Device`."""
    chosen = np.array(held, dtype=np.int64)
    device = _device(model, chosen, rate)
    before, after = _before(device, _part(heads, chosen)), _after(device, _part(tails, chosen))
    tried = _tried(before), _tried(after)
    return float(_best_pair(device, before, after, _nothing(len(held)), tried))


def _part(events: Events, held: Ints) -> Events:
    # One layout in memory, so that the compiled code needs one signature.
    forward, gradient, weight = (np.ascontiguousarray(times[:, held]) for times in events)
    return Events(forward, gradient, weight)


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


def _tried(side: _Side) -> Ints:
    """Return room for the moments that are tried."""
    return np.empty(min(len(side.time), _MOST), np.int64)


def _nothing(num: int) -> _Side:
    """Return a side with one moment at which nothing has been possible yet."""
    none = np.zeros((1, num), np.int64)
    return _Side(np.zeros(1), none, none, none, np.zeros(1))


@lean
def _best_pair(
    device: _Device, before: _Side, after: _Side, nothing: _Side, tried: tuple[Ints, Ints]
) -> float:
    per_microbatch = 0.0
    for n in range(len(device.forward)):
        per_microbatch += device.forward[n] + device.gradient[n] + device.weight[n]
    total = device.num_microbatches * per_microbatch
    # Less than a billionth of the total is taken for rounding, not for work.
    least = total * (1 - 1e-9)
    best = total
    early, late = tried
    for share in range(len(early)):
        early[share] = _most_idle(device, before, nothing, share, len(early), True)
    for share in range(len(late)):
        late[share] = _most_idle(device, after, nothing, share, len(late), False)
    for u in early:
        for v in late:
            length = before.time[u] + after.time[v] + total
            # Even if nothing could be done, it would be no better than the best.
            if length > best:
                done = _done(device, before, u, after, v)
                if done < least:
                    best = max(best, length - done)
    return best


@lean
def _most_idle(  # noqa: PLR0917 - compiled code takes its arguments by position
    device: _Device, side: _Side, nothing: _Side, share: int, shares: int, is_before: bool
) -> int:
    """Return the moment with the most idle time of one of equal shares."""
    num = len(side.time)
    chosen, most = 0, -np.inf
    for at in range(share * num // shares, (share + 1) * num // shares):
        before, u, after, v = (side, at, nothing, 0) if is_before else (nothing, 0, side, at)
        idle = side.time[at] - _done(device, before, u, after, v)
        if idle > most:
            most, chosen = idle, at
    return chosen


@lean
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


@lean
def _fitting(most: float, room: float, size: float) -> float:
    return min(most, max(0.0, room) / size) if size > 0 else most


def _moments(events: Events) -> Floats:
    """Return all times at which a piece of the device becomes possible, in order."""
    return np.unique(np.concatenate([times.ravel() for times in events]))


def _counts(times: Floats, delay: Floats, moments: Floats) -> Ints:
    """Return, per moment and stage, how many of the times plus delay are before it."""
    counts = np.zeros((len(moments), times.shape[1]), np.int64)
    _count(times, delay, moments, counts)
    return counts


@lean
def _count(times: Floats, delay: Floats, moments: Floats, counts: Ints) -> None:
    for n in range(times.shape[1]):
        count = 0
        for at in range(len(moments)):
            while count < len(times) and times[count, n] + delay[n] < moments[at]:
                count += 1
            counts[at, n] = count


def _carried(device: _Device, begins: Floats, rate: float, moments: Floats) -> Floats:
    """Return the bytes the lane can have carried: it starts when some stage's transfer can."""
    earliest = np.min(begins[device.moves])
    return np.minimum(device.carried, rate * np.maximum(0.0, moments - earliest))


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
        free + sum(freed.T),
    )


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
        free + sum((forwards * device.keep).T),
    )
