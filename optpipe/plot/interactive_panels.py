"""The Gantt chart of one schedule, with one glyph call for all bars and one for the path on top."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from bokeh.core.properties import value
from bokeh.models import (
    ColumnDataSource,
    FixedTicker,
    HoverTool,
    InlineStyleSheet,
    LinearColorMapper,
    Range1d,
)
from bokeh.models.annotations import Span, Title
from bokeh.models.widgets import Select
from bokeh.plotting import figure

from optpipe.memory import device_peak_bytes
from optpipe.plot.scene import (
    BAR_COLOURS,
    KINDS,
    PALETTES,
    Palette,
    codes_of,
    headline,
    places,
)
from optpipe.plot.terminal import LETTERS, NAMES
from optpipe.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bokeh.models.renderers import GlyphRenderer
    from numpy.typing import NDArray

    from optpipe.plot.scene import Bars, Drawing, Theme, View
    from optpipe.schedule import ActionType

__all__ = [
    "FONT",
    "INPUT_MARGIN",
    "MOST_AT_ONCE",
    "VEIL_CODE",
    "WORDS",
    "css_of",
    "draw_gantt",
    "draw_memory",
    "left_border",
    "legend_of",
]


FONT = "system-ui, sans-serif"
INPUT_MARGIN = (4, 10, 4, 0)
_MOST_OUTLINED = 3_000
_PX_PER_DEVICE, _MAX_PX = 30, 620
_MOST_NAMED_DEVICES = 33
_LONGEST_NAME = 14
_PX_PER_LETTER = 7
_FLOAT32_BITS = 24
_SHORTEST_SHARE = 1e-3
_LABEL_COLOUR = "#14181c"

MOST_AT_ONCE = 12_000
"""With more bars, a moving frame draws every tenth, and a script only those near the frame."""

_LABEL_COLUMNS = ("x", "y", "text")
_PATH_COLUMNS = ("left", "right", "top", "bottom", "code", "cover", "edge", *_LABEL_COLUMNS)
VEIL_CODE = len(BAR_COLOURS)


def draw_gantt(
    view: View,
    drawing: Drawing,
    time: Range1d,
    *,
    name: str,
    theme: Theme,
    has_sides: bool,
    border_px: int,
) -> tuple[GlyphRenderer[Any], dict[str, Any]]:
    """Draw one schedule over a time axis; return the bars, and what the scripts read and change.

    * ``has_sides``: whether to leave space for transfers above and below compute.
    * ``border_px``: width for the devices' names; equal for all figures of a layout, so that times
      line up.
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
    title = _add_title(plot, f"{view.title}: {headline(view.problem, drawing, view.bound_ms)}")
    _label_devices(plot, view, drawing)
    # Each row is filled: what no bar covers is idle.
    place, rows = places(has_sides=has_sides)[0], np.arange(num_devices)
    plot.quad(
        left=np.zeros(num_devices),
        right=np.full(num_devices, drawing.makespan_ms),
        top=rows + place.top,
        bottom=rows + place.bottom,
        fill_color=look.bubble,
        line_color=None,
    )
    source = ColumnDataSource(_columns(drawing.bars, has_sides=has_sides))
    is_outlined = len(source.data["left"]) <= _MOST_OUTLINED
    bars: GlyphRenderer[Any] = plot.quad(
        source=source,
        fill_color=_colour_of_code(look),
        line_color=look.page if is_outlined else None,
        line_width=0.6,
        name="bars",
    )
    labels = ColumnDataSource({name: [] for name in _LABEL_COLUMNS})
    _draw_labels(plot, labels, "glyph")
    path = _draw_path(plot, look)
    _draw_ends(plot, view, drawing, look)
    return bars, {
        "gantt": plot,
        "title": title,
        "headline": title.text,
        "bars": source,
        "labels": labels,
        "letters": _LETTERS,
        "hasChunks": len(view.problem.stages) > num_devices,
        "path": path,
    }


def left_border(names: list[str]) -> int:
    """Return the room in pixels that the longest of some devices' names and idle shares takes."""
    longest = max((len(_short(name)) for name in names), default=0)
    return 24 + _PX_PER_LETTER * (longest + len(" 100%"))


def _columns(bars: Bars, *, has_sides: bool) -> dict[str, NDArray[Any]]:
    """Return a row per bar, in types that are small and exact enough to draw and to describe."""
    lanes = np.array(places(has_sides=has_sides))[bars.lane]
    middle = bars.device[:, np.newaxis]
    lengths = (bars.end - bars.start)[bars.end > bars.start]
    step = float(bars.end.max(initial=0.0)) / 2**_FLOAT32_BITS
    is_exact = len(lengths) == 0 or step <= _SHORTEST_SHARE * float(lengths.min())
    time = np.float32 if is_exact else np.float64
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


