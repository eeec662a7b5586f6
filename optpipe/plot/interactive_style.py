"""Colours of the interactive chart, on a light page and on a dark one."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from optpipe.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bokeh.resources import Component

__all__ = [
    "COMPONENTS",
    "FONT",
    "INPUT_MARGIN",
    "PALETTES",
    "Palette",
    "Theme",
    "css_of",
    "require_bokeh",
    "theme_of",
]


Theme = Literal["light", "dark"]
FONT = "system-ui, sans-serif"
INPUT_MARGIN = (4, 10, 4, 0)
COMPONENTS: tuple[Component, ...] = ("bokeh", "bokeh-widgets")
"""The scripts of BokehJS that a chart needs, in the order in which a page loads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Palette:
    """Everything that is not a bar."""

    page: str
    text: str
    quiet: str
    grid: str
    bubble: str
    outline: str
    edge: str
    memory: str
    static: str
    limit: str
    bound: str


PALETTES: Mapping[Theme, Palette] = {
    "light": Palette(
        page="#ffffff",
        text="#1f2328",
        quiet="#57606a",
        grid="#e6e9ec",
        bubble="#eceff1",
        outline="#1f2328",
        edge="#b4bac2",
        memory="#4a9ad4",
        static="#90a4ae",
        limit="#b3261e",
        bound="#6a1b9a",
    ),
    "dark": Palette(
        page="#15181c",
        text="#e6e9ec",
        quiet="#9aa5b1",
        grid="#2a3037",
        bubble="#262b31",
        outline="#ffffff",
        edge="#555d68",
        memory="#4a9ad4",
        static="#5f6d78",
        limit="#ff6b5e",
        bound="#ce93f5",
    ),
}


def css_of(theme: Theme) -> str:
    """Return what makes inputs, toolbars and their menus look like the page; bokeh's are white."""
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


def theme_of(theme: Theme) -> dict[str, dict[str, dict[str, object]]]:
    """Return what bokeh applies to frames, axes, grids, titles and tooltips."""
    look = PALETTES[theme]
    return {
        "attrs": {
            "Plot": {
                "background_fill_color": look.page,
                "border_fill_color": look.page,
                "outline_line_color": None,
            },
            "Axis": {
                "axis_label_text_color": look.quiet,
                "axis_label_text_font": FONT,
                "axis_label_text_font_size": "12px",
                "axis_label_text_font_style": "normal",
                "axis_line_color": look.grid,
                "major_label_text_color": look.text,
                "major_label_text_font": FONT,
                "major_label_text_font_size": "12px",
                "major_tick_line_color": look.grid,
                "minor_tick_line_color": None,
            },
            "Grid": {"grid_line_color": look.grid},
            "Title": {
                "text_color": look.text,
                "text_font": FONT,
                "text_font_size": "13px",
                "text_font_style": "bold",
            },
            "Label": {"text_color": look.text, "text_font": FONT, "text_font_size": "12px"},
            "Legend": {
                "background_fill_color": look.page,
                "background_fill_alpha": 0.85,
                "border_line_color": None,
                "label_text_color": look.text,
                "label_text_font": FONT,
                "label_text_font_size": "12px",
            },
        }
    }


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
