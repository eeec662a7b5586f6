"""Programs as CSV, one row per device: torch.distributed.pipelining's own form.

Without offload and recompute actions the text is a torch ``compute_only`` schedule, which torch and
torchtitan (``pipeline_parallel_schedule_csv``) read. Empty cells, which torch's files use to line
time steps up, are skipped.
"""

from __future__ import annotations

import csv
import io

from optpipe.action import Programs, parse_action
from optpipe.errors import ActionSyntaxError, ScheduleFormatError

__all__ = ["dump_csv", "load_csv"]


def dump_csv(programs: Programs) -> str:
    """Return programs as CSV text."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for program in programs:
        writer.writerow([str(action) for action in program])
    return out.getvalue()


def load_csv(text: str) -> Programs:
    """Return the programs of a CSV text.

    Raises
    ------
    ScheduleFormatError
        If a cell is not exactly one action; says row and column.
    """
    programs = []
    try:
        # Spreadsheets put a byte order mark in front.
        rows = list(csv.reader(io.StringIO(text.removeprefix("\ufeff")), strict=True))
    except csv.Error as error:
        raise ScheduleFormatError(f"not CSV: {error}; write one row per device") from None
    for row_number, row in enumerate(rows, start=1):
        program = []
        for column, cell in enumerate(row, start=1):
            if not cell.strip():
                continue
            try:
                program.append(parse_action(cell.strip()))
            except ActionSyntaxError as error:
                raise ScheduleFormatError(f"row {row_number}, column {column}: {error}") from None
        programs.append(tuple(program))
    if not programs:
        raise ScheduleFormatError("the CSV is empty; write one row per device")
    return tuple(programs)
