"""The items of a sweep as one table: CSV for programs, Markdown for documents, JSON.

What is not known is None. Axes are columns of their own, named as in the sweep.
"""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, cast

from optpipe.errors import InputError
from optpipe.plot.units import format_bytes, format_ms, format_share

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "Column",
    "Row",
    "axes_of",
    "dump_sweep",
    "dump_sweep_csv",
    "dump_sweep_markdown",
    "load_sweep_csv",
    "sweep_columns",
]


class Row(TypedDict):
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


def axes_of(rows: Sequence[Row]) -> list[str]:
    """Return the names of all axes, in the order in which they first appear."""
    return list(dict.fromkeys(name for row in rows for name in row["values"]))


def dump_sweep(rows: Sequence[Row], form: str) -> str:
    """Return the rows as ``json`` (``{"rows": [...]}``), ``csv`` or ``markdown``."""
    if form == "csv":
        return dump_sweep_csv(rows)
    if form == "markdown":
        return dump_sweep_markdown(rows)
    return json.dumps({"rows": list(rows)}, allow_nan=False)


def dump_sweep_csv(rows: Sequence[Row]) -> str:
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


def load_sweep_csv(text: str) -> list[Row]:
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


def _row(cells: Sequence[str], axes: Sequence[str]) -> Row:
    # By place: an axis may be called as a column is.
    first, last = len(_BEFORE), len(_BEFORE) + len(axes)
    texts = dict(zip((*_BEFORE, *_AFTER), (*cells[:first], *cells[last:]), strict=True))
    values = dict(zip(axes, cells[first:last], strict=True))
    fields = {name: _field(name, cell) for name, cell in texts.items()}
    known = {name: _value(cell) for name, cell in values.items() if cell}
    return cast("Row", fields | {"values": known})


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


def dump_sweep_markdown(rows: Sequence[Row]) -> str:
    """Return a Markdown table for people, without hashes and ids."""
    columns = sweep_columns(rows)
    lines = [
        _line([column.name for column in columns]),
        _line(["---:" if column.is_number else "---" for column in columns]),
    ]
    lines += [_line(cells) for cells in zip(*(column.cells for column in columns), strict=True)]
    return "\n".join(lines) + "\n"


class Column(NamedTuple):
    """One column for people: its name, whether it holds numbers, a cell per row."""

    name: str
    is_number: bool
    cells: tuple[str, ...]


def sweep_columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns for people: the axes (or the names), then what was found."""
    axes = axes_of(rows)
    found = [_axis_column(rows, name) for name in axes] or [
        Column("problem", False, tuple(row["name"] or f"#{row['index']}" for row in rows))
    ]
    for title, name in _TITLES.items():
        fields: list[Mapping[str, Any]] = [*rows]
        cells = tuple(_shown(name, row[name]) for row in fields)
        found.append(Column(title, name in _SHOWN, cells))
    return found


def _axis_column(rows: Sequence[Row], name: str) -> Column:
    values = [row["values"].get(name) for row in rows]
    is_number = all(isinstance(value, int | float | None) for value in values)
    cells = [_NONE if value is None else _value_text(value) for value in values]
    return Column(name, is_number, tuple(cells))


def _shown(name: str, value: Any) -> str:
    if value is None:
        return _NONE if name in _SHOWN else ""
    return _SHOWN[name](value) if name in _SHOWN else str(value)


def _line(cells: Sequence[str]) -> str:
    escaped = (" ".join(cell.split()).replace("|", r"\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"
