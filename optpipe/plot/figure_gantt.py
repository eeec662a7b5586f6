"""The Gantt chart of one panel of an image file.

Up to some thousand bars are shapes; more are shared out to columns of pixels, so that neither the
file nor the time to draw it grows with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from optpipe.plot.bars import KINDS, LANES
from optpipe.plot.colours import BAR_COLOURS
from optpipe.plot.glyphs import LETTERS
from optpipe.plot.pixels import codes_of, pixels_of
from optpipe.plot.rows import has_side_lanes, places

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from optpipe.action import Programs
    from optpipe.plot.bars import Bars, Drawing
    from optpipe.plot.rows import Place

__all__ = ["BUBBLE_COLOUR", "MOST_SHAPES", "draw_gantt"]

MOST_SHAPES = 6_000
BUBBLE_COLOUR = "#eceff1"
_NUM_COLUMNS = 1_400
_ROWS_PER_DEVICE = 24
_MOST_LABELS = 1_500
_LABELS_PER_INCH = 16
_EDGE = 0.4


def draw_gantt(
    axis: Any, drawing: Drawing, programs: Programs, *, length_ms: float, width_inches: float
) -> None:
    """Draw bars and bubbles; the rows are those of `optpipe.plot.rows`."""
    bars, num_devices = drawing.bars, len(programs)
    lanes = places(has_sides=has_side_lanes(bars))
    compute = lanes[LANES.index("compute")]
    axis.barh(
        np.arange(num_devices),
        drawing.makespan_ms,
        height=compute.bottom - compute.top,
        color=BUBBLE_COLOUR,
        zorder=1,
    )
    if len(bars) > MOST_SHAPES:
        _draw_pixels(axis, bars, num_devices, lanes, length_ms)
        return
    _draw_shapes(axis, bars, lanes)
    inches_per_ms = width_inches / length_ms if length_ms > 0 else 0.0
    _label(axis, bars, inches_per_ms)


def _draw_shapes(axis: Any, bars: Bars, lanes: Sequence[Place]) -> None:
    """Draw all bars of a colour as one path, in which a bar takes a few bytes."""
    from matplotlib.patches import PathPatch  # noqa: PLC0415 - an optional extra

    edges = np.array(lanes)[bars.lane] + bars.device[:, np.newaxis]
    codes = codes_of(bars)
    for code in np.unique(codes):
        rows = codes == code
        outline = _outline(bars.start[rows], bars.end[rows], edges[rows])
        axis.add_patch(
            PathPatch(
                outline, facecolor=BAR_COLOURS[code], edgecolor="white", linewidth=_EDGE, zorder=2
            )
        )


def _outline(
    start: NDArray[np.float64], end: NDArray[np.float64], edges: NDArray[np.float64]
) -> Any:
    from matplotlib.path import Path  # noqa: PLC0415 - an optional extra

    top, bottom = edges[:, 0], edges[:, 1]
    corners = [(start, top), (end, top), (end, bottom), (start, bottom), (start, top)]
    vertices = np.stack([np.stack(corner, axis=1) for corner in corners], axis=1)
    steps = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    return Path(vertices.reshape(-1, 2), np.tile(steps, len(start)))


def _label(axis: Any, bars: Bars, inches_per_ms: float) -> None:
    """Write letter and micro-batch into the bars that have room for it."""
    room = (bars.end - bars.start) * inches_per_ms * _LABELS_PER_INCH
    is_compute = bars.lane == LANES.index("compute")
    texts = []
    for row in np.flatnonzero(is_compute & (room >= 2)):
        kind = KINDS[bars.kind[row]]
        text = f"{LETTERS[kind]}{bars.microbatch[row]}" if kind is not None else ""
        if room[row] >= len(text):
            texts.append(((bars.start[row] + bars.end[row]) / 2, bars.device[row], text))
    if len(texts) > _MOST_LABELS:
        return
    for middle, device, text in texts:
        axis.text(middle, device, text, ha="center", va="center", fontsize=6, zorder=3)


def _draw_pixels(
    axis: Any, bars: Bars, num_devices: int, lanes: Sequence[Place], length_ms: float
) -> None:
    """Draw an image whose columns mix the colours of what happens in them.

    What is idle of a column lets the bubble behind it through.
    """
    pixels = pixels_of(
        bars, _palette(), num_devices=num_devices, length_ms=length_ms, num_columns=_NUM_COLUMNS
    )
    drawn = np.round(255 * np.concatenate([pixels.colour, pixels.busy[..., np.newaxis]], axis=3))
    image = np.zeros((num_devices, _ROWS_PER_DEVICE, _NUM_COLUMNS, 4), np.uint8)
    heights = (np.arange(_ROWS_PER_DEVICE) + 0.5) / _ROWS_PER_DEVICE - 0.5
    for lane, place in enumerate(lanes):
        rows = np.flatnonzero((heights >= place.top) & (heights <= place.bottom))
        seen = drawn[:, lane, np.newaxis]
        image[:, rows] = np.where(seen[..., 3:] > 0, seen, image[:, rows])
    axis.imshow(
        image.reshape(num_devices * _ROWS_PER_DEVICE, _NUM_COLUMNS, 4),
        extent=(0.0, length_ms, num_devices - 0.5, -0.5),
        aspect="auto",
        origin="upper",
        zorder=2,
    )


def _palette() -> NDArray[np.float32]:
    rows = [[int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)] for colour in BAR_COLOURS]
    return np.array(rows, np.float32)
