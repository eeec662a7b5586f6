"""Interactive charts of schedules and frontiers in a browser.

They need the extra ``plot``: ``pip install '.[plot]'`` in a clone of OptPipe.

A chart is a bokeh layout. `chart_item` turns it into JSON for a page that has BokehJS already (the
service's), `chart_html` into one file that needs nothing else. Neither uses the network. This
module needs bokeh: call `optpipe.plot.scene.require_drawing` before.
"""

from __future__ import annotations

import hashlib
import json
import re
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from bokeh.embed import json_item
from bokeh.layouts import column, row
from bokeh.models import (
    BoxZoomTool,
    ClickPanTool,
    ColumnDataSource,
    CustomJS,
    GridPlot,
    HoverTool,
    InlineStyleSheet,
    LayoutDOM,
    PanTool,
    Range1d,
    ResetTool,
    SaveTool,
    Toolbar,
    ToolProxy,
    WheelZoomTool,
    ZoomInTool,
    ZoomOutTool,
)
from bokeh.models.dom import HTML, ValueRef
from bokeh.models.widgets import Div, NumericInput
from bokeh.plotting import figure
from bokeh.resources import Resources
from bokeh.themes import Theme as BokehTheme

from optpipe.plot.interactive_panels import (
    FONT,
    INPUT_MARGIN,
    MOST_AT_ONCE,
    VEIL_CODE,
    WORDS,
    css_of,
    draw_gantt,
    draw_memory,
    left_border,
    legend_of,
)
from optpipe.plot.scene import (
    COMPONENTS,
    LINE_COLOURS,
    PALETTES,
    Theme,
    Unit,
    edges,
    has_side_lanes,
    length_of,
    steps_of,
    unit_of,
)
from optpipe.schedule import gap_of
from optpipe.units import format_ms, format_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bokeh.models import Tool
    from bokeh.models.renderers import GlyphRenderer

    from optpipe.plot.scene import View
    from optpipe.sweep import FrontierLine, Point

__all__ = ["chart_html", "chart_item", "frontier_chart", "schedule_chart"]


_MARGIN = 0.01
_CLOSEST = 1e-6
_WRAPPING = {"flex-wrap": "wrap"}


def schedule_chart(views: Sequence[View], *, theme: Theme = "light") -> LayoutDOM:
    """Return schedules one above the other on one time axis, each with a memory chart below it.

    Hovering over an action describes it in words and shows its micro-batch's whole path, in every
    view. A tap keeps the path and shows the memory of the action's device. The layout's ``tags``
    are the views' objectives in ms. The time axis is the Range1d named ``time``. The views' figures
    are ``gantt-0``, ``gantt-1``, ... and ``memory-0``, ``memory-1``, ... Raises
    `IllegalScheduleError` if programs get stuck.
    """
    drawings = [view.drawing for view in views]
    length_ms = max((drawing.makespan_ms for drawing in drawings), default=0.0)
    length = length_ms or 1.0
    start, end = -_MARGIN * length, (1 + _MARGIN) * length
    time = Range1d(
        start=start, end=end, bounds=(start, end), min_interval=_CLOSEST * length, name="time"
    )
    tags = [length_of(view.problem, drawing) for view, drawing in zip(views, drawings, strict=True)]
    border_px = left_border([device.name for view in views for device in view.problem.devices])
    has_sides = any(has_side_lanes(drawing.bars) for drawing in drawings)
    parts: list[dict[str, Any]] = []
    figures: list[Any] = []
    all_bars = []
    for index, (view, drawing) in enumerate(zip(views, drawings, strict=True)):
        bars, gantt = draw_gantt(
            view,
            drawing,
            time,
            name=f"gantt-{index}",
            theme=theme,
            has_sides=has_sides,
            border_px=border_px,
        )
        plot, memory = draw_memory(
            view, drawing, time, name=f"memory-{index}", theme=theme, border_px=border_px
        )
        all_bars.append(bars)
        figures += [gantt["gantt"], plot]
        plot.visible = memory["select"].visible = drawing.has_memory
        parts.append(gantt | memory)
    last_microbatch = max((view.problem.num_microbatches for view in views), default=1) - 1
    follow = NumericInput(
        title="follow micro-batch",
        low=0,
        high=last_microbatch,
        value=None,
        placeholder=f"0 to {last_microbatch}",
        width=150,
        margin=INPUT_MARGIN,
        name="follow",
        stylesheets=[InlineStyleSheet(css=css_of(theme))],
    )
    args = {"parts": parts, "follow": follow, "time": time, "veil": VEIL_CODE, "most": MOST_AT_ONCE}
    script = CustomJS(args=args, code=_script("titles", "labels", "schedules"))
    follow.js_on_change("value", script)
    time.js_on_change("start", script)
    time.js_on_change("end", script)
    for view, bars, part in zip(views, all_bars, parts, strict=True):
        _connect(view, bars, part, script)
    if figures:
        last = figures[-1] if drawings[-1].has_memory else figures[-2]
        last.xaxis.visible = True
        last.xaxis.axis_label = "time (ms)"
    grid = _stacked(figures, theme)
    controls = row(follow, *(part["select"] for part in parts), styles=_WRAPPING)
    samples = legend_of(
        drawings, PALETTES[theme], has_bound=any(view.has_bound_line for view in views)
    )
    legend = Div(text=samples, sizing_mode="stretch_width", margin=(2, 0, 4, 0))
    return column(legend, controls, grid, sizing_mode="stretch_width", name="schedules", tags=tags)


