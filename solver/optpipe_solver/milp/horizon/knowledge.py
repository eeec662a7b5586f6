"""What the compiled deductions work on: facts, cells, and what is known so far; orders noted."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numba

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
    Flags = NDArray[np.bool_]

__all__ = ["Cells", "Facts", "Known", "put_before"]


class Facts(NamedTuple):
    """What never changes; items of one device stand together, from ``low`` to ``high``.

    ``arcs`` holds two producers and two consumers each (-1 = none, two = alternatives) and
    ``delay`` the ms between; ``pushes`` and ``pulls`` whether the producer, the consumer surely
    exists where the other does. ``room`` is per device, ``extra`` the least bytes an item takes.
    """

    duration: Floats
    certain: Flags
    device: Ints
    low: Ints
    high: Ints
    arcs: Ints
    delay: Floats
    pushes: Flags
    pulls: Flags
    extra: Ints
    room: Ints
    orders: bool
    memory: bool
    tolerance: float


class Cells(NamedTuple):
    """(stage, micro-batch) pairs by device: chain of F, I, W, the alternative B, bytes by state.

    A cell has done none, F, F and I, or all: states 0 to 3, of which ``first`` to ``last`` can be
    within what is open. ``cost`` is the least the cell adds to its device in a state. Cells of one
    ``lot`` go first in, first out (-1: in any order).
    """

    low: Ints
    high: Ints
    chain: Ints
    fused: Ints
    first: Ints
    last: Ints
    cost: Ints
    lot: Ints


class Known(NamedTuple):
    """What is known so far: windows of starts in ms, and ``before[a, b]``."""

    earliest: Floats
    latest: Floats
    before: Flags


@numba.njit(cache=True, nogil=True)
def put_before(facts: Facts, known: Known, a: int, b: int) -> int:
    """Note that a stands before b, and what follows by transitivity; -1 = impossible.

    An order passes through an item only if that surely exists.
    """
    before, certain = known.before, facts.certain
    low, high = facts.low[facts.device[a]], facts.high[facts.device[a]]
    for x in range(low, high):
        if x != a and not (before[x, a] and certain[a]):
            continue
        for y in range(low, high):
            if y != b and not (before[b, y] and certain[b]):
                continue
            if certain[x] and certain[y] and (x == y or before[y, x]):
                return -1
            before[x, y] = x != y
    return 1
