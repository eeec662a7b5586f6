"""Differences in words: a line each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from optpipe.explain.difference import ScheduleDifference
from optpipe.explain.phrases import count, microbatches
from optpipe.plot.units import format_bytes, format_ms, format_share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.explain.difference import Cost, ModeChange, OrderChange
    from optpipe.explain.fields import FieldChange, ProblemDifference

__all__ = ["cost_line", "difference_lines"]

_MOST_LINES = 40


def difference_lines(found: ScheduleDifference | ProblemDifference) -> list[str]:
    """Return a line per change; of very many the first, and how many more there are."""
    if isinstance(found, ScheduleDifference):
        lines = list(_schedule_lines(found))
    else:
        lines = [_field_line(change) for change in found.fields]
    if len(lines) > _MOST_LINES:
        return [*lines[:_MOST_LINES], f"... and {len(lines) - _MOST_LINES} more (--json has all)"]
    return lines


def cost_line(cost: Cost) -> str:
    """Return ``makespan: 1,200.0 ms -> 1,100.0 ms (-100.0 ms, -8.3 %)``."""
    before, after = _value(cost.before, cost.unit), _value(cost.after, cost.unit)
    if cost.before is None or cost.after is None:
        return f"{cost.name}: {before} -> {after}"
    change = cost.after - cost.before
    if change == 0:
        return f"{cost.name}: {before}, unchanged"
    sign = "+" if change > 0 else ""
    if cost.unit == "share":
        return f"{cost.name}: {before} -> {after} ({sign}{100 * change:.1f} points)"
    by = _value(change, cost.unit)
    if cost.before == 0:
        return f"{cost.name}: {before} -> {after} ({sign}{by})"
    share = format_share(change / cost.before)
    return f"{cost.name}: {before} -> {after} ({sign}{by}, {sign}{share})"


def _schedule_lines(found: ScheduleDifference) -> Iterator[str]:
    for place in found.placement:
        before, after = (_place(device) for device in (place.before, place.after))
        yield f"stage {place.stage}: {before} -> {after}"
    for change in (*found.treatment, *found.backward):
        yield _mode_line(change)
    for order in found.order:
        yield _order_line(order)


def _place(device: int | None) -> str:
    return "absent" if device is None else f"device {device}"


def _mode_line(change: ModeChange) -> str:
    what = "backward " if "(" in change.before else ""
    return (
        f"stage {change.stage}: {microbatches(change.microbatches)}: {what}{change.before} -> "
        f"{change.after}"
    )


def _order_line(order: OrderChange) -> str:
    parts = []
    if order.moved:
        parts.append(f"{order.moved} of {count(order.common, 'common action')} moved")
    if order.removed:
        parts.append(f"{order.removed} removed")
    if order.added:
        parts.append(f"{order.added} added")
    first = f"cell {order.cell}: {order.before or 'the end'} -> {order.after or 'the end'}"
    return f"device {order.device}: {', '.join(parts) or 'changed'}; first at {first}"


def _field_line(change: FieldChange) -> str:
    text = f"{change.path}: {_shown(change.before)} -> {_shown(change.after)}"
    numbers = [change.before, change.after]
    if any(isinstance(n, bool) or not isinstance(n, int | float) for n in numbers):
        return text
    if change.before == 0:
        return text
    share = (change.after - change.before) / change.before
    return f"{text} ({'+' if share > 0 else ''}{format_share(share)})"


def _shown(value: Any) -> str:
    return json.dumps(value)


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "unknown"
    match unit:
        case "ms":
            return f"{format_ms(value)} ms"
        case "bytes":
            return format_bytes(int(value))
        case _:
            return format_share(value)