def _connect(view: View, bars: GlyphRenderer[Any], part: dict[str, Any], script: CustomJS) -> None:
    """Let one view's figures run the script."""
    gantt = part["gantt"]
    names = [device.name for device in view.problem.devices]
    args = {"bars": part["bars"], "kinds": list(WORDS), "devices": names}
    tooltip = ValueRef(field="code", formatter=CustomJS(args=args, code=_script("hover")))
    hover = HoverTool(
        renderers=[bars],
        tooltips=HTML(html=[tooltip]),
        point_policy="follow_mouse",
        attachment="vertical",
        limit=1,
        callback=script,
    )
    gantt.add_tools(hover)
    gantt.js_on_change("inner_width", script)
    for event in ("tap", "doubletap", "mouseleave"):
        gantt.js_on_event(event, script)
    part["select"].js_on_change("value", script)


def _script(*names: str) -> str:
    """Return files as one module: Bokeh loads modules from text, which cannot import others."""
    folder = files("optpipe.plot")
    return "\n".join(folder.joinpath(f"{name}.mjs").read_text("utf-8") for name in names)


# --- The frontier of a sweep to zoom into: the best objective and its bound over the memory limit.

_HEIGHT_PX = 400
_FOOT = 0.03
_MOST_NAMED = 16


def frontier_chart(
    lines: Sequence[FrontierLine], title: str, *, theme: Theme = "light"
) -> LayoutDOM:
    """Return the best objectives and bounds over the memory limit, a line per family."""
    look = PALETTES[theme]
    points = [point for line in lines for point in line.points]
    bottom, top = edges(points)
    unit = unit_of(points)
    plot = figure(
        name="frontier",
        y_range=Range1d(start=bottom, end=top),
        frame_height=_HEIGHT_PX,
        sizing_mode="stretch_width",
        tools="pan,wheel_zoom,box_zoom,zoom_in,zoom_out,reset,save",
        active_scroll="wheel_zoom",
        x_axis_label=f"memory per device ({unit.name})",
        y_axis_label="objective (ms); dashed: lower bound",
        toolbar_location="above",
    )
    plot.toolbar.logo = None
    plot.toolbar.stylesheets = [InlineStyleSheet(css=css_of(theme))]
    for index, line in enumerate(lines):
        _add_line(
            plot, line, unit, LINE_COLOURS[index % len(LINE_COLOURS)], is_named=index < _MOST_NAMED
        )
    nothing = sorted({point.limit_bytes / unit.size for point in points if point.is_infeasible})
    if nothing:
        plot.scatter(
            x=nothing,
            y=[bottom + _FOOT * (top - bottom)] * len(nothing),
            marker="x",
            size=11,
            line_width=2,
            color=look.limit,
            legend_label="nothing fits (proven)",
        )
    # The legend is below the plot: inside, it would cover points. Without a line there is none.
    for legend in plot.legend:
        legend.orientation = "horizontal"
        legend.ncols = 3
        legend.click_policy = "hide"
        plot.add_layout(legend, "below")
    parts: list[Any] = [plot]
    if title:
        # HTML, which breaks into lines where the page is narrow.
        font = f"bold 13px {FONT}"
        styles: dict[str, str | None] = {
            "color": look.text,
            "font": font,
            "overflow-wrap": "anywhere",
        }
        parts.insert(0, Div(text=escape(title), styles=styles, sizing_mode="stretch_width"))
    return column(*parts, sizing_mode="stretch_width", name="frontier-layout")


