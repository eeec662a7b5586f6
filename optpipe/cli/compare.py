"""``optpipe compare``: every method on one problem, in one table."""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from optpipe.cli.console import (
    INFEASIBLE,
    INTERRUPTED,
    NOTHING_FOUND,
    AsJson,
    ProblemFile,
    interruptible,
    needs_extra,
    read_problem,
    stderr,
    stdout,
)
from optpipe.cli.options import OptionsOf, takes
from optpipe.errors import InputError
from optpipe.formats.tables import comparison_columns, dump_comparison, is_present
from optpipe.requests import CompareOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console

    from optpipe.formats.tables import Rows
    from optpipe.problem import Problem
    from optpipe_solver.compare import ComparisonRow

__all__ = ["compare"]


_LEAST_WIDTH = 100
_LEGEND = """\
bubble: idle share of the busiest device, of makespan and of span; memory: the fullest device
P50, P95: step time when every duration varies by +-10 %; took: seconds to find the schedule"""
_OTHER_PROBLEM = """\
placement: rows that are not "as given" solve another problem, the same model cut into two chunks
per device, in a loop or a V; best among them is the optimiser's on the copy that suits it best
guess: the problem does not say the layers of its stages; each was halved, whole layers or not"""

AsMarkdown = Annotated[
    bool, typer.Option("--markdown", help="Print a Markdown table, for documents.")
]


@takes(CompareOptions, defaults={"time_limit_s": 20.0, "threads": 2})
def compare(
    given: OptionsOf[CompareOptions],
    problem_file: ProblemFile,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """Run every method and print one table.

    Best first: schedules that fit, then those over the memory limit with what they would take, and
    below the table the methods that have none, each with the reason. Where a published schedule
    asks for another placement, a copy of the problem with it is tried and also optimised, in half
    of the time. Leaves as solve does: 0 with a schedule of the problem as given, 2 on bad input, 3
    where none can exist, 4 where none was found; by Ctrl-C with 130 and what there is so far.

    \b
    Examples:
      optpipe compare problem.json
      optpipe compare problem.json --time-limit 60 --markdown
      optpipe compare problem.json --tokens-per-microbatch 4096 \\
          --tflop-per-microbatch 210 --peak-tflops 3956
    """
    if as_json and as_markdown:
        raise InputError("--json and --markdown exclude each other; give one of them")
    options = given()
    limit_s = options.time_limit_s or 0.0
    problem = read_problem(problem_file)
    text = f"comparing every method; the optimiser takes up to {limit_s:g} s"
    with needs_extra("solver"), interruptible() as stop, _progress(text) as tell:
        from optpipe_solver.compare import Workload
        from optpipe_solver.compare import compare as compare_methods

        found = compare_methods(
            problem,
            time_limit_s=limit_s,
            threads=options.threads,
            seed=options.seed,
            workload=Workload(**options.workload.model_dump()),
            on_row=lambda row: tell(f"{row.method} ({row.placement})"),
            should_stop=stop.is_set,
        )
    _print([row.as_json() for row in found], as_json=as_json, as_markdown=as_markdown)
    if stop.is_set():
        stderr().print("stopped by Ctrl-C; methods that were not reached are missing")
        raise typer.Exit(INTERRUPTED)
    _leave(problem, found)


def _print(rows: Rows, *, as_json: bool, as_markdown: bool) -> None:
    if as_json:
        stdout().out(json.dumps(rows, indent=2), highlight=False)
    elif as_markdown:
        stdout().out(dump_comparison(rows, "markdown"), highlight=False, end="")
    else:
        _show(stdout(), rows)


def _leave(problem: Problem, found: Sequence[ComparisonRow]) -> None:
    """Leave with the code that solve has for the problem as given.

    Raises `typer.Exit` if no row is a schedule of it that fits, with 3 where that is proven and 4
    elsewhere.
    """
    from optpipe_solver.compare import AS_GIVEN
    from optpipe_solver.feasibility import feasibility

    fits = (row for row in found if row.programs is not None and not row.over_limit)
    if any(row.placement == AS_GIVEN for row in fits):
        return
    missing = feasibility(problem).message
    if missing:
        stderr().print(f"infeasible: {missing}", markup=False, soft_wrap=True)
        raise typer.Exit(INFEASIBLE)
    stderr().print("no method has a schedule of this problem that fits; allow more time")
    raise typer.Exit(NOTHING_FOUND)


@contextmanager
def _progress(text: str) -> Iterator[Callable[[str], None]]:
    """Say what goes on: with a clock and what was done last on a terminal, once elsewhere."""
    console = stderr()
    if not console.is_terminal:
        console.print(text, markup=False)
        yield lambda _: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        TextColumn("{task.fields[done]}", markup=False, style="dim"),
    )
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(text, total=None, done="")
        yield lambda done: shown.update(task, done=f"done: {done}")


def _show(console: Console, rows: Rows) -> None:
    # Narrower, names would be cut to a few letters a line; files and pipes count as 80 columns.
    console.width = max(console.width, _LEAST_WIDTH)
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
    """Return the table; the name of a method is the one thing that may wrap."""
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
    # A blank before the plus lets a long name break there instead of in a word.
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
