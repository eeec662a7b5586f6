"""Figures one above the other, with one toolbar whose tools act on all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bokeh.models import (
    BoxZoomTool,
    ClickPanTool,
    GridPlot,
    InlineStyleSheet,
    PanTool,
    ResetTool,
    SaveTool,
    Toolbar,
    ToolProxy,
    WheelZoomTool,
    ZoomInTool,
    ZoomOutTool,
)

from optpipe.plot.chart.style import css_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bokeh.models import Tool

    from optpipe.plot.chart.style import Theme

__all__ = ["stacked"]


def stacked(figures: Sequence[Any], theme: Theme) -> GridPlot:
    """Return figures that share a time axis in a column; all tools act on that axis alone.

    Bokeh's own merging of toolbars orders tools differently each time.
    """
    tools = [_tools() for _ in figures]
    for plot, (pan, wheel, *others) in zip(figures, tools, strict=True):
        plot.add_tools(pan, wheel, *others)
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


def _tools() -> list[Tool]:
    """Return new tools of one figure; those that are active from the start come first."""
    return [
        PanTool(dimensions="width"),
        WheelZoomTool(dimensions="width"),
        BoxZoomTool(dimensions="width"),
        ZoomInTool(dimensions="width"),
        ZoomOutTool(dimensions="width"),
        ClickPanTool(direction="left"),
        ClickPanTool(direction="right"),
        ResetTool(),
        SaveTool(),
    ]