def _words_of(point: Point) -> str:
    objective_ms = point.objective_ms or 0.0
    if point.bound_ms is None:
        return f"{format_ms(objective_ms)} ms, no bound"
    gap = format_share(gap_of(objective_ms, point.bound_ms) or 0.0)
    return f"{format_ms(objective_ms)} ms, bound {format_ms(point.bound_ms)} ms, gap {gap}"


def _add_line(plot: Any, line: FrontierLine, unit: Unit, colour: str, *, is_named: bool) -> None:
    """Draw what was found, what is proven, and the room between."""
    named: dict[str, Any] = {"legend_label": line.label or " "} if is_named else {}
    steps = steps_of(line.points)
    plot.varea(
        x=[end / unit.size for end in steps.ends_bytes],
        y1=steps.low_ms,
        y2=steps.high_ms,
        fill_color=colour,
        fill_alpha=0.15,
    )
    plot.step(
        x=[point.limit_bytes / unit.size for point in steps.proven],
        y=[point.bound_ms for point in steps.proven],
        mode="before",
        line_color=colour,
        line_dash="dashed",
        line_width=1.5,
    )
    source = ColumnDataSource(
        {
            "memory": [point.limit_bytes / unit.size for point in steps.found],
            "ms": [point.objective_ms for point in steps.found],
            "name": [line.label for _ in steps.found],
            "told": [_words_of(point) for point in steps.found],
        }
    )
    shape: dict[str, Any] = {"mode": "after", "line_color": colour, "line_width": 2}
    plot.step(source=source, x="memory", y="ms", **shape, **named)
    dots = plot.scatter(source=source, x="memory", y="ms", size=7, color=colour)
    tooltips = [("", "@name"), ("memory", f"@memory{{0.[000]}} {unit.name}"), ("", "@told")]
    plot.add_tools(HoverTool(renderers=[dots], tooltips=tooltips))


# --- A bokeh layout as JSON for a page that has BokehJS, or as one file that holds everything.

_COUNTED = re.compile(r"p\d+")
_PLACE = "chart"
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="{theme}">
<title>{title}</title>
<style>
body {{ margin: 12px 16px; background: {page}; color: {text}; font: 14px system-ui, sans-serif; }}
h1 {{ font-size: 18px; margin: 0 0 8px; overflow-wrap: anywhere; }}
.bk-Tooltip {{ --tooltip-color: {page}; --tooltip-text: {text}; --tooltip-border: {edge};
  --tooltip-arrow-color: {edge}; }}
