"""The memory chart of one panel of an image file: what devices hold against their limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from optpipe.memory import device_peak_bytes
from optpipe.plot.pixels import peaks_of
from optpipe.plot.units import format_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe.action import Programs
    from optpipe.plot.bars import Curve, Drawing
    from optpipe.problem import Problem

__all__ = [
    "LIMIT_COLOUR",
    "MEMORY_COLOUR",
    "MEMORY_OPACITY",
    "MOST_CURVES",
    "STATIC_COLOUR",
    "draw_curves",
    "draw_range",
    "peak_label",
]

LIMIT_COLOUR, MEMORY_COLOUR, STATIC_COLOUR = "#b3261e", "#4a9ad4", "#90a4ae"
MEMORY_OPACITY = 0.55
_HEIGHT = 0.8
_NUM_COLUMNS = 700
MOST_CURVES = 24


def draw_curves(axis: Any, problem: Problem, drawing: Drawing, *, length_ms: float) -> None:
    """Draw each device's curve in a row of its own, from 0 to its limit."""
    end = drawing.makespan_ms
    for device, curve in enumerate(drawing.memory):
        limit = problem.devices[device].usable_bytes
        base, scale = device + 0.5, _HEIGHT / max(1, limit)
        moments, held = _thinned(curve, end, length_ms)
        heights = base - held * scale
        options: dict[str, Any] = {"step": "post", "linewidth": 0}
        floor = base - problem.static_bytes_of(device) * scale
        axis.fill_between(
            moments, base, heights, color=MEMORY_COLOUR, alpha=MEMORY_OPACITY, **options
        )
        axis.fill_between([0, end], base, floor, color=STATIC_COLOUR, **options)
        top = base - limit * scale
        over = np.minimum(heights, top)
        axis.fill_between(moments, top, over, color=LIMIT_COLOUR, **options)
        axis.hlines(top, 0, end, colors=LIMIT_COLOUR, linewidth=0.9)


def draw_range(axis: Any, problem: Problem, drawing: Drawing) -> None:
    """Draw what the fullest and the emptiest device hold at each moment, as shares of limits.

    For more devices than a picture has room for curves.
    """
    edges = np.linspace(0.0, drawing.makespan_ms, _NUM_COLUMNS + 1)
    shares = np.array(
        [
            peaks_of(curve, drawing.makespan_ms, edges) / max(1, device.usable_bytes)
            for curve, device in zip(drawing.memory, problem.devices, strict=True)
        ]
    )
    shares = np.concatenate([shares, shares[:, -1:]], axis=1)
    most, least = shares.max(axis=0), shares.min(axis=0)
    options: dict[str, Any] = {"step": "post", "linewidth": 0}
    axis.fill_between(edges, least, most, color=MEMORY_COLOUR, alpha=MEMORY_OPACITY, **options)
    axis.fill_between(edges, 1.0, np.maximum(most, 1.0), color=LIMIT_COLOUR, **options)
    axis.plot(edges, most, drawstyle="steps-post", color=MEMORY_COLOUR, linewidth=1.0)
    axis.hlines(1.0, 0, drawing.makespan_ms, colors=LIMIT_COLOUR, linewidth=0.9)
    axis.set_ylim(0.0, 1.12 * max(1.0, float(most.max())))
    axis.set_yticks([0.0, 0.5, 1.0], ["0", "50 %", "100 % of the limit"])


def peak_label(problem: Problem, programs: Programs, device: int) -> str:
    """Return a device's peak and its limit, with a word before them where it is exceeded."""
    peak = device_peak_bytes(problem, device, programs[device])
    limit = problem.devices[device].usable_bytes
    mark = "OVER: " if peak > limit else ""
    return f"{mark}{format_bytes(peak)} of {format_bytes(limit)}"


def _thinned(
    curve: Curve, end_ms: float, length_ms: float
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return a curve as steps up to the end; of more steps than columns, each column's peak."""
    if len(curve.moments) <= 2 * _NUM_COLUMNS or length_ms <= 0:
        moments, held = curve.moments, curve.held
    else:
        num_columns = max(1, round(_NUM_COLUMNS * end_ms / length_ms))
        edges = np.linspace(0.0, end_ms, num_columns + 1)
        moments, held = edges[:-1], peaks_of(curve, end_ms, edges)
    return np.append(moments, end_ms), np.append(held, held[-1])
