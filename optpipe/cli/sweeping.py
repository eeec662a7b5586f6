"""``optpipe sweep``: one problem along axes, one table and one frontier at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from optpipe.cli.console import INFEASIBLE, INTERRUPTED, NOTHING_FOUND, needs_extra, stderr, stdout
from optpipe.cli.options import (
    ApiKey,
    Gap,
    Method,
    ProblemFile,
    Seed,
    Threads,
    TimeLimit,
    WorkLimit,
)
from optpipe.cli.reading import read_problem
from optpipe.cli.writing import check_apart, check_writable, write_file
from optpipe.errors import InputError
from optpipe.formats.json_text import read_text
from optpipe.formats.sweep_table import dump_sweep, load_sweep_csv, sweep_columns
from optpipe.frontier import Point, family_of, frontier, label_of, memory_of
from optpipe.plot.frontier import SUFFIXES, require_drawing, save_frontier
from optpipe.schedule import OPTIMAL_GAP
from optpipe.sweep import sweep as vary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optpipe.formats.sweep_table import Row
    from optpipe.problem import Problem
    from optpipe.sweep import Variation

__all__ = ["parse_axes", "sweep"]

_FORMS = {".csv": "csv", ".md": "markdown", ".json": "json"}

AxisTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--axis",
        metavar="NAME=V1,V2,...",
        help="memory_scale, memory_gb, num_microbatches, pcie_scale, link_scale, latency_ms, "
        "placement (linear, loop, v, or lists), objective, offload, recompute (true, false), or "
        "the path of a field: devices[*].memory_bytes, stages[3].forward_ms. Again for another.",
    ),
]
TableFile = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write the table here: .csv, .md or .json. A .csv file that exists is gone on with: "
        "what it has is not solved again.",
    ),
]
FrontierFile = Annotated[
    Path | None,
    typer.Option(
        "--frontier",
        metavar="FILE",
        help="Draw the best objective and its bound over memory here: .svg, .png, .pdf; .html to "
        "zoom into.",
    ),
]
MaybeUrl = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Have a service solve it, as a batch; else it is done here."),
]


def sweep(
    problem_file: ProblemFile,
    axis: AxisTexts = None,
    output: TableFile = None,
    frontier_file: FrontierFile = None,
    time_limit: TimeLimit = 20.0,
    threads: Threads = 2,
    seed: Seed = 0,
    method: Method = "auto",
    gap: Gap = OPTIMAL_GAP,
    work_limit: WorkLimit = None,
    url: MaybeUrl = None,
    api_key: ApiKey = None,
) -> None:
    """Solve a problem along axes, and show what memory buys.

    Limits and options are those of each combination. Every combination must be a valid problem;
    that is found out before anything is solved. Ctrl-C keeps what there is. Leaves with 0 where
    any combination has a schedule, 3 where all are proven infeasible, 4 where nothing was found.

    \b
    Examples:
      optpipe sweep problem.json --axis memory_scale=1,0.75,0.5
      optpipe sweep problem.json --axis memory_gb=16,24,32,40 --axis num_microbatches=8,16 \\
          -o table.csv --frontier frontier.svg
      optpipe sweep problem.json --axis offload=true,false --url http://planner:8000
    """
    _check_files(output, frontier_file)
    check_apart(output, frontier_file, inputs=[problem_file])
    problem = read_problem(problem_file)
    variations = vary(problem, axes := parse_axes(axis or []))
    known = _known_rows(output, variations)
    options = {
        "time_limit_s": time_limit,
        "work_limit": work_limit,
        "threads": threads,
        "seed": seed,
        "gap": gap,
        "method": method,
    }
    if url is not None:
        from optpipe.cli.sweeping_remote import sweep_remote

        rows = sweep_remote(url, api_key, problem, axes, options)
        was_stopped = False
    else:
        with needs_extra("solver"):
            from optpipe.cli.sweeping_local import sweep_here

            rows, was_stopped = sweep_here(
                variations, known, options, lambda rows: _write(rows, output)
            )
    _write(rows, output)
    _show(rows)
    if frontier_file is not None:
        _draw(problem, variations, rows, frontier_file)
    _leave(rows, was_stopped=was_stopped)


def parse_axes(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return name -> values of texts like ``memory_scale=1,0.5``; values are JSON, or words.

    Raises
    ------
    InputError
        If one is no axis, or stands twice.
    """
    axes: dict[str, list[Any]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        if not name.strip() or not values.strip():
            raise InputError(f"--axis {text}: must be NAME=VALUE,VALUE,...; write it so")
        if name.strip() in axes:
            raise InputError(f"--axis {name.strip()} stands twice; put all its values into one")
        axes[name.strip()] = _values(values)
    return axes


def _values(text: str) -> list[Any]:
    try:
        found: list[Any] = json.loads(f"[{text}]")
    except ValueError:
        return [_value(part.strip()) for part in text.split(",")]
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _check_files(output: Path | None, frontier_file: Path | None) -> None:
    """Refuse files that cannot be written, before hours of work."""
    for path, suffixes in ((output, tuple(_FORMS)), (frontier_file, SUFFIXES)):
        if path is not None and path.suffix not in suffixes:
            raise InputError(
                f"cannot write {path.name}: the suffix chooses the format; use one of "
                f"{', '.join(suffixes)}"
            )
        check_writable(path)
    if frontier_file is not None:
        require_drawing(frontier_file)


def _known_rows(output: Path | None, variations: Sequence[Variation]) -> list[Row]:
    """Return what an earlier run has left in the file.

    Raises
    ------
    InputError
        If the file is something else, or has rows of other problems: they would be lost.
    """
    if output is None or output.suffix != ".csv" or not output.exists():
        return []
    try:
        rows = load_sweep_csv(read_text(output))
    except InputError as error:
        raise InputError(f"{output} exists and is not the table of a sweep: {error}") from None
    hashes = {variation.problem.problem_hash for variation in variations}
    others = [row["name"] for row in rows if row["problem_hash"] not in hashes]
    if others:
        raise InputError(
            f"{output} has rows that are not of this sweep, the first is {others[0]!r}; give "
            "another file"
        )
    return rows


def _write(rows: Sequence[Row], output: Path | None) -> None:
    """Write the table so that the file is whole at any moment."""
    if output is not None:
        write_file(output, dump_sweep(rows, _FORMS[output.suffix]))


def _show(rows: Sequence[Row]) -> None:
    console = stdout()
    table = Table(box=None, pad_edge=False)
    columns = [column for column in sweep_columns(rows) if column.name != "message"]
    for column in columns:
        justify = "right" if column.is_number else "left"
        table.add_column(column.name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*cells)
    console.print(table, markup=False)
    # As a column they would be a few letters wide.
    notes = [f"{row['name']}: {row['message']}" for row in rows if row["message"]]
    if notes:
        console.print("\n" + "\n".join(notes), markup=False, soft_wrap=True)


def _draw(
    problem: Problem, variations: Sequence[Variation], rows: Sequence[Row], path: Path
) -> None:
    points = [_point(variations[row["index"]], row) for row in rows]
    save_frontier(frontier(points), path, problem.name)
    stderr().print(f"written to {path}", markup=False)


def _point(variation: Variation, row: Row) -> Point:
    return Point(
        index=row["index"],
        family=family_of(variation.problem),
        label=label_of(variation.values, variation.problem.name),
        memory_bytes=memory_of(variation.problem),
        objective_ms=row["objective_ms"],
        bound_ms=row["bound_ms"],
        is_infeasible=row["state"] == "infeasible",
    )


def _leave(rows: Sequence[Row], *, was_stopped: bool) -> None:
    if was_stopped:
        stderr().print("stopped by Ctrl-C; combinations that were not reached are missing")
        raise typer.Exit(INTERRUPTED)
    if any(row["objective_ms"] is not None for row in rows):
        return
    all_infeasible = all(row["state"] == "infeasible" for row in rows)
    raise typer.Exit(INFEASIBLE if all_infeasible else NOTHING_FOUND)
