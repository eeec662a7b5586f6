"""How pictures and tables write times, sizes and shares."""

from __future__ import annotations

import math

__all__ = ["format_bytes", "format_ms", "format_share", "tick_step"]


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
    """Return a share of one as a percentage: 9.4 %."""
    return f"{round(100 * value, 1) + 0.0:.1f} %"  # not -0.0


def tick_step(length: float, num_ticks: int) -> float:
    """Return the 1-2-5 step that cuts a length into at most about ``num_ticks`` parts."""
    if length <= 0:
        return 1.0
    raw = length / max(1, num_ticks)
    power = 10.0 ** math.floor(math.log10(raw))
    return next((power * step for step in (1, 2, 5) if power * step >= raw), power * 10)
