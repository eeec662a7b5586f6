"""What a device can do and hold at one moment: patterns of phases that fit its lanes and memory.

A pattern is a set of cells of one device, each in a phase: at most one per lane (of both transfer
lanes together where the device is half duplex), bytes within the room. `heaviest` finds the one
with the greatest total price. Waiting phases take no lane and may come several times; of several
with the same size only the dearest matters, so they are counted by size.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.exact.phases import Lane

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from optpipe_solver.exact.phases import Phase, Work

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

__all__ = ["Pattern", "Patterns", "Window"]

_MOST = 20_000
"""Most multisets of waiting phases looked at; devices with more are left out."""

Pattern = tuple[int, ...]
"""Indices of phases, one per cell."""


class Window(NamedTuple):
    """A time of fixed length: which phases can be in it, and how many cells between F and I."""

    length: float
    allowed: tuple[bool, ...]
    most_held: int


class _Use(NamedTuple):
    """Phases on lanes at one moment."""

    phases: Pattern
    held_bytes: int
    num_held: int


class Patterns:
    """The patterns of one device.

    Attributes
    ----------
    is_countable
        False where there are too many to look at.
    """

    def __init__(self, work: Work) -> None:
        self.phases = work.phases
        self._room = work.room_bytes
        self._sizes = sorted(
            {p.held_bytes for p in self.phases if p.lane is Lane.NONE and p.held_bytes > 0},
            reverse=True,
        )
        self._most = work.num_microbatches * len(work.stages)
        self._uses = _uses(self.phases, work)
        multisets = _multisets(self._sizes, self._room, self._most)
        self.is_countable = multisets is not None
        multisets = multisets or [(0,) * len(self._sizes)]
        counts = np.array(multisets, dtype=np.int64).reshape(len(multisets), len(self._sizes))
        held = counts @ np.array(self._sizes, dtype=np.int64)
        order = np.argsort(held, kind="stable")
        self._counts, self._held = counts[order], held[order]
        self._num = self._counts.sum(axis=1)

    def heaviest(self, prices: Sequence[float], window: Window) -> tuple[float, Pattern]:
        """Return the greatest total price of a pattern possible in a window, and that pattern."""
        dearest = self._dearest(prices, window)
        value = self._counts @ np.array([prices[i] if i >= 0 else 0.0 for i in dearest])
        best, found = 0.0, (-1, _Use((), 0, 0))
        by_limit: dict[int, tuple[Ints, Floats, Ints]] = {}
        for use in self._uses:
            left = min(window.most_held, self._most) - use.num_held
            if left < 0 or not all(window.allowed[i] for i in use.phases):
                continue
            if left not in by_limit:
                rows = np.flatnonzero(self._num <= left)
                by_limit[left] = rows, np.maximum.accumulate(value[rows]), self._held[rows]
            rows, most, held = by_limit[left]
            at = int(np.searchsorted(held, self._room - use.held_bytes, side="right")) - 1
            if at < 0:
                continue
            total = sum(prices[i] for i in use.phases) + float(most[at])
            if total > best:
                row = int(rows[int(np.argmax(value[rows[: at + 1]]))])
                best, found = total, (row, use)
        row, use = found
        waits = () if row < 0 else self._counts[row]
        spread = [i for i, n in zip(dearest, waits, strict=False) for _ in range(n) if i >= 0]
        return best, (*use.phases, *spread)

    def _dearest(self, prices: Sequence[float], window: Window) -> list[int]:
        """Return, by size, the waiting phase with the greatest price; -1 = none is possible."""
        dearest = []
        for size in self._sizes:
            ways = [
                i
                for i, phase in enumerate(self.phases)
                if phase.lane is Lane.NONE and phase.held_bytes == size and window.allowed[i]
            ]
            dearest.append(max(ways, key=lambda i: prices[i], default=-1))
        return dearest


def _uses(phases: Sequence[Phase], work: Work) -> list[_Use]:
    """Return what can be on the lanes at one moment, nobody waiting."""
    lanes = [
        [-1, *(i for i, phase in enumerate(phases) if phase.lane is lane)]
        for lane in (Lane.COMPUTE, Lane.D2H, Lane.H2D)
    ]
    uses = []
    for compute, away, home in product(*lanes):
        if work.half_duplex and away >= 0 and home >= 0:
            continue
        chosen = tuple(i for i in (compute, away, home) if i >= 0)
        held_bytes = sum(phases[i].held_bytes for i in chosen)
        if held_bytes <= work.room_bytes:
            uses.append(_Use(chosen, held_bytes, sum(not phases[i].is_late for i in chosen)))
    return uses


def _multisets(sizes: Sequence[int], room: int, most: int) -> list[tuple[int, ...]] | None:
    """Return all numbers of waiting cells by size that fit; None where there are too many."""
    found: list[tuple[tuple[int, ...], int]] = [((), 0)]
    for size in sizes:
        longer = []
        for counts, held in found:
            for n in range(min(most - sum(counts), (room - held) // size) + 1):
                longer.append(((*counts, n), held + n * size))
                if len(longer) > _MOST:
                    return None
        found = longer
    return [counts for counts, _ in found]
