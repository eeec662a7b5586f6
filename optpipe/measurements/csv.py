"""Times, stages and messages as CSV tables; the first row names the columns.

* times: ``stage, action, time_ms`` and, where known, ``microbatch, step, rank``;
* stages: ``stage`` and any fields of a problem's stage that are no times, ``device`` too;
* messages: ``from, to, bytes, time_ms``.
"""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from optpipe.errors import MeasurementError, explain
from optpipe.measurements.to_problem import Measurements
from optpipe.measurements.values import Sample, StageFacts, Transfer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["dump_times", "read_messages_table", "read_stages_table", "read_times"]


_TIMES = ("stage", "action", "time_ms")
_OPTIONAL = ("microbatch", "step", "rank")
_SHOWN_CHARS = 80
_MESSAGES = {"from": "source", "to": "target", "bytes": "num_bytes", "time_ms": "time_ms"}


Value = TypeVar("Value", bound=BaseModel)


class _CsvRow(NamedTuple):
    """A row's line in the file, and its cells by column; empty cells are left out."""

    line: int
    cells: dict[str, str]


def read_times(text: str) -> Measurements:
    """Return the measurements of a table of times; errors name the line.

    Where rows name ranks, the ranks' stages say which stages share a device.
    """
    rows = _rows(text, needed=_TIMES, known=(*_TIMES, *_OPTIONAL))
    samples = tuple(_sample(row) for row in rows)
    return Measurements(source="a table of times", samples=samples, placement=_placement(samples))


def dump_times(measurements: Measurements) -> str:
    """Return the samples as a table that `read_times` inverts."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = (*_TIMES, *_OPTIONAL)
    writer.writerow(columns)
    for sample in measurements.samples:
        values = (getattr(sample, name) for name in columns)
        writer.writerow(["" if value is None else value for value in values])
    return out.getvalue()


def read_stages_table(text: str) -> tuple[StageFacts, ...]:
    """Return the facts of a table of stages, by stage; errors name the line or the stage."""
    fields = tuple(name for name in StageFacts.model_fields if name != "modes")
    rows = _rows(text, needed=("stage",), known=("stage", *fields))
    found: dict[int, StageFacts] = {}
    for row in rows:
        cells = {name: _number(row, name) for name in row.cells}
        stage = cells.pop("stage")
        if not isinstance(stage, int) or stage in found:
            again = "stands twice" if stage in found else "must be a whole number from 0"
            raise MeasurementError(f"line {row.line}: stage = {stage}: {again}; correct the row")
        found[stage] = _checked(StageFacts, cells, row.line)
    gaps = sorted(set(range(1 + max(found))) - set(found))
    if gaps:
        raise MeasurementError(f"the table has no row for stage {gaps[0]}; add it")
    return tuple(found[stage] for stage in sorted(found))


def read_messages_table(text: str) -> tuple[Transfer, ...]:
    """Return the messages of a table; errors name the line."""
    rows = _rows(text, needed=tuple(_MESSAGES), known=tuple(_MESSAGES))
    return tuple(
        _checked(Transfer, {_MESSAGES[name]: _number(row, name) for name in row.cells}, row.line)
        for row in rows
    )


def _rows(text: str, needed: Sequence[str], known: Sequence[str]) -> list[_CsvRow]:
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff")), strict=True)
    header: list[str] = []
    rows = []
    try:
        for line in reader:
            cells, number = [cell.strip() for cell in line], reader.line_num
            if not any(cells):
                continue
            if not header:
                _check_header(cells, needed, known, number)
                header = cells
                continue
            if len(cells) != len(header):
                raise MeasurementError(
                    f"line {number}: {len(cells)} cells, but {len(header)} columns; "
                    "write one cell per column, empty where unknown"
                )
            found = {name: cell for name, cell in zip(header, cells, strict=True) if cell}
            rows.append(_CsvRow(number, found))
    except csv.Error as error:
        raise MeasurementError(
            f"line {reader.line_num}: not CSV: {error}; separate cells by commas"
        ) from None
    if not rows:
        raise MeasurementError(
            f"the table has no rows; write a header with {', '.join(needed)}, then a row for each"
        )
    return rows


def _check_header(names: list[str], needed: Sequence[str], known: Sequence[str], line: int) -> None:
    missing = [name for name in needed if name not in names]
    if missing:
        text = ", ".join(names)
        shown = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
        raise MeasurementError(
            f"line {line}: columns {shown}: {missing[0]} is missing; "
            f"a header needs {', '.join(needed)}"
        )
    for name in names:
        if name not in known or names.count(name) > 1:
            rule = "stands twice" if names.count(name) > 1 else "is unknown"
            raise MeasurementError(
                f"line {line}: column {name!r} {rule}; the columns are {', '.join(known)}"
            )


def _sample(row: _CsvRow) -> Sample:
    cells: dict[str, Any] = {
        name: cell if name == "action" else _number(row, name) for name, cell in row.cells.items()
    }
    return _checked(Sample, cells, row.line)


def _checked(kind: type[Value], fields: dict[str, Any], line: int) -> Value:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise MeasurementError(f"line {line}: {explain(error, kind)}") from None


def _number(row: _CsvRow, name: str) -> int | float:
    text = row.cells[name]
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise MeasurementError(
            f"line {row.line}: {name} = {text!r}: must be a number; correct the cell"
        ) from None


def _placement(samples: Iterable[Sample]) -> tuple[int, ...]:
    """Return the device of each stage, where ranks are named for all: ranks in order."""
    rank_of: dict[int, int] = {}
    for sample in samples:
        if sample.rank is None:
            return ()
        rank_of[sample.stage] = min(sample.rank, rank_of.get(sample.stage, sample.rank))
    device_of = {rank: device for device, rank in enumerate(sorted(set(rank_of.values())))}
    if sorted(rank_of) != list(range(len(rank_of))):
        return ()
    return tuple(device_of[rank_of[stage]] for stage in sorted(rank_of))
