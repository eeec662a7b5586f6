"""Formats of times, sizes, shares and results in pictures, tables and notebooks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sized
from enum import Enum
from html import escape
from typing import Any

__all__ = ["ShortRepr", "format_bytes", "format_ms", "format_share", "html_table", "tick_step"]

_MOST_CHARS = 199
_MOST_TEXT = 60


class ShortRepr:
    """Base of results: their repr has less than 200 characters.

    It shows numbers and texts, and how many items a list has. Empty fields are left out.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        """Return the class and its short fields."""
        kind: Any = type(self)
        names = getattr(kind, "model_fields", None) or kind.__dataclass_fields__
        values = {name: getattr(self, name) for name in names}
        parts = [f"{name}={text}" for name, it in values.items() if (text := _shorten(it))]
        found = f"{kind.__name__}({', '.join(parts)})"
        return found if len(found) <= _MOST_CHARS else f"{found[: _MOST_CHARS - 4]}...)"

    __str__ = __repr__


def _shorten(value: object) -> str:
    """Return a number or text, the number of items of a list; nothing for all others."""
    if isinstance(value, bool | int | Enum):
        return str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        cut = value if len(value) <= _MOST_TEXT else f"{value[: _MOST_TEXT - 3]}..."
        return repr(cut) if value else ""
    if isinstance(value, Sized) and len(value):
        return f"<{len(value)} items>"
    return ""


def format_ms(value: float) -> str:
    """Return a time in ms with a sensible number of digits: 2,345.6 or 0.042."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.1f}"
    return f"{value:.4g}"


def format_bytes(value: int) -> str:
    """Return a size with its binary unit: 74.8 GiB."""
    if abs(value) < 1024:
        return f"{value} B"
    size = float(value)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if abs(size) < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def format_share(value: float) -> str:
    """Return a share of one as a percentage: 9.4%."""
    return f"{round(100 * value, 1) + 0.0:.1f}%"  # not -0.0


def tick_step(length: float, num_ticks: int) -> float:
    """Return the 1-2-5 step that cuts a length into at most about ``num_ticks`` parts."""
    if length <= 0:
        return 1.0
    raw = length / max(1, num_ticks)
    power = 10.0 ** math.floor(math.log10(raw))
    return next((power * step for step in (1, 2, 5) if power * step >= raw), power * 10)


def html_table(rows: Iterable[tuple[str, ...]]) -> str:
    """Return rows of texts as an HTML table, for notebooks."""
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
