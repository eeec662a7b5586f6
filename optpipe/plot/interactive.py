"""Schedules and frontiers to zoom into, in a browser: ``pip install 'optpipe[plot]'``.

A chart is a bokeh layout. `chart_item` turns it into JSON for a page that has BokehJS already (the
service's), `chart_html` into one file that needs nothing else. Neither asks the network for
anything. The work is in `optpipe.plot.chart`, which is imported when it is needed, as bokeh is.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from optpipe.errors import MissingExtraError
from optpipe.plot.chart import COMPONENTS
from optpipe.plot.chart.style import Theme

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bokeh.models import LayoutDOM

    from optpipe.action import Programs
    from optpipe.frontier import Line
    from optpipe.problem import Problem

__all__ = [
    "COMPONENTS",
    "Theme",
    "View",
    "chart_html",
    "chart_item",
    "frontier_chart",
    "require_bokeh",
    "schedule_chart",
]


@dataclass(frozen=True)
class View:
    """One schedule of a chart: legal programs, over a memory limit or not.

    Parameters
    ----------
    title
        Stands before the numbers.
    problem, programs
        What is shown.
    bound_ms
        Proven lower bound of the problem's objective, where one is known.
    """

    title: str
    problem: Problem
    programs: Programs
    bound_ms: float | None = None


def schedule_chart(views: Sequence[View], *, theme: Theme = "light") -> LayoutDOM:
    """Return schedules one above the other on one time axis, each with a memory chart below it.

    Hovering over an action says in words what it is and shows its micro-batch's whole path, in
    every view; a tap keeps the path and shows the memory of the action's device. The time axis is
    the Range1d named ``time``, the views' figures are ``gantt-0``, ``gantt-1``, ... and
    ``memory-0``, ``memory-1``, ...

    Raises
    ------
    MissingExtraError
        If bokeh is not installed.
    IllegalScheduleError
        If programs get stuck.
    """
    require_bokeh()
    from optpipe.plot.chart.schedules import lay_out  # noqa: PLC0415 - an optional extra

    return lay_out(views, theme)


def frontier_chart(lines: Sequence[Line], title: str, *, theme: Theme = "light") -> LayoutDOM:
    """Return the best objectives and bounds over the memory limit, a line per family.

    Raises
    ------
    MissingExtraError
        If bokeh is not installed.
    """
    require_bokeh()
    from optpipe.plot.chart.frontier import lay_out  # noqa: PLC0415 - an optional extra

    return lay_out(lines, title, theme)


def chart_item(layout: LayoutDOM, *, theme: Theme = "light") -> str:
    """Return a chart as JSON for ``Bokeh.embed.embed_item``; equal charts, equal text.

    The page must have loaded `COMPONENTS` of the same version of bokeh.

    Raises
    ------
    MissingExtraError
        If bokeh is not installed.
    """
    require_bokeh()
    from optpipe.plot.chart.page import item_of  # noqa: PLC0415 - an optional extra

    return item_of(layout, theme)


def chart_html(layout: LayoutDOM, *, title: str, theme: Theme = "light") -> str:
    """Return a chart as one HTML file that holds everything it needs; equal charts, equal text.

    Raises
    ------
    MissingExtraError
        If bokeh is not installed.
    """
    require_bokeh()
    from optpipe.plot.chart.page import html_of  # noqa: PLC0415 - an optional extra

    return html_of(layout, title, theme)


def require_bokeh() -> None:
    """Refuse to draw without bokeh.

    Raises
    ------
    MissingExtraError
        If it is not installed.
    """
    if find_spec("bokeh") is None:
        raise MissingExtraError(
            "interactive charts need bokeh, which is not installed; "
            "run: pip install 'optpipe[plot]'"
        )