</style>
{scripts}
</head>
<body>
<h1>{title}</h1>
<main id="{place}"></main>
<script type="application/json" id="item">{item}</script>
<script>
Bokeh.embed.embed_item(JSON.parse(document.getElementById("item").textContent), "{place}")
</script>
</body>
</html>
"""


def chart_item(layout: LayoutDOM, *, theme: Theme = "light") -> str:
    """Return a chart as JSON for ``Bokeh.embed.embed_item``; equal charts, equal text.

    The page must have loaded `COMPONENTS` of the same version of bokeh.
    """
    item = json_item(layout, theme=BokehTheme(json=_theme_of(theme)))
    return json.dumps(_renamed(item), separators=(",", ":"), allow_nan=False)


def chart_html(layout: LayoutDOM, *, title: str, theme: Theme = "light") -> str:
    """Return a chart as one HTML file that holds everything it needs; equal charts, equal text."""
    look = PALETTES[theme]
    scripts = Resources(mode="inline", components=list(COMPONENTS)).render_js()
    return _PAGE.format(
        theme=theme,
        title=escape(title),
        page=look.page,
        text=look.text,
        edge=look.edge,
        scripts=scripts,
        place=_PLACE,
        # Nothing in a script element may look like its end, or like a comment, which has no end.
        item=chart_item(layout, theme=theme).replace("<", "\\u003c"),
    )


def _theme_of(theme: Theme) -> dict[str, dict[str, dict[str, object]]]:
    """Return the styles that bokeh applies to frames, axes, grids, titles and tooltips."""
    look = PALETTES[theme]

    def text(name: str, colour: str, size: str = "12px") -> dict[str, object]:
        return {f"{name}_color": colour, f"{name}_font": FONT, f"{name}_font_size": size}

    return {
        "attrs": {
            "Plot": {
                "background_fill_color": look.page,
                "border_fill_color": look.page,
                "outline_line_color": None,
            },
            "Axis": {
                **text("axis_label_text", look.quiet),
                **text("major_label_text", look.text),
                "axis_label_text_font_style": "normal",
                "axis_line_color": look.grid,
                "major_tick_line_color": look.grid,
                "minor_tick_line_color": None,
            },
            "Grid": {"grid_line_color": look.grid},
            "Title": {**text("text", look.text, "13px"), "text_font_style": "bold"},
            "Label": text("text", look.text),
            "Legend": {
                **text("label_text", look.text),
                "background_fill_color": look.page,
                "background_fill_alpha": 0.85,
                "border_line_color": None,
            },
        }
    }


def _renamed(item: Any) -> Any:
    """Return an item whose models are numbered by their place in it, below a digest of it.

    Bokeh counts models from the start of the process, so that the same chart would be other bytes
    each time. The digest keeps the models of two charts on one page apart.
    """
    plain = _walked(item, {}, "")
    text = json.dumps(plain, separators=(",", ":"), allow_nan=False)
    return _walked(item, {}, hashlib.sha256(text.encode()).hexdigest()[:10])


def _walked(value: Any, names: dict[str, str], prefix: str) -> Any:
    if isinstance(value, dict):
        return {
            key: names.setdefault(part, f"{prefix}-{len(names)}")
            if key in {"id", "root_id"} and isinstance(part, str) and _COUNTED.fullmatch(part)
            else _walked(part, names, prefix)
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [_walked(part, names, prefix) for part in value]
    return value


# --- Figures one above the other, with one toolbar whose tools act on all of them.


def _stacked(figures: Sequence[Any], theme: Theme) -> GridPlot:
    """Return figures that share a time axis in a column; all tools act on that axis alone.

    Bokeh's own merging of toolbars orders tools differently each time.
    """
    tools: list[list[Tool]] = []
    for plot in figures:
        pan, wheel = PanTool(dimensions="width"), WheelZoomTool(dimensions="width")
        own = [
            pan,
            wheel,
            BoxZoomTool(dimensions="width"),
            ZoomInTool(dimensions="width"),
            ZoomOutTool(dimensions="width"),
            ClickPanTool(direction="left"),
            ClickPanTool(direction="right"),
            ResetTool(),
            SaveTool(),
        ]
        tools.append(own)
        plot.add_tools(*own)
        plot.toolbar.active_drag = pan
        plot.toolbar.active_scroll = wheel
    proxies: list[Tool | ToolProxy] = [
        ToolProxy(tools=list(equal)) for equal in zip(*tools, strict=True)
    ]
    look = InlineStyleSheet(css=css_of(theme))
    return GridPlot(
        children=[(plot, place, 0) for place, plot in enumerate(figures)],
        toolbar=Toolbar(tools=proxies, logo=None, stylesheets=[look]),
        toolbar_location="above",
        sizing_mode="stretch_width",
    )
