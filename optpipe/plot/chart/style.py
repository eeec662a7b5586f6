"""Colours of the interactive chart, on a light page and on a dark one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PALETTES", "Palette", "Theme", "theme_of", "widget_css"]

Theme = Literal["light", "dark"]
_FONT = "system-ui, sans-serif"


@dataclass(frozen=True, slots=True, kw_only=True)
class Palette:
    """Everything that is not a bar."""

    page: str
    text: str
    quiet: str
    grid: str
    bubble: str
    outline: str
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
        memory="#4a9ad4",
        static="#5f6d78",
        limit="#ff6b5e",
        bound="#ce93f5",
    ),
}


def widget_css(theme: Theme) -> str:
    """Return what makes inputs of a page look like it; bokeh's are dark on white."""
    look = PALETTES[theme]
    return (
        f":host {{ color: {look.text}; font-family: {_FONT}; font-size: 12px }}"
        f".bk-input {{ background-color: {look.page}; color: {look.text};"
        f" border-color: {look.quiet}; min-height: 28px; padding-block: 2px }}"
        f"select.bk-input {{ background-size: 4px 5px; background-image:"
        f" linear-gradient(45deg, transparent 50%, {look.text} 50%),"
        f" linear-gradient(135deg, {look.text} 50%, transparent 50%);"
        " background-position: right 14px center, right 10px center }"
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
                "axis_label_text_font": _FONT,
                "axis_label_text_font_size": "12px",
                "axis_label_text_font_style": "normal",
                "axis_line_color": look.grid,
                "major_label_text_color": look.text,
                "major_label_text_font": _FONT,
                "major_label_text_font_size": "12px",
                "major_tick_line_color": look.grid,
                "minor_tick_line_color": None,
            },
            "Grid": {"grid_line_color": look.grid},
            "Title": {
                "text_color": look.text,
                "text_font": _FONT,
                "text_font_size": "13px",
                "text_font_style": "bold",
            },
            "Label": {"text_color": look.text, "text_font": _FONT, "text_font_size": "12px"},
            "Legend": {
                "background_fill_color": look.page,
                "background_fill_alpha": 0.85,
                "border_line_color": None,
                "label_text_color": look.text,
                "label_text_font": _FONT,
                "label_text_font_size": "12px",
            },
        }
    }
