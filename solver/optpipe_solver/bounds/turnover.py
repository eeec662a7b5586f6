"""What a device must do between two events when its memory is full: load and memory together.

A stage without offload has room for ``fits`` = floor(room / keep) micro-batches between F and I.

*Refill.* Take j <= k - fits. When I_j(s) starts, at most j - 1 micro-batches have had I or W, so
at most j - 1 + fits have had F. When F_k(s) starts, k of them hold keep less what I and W gave
back: at least (k keep - room) must be given back, of which at most (j - 1) keep before I_j
started. What is missing, (k - j + 1) keep - room > 0, takes at least as many ms as the device's I
and W need per byte at best: I alone, I / (keep - context), or pairs, (I + W) / keep; a W alone
cannot come before its I. Besides, k - 1 - (j - 1 + fits) forwards are run in between. Hence

    F_k >= I_j + lag + (k - fits - j) pace,
    lag = ((fits + 1) keep - room) x least ms per byte,  pace = F + keep x least ms per byte.

*Drain*, the mirror image with tails. Take j <= k - fits. Before the k-th last I of s ends, what
follows the j-th last F of s? After that F started, at most j - 1 + fits micro-batches are without
I and what is pending fits into the room: I and W worth at most ``most`` ms of it, besides those of
the j - 1 later micro-batches. After the k-th last I ended, there are k - 1 I, k W, and, of the
forwards, at least those from the (k - fits)-th last on, since otherwise k would be pending at
once. So between the two ends at least k - fits - j + 1 forwards and (k - j) I + (k - j + 1) W -
most are run:

    I_k >= F_j + lag + (k - fits - j) pace,
    lag = F + fits I + (fits + 1) W - most,  pace = F + I + W,

where F_j is the tail after the end of the j-th last F, and I_k after that of the k-th last I.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from optpipe_solver.bounds.relaxation import Floats, Ints, Relaxed

__all__ = ["Turnover", "drain", "refill"]


class Turnover(NamedTuple):
    """Per stage: how many micro-batches fit (m where this argument says nothing), lag and pace."""

    fits: Ints
    lag: Floats
    pace: Floats


def refill(model: Relaxed) -> Turnover:
    """Return the rule for heads."""
    rows = [_refill(model, s) for s in range(len(model.keep))]
    return _as_arrays(rows)


def drain(model: Relaxed) -> Turnover:
    """Return the rule for tails."""
    rows = [_drain(model, s) for s in range(len(model.keep))]
    return _as_arrays(rows)


def _as_arrays(rows: list[tuple[int, float, float]]) -> Turnover:
    return Turnover(
        np.array([fits for fits, _, _ in rows], dtype=np.int64),
        np.array([lag for _, lag, _ in rows]),
        np.array([pace for _, _, pace in rows]),
    )


def _fits(model: Relaxed, s: int, room: float) -> int:
    m = model.num_microbatches
    if model.moved[s] > 0 or model.keep[s] == 0 or room < model.keep[s]:
        return m
    return min(m, int(room // model.keep[s]))


def _refill(model: Relaxed, s: int) -> tuple[int, float, float]:
    keep, room = float(model.keep[s]), float(model.room_forward[s])
    fits = _fits(model, s, room)
    if fits == model.num_microbatches:
        return fits, 0.0, 0.0
    gradient, weight = float(model.gradient[s]), float(model.weight[s])
    per_byte = (gradient + weight) / keep
    freed = keep - float(model.context[s])
    if freed > 0:
        per_byte = min(per_byte, gradient / freed)
    lag = ((fits + 1) * keep - room) * per_byte
    return fits, lag, float(model.forward[s]) + keep * per_byte


def _drain(model: Relaxed, s: int) -> tuple[int, float, float]:
    keep = float(model.keep[s])
    room = float(min(model.room_forward[s], max(model.room_gradient[s], model.room_weight[s])))
    fits = _fits(model, s, room)
    if fits == model.num_microbatches:
        return fits, 0.0, 0.0
    forward, gradient = float(model.forward[s]), float(model.gradient[s])
    weight, context = float(model.weight[s]), float(model.context[s])
    per_byte = (gradient + weight) / keep
    if weight > 0:
        per_byte = max(per_byte, weight / context if context > 0 else np.inf)
    lag = forward + fits * gradient + (fits + 1) * weight - room * per_byte
    return fits, lag, forward + gradient + weight