def _narrow(column: NDArray[np.int32]) -> NDArray[Any]:
    limits = np.iinfo(np.int16)
    return column.astype(np.int16) if column.max(initial=0) <= limits.max else column


def _draw_path(plot: Any, look: Palette) -> ColumnDataSource:
    """Add the layer for one micro-batch's bars over a veil; it is empty at first.

    It is on the level that is painted apart from the bars, so a moving pointer does not repaint a
    hundred thousand bars. Bokeh does not clip that level, so the script has to.
    """
    path = ColumnDataSource({name: [] for name in _PATH_COLUMNS})
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
    if not view.has_bound_line:
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


def _label_devices(plot: Any, view: View, drawing: Drawing) -> None:
    names = [
        f"{_short(device.name)} {100 * share:.0f}%"
        for device, share in zip(view.problem.devices, drawing.idle, strict=True)
    ]
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


# --- The memory chart under a Gantt chart: one device's bytes against its limit, over time.

_HEIGHT_PX = 72
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_FAR_AWAY = 3.0
_LABEL = 16
"""Characters of a title that fit over a select box."""


def draw_memory(
    view: View, drawing: Drawing, time: Range1d, *, name: str, theme: Theme, border_px: int
) -> tuple[Any, dict[str, Any]]:
    """Draw the device that is fullest in proportion to its limit; scripts change to others.

    Return the figure, and the data that the scripts read and change. ``curves`` are all curves, one
    after the other, in ms and in the axis's unit. ``devices`` has each device's ``first`` row in
    them.
    """
    look = PALETTES[theme]
    limits = [device.usable_bytes for device in view.problem.devices]
    peaks = [
        device_peak_bytes(view.problem, device, program) if drawing.has_memory else 0
        for device, program in enumerate(view.programs)
    ]
    most = max(peaks, default=0)
    unit, size = next((unit for unit in _UNITS if most >= unit[1]), _UNITS[-1])
    devices = _devices(view, drawing, peaks, size)
    chosen = max(range(len(peaks)), key=lambda device: peaks[device] / max(1, limits[device]))
    curve = drawing.memory[chosen]
    levels = np.append(curve.held_bytes, curve.held_bytes[-1]) / size
    limit_levels = np.full(len(levels), limits[chosen] / size)
    # The chart's script makes the same columns for other devices.
    shown: dict[str, NDArray[Any] | list[str]] = {
        "moment": np.append(curve.moments, drawing.makespan_ms),
        "zero": np.zeros(len(levels)),
        "static": np.full(len(levels), view.problem.static_bytes_of(chosen) / size),
        "held": levels,
        "limit": limit_levels,
        "over": np.maximum(levels, limit_levels),
        "device": [view.problem.devices[chosen].name] * len(levels),
    }
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
    title = _add_title(plot, _label(view, chosen, peaks[chosen]), is_bold=False)
    source = ColumnDataSource(shown)
    for lower, upper, colour, alpha in (
        ("zero", "static", look.static, 1.0),
        ("static", "held", look.memory, 0.55),
        ("limit", "over", look.limit, 0.8),
    ):
        plot.varea_step(
            source=source,
            x="moment",
            y1=lower,
            y2=upper,
            step_mode="after",
            fill_color=colour,
            fill_alpha=alpha,
        )
    # Areas alone have no tooltips: an invisible edge names device, time and memory.
    edge = plot.step(source=source, x="moment", y="held", mode="after", line_alpha=0)
    level = f"@held{{0.[0]}} {unit}"
    tooltips = [("", "@device"), ("from", "@moment{0,0.[0]} ms"), ("holds", level)]
    plot.add_tools(
        HoverTool(renderers=[edge], tooltips=tooltips, mode="vline", name="memory-hover")
    )
    limit = Span(
        location=limits[chosen] / size, dimension="width", line_color=look.limit, line_width=1.5
    )
    plot.add_layout(limit)
    plot.yaxis.ticker.desired_num_ticks = 3
    # Cut the title to the width of a select box.
    short = view.title if len(view.title) <= _LABEL else view.title[: _LABEL - 1] + "…"
    options: list[str | tuple[Any, str]] = [
        (str(index), device.name) for index, device in enumerate(view.problem.devices)
    ]
    select = Select(
        title=f"memory: {short}",
        value=str(chosen),
        options=options,
        width=150,
        margin=INPUT_MARGIN,
        stylesheets=[InlineStyleSheet(css=css_of(theme))],
    )
    moments = np.concatenate([curve.moments for curve in drawing.memory])
    held_levels = np.concatenate([curve.held_bytes for curve in drawing.memory]) / size
    curves = {"moments": moments.astype(np.float32), "held": held_levels.astype(np.float32)}
    return plot, {
        "memory": title,
        "curves": ColumnDataSource(curves),
        "devices": ColumnDataSource(devices),
        "shown": source,
        "limit": limit,
        "select": select,
        "end": drawing.makespan_ms,
    }


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
        "name": [device.name for device in problem.devices],
    }


