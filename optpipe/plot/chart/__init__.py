"""The parts of the interactive chart (`optpipe.plot.interactive`); most of them import bokeh."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bokeh.resources import Component

__all__ = ["COMPONENTS"]

COMPONENTS: tuple[Component, ...] = ("bokeh", "bokeh-widgets")
"""The scripts of BokehJS that a chart needs, in the order in which a page loads them."""
