"""The rows of a comparison as tables: Markdown for documents, CSV for programs, cells for screens.

A row is what ``optpipe compare --json`` prints and ``POST /v1/compare`` answers: JSON values, one
method each, already in order. One whose ``programs`` are null has no numbers but a ``reason``.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from optpipe.plot.units import format_ms

__all__ = [
    "Column",
    "Rows",
    "comparison_columns",
    "dump_comparison",
    "dump_comparison_csv",
    "dump_comparison_markdown",
    "is_present",
    "remark",
]

Rows: TypeAlias = Sequence[Mapping[str, Any]]

_AS_GIVEN = "as given"
_NONE = "-"
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")
_CSV_FIELDS = (
    "method",
    "placement",
    "makespan_ms",
    "makespan_bubble",
    "span_ms",
    "span_bubble",
    "p50_ms",
    "p95_ms",
    "peak_bytes",
    "host_peak_bytes",
    "tokens_per_s",
    "mfu",
    "seconds",
    "over_limit",
    "reason",
)
_OF_EVERY_ROW = frozenset({"method", "placement", "seconds", "reason"})


class Column(NamedTuple):
    """One column for people: its name, the unit of its numbers ('' for texts), a cell per row."""

    name: str
    unit: str
    cells: tuple[str, ...]


def is_present(row: Mapping[str, Any]) -> bool:
    """Return whether the method has a schedule, within the memory limit or not."""
    return row["programs"] is not None


def remark(row: Mapping[str, Any]) -> str:
    """Return what is to be said about a row: over the limit, why it is absent, or nothing."""
    limit = "over the memory limit" if row["over_limit"] else ""
    return "; ".join(part for part in (limit, row["reason"]) if part)


def comparison_columns(rows: Rows) -> list[Column]:
    """Return the columns that these rows fill, all but the remark.

    The placement is left out where all are as given, tokens/s and MFU where nobody told them.
    """
    found = [Column("method", "", tuple(row["method"] for row in rows))]
    if any(row["placement"] != _AS_GIVEN for row in rows):
        found.append(Column("placement", "", tuple(row["placement"] for row in rows)))
    found += [
        _numbers(rows, "makespan", "ms", "makespan_ms", format_ms),
        _numbers(rows, "bubble", "%", "makespan_bubble", _percent),
        _numbers(rows, "span", "ms", "span_ms", format_ms),
        _numbers(rows, "bubble", "%", "span_bubble", _percent),
        _numbers(rows, "P50", "ms", "p50_ms", format_ms),
        _numbers(rows, "P95", "ms", "p95_ms", format_ms),
        _sizes(rows, "memory", "peak_bytes"),
        _sizes(rows, "host", "host_peak_bytes"),
    ]
    if any(row["tokens_per_s"] is not None for row in rows):
        found.append(_numbers(rows, "tokens", "/s", "tokens_per_s", "{:,.0f}".format))
    if any(row["mfu"] is not None for row in rows):
        found.append(_numbers(rows, "MFU", "%", "mfu", _percent))
    found.append(Column("took", "s", tuple(f"{row['seconds']:.2f}" for row in rows)))
    return found


def dump_comparison(rows: Rows, form: str) -> str:
    """Return the rows as ``json`` (``{"rows": [...]}``), ``csv`` or ``markdown``."""
    if form == "csv":
        return dump_comparison_csv(rows)
    if form == "markdown":
        return dump_comparison_markdown(rows)
    return json.dumps({"rows": list(rows)}, allow_nan=False)


def dump_comparison_csv(rows: Rows) -> str:
    """Return CSV with a header, times in ms and sizes in bytes; unknown numbers are empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_CSV_FIELDS)
    for row in rows:
        known = _CSV_FIELDS if is_present(row) else _OF_EVERY_ROW
        writer.writerow([row[name] if name in known else None for name in _CSV_FIELDS])
    return out.getvalue()


def dump_comparison_markdown(rows: Rows) -> str:
    """Return a Markdown table, remarks in the last column."""
    columns = [*comparison_columns(rows), Column("remark", "", tuple(map(remark, rows)))]
    lines = [
        _markdown_line([f"{column.name} {column.unit}".rstrip() for column in columns]),
        _markdown_line(["---:" if column.unit else "---" for column in columns]),
    ]
    lines += [_markdown_line(cells) for cells in zip(*(c.cells for c in columns), strict=True)]
    return "\n".join(lines) + "\n"


def _markdown_line(cells: Sequence[str]) -> str:
    escaped = (" ".join(cell.split()).replace("|", r"\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def _numbers(
    rows: Rows, name: str, unit: str, field: str, written: Callable[[float], str]
) -> Column:
    cells = (
        written(row[field]) if is_present(row) and row[field] is not None else _NONE for row in rows
    )
    return Column(name, unit, tuple(cells))


def _sizes(rows: Rows, name: str, field: str) -> Column:
    """Return a column of bytes in the unit that suits its largest one."""
    largest = max((row[field] for row in rows if is_present(row)), default=0)
    power = 0
    while largest >= 1024 ** (power + 1) and power < len(_SIZES) - 1:
        power += 1
    digits = 1 if power else 0
    return _numbers(
        rows, name, _SIZES[power], field, lambda value: f"{value / 1024**power:.{digits}f}"
    )


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"