def _label(view: View, device: int, peak: int) -> str:
    description = view.problem.devices[device]
    over = ", over the limit" if peak > description.usable_bytes else ""
    return (
        f"{view.title}, memory of {description.name}: peak {format_bytes(peak)} of "
        f"{format_bytes(description.usable_bytes)}{over}"
    )


# --- What the colours of a chart mean, as HTML above it, and in the words of its tooltips.


def _word(kind: ActionType | None) -> str:
    if kind is None:
        return "gradient reduction"
    if kind.is_transfer:
        return f"{kind.name.lower()} ({NAMES[kind]})"
    return NAMES[kind]


_LETTERS = ["" if kind is None else LETTERS.get(kind, "") for kind in KINDS]
WORDS = tuple(_word(kind) for kind in KINDS)
"""The action of each of `KINDS`."""


def legend_of(drawings: Sequence[Drawing], look: Palette, *, has_bound: bool) -> str:
    """Return a line of samples: the actions that some drawings have, and what is always there."""
    used = sorted({int(code) for drawing in drawings for code in set(drawing.bars.kind)})
    colours = [(BAR_COLOURS[2 * code], f"{_LETTERS[code]} {WORDS[code]}".strip()) for code in used]
    colours += [
        (look.bubble, "bubble; % next to a device: its idle share"),
        (look.static, "weights, gradients, optimizer"),
        (look.memory, "activations"),
    ]
    samples = [_sample(f"background:{colour}", name) for colour, name in colours]
    samples.append(_sample(f"background:{look.limit};height:2px", "memory limit"))
    if has_bound:
        samples.append(_sample(f"border-left:2px dashed {look.bound};width:0", "lower bound"))
    inner = "".join(samples)
    return (
        f'<div style="display:flex;flex-wrap:wrap;gap:2px 14px;color:{look.text};'
        f'font:12px system-ui,sans-serif;align-items:center">{inner}</div>'
    )


def _sample(style: str, name: str) -> str:
    box = f"display:inline-block;width:14px;height:11px;vertical-align:middle;{style}"
    return (
        f'<span><span style="{box}"></span> <span style="vertical-align:middle">'
        f"{escape(name)}</span></span>"
    )


# --- The title of a figure, which a script wraps where the figure is narrow.


def _add_title(plot: Any, text: str, *, is_bold: bool = True) -> Title:
    """Put a title above a figure and return it; it has the figure's name and ``-title``.

    It is an annotation like others: of a figure's own title Bokeh does not notice when it gets
    another line.
    """
    title = Title(
        text=text, text_font_style="bold" if is_bold else "normal", name=f"{plot.name}-title"
    )
    plot.add_layout(title, "above")
    return title


def css_of(theme: Theme) -> str:
    """Return the styles that make inputs, toolbars and menus look like the page."""
    look = PALETTES[theme]
    arrow = (
        f"linear-gradient(45deg, transparent 50%, {look.text} 50%),"
        f" linear-gradient(135deg, {look.text} 50%, transparent 50%)"
    )
    return (
        f":host {{ color-scheme: {theme}; color: {look.text};"
        f" font-family: {FONT}; font-size: 12px;"
        f" --color: {look.text}; --background-color: {look.page}; --inverted-color: {look.page};"
        f" --surface-background-color: {look.grid}; --hover-color: {look.grid};"
        f" --active-bg: {look.grid}; --border-color: {look.edge}; --divider-color: {look.grid};"
        f" --placeholder-color: {look.quiet}; --icon-color: {look.quiet}; --border-radius: 3px }}"
        f".bk-input {{ min-height: 28px; padding-block: 2px; padding-inline: 8px }}"
        # As exact as bokeh's own rule, which draws a black arrow.
        f"select:not([multiple]).bk-input {{ background-image: {arrow};"
        " background-size: 4px 5px; background-position: right 12px center, right 8px center }"
    )
