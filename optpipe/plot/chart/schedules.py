"""Schedules one above the other: the figures, the tools they share, and the scripts between."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any

from bokeh.layouts import column, row
from bokeh.models import CustomJS, HoverTool, InlineStyleSheet, LayoutDOM, Range1d
from bokeh.models.dom import HTML, ValueRef
from bokeh.models.widgets import Div, NumericInput

from optpipe.plot.bars import KINDS, drawing_of
from optpipe.plot.chart.gantt import (
    MOST_AT_ONCE,
    VEIL_CODE,
    draw_gantt,
    has_bound_line,
    left_border,
)
from optpipe.plot.chart.legend import WORDS, legend_of
from optpipe.plot.chart.memory import draw_memory
from optpipe.plot.chart.stack import stacked
from optpipe.plot.chart.style import INPUT_MARGIN, PALETTES, Theme, css_of
from optpipe.plot.glyphs import LETTERS
from optpipe.plot.rows import has_side_lanes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.plot.bars import Drawing
    from optpipe.plot.chart.gantt import Gantt
    from optpipe.plot.chart.memory import Memory
    from optpipe.plot.interactive import View

__all__ = ["lay_out"]

_MARGIN = 0.01
_CLOSEST = 1e-6
_WRAPPING = {"flex-wrap": "wrap"}


def lay_out(views: Sequence[View], theme: Theme) -> LayoutDOM:
    """Return the chart of some schedules; see `optpipe.plot.interactive.schedule_chart`."""
    drawings = [drawing_of(view.problem, view.programs) for view in views]
    time = _time_axis(max((drawing.makespan_ms for drawing in drawings), default=0.0))
    border_px = left_border([device.name for view in views for device in view.problem.devices])
    has_sides = any(has_side_lanes(drawing.bars) for drawing in drawings)
    gantts = [
        draw_gantt(
            view,
            drawing,
            time,
            name=f"gantt-{index}",
            theme=theme,
            has_sides=has_sides,
            border_px=border_px,
        )
        for index, (view, drawing) in enumerate(zip(views, drawings, strict=True))
    ]
    memories = [
        draw_memory(view, drawing, time, name=f"memory-{index}", theme=theme, border_px=border_px)
        for index, (view, drawing) in enumerate(zip(views, drawings, strict=True))
    ]
    follow = _follow(views, theme)
    parts = [_part(*held) for held in zip(views, drawings, gantts, memories, strict=True)]
    script = _script_of(parts, follow, time)
    for view, gantt, memory in zip(views, gantts, memories, strict=True):
        _connect(view, gantt, memory, script)
    if memories:
        _label_time(memories[-1].figure)
    figures = [held.figure for pair in zip(gantts, memories, strict=True) for held in pair]
    grid = stacked(figures, theme)
    controls = row(follow, *(memory.select for memory in memories), styles=_WRAPPING)
    samples = legend_of(
        drawings, PALETTES[theme], has_bound=any(has_bound_line(view) for view in views)
    )
    legend = Div(text=samples, sizing_mode="stretch_width", margin=(2, 0, 4, 0))
    return column(legend, controls, grid, sizing_mode="stretch_width", name="schedules")


def _time_axis(length_ms: float) -> Range1d:
    """Return the axis that all figures share; it zooms in, and never out of the picture."""
    length = length_ms or 1.0
    start, end = -_MARGIN * length, (1 + _MARGIN) * length
    return Range1d(
        start=start, end=end, bounds=(start, end), min_interval=_CLOSEST * length, name="time"
    )


def _part(view: View, drawing: Drawing, gantt: Gantt, memory: Memory) -> dict[str, Any]:
    """Return what the script reads and changes of one view."""
    return {
        "gantt": gantt.figure,
        "title": gantt.title,
        "headline": gantt.title.text,
        "bars": gantt.bars.data_source,
        "labels": gantt.labels,
        "letters": [LETTERS.get(kind, "") if kind is not None else "" for kind in KINDS],
        "hasChunks": len(view.problem.stages) > len(view.problem.devices),
        "path": gantt.path,
        "memory": memory.title,
        "curves": memory.curves,
        "devices": memory.devices,
        "shown": memory.shown,
        "limit": memory.limit,
        "select": memory.select,
        "end": drawing.makespan_ms,
    }


def _script_of(parts: Sequence[dict[str, Any]], follow: NumericInput, time: Range1d) -> CustomJS:
    """Return the one script of all figures; it runs when what they share changes."""
    args = {
        "parts": parts,
        "follow": follow,
        "time": time,
        "veil": VEIL_CODE,
        "most": MOST_AT_ONCE,
    }
    script = CustomJS(args=args, code=_script("titles", "labels", "schedules"))
    follow.js_on_change("value", script)
    time.js_on_change("start", script)
    time.js_on_change("end", script)
    return script


def _connect(view: View, gantt: Gantt, memory: Memory, script: CustomJS) -> None:
    """Let one view's figures run the script."""
    gantt.figure.add_tools(_hover(view, gantt, script))
    gantt.figure.js_on_change("inner_width", script)
    for event in ("tap", "doubletap", "mouseleave"):
        gantt.figure.js_on_event(event, script)
    memory.select.js_on_change("value", script)


def _hover(view: View, gantt: Gantt, script: CustomJS) -> HoverTool:
    names = [device.name for device in view.problem.devices]
    args = {"bars": gantt.bars.data_source, "kinds": list(WORDS), "devices": names}
    told = ValueRef(field="code", formatter=CustomJS(args=args, code=_script("hover")))
    return HoverTool(
        renderers=[gantt.bars],
        tooltips=HTML(html=[told]),
        point_policy="follow_mouse",
        attachment="vertical",
        limit=1,
        callback=script,
    )


def _script(*names: str) -> str:
    """Return files as one module: Bokeh loads modules from text, which cannot import others."""
    folder = files("optpipe.plot.chart")
    return "\n".join(folder.joinpath(f"{name}.mjs").read_text("utf-8") for name in names)


def _follow(views: Sequence[View], theme: Theme) -> NumericInput:
    most = max((view.problem.num_microbatches for view in views), default=1) - 1
    return NumericInput(
        title="follow micro-batch",
        low=0,
        high=most,
        value=None,
        placeholder=f"0 to {most}",
        width=150,
        margin=INPUT_MARGIN,
        name="follow",
        stylesheets=[InlineStyleSheet(css=css_of(theme))],
    )


def _label_time(plot: Any) -> None:
    plot.xaxis.axis_label = "time (ms)"
