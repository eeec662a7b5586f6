"""From bars to columns of pixels, for schedules with more actions than a picture has columns.

The numpy sibling of `optpipe.plot.raster`, which the terminal uses: that one works on a line of
characters, this one on a hundred thousand bars.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from optpipe.plot.bars import KINDS, LANES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe.plot.bars import Bars, Curve

__all__ = ["NUM_CODES", "Pixels", "codes_of", "peaks_of", "pixels_of"]

NUM_CODES = 2 * len(KINDS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pixels:
    """Lanes cut into columns of equal length.

    Attributes
    ----------
    colour
        The mean of the colours of what happens in a column, by the time it takes; float32 of
        shape (devices, lanes, columns, 3), 0 to 1. Black where nothing does.
    busy
        The share of a column that is filled, 0 to 1; float32, (devices, lanes, columns).
    """

    colour: NDArray[np.float32]
    busy: NDArray[np.float32]


def codes_of(bars: Bars) -> NDArray[np.int8]:
    """Return 2 x kind + (micro-batch mod 2) of each bar: what has a colour of its own."""
    return (2 * bars.kind + bars.microbatch % 2).astype(np.int8)


def pixels_of(
    bars: Bars,
    palette: NDArray[np.float32],
    *,
    num_devices: int,
    length_ms: float,
    num_columns: int,
) -> Pixels:
    """Share bars out to columns; no time is lost, and none is counted twice.

    Mixing, rather than showing what a column has most of, keeps columns from beating against
    actions: stripes that are in no schedule.

    Parameters
    ----------
    bars
        Those of one lane must not overlap; those of a simulation never do.
    palette
        Red, green and blue of each code, 0 to 1.
    """
    edges = np.linspace(0.0, length_ms, num_columns + 1)
    shape = (num_devices, len(LANES), num_columns)
    colour, busy = np.zeros((*shape, 3), np.float32), np.zeros(shape, np.float32)
    codes = codes_of(bars)
    for rows in _groups((bars.device * len(LANES) + bars.lane) * NUM_CODES + codes):
        place = bars.device[rows[0]], bars.lane[rows[0]]
        share = _shares(bars.start[rows], bars.end[rows], edges)
        busy[place] += share
        colour[place] += share[:, np.newaxis] * palette[codes[rows[0]]]
    colour /= np.maximum(busy, np.finfo(np.float32).tiny)[..., np.newaxis]
    return Pixels(colour=colour, busy=np.minimum(busy, 1.0))


def _groups(keys: NDArray[np.int32]) -> list[NDArray[np.int64]]:
    """Return the rows of each key, in the order of keys."""
    order = np.argsort(keys, kind="stable")
    changes = np.flatnonzero(np.diff(keys[order])) + 1
    return np.split(order, changes) if len(keys) else []


def peaks_of(curve: Curve, end_ms: float, edges: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the most bytes held at any moment of each column between neighbouring edges.

    Columns from ``end_ms`` on hold what is held at the end.
    """
    before = np.searchsorted(curve.moments, edges[:-1], side="right") - 1
    until = np.searchsorted(curve.moments, np.minimum(edges[1:], end_ms), side="left")
    peaks: NDArray[np.int64] = np.array(
        [
            curve.held[first : max(last, first + 1)].max()
            for first, last in zip(np.maximum(before, 0), until, strict=True)
        ],
        np.int64,
    )
    return peaks


def _shares(
    start: NDArray[np.float64], end: NDArray[np.float64], edges: NDArray[np.float64]
) -> NDArray[np.float32]:
    """Return how much of each column some bars fill that do not overlap, as shares of it.

    The time filled up to a moment grows along a bar and stands still between bars: its values at
    the edges of a column differ by what the column holds.
    """
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    filled = np.concatenate([[0.0], np.cumsum(end - start)])
    moments = np.stack([start, end], axis=1).ravel()
    heights = np.stack([filled[:-1], filled[1:]], axis=1).ravel()
    width = (edges[-1] - edges[0]) / (len(edges) - 1) or 1.0
    shares: NDArray[np.float32] = (np.diff(np.interp(edges, moments, heights)) / width).astype(
        np.float32
    )
    return shares
