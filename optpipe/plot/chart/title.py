"""The title of a figure, which a script wraps where the figure is narrow."""

from __future__ import annotations

from typing import Any

from bokeh.models.annotations import Title

__all__ = ["add_title"]


def add_title(plot: Any, text: str, *, is_bold: bool = True) -> Title:
    """Put a title above a figure and return it; it has the figure's name and ``-title``.

    It is an annotation like others: of a figure's own title Bokeh does not notice when it gets
    another line.
    """
    title = Title(
        text=text,
        text_font_style="bold" if is_bold else "normal",
        name=f"{plot.name}-title",
    )
    plot.add_layout(title, "above")
    return title
