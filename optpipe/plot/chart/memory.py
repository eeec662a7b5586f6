"""The memory chart under a Gantt chart: one device's bytes against its limit, over time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from bokeh.models import ColumnDataSource, InlineStyleSheet, Range1d
from bokeh.models.annotations import Span
from bokeh.models.widgets import Select
from bokeh.plotting import figure

from optpipe.memory import device_peak_bytes
from optpipe.plot.chart.style import INPUT_MARGIN, PALETTES, Palette, Theme, css_of
from optpipe.plot.chart.title import add_title
from optpipe.plot.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bokeh.models.annotations import Title
    from numpy.typing import NDArray

    from optpipe.plot.bars import Curve, Drawing
    from optpipe.plot.interactive import View

__all__ = ["Memory", "draw_memory"]

_HEIGHT_PX = 72
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_FAR_AWAY = 3.0
_LABEL = 16
"""Characters of a title that fit over a select box."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memory:
    """The figure and what the scripts change of it.

    Attributes
    ----------
    curves
        All devices' curves, one after the other: ``moments`` in ms, ``held`` in the axis's unit.
    devices
        A row per device: ``first`` row in `curves`, ``static``, ``limit``, and ``label``.
    shown
        The curve that is drawn.
    select
        Chooses the device; its values are "0", "1", ...
    """

    figure: Any
    title: Title
    curves: ColumnDataSource
    devices: ColumnDataSource
    shown: ColumnDataSource
    limit: Span
    select: Select


def draw_memory(
    view: View, drawing: Drawing, time: Range1d, *, name: str, theme: Theme, border_px: int
) -> Memory:
    """Draw the device that is fullest in proportion to its limit; scripts change to others."""
    look = PALETTES[theme]
    limits = [device.usable_bytes for device in view.problem.devices]
    peaks = _peaks(view)
    unit, size = _unit(max(peaks, default=0))
    devices = _devices(view, drawing, peaks, size)
    chosen = max(range(len(peaks)), key=lambda device: peaks[device] / max(1, limits[device]))
    shown = _drawn(
        drawing.memory[chosen],
        drawing.makespan_ms,
        size=size,
        static_bytes=view.problem.static_bytes_of(chosen),
        limit_bytes=limits[chosen],
    )
    plot: Any = figure(
        name=name,
        x_range=time,
        y_range=Range1d(start=0, end=_ceiling(peaks, limits) / size),
        frame_height=_HEIGHT_PX,
        min_border_left=border_px,
        min_border_right=16,
        sizing_mode="stretch_width",
        tools="",
        toolbar_location=None,
        y_axis_label=unit,
    )
    title = add_title(plot, _label(view, chosen, peaks[chosen]), is_bold=False)
    source = ColumnDataSource(shown)
    _draw_areas(plot, source, look)
    limit = Span(
        location=limits[chosen] / size,
        dimension="width",
        line_color=look.limit,
        line_width=1.5,
    )
    plot.add_layout(limit)
    plot.yaxis.ticker.desired_num_ticks = 3
    return Memory(
        figure=plot,
        title=title,
        curves=_curves(drawing, size),
        devices=ColumnDataSource(devices),
        shown=source,
        limit=limit,
        select=_select(view, chosen, theme),
    )


def _peaks(view: View) -> list[int]:
    return [
        device_peak_bytes(view.problem, device, program)
        for device, program in enumerate(view.programs)
    ]


def _unit(most_bytes: int) -> tuple[str, int]:
    return next((unit for unit in _UNITS if most_bytes >= unit[1]), _UNITS[-1])


def _ceiling(peaks: Sequence[int], limits: Sequence[int]) -> float:
    """Return the bytes at the upper edge: limits far above every peak would flatten the curve."""
    peak = max(peaks, default=0)
    near = [limit for limit in limits if limit <= _FAR_AWAY * peak]
    return 1.1 * max([peak, *near, 1])


def _devices(
    view: View, drawing: Drawing, peaks: Sequence[int], size: int
) -> dict[str, NDArray[Any] | list[str]]:
    problem = view.problem
    lengths = [len(curve.moments) for curve in drawing.memory]
    return {
        "first": np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int32),
        "length": np.array(lengths, np.int32),
        "static": np.array(
            [problem.static_bytes_of(index) / size for index in range(len(peaks))], np.float64
        ),
        "limit": np.array([device.usable_bytes / size for device in problem.devices], np.float64),
        "label": [_label(view, index, peak) for index, peak in enumerate(peaks)],
    }


def _label(view: View, device: int, peak: int) -> str:
    held = view.problem.devices[device]
    over = ", over the limit" if peak > held.usable_bytes else ""
    return (
        f"{view.title}, memory of {held.name}: peak {format_bytes(peak)} of "
        f"{format_bytes(held.usable_bytes)}{over}"
    )


def _curves(drawing: Drawing, size: int) -> ColumnDataSource:
    moments = np.concatenate([curve.moments for curve in drawing.memory])
    held = np.concatenate([curve.held for curve in drawing.memory]) / size
    return ColumnDataSource(
        {"moments": moments.astype(np.float32), "held": held.astype(np.float32)}
    )


def _drawn(
    curve: Curve, end_ms: float, *, size: int, static_bytes: int, limit_bytes: int
) -> dict[str, NDArray[Any]]:
    """Return the columns of a drawn curve; the chart's script makes the same for other devices."""
    held = np.append(curve.held, curve.held[-1]) / size
    limit = np.full(len(held), limit_bytes / size)
    return {
        "moment": np.append(curve.moments, end_ms),
        "zero": np.zeros(len(held)),
        "static": np.full(len(held), static_bytes / size),
        "held": held,
        "limit": limit,
        "over": np.maximum(held, limit),
    }


def _draw_areas(plot: Any, shown: ColumnDataSource, look: Palette) -> None:
    for lower, upper, colour, alpha in (
        ("zero", "static", look.static, 1.0),
        ("static", "held", look.memory, 0.55),
        ("limit", "over", look.limit, 0.8),
    ):
        plot.varea_step(
            source=shown,
            x="moment",
            y1=lower,
            y2=upper,
            step_mode="after",
            fill_color=colour,
            fill_alpha=alpha,
        )


def _clipped(title: str) -> str:
    """Return as much of a title as stands over a select box."""
    return title if len(title) <= _LABEL else title[: _LABEL - 1] + "…"


def _select(view: View, chosen: int, theme: Theme) -> Select:
    options: list[str | tuple[Any, str]] = [
        (str(index), device.name) for index, device in enumerate(view.problem.devices)
    ]
    return Select(
        title=f"memory: {_clipped(view.title)}",
        value=str(chosen),
        options=options,
        width=150,
        margin=INPUT_MARGIN,
        stylesheets=[InlineStyleSheet(css=css_of(theme))],
    )
