"""The frontier of a sweep to zoom into: the best objective and its bound over the memory limit."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from bokeh.layouts import column
from bokeh.models import ColumnDataSource, HoverTool, InlineStyleSheet, LayoutDOM, Range1d
from bokeh.models.widgets import Div
from bokeh.plotting import figure

from optpipe.plot.chart.style import FONT, PALETTES, Palette, Theme, css_of
from optpipe.plot.frontier import LINE_COLOURS, Unit, edges, unit_of
from optpipe.plot.headline import gap_of
from optpipe.plot.units import format_ms, format_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.frontier import Line, Point

__all__ = ["lay_out"]

_HEIGHT_PX = 400
_FOOT = 0.03
_MOST_NAMED = 16


def lay_out(lines: Sequence[Line], title: str, theme: Theme) -> LayoutDOM:
    """Return the chart of a frontier; see `optpipe.plot.interactive.frontier_chart`."""
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
        _draw_line(
            plot,
            line,
            unit,
            LINE_COLOURS[index % len(LINE_COLOURS)],
            is_named=index < _MOST_NAMED,
        )
    _draw_infeasible(plot, points, unit, bottom + _FOOT * (top - bottom), look)
    _place_legend(plot)
    parts = [_heading(title, look), plot] if title else [plot]
    return column(*parts, sizing_mode="stretch_width", name="frontier-layout")


def _heading(title: str, look: Palette) -> Div:
    """Return the title as HTML, which breaks into lines where the page is narrow."""
    styles: dict[str, str | None] = {
        "color": look.text,
        "font": f"bold 13px {FONT}",
        "overflow-wrap": "anywhere",
    }
    return Div(text=escape(title), styles=styles, sizing_mode="stretch_width")


def _draw_line(plot: Any, line: Line, unit: Unit, colour: str, *, is_named: bool) -> None:
    """Draw what was found, what is proven, and the room between."""
    named: dict[str, Any] = {"legend_label": line.label or " "} if is_named else {}
    found = [point for point in line.points if point.objective_ms is not None]
    proven = [
        point for point in line.points if point.bound_ms is not None and not point.is_infeasible
    ]
    between = [point for point in found if point.bound_ms is not None]
    plot.varea(
        x=[point.limit_bytes / unit.size for point in between],
        y1=[point.bound_ms for point in between],
        y2=[point.objective_ms for point in between],
        fill_color=colour,
        fill_alpha=0.15,
    )
    plot.line(
        x=[point.limit_bytes / unit.size for point in proven],
        y=[point.bound_ms for point in proven],
        line_color=colour,
        line_dash="dashed",
        line_width=1.5,
    )
    source = ColumnDataSource(_columns(line, found, unit))
    plot.line(source=source, x="memory", y="ms", line_color=colour, line_width=2, **named)
    dots = plot.scatter(source=source, x="memory", y="ms", size=7, color=colour)
    told = [("", "@name"), ("memory", f"@memory{{0.[000]}} {unit.name}"), ("", "@told")]
    plot.add_tools(HoverTool(renderers=[dots], tooltips=told))


def _columns(line: Line, found: Sequence[Point], unit: Unit) -> dict[str, list[Any]]:
    return {
        "memory": [point.limit_bytes / unit.size for point in found],
        "ms": [point.objective_ms for point in found],
        "name": [line.label for _ in found],
        "told": [_told(point) for point in found],
    }


def _told(point: Point) -> str:
    objective_ms = point.objective_ms or 0.0
    if point.bound_ms is None:
        return f"{format_ms(objective_ms)} ms, no bound"
    gap = format_share(gap_of(objective_ms, point.bound_ms))
    return f"{format_ms(objective_ms)} ms, bound {format_ms(point.bound_ms)} ms, gap {gap}"


def _draw_infeasible(
    plot: Any, points: Sequence[Point], unit: Unit, height: float, look: Palette
) -> None:
    nothing = sorted({point.limit_bytes / unit.size for point in points if point.is_infeasible})
    if not nothing:
        return
    plot.scatter(
        x=nothing,
        y=[height] * len(nothing),
        marker="x",
        size=11,
        line_width=2,
        color=look.limit,
        legend_label="nothing fits (proven)",
    )


def _place_legend(plot: Any) -> None:
    """Put the legend below: inside, it would cover points. Without a line there is none."""
    if not plot.legend:
        return
    legend = plot.legend[0]
    legend.orientation = "horizontal"
    legend.ncols = 3
    legend.click_policy = "hide"
    plot.add_layout(legend, "below")
