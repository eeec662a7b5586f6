"""Random numbers from a state of our own, so that threads neither share nor disturb them.

xorshift64* (Vigna, "An experimental exploration of Marsaglia's xorshift generators, scrambled",
2016): a 64-bit state, three shifts, one multiplication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optpipe_solver.lean import lean

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["below", "seeded", "unit"]


def seeded(seed: int) -> NDArray[np.uint64]:
    """Return a state that is a function of the seed (any integer)."""
    return np.random.SeedSequence(seed & (2**64 - 1)).generate_state(1, np.uint64) | np.uint64(1)


@lean
def _next(state: NDArray[np.uint64]) -> np.uint64:
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return x * np.uint64(2685821657736338717)


@lean
def unit(state: NDArray[np.uint64]) -> float:
    """Return a number in 0 <= x < 1."""
    return (_next(state) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@lean
def below(state: NDArray[np.uint64], limit: int) -> int:
    """Return an integer in 0 <= x < limit, limit >= 1."""
    return int(unit(state) * limit)
