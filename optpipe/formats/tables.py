"""The items of a sweep as one table: CSV for programs, Markdown for documents, JSON.

Unknown values are None. Axes are columns of their own, named as in the sweep.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

from typing_extensions import TypedDict  # pydantic asks for it below Python 3.12

from optpipe.errors import InputError
from optpipe.units import format_bytes, format_ms, format_share

__all__ = [
    "Rows",
    "SweepRow",
    "TableColumn",
    "comparison_columns",
    "dump_comparison",
    "dump_sweep",
    "is_present",
    "load_sweep_csv",
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
_NUMBERS: Mapping[str, tuple[Callable[[str], Any], Callable[[Any], str]]] = {
    "objective_ms": (float, format_ms),
    "bound_ms": (float, format_ms),
    "gap": (float, format_share),
    "memory_bytes": (int, format_bytes),
    "seconds": (float, "{:.1f}".format),
}
"""How each number is read from a cell of CSV, and written into one of Markdown."""
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


def _axes_of(rows: Sequence[SweepRow]) -> list[str]:
    """Return the names of all axes, in the order in which they first appear."""
    return list(dict.fromkeys(name for row in rows for name in row["values"]))


def dump_sweep(rows: Sequence[SweepRow], form: str) -> str:
    """Return the rows as ``json`` (``{"rows": [...]}``), ``csv`` or ``markdown``.

    In CSV axes are between name and state, and unknown numbers are empty. Markdown is for people
    and has neither hashes nor ids.
    """
    if form == "markdown":
        return _markdown(sweep_columns(rows))
    if form != "csv":
        return json.dumps({"rows": list(rows)}, allow_nan=False)
    axes = _axes_of(rows)
    lines: list[Sequence[Any]] = [[*_BEFORE, *axes, *_AFTER]]
    for row in rows:
        # A carriage return is the one character that makes CSV unreadable and is not quoted.
        plain = {k: v.replace("\r", " ") if isinstance(v, str) else v for k, v in row.items()}
        values = [
            _value_text(row["values"][axis]) if axis in row["values"] else "" for axis in axes
        ]
        first, last = ([plain[name] for name in names] for names in (_BEFORE, _AFTER))
        lines.append([*first, *values, *last])
    return _csv(lines)


def _csv(lines: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue()


def load_sweep_csv(text: str) -> list[SweepRow]:
    """Return the rows of such CSV.

    Raises `InputError` if it is another table.
    """
    try:
        header, *lines = list(csv.reader(io.StringIO(text, newline=""))) or [[]]
    except csv.Error as error:
        raise InputError(f"the table is no CSV: {error}; give another file") from None
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


def _row(cells: Sequence[str], axes: Sequence[str]) -> SweepRow:
    # By place: an axis may be called as a column is.
    first, last = len(_BEFORE), len(_BEFORE) + len(axes)
    fields: dict[str, Any] = {}
    for name, cell in zip((*_BEFORE, *_AFTER), (*cells[:first], *cells[last:]), strict=True):
        if name == "index":
            fields[name] = int(cell)
        elif name in _NUMBERS:
            fields[name] = _NUMBERS[name][0](cell) if cell else None
        else:
            fields[name] = cell if cell or name in ("name", "state") else None
    values = zip(axes, cells[first:last], strict=True)
    fields["values"] = {name: _value(cell) for name, cell in values if cell}
    return cast("SweepRow", fields)


def _value_text(value: Any) -> str:
    """Return a value so that `_value` can read it: a text unchanged if it is no JSON."""
    is_plain = isinstance(value, str) and value.isprintable() and value and _value(value) == value
    return value if is_plain else json.dumps(value)


def _value(cell: str) -> Any:
    try:
        return json.loads(cell)
    except ValueError:
        return cell


class TableColumn(NamedTuple):
    """One column of a Markdown table: its name, a cell per row, and the unit of its numbers."""

    name: str
    cells: tuple[str, ...]
    is_number: bool = False
    unit: str = ""


def _markdown(columns: Sequence[TableColumn]) -> str:
    lines = [
        [f"{column.name} {column.unit}".rstrip() for column in columns],
        ["---:" if column.is_number else "---" for column in columns],
        *zip(*(column.cells for column in columns), strict=True),
    ]
    text = ""
    for cells in lines:
        # No line end and no bar in a cell may break the table.
        plain = (" ".join(cell.split()).replace("|", r"\|") for cell in cells)
        text += f"| {' | '.join(plain)} |\n"
    return text


def sweep_columns(rows: Sequence[SweepRow]) -> list[TableColumn]:
    """Return the columns of a Markdown table: the axes (or the names), then the results."""
    found = []
    for axis in _axes_of(rows):
        values = [row["values"].get(axis) for row in rows]
        cells = tuple(_NONE if value is None else _value_text(value) for value in values)
        is_number = all(isinstance(value, int | float | None) for value in values)
        found.append(TableColumn(axis, cells, is_number))
    if not found:
        names = tuple(row["name"] or f"#{row['index']}" for row in rows)
        found.append(TableColumn("problem", names))
    fields: list[Mapping[str, Any]] = [*rows]
    for title, name in _TITLES.items():
        is_number = name in _NUMBERS
        write, none = (_NUMBERS[name][1], _NONE) if is_number else (str, "")
        cells = tuple(none if row[name] is None else write(row[name]) for row in fields)
        found.append(TableColumn(title, cells, is_number))
    return found


# --- The rows of a comparison as tables: Markdown for documents, CSV for programs, cells for
# screens. ``optpipe compare --json`` and ``POST /v1/compare`` return the same rows: JSON values,
# one method each, already in order. A row whose ``programs`` are null has a ``reason`` instead of
# numbers.

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


def is_present(row: Mapping[str, Any]) -> bool:
    """Return whether the method has a schedule, within the memory limit or not."""
    return row["programs"] is not None


def comparison_columns(rows: Rows) -> list[TableColumn]:
    """Return the columns that these rows fill, all but the remark.

    The placement is left out if all are as given, tokens/s and MFU if they are not known.
    """
    found = [TableColumn("method", tuple(row["method"] for row in rows))]
    if any(row["placement"] != _AS_GIVEN for row in rows):
        found.append(TableColumn("placement", tuple(row["placement"] for row in rows)))
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
    took = tuple(f"{row['seconds']:.2f}" for row in rows)
    return [*found, TableColumn("took", took, is_number=True, unit="s")]


def dump_comparison(rows: Rows, form: str) -> str:
    """Return the rows as ``json`` (``{"rows": [...]}``), ``csv`` or ``markdown``.

    In CSV times are in ms, sizes in bytes, and unknown numbers are empty. In Markdown the last
    column has the excess over the limit, or why a method is absent.
    """
    if form == "markdown":
        reasons = (row["reason"] for row in rows)
        limits = ("over the memory limit" if row["over_limit"] else "" for row in rows)
        remarks = ("; ".join(filter(None, pair)) for pair in zip(limits, reasons, strict=True))
        return _markdown([*comparison_columns(rows), TableColumn("remark", tuple(remarks))])
    if form != "csv":
        return json.dumps({"rows": list(rows)}, allow_nan=False)
    lines: list[Sequence[Any]] = [_CSV_FIELDS]
    for row in rows:
        known = _CSV_FIELDS if is_present(row) else _OF_EVERY_ROW
        lines.append([row[name] if name in known else None for name in _CSV_FIELDS])
    return _csv(lines)


def _numbers(
    rows: Rows, name: str, unit: str, field: str, written: Callable[[float], str]
) -> TableColumn:
    cells = (
        written(row[field]) if is_present(row) and row[field] is not None else _NONE for row in rows
    )
    return TableColumn(name, tuple(cells), is_number=True, unit=unit)


def _sizes(rows: Rows, name: str, field: str) -> TableColumn:
    """Return a column of bytes in the unit that suits its largest one."""
    largest = max((row[field] for row in rows if is_present(row)), default=0)
    power = sum(largest >= 1024**at for at in range(1, len(_SIZES)))
    digits = 1 if power else 0
    return _numbers(
        rows, name, _SIZES[power], field, lambda value: f"{value / 1024**power:.{digits}f}"
    )


def _percent(value: float) -> str:
    return f"{round(100 * value, 1) + 0.0:.1f}"  # not -0.0
