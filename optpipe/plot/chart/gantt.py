"""The Gantt chart of one schedule: one glyph call for all bars, one for the path on top."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from bokeh.core.properties import value
from bokeh.models import ColumnDataSource, FixedTicker, LinearColorMapper, Range1d
from bokeh.models.annotations import Span
from bokeh.plotting import figure

from optpipe.plot.chart.style import FONT, PALETTES, Palette, Theme
from optpipe.plot.chart.title import add_title
from optpipe.plot.colours import BAR_COLOURS
from optpipe.plot.headline import headline
from optpipe.plot.pixels import codes_of
from optpipe.plot.rows import places

if TYPE_CHECKING:
    from bokeh.models.annotations import Title
    from bokeh.models.renderers import GlyphRenderer
    from numpy.typing import NDArray

    from optpipe.plot.bars import Bars, Drawing
    from optpipe.plot.interactive import View

__all__ = [
    "LABEL_COLUMNS",
    "MOST_AT_ONCE",
    "PATH_COLUMNS",
    "VEIL_CODE",
    "Gantt",
    "draw_gantt",
    "has_bound_line",
    "left_border",
]

_MOST_OUTLINED = 3_000
_PX_PER_DEVICE, _MAX_PX = 30, 620
_MOST_NAMED_DEVICES = 33
_LONGEST_NAME = 14
_PX_PER_LETTER = 7
_FLOAT32_BITS = 24
_SHORTEST_SHARE = 1e-3
_LABEL_COLOUR = "#14181c"

MOST_AT_ONCE = 12_000
"""Of more bars, a frame that moves has every tenth, and a script keeps to those near the frame."""

LABEL_COLUMNS = ("x", "y", "text")
PATH_COLUMNS = ("left", "right", "top", "bottom", "code", "cover", "edge", *LABEL_COLUMNS)
VEIL_CODE = len(BAR_COLOURS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gantt:
    """The figure and what the scripts change of it.

    Attributes
    ----------
    labels
        What stands in the bars; empty until a script knows how wide they are.
    """

    figure: Any
    title: Title
    bars: GlyphRenderer[Any]
    labels: ColumnDataSource
    path: ColumnDataSource


def draw_gantt(
    view: View,
    drawing: Drawing,
    time: Range1d,
    *,
    name: str,
    theme: Theme,
    has_sides: bool,
    border_px: int,
) -> Gantt:
    """Draw one schedule over a time axis that others may share.

    Parameters
    ----------
    has_sides
        Whether to leave room for transfers beside compute.
    border_px
        Room for the devices' names; equal for all figures of a layout, so that times line up.
    """
    look = PALETTES[theme]
    num_devices = len(view.problem.devices)
    plot = figure(
        name=name,
        x_range=time,
        y_range=Range1d(start=num_devices - 0.45, end=-0.55),
        frame_height=min(_PX_PER_DEVICE * num_devices, _MAX_PX),
        min_border_left=border_px,
        min_border_right=16,
        sizing_mode="stretch_width",
        tools="",
        toolbar_location=None,
        # Without a graphics card WebGL takes several times as long as the canvas (docs/plot.md).
        output_backend="canvas",
        lod_threshold=MOST_AT_ONCE,
    )
    title = add_title(plot, f"{view.title}: {headline(view.problem, drawing, view.bound_ms)}")
    _label_devices(plot, view)
    _draw_bubbles(plot, drawing, num_devices, look, has_sides=has_sides)
    source = ColumnDataSource(_columns(drawing.bars, has_sides=has_sides))
    bars = _draw_bars(plot, source, look)
    labels = ColumnDataSource({name: [] for name in LABEL_COLUMNS})
    _draw_labels(plot, labels, "glyph")
    path = _draw_path(plot, look)
    _draw_ends(plot, view, drawing, look)
    return Gantt(figure=plot, title=title, bars=bars, labels=labels, path=path)


def left_border(names: list[str]) -> int:
    """Return the room in pixels that the longest of some devices' names takes."""
    longest = max((len(_short(name)) for name in names), default=0)
    return 24 + _PX_PER_LETTER * max(longest, 5)


def _columns(bars: Bars, *, has_sides: bool) -> dict[str, NDArray[Any]]:
    """Return a row per bar, in types that are small and exact enough to draw and to tell."""
    lanes = np.array(places(has_sides=has_sides))[bars.lane]
    middle = bars.device[:, np.newaxis]
    time = _time_type(bars)
    return {
        "left": bars.start.astype(time),
        "right": bars.end.astype(time),
        "top": (middle[:, 0] + lanes[:, 0]).astype(np.float32),
        "bottom": (middle[:, 0] + lanes[:, 1]).astype(np.float32),
        "code": codes_of(bars),
        "device": _narrow(bars.device),
        "stage": _narrow(bars.stage),
        "microbatch": _narrow(bars.microbatch),
        "before": bars.before.astype(np.float32),
        "after": bars.after.astype(np.float32),
    }


