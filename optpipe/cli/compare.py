"""``optpipe compare``: one table of every method on one problem."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from optpipe.cli import console as cli
from optpipe.cli.options import RequestBuilder, takes
from optpipe.errors import InputError
from optpipe.formats.tables import comparison_columns, dump_comparison, is_present
from optpipe.requests import CompareOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.formats.tables import Rows
    from optpipe.problem import Problem
    from optpipe_solver.compare import ComparisonRow

__all__ = ["compare"]


_MIN_WIDTH = 100
_LEGEND = """\
bubble: idle share of makespan and span, mean over the devices; memory: the fullest device
P50, P95: step time when every duration varies by +-10%; took: seconds to find the schedule"""
_OTHER_PROBLEM = """\
placement: rows that are not "as given" solve another problem: the same model with two chunks per
device, in a loop or a V; the optimiser's row is on the best of these placements
guess: the problem has no layers of stages; each stage was halved, whole layers or not"""

AsMarkdown = Annotated[
    bool, typer.Option("--markdown", help="Print a Markdown table, for documents.")
]


@takes(CompareOptions, defaults={"time_limit_s": 20.0, "threads": 2})
def compare(
    builder: RequestBuilder[CompareOptions],
    problem_file: cli.ProblemFile,
    as_json: cli.AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """Run every method and print one table.

    The best rows come first: schedules that fit, then those over the memory limit with the memory
    they need. Below the table are the methods without a schedule, with the reason. Some published
    schedules need another placement. They run on a copy of the problem with that placement, which
    is also optimised, in half of the time.

    Exit codes: 0 with a schedule of the problem as given, 2 on bad input, 3 if none can exist, 4 if
    none was found. After Ctrl-C the rows so far are printed, and the exit code is 130.

    \b
    Examples:
      optpipe compare problem.json
      optpipe compare problem.json --time-limit 60 --markdown
      optpipe compare problem.json --tokens-per-microbatch 4096 \\
          --tflop-per-microbatch 210 --peak-tflops 3956
    """
    if as_json and as_markdown:
        raise InputError("--json and --markdown exclude each other; give one of them")
    began_s, best_ms = time.monotonic(), math.inf
    options = builder.build()
    problem = cli.read_problem(problem_file)
    console = cli.stderr()

    def note_done(row: ComparisonRow) -> None:
        """Show the newest row on a terminal, and print each row better than all before."""
        nonlocal best_ms
        status.update(f"{text}; done: {escape(f'{row.method} ({row.placement})')}")
        if _fits_as_given(row) and row.objective_ms < best_ms:
            best_ms = row.objective_ms
            line = cli.progress_line(time.monotonic() - began_s, row.method, best_ms, None)
            console.print(line, markup=False)

    text = f"comparing every method; the optimiser takes up to {options.time_limit_s or 0:g} s"
    if not console.is_terminal:  # a status line is shown on a terminal only
        console.print(text, markup=False)
    with cli.needs_extra("solver"), cli.interruptible() as stop, console.status(text) as status:
        from optpipe_solver.compare import Workload
        from optpipe_solver.compare import compare as compare_methods

        found = compare_methods(
            problem,
            time_limit_s=cli.remaining_s(options.time_limit_s, began_s),
            threads=options.threads,
            seed=options.seed,
            workload=Workload(**options.workload.model_dump()),
            on_row=note_done,
            should_stop=stop.is_set,
        )
    rows = [row.as_json() for row in found]
    if as_json:
        cli.print_json(rows)
    elif as_markdown:
        cli.stdout().out(dump_comparison(rows, "markdown"), highlight=False, end="")
    else:
        _show(rows)
    if stop.is_set():
        raise cli.stopped_by_user("methods")
    _check_found(problem, found)


def _check_found(problem: Problem, found: Sequence[ComparisonRow]) -> None:
    """Exit as ``optpipe solve`` if no row is a schedule of the problem as given that fits."""
    from optpipe_solver.feasibility import feasibility

    if any(map(_fits_as_given, found)):
        return
    missing = feasibility(problem).message
    if missing:
        raise cli.nothing_found("infeasible", missing)
    cli.stderr().print("no method has a schedule of this problem that fits; allow more time")
    raise typer.Exit(cli.NOTHING_FOUND)


def _fits_as_given(row: ComparisonRow) -> bool:
    from optpipe_solver.compare import AS_GIVEN

    return row.programs is not None and not row.over_limit and row.placement == AS_GIVEN


def _show(rows: Rows) -> None:
    console = cli.stdout()
    # Files and pipes have 80 columns, where names would be cut to a few letters a line.
    console.width = max(console.width, _MIN_WIDTH)
    present = [row for row in rows if is_present(row)]
    if present:
        console.print(_table(present))
        console.print(_LEGEND, style="dim", markup=False)
        if any(column.name == "placement" for column in comparison_columns(present)):
            console.print(_OTHER_PROBLEM, style="dim", markup=False)
    reasons: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if not is_present(row):
            reasons[row["reason"]].append(row["method"])
    if reasons:
        console.print("\nnot applicable here:")
    for reason, methods in reasons.items():
        console.print(f"  {', '.join(methods)}: {reason}", markup=False)


def _table(rows: Rows) -> Table:
    """Return the table; only the names of methods wrap."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    columns = comparison_columns(rows)
    for column in columns:
        is_name = column.name == "method"
        table.add_column(
            f"{column.name}\n{column.unit}",
            justify="right" if column.unit else "left",
            no_wrap=not is_name,
            overflow="fold" if is_name else "ellipsis",
        )
    # A blank before the plus lets a long name break there.
    cells = [
        [cell.replace("+", " +") if at == 0 else cell for at, cell in enumerate(row)]
        for row in zip(*(column.cells for column in columns), strict=True)
    ]
    if any(row["over_limit"] for row in rows):
        table.add_column("limit\n", no_wrap=True)
        for line, row in zip(cells, rows, strict=True):
            line.append("over" if row["over_limit"] else "fits")
    for line, row in zip(cells, rows, strict=True):
        table.add_row(*line, style="dim" if row["over_limit"] else "")
    return table
