"""Programs as CSV, one row per device: torch.distributed.pipelining's own form.

Without offload and recompute actions the text is a torch ``compute_only`` schedule, which torch and
torchtitan (``pipeline_parallel_schedule_csv``) read; ``dump_csv(..., for_torch=True)`` makes sure
that they run it right. Empty cells, which torch's files use to line time steps up, are skipped.
"""

from __future__ import annotations

import csv
import io
import re

from optpipe.errors import ActionSyntaxError, ScheduleFormatError
from optpipe.schedule import (
    Action,
    ActionType,
    Programs,
    cells_of,
    parse_action,
    parse_cell,
)

__all__ = ["dump_csv", "load_csv"]


_UNKNOWN_TO_TORCH = frozenset(
    {ActionType.OFFLOAD, ActionType.RELEASE, ActionType.RELOAD, ActionType.RECOMPUTE}
)


def dump_csv(programs: Programs, *, for_torch: bool = False) -> str:
    """Return programs as CSV text.

    Parameters
    ----------
    for_torch
        Whether torch's own schedule runtime will run it: then programs that it cannot run, or
        would run with wrong gradients, are refused. `optpipe.runtime` runs all of them.

    Raises
    ------
    ScheduleFormatError
        For torch only: with the first cell of an action that torch lacks, or of a forward of the
        last stage that is not in the order of the micro-batches; or with an empty row.
    """
    if for_torch:
        _expect_for_torch(programs)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for program in programs:
        writer.writerow(cells_of(program))
    return out.getvalue()


def _expect_for_torch(programs: Programs) -> None:
    last = max((action.stage for program in programs for action in program), default=0)
    for row, program in enumerate(programs, start=1):
        if not program:
            raise ScheduleFormatError(
                f"row {row} is empty, but torch's runtime needs an action on every rank; leave "
                "that device out of the problem, and solve again"
            )
        num_losses = column = 0
        for action in program:
            column += not action.paired
            if action.type in _UNKNOWN_TO_TORCH or action.mode:
                raise _unknown_to_torch(row, column, action)
            if action.stage == last and action.type is ActionType.FORWARD:
                if action.microbatch != num_losses:
                    raise _out_of_order(row, column, action, num_losses)
                num_losses += 1


def _unknown_to_torch(row: int, column: int, action: Action) -> ScheduleFormatError:
    what = "modes" if action.mode else action.type.value
    return ScheduleFormatError(
        f"row {row}, column {column}: torch's runtime has no {what} ({action}), and "
        "without it the program needs more memory than was planned; run it with optpipe.runtime, "
        "or solve a problem without bandwidths, recompute_ms and modes"
    )


def _out_of_order(row: int, column: int, action: Action, expected: int) -> ScheduleFormatError:
    return ScheduleFormatError(
        f"row {row}, column {column}: {action} stands where torch's runtime expects "
        f"{action._replace(microbatch=expected)}; it takes the losses of the last stage for those "
        "of the micro-batches in their order, and would make wrong gradients silently; run it with "
        "optpipe.runtime, or use a schedule that keeps the order"
    )


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
        program: list[Action] = []
        for column, cell in enumerate(row, start=1):
            if not cell.strip():
                continue
            try:
                program.extend(parse_cell(cell.strip()))
            except ActionSyntaxError as error:
                place = f"row {row_number}, column {column}"
                hint = "; separate cells by commas" if _are_actions(cell) else ""
                raise ScheduleFormatError(f"{place}: {error}{hint}") from None
        programs.append(tuple(program))
    if not programs:
        raise ScheduleFormatError("the CSV is empty; write one row per device")
    return tuple(programs)


def _are_actions(cell: str) -> bool:
    """Whether a cell is a row of a table that separates cells otherwise."""
    first, *others = re.split(r"[;\t]", cell.strip())
    try:
        parse_action(first.strip())
    except ActionSyntaxError:
        return False
    return bool(others)