def _time_type(bars: Bars) -> type[np.floating[Any]]:
    """Return float32 where its steps are a thousandth of the shortest bar, or shorter."""
    lengths = (bars.end - bars.start)[bars.end > bars.start]
    step = float(bars.end.max(initial=0.0)) / 2**_FLOAT32_BITS
    is_exact = len(lengths) == 0 or step <= _SHORTEST_SHARE * float(lengths.min())
    return np.float32 if is_exact else np.float64


def _narrow(column: NDArray[np.int32]) -> NDArray[Any]:
    limits = np.iinfo(np.int16)
    return column.astype(np.int16) if column.max(initial=0) <= limits.max else column


def _draw_bubbles(
    plot: Any, drawing: Drawing, num_devices: int, look: Palette, *, has_sides: bool
) -> None:
    """Fill each row: what no bar covers is idle."""
    place = places(has_sides=has_sides)[0]
    rows = np.arange(num_devices)
    plot.quad(
        left=np.zeros(num_devices),
        right=np.full(num_devices, drawing.makespan_ms),
        top=rows + place.top,
        bottom=rows + place.bottom,
        fill_color=look.bubble,
        line_color=None,
    )


def _draw_bars(plot: Any, source: ColumnDataSource, look: Palette) -> GlyphRenderer[Any]:
    is_outlined = len(source.data["left"]) <= _MOST_OUTLINED
    drawn: GlyphRenderer[Any] = plot.quad(
        source=source,
        fill_color=_colour_of_code(look),
        line_color=look.page if is_outlined else None,
        line_width=0.6,
        name="bars",
    )
    return drawn


def _draw_path(plot: Any, look: Palette) -> ColumnDataSource:
    """Make the place for one micro-batch's bars over a veil; it is empty at first.

    It stands on the level that is painted apart from the bars: following the pointer does not draw
    a hundred thousand bars again. Bokeh does not clip that level, so the script has to.
    """
    path = ColumnDataSource({name: [] for name in PATH_COLUMNS})
    plot.quad(
        source=path,
        fill_color=_colour_of_code(look),
        fill_alpha="cover",
        line_color=look.outline,
        line_alpha="edge",
        level="overlay",
        name="path",
    )
    _draw_labels(plot, path, "overlay")
    return path


def _draw_labels(plot: Any, source: ColumnDataSource, level: str) -> None:
    plot.text(
        source=source,
        text="text",
        text_align="center",
        text_baseline="middle",
        text_color=_LABEL_COLOUR,
        text_font=value(FONT),
        text_font_size="10px",
        level=level,
        name=f"labels-{level}",
    )


def _colour_of_code(look: Palette) -> dict[str, Any]:
    """Return the colour of a bar by its code; the code after the last is the veil."""
    palette = [*BAR_COLOURS, look.page]
    mapper = LinearColorMapper(palette=palette, low=-0.5, high=len(palette) - 0.5)
    return {"field": "code", "transform": mapper}


def _draw_ends(plot: Any, view: View, drawing: Drawing, look: Palette) -> None:
    plot.add_layout(
        Span(
            location=drawing.makespan_ms,
            dimension="height",
            line_color=look.quiet,
            line_dash="dotted",
        )
    )
    if not has_bound_line(view):
        return
    line = Span(
        location=view.bound_ms,
        dimension="height",
        line_color=look.bound,
        line_dash="dashed",
        line_width=2,
        name="bound",
    )
    plot.add_layout(line)


def has_bound_line(view: View) -> bool:
    """Whether a bound is known and a moment of the axis: one of the makespan is, of a span not."""
    return bool(view.bound_ms) and view.problem.objective == "makespan"


def _label_devices(plot: Any, view: View) -> None:
    names = [_short(device.name) for device in view.problem.devices]
    step = -(-len(names) // _MOST_NAMED_DEVICES)
    shown = list(range(0, len(names), step))
    plot.yaxis.ticker = FixedTicker(ticks=shown)
    plot.yaxis.major_label_overrides = {index: names[index] for index in shown}
    plot.yaxis.major_tick_line_color = None
    plot.yaxis.axis_line_color = None
    plot.ygrid.visible = False
    plot.xaxis.visible = False


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
