"""The items of a sweep as one table: CSV for programs, Markdown for documents, JSON.

What is not known is None. Axes are columns of their own, named as in the sweep.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

from typing_extensions import TypedDict  # pydantic asks for it below Python 3.12

from optpipe.errors import InputError
from optpipe.units import format_bytes, format_ms, format_share

__all__ = [
    "ComparisonColumn",
    "Rows",
    "SweepColumn",
    "SweepRow",
    "axes_of",
    "comparison_columns",
    "dump_comparison",
    "dump_comparison_csv",
    "dump_comparison_markdown",
    "dump_sweep",
    "dump_sweep_csv",
    "dump_sweep_markdown",
    "is_present",
    "load_sweep_csv",
    "remark",
    "sweep_columns",
]


class SweepRow(TypedDict):
    """One item. ``state`` is that of a job; ``memory_bytes`` the budget of the largest device."""

    index: int
    values: dict[str, Any]
    name: str
    state: str
    objective_ms: float | None
    bound_ms: float | None
    gap: float | None
    memory_bytes: int
    seconds: float | None
    problem_hash: str
    job_id: str | None
    message: str | None


_BEFORE = ("index", "name")
_AFTER = (
    "state",
    "objective_ms",
    "bound_ms",
    "gap",
    "memory_bytes",
    "seconds",
    "problem_hash",
    "job_id",
    "message",
)
_NUMBERS: Mapping[str, Callable[[str], Any]] = {
    "index": int,
    "objective_ms": float,
    "bound_ms": float,
    "gap": float,
    "memory_bytes": int,
    "seconds": float,
}
_SHOWN: Mapping[str, Callable[[Any], str]] = {
    "objective_ms": format_ms,
    "bound_ms": format_ms,
    "gap": format_share,
    "memory_bytes": format_bytes,
    "seconds": "{:.1f}".format,
}
_TITLES = {
    "state": "state",
    "memory": "memory_bytes",
    "objective ms": "objective_ms",
    "bound ms": "bound_ms",
    "gap": "gap",
    "took s": "seconds",
    "message": "message",
}
_NONE = "-"


def axes_of(rows: Sequence[SweepRow]) -> list[str]:
    """Return the names of all axes, in the order in which they first appear."""
    return list(dict.fromkeys(name for row in rows for name in row["values"]))


def dump_sweep(rows: Sequence[SweepRow], form: str) -> str:
    """Return the rows as ``json`` (``{"rows": [...]}``), ``csv`` or ``markdown``."""
    if form == "csv":
        return dump_sweep_csv(rows)
    if form == "markdown":
        return dump_sweep_markdown(rows)
    return json.dumps({"rows": list(rows)}, allow_nan=False)


def dump_sweep_csv(rows: Sequence[SweepRow]) -> str:
    """Return CSV with a header: axes stand between name and state; unknown numbers are empty."""
    axes = axes_of(rows)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*_BEFORE, *axes, *_AFTER])
    for row in rows:
        fields: Mapping[str, Any] = row
        values = [
            _value_text(row["values"][name]) if name in row["values"] else "" for name in axes
        ]
        writer.writerow(
            [*(_cell(fields[name]) for name in _BEFORE)]
            + values
            + [_cell(fields[name]) for name in _AFTER]
        )
    return out.getvalue()


def _cell(value: Any) -> Any:
    # The one character that makes CSV unreadable and is not quoted by its writer.
    return value.replace("\r", " ") if isinstance(value, str) else value


def load_sweep_csv(text: str) -> list[SweepRow]:
    """Return the rows of such CSV.

    Raises
    ------
    InputError
        If it is another table.
    """
    header, *lines = _cells(text) or [[]]
    num_axes = len(header) - len(_BEFORE) - len(_AFTER)
    axes = header[len(_BEFORE) : len(_BEFORE) + num_axes]
    if header != [*_BEFORE, *axes, *_AFTER]:
        raise InputError(
            f"the first line is not that of a sweep's table: {', '.join(header)[:80]!r}; it begins "
            f"with {','.join(_BEFORE)} and ends with {','.join(_AFTER)}: give another file"
        )
    try:
        return [_row(line, axes) for line in lines]
    except ValueError as error:
        raise InputError(f"the table of a sweep is damaged: {error}; give another file") from None


def _cells(text: str) -> list[list[str]]:
    try:
        return list(csv.reader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise InputError(f"the table is no CSV: {error}; give another file") from None


def _row(cells: Sequence[str], axes: Sequence[str]) -> SweepRow:
    # By place: an axis may be called as a column is.
    first, last = len(_BEFORE), len(_BEFORE) + len(axes)
    texts = dict(zip((*_BEFORE, *_AFTER), (*cells[:first], *cells[last:]), strict=True))
    values = dict(zip(axes, cells[first:last], strict=True))
    fields = {name: _field(name, cell) for name, cell in texts.items()}
    known = {name: _value(cell) for name, cell in values.items() if cell}
    return cast("SweepRow", fields | {"values": known})


def _field(name: str, cell: str) -> Any:
    if name in _NUMBERS:
        return _NUMBERS[name](cell) if cell else None
    return cell if cell or name in ("name", "state") else None


def _value_text(value: Any) -> str:
    """Return a value so that `_value` finds it again: a text as it is, where that is no JSON."""
    is_plain = isinstance(value, str) and value.isprintable() and value and _value(value) == value
    return value if is_plain else json.dumps(value)


def _value(cell: str) -> Any:
    try:
        return json.loads(cell)
    except ValueError:
        return cell


def dump_sweep_markdown(rows: Sequence[SweepRow]) -> str:
    """Return a Markdown table for people, without hashes and ids."""
    columns = sweep_columns(rows)
    lines = [
        _line([column.name for column in columns]),
        _line(["---:" if column.is_number else "---" for column in columns]),
    ]
    lines += [_line(cells) for cells in zip(*(column.cells for column in columns), strict=True)]
    return "\n".join(lines) + "\n"


class SweepColumn(NamedTuple):
    """One column for people: its name, whether it holds numbers, a cell per row."""

    name: str
    is_number: bool
    cells: tuple[str, ...]


def sweep_columns(rows: Sequence[SweepRow]) -> list[SweepColumn]:
    """Return the columns for people: the axes (or the names), then what was found."""
    axes = axes_of(rows)
    found = [_axis_column(rows, name) for name in axes] or [
        SweepColumn("problem", False, tuple(row["name"] or f"#{row['index']}" for row in rows))
    ]
    for title, name in _TITLES.items():
        fields: list[Mapping[str, Any]] = [*rows]
        cells = tuple(_shown(name, row[name]) for row in fields)
        found.append(SweepColumn(title, name in _SHOWN, cells))
    return found


def _axis_column(rows: Sequence[SweepRow], name: str) -> SweepColumn:
    values = [row["values"].get(name) for row in rows]
    is_number = all(isinstance(value, int | float | None) for value in values)
    cells = [_NONE if value is None else _value_text(value) for value in values]
    return SweepColumn(name, is_number, tuple(cells))


def _shown(name: str, value: Any) -> str:
    if value is None:
        return _NONE if name in _SHOWN else ""
    return _SHOWN[name](value) if name in _SHOWN else str(value)


def _line(cells: Sequence[str]) -> str:
    escaped = (" ".join(cell.split()).replace("|", r"\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


# --- The rows of a comparison as tables: Markdown for documents, CSV for programs, cells for
# screens. A row is what ``optpipe compare --json`` prints and ``POST /v1/compare`` answers: JSON
# values, one method each, already in order. One whose ``programs`` are null has no numbers but a
# ``reason``.

Rows: TypeAlias = Sequence[Mapping[str, Any]]

_AS_GIVEN = "as given"
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


class ComparisonColumn(NamedTuple):
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


def comparison_columns(rows: Rows) -> list[ComparisonColumn]:
    """Return the columns that these rows fill, all but the remark.

    The placement is left out where all are as given, tokens/s and MFU where nobody told them.
    """
    found = [ComparisonColumn("method", "", tuple(row["method"] for row in rows))]
    if any(row["placement"] != _AS_GIVEN for row in rows):
        found.append(ComparisonColumn("placement", "", tuple(row["placement"] for row in rows)))
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
    found.append(ComparisonColumn("took", "s", tuple(f"{row['seconds']:.2f}" for row in rows)))
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
    columns = [*comparison_columns(rows), ComparisonColumn("remark", "", tuple(map(remark, rows)))]
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
) -> ComparisonColumn:
    cells = (
        written(row[field]) if is_present(row) and row[field] is not None else _NONE for row in rows
    )
    return ComparisonColumn(name, unit, tuple(cells))


def _sizes(rows: Rows, name: str, field: str) -> ComparisonColumn:
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
