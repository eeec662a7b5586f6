"""``optpipe sweep``: one problem along axes, one table and one frontier at the end."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from optpipe.cli.console import (
    INFEASIBLE,
    INTERRUPTED,
    NOTHING_FOUND,
    ApiKey,
    ProblemFile,
    check_apart,
    check_writable,
    gap_text,
    interruptible,
    needs_extra,
    read_problem,
    say_written,
    stderr,
    stdout,
    write_file,
)
from optpipe.cli.options import OptionsOf, takes
from optpipe.errors import InputError
from optpipe.formats.json import read_text
from optpipe.formats.tables import dump_sweep, load_sweep_csv, sweep_columns
from optpipe.plot.image import FRONTIER_SUFFIXES, save_frontier
from optpipe.plot.scene import require_drawing
from optpipe.requests import SweepRequest
from optpipe.schedule import gap_of
from optpipe.sweep import Point, family_of, frontier, label_of, memory_of, tighter_ones
from optpipe.sweep import sweep as vary
from optpipe.units import format_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from optpipe.formats.tables import SweepRow
    from optpipe.problem import Problem
    from optpipe.schedule import Schedule
    from optpipe.sweep import Variation
    from optpipe_solver import Result

__all__ = ["parse_axes", "sweep", "sweep_here", "sweep_remote"]


_FORMS = {".csv": "csv", ".md": "markdown", ".json": "json"}

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


@takes(
    SweepRequest,
    without=["what_if", "name", "tags", "priority", "cache"],
    defaults={"time_limit_s": 20.0, "threads": 2},
    readers={"axes": lambda texts: {"axes": parse_axes(texts)}},
)
def sweep(
    given: OptionsOf[SweepRequest],
    problem_file: ProblemFile,
    output: TableFile = None,
    frontier_file: FrontierFile = None,
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
    request = given(problem=problem)
    variations = vary(problem, request.axes)
    known = _known_rows(output, variations)
    options = request.options.model_dump(exclude={"cache"})
    if url is not None:
        rows = sweep_remote(url, api_key, problem, request.axes, options)
        was_stopped = False
    else:
        with needs_extra("solver"):
            rows, was_stopped = sweep_here(
                variations, known, options, lambda rows: _write(rows, output)
            )
    _write(rows, output)
    _show(rows)
    if frontier_file is not None:
        points = [_point(variations[row["index"]], row) for row in rows]
        save_frontier(frontier(points), frontier_file, problem.name)
        say_written(frontier_file)
    _leave(rows, was_stopped=was_stopped)


def parse_axes(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return name -> values of texts like ``memory_scale=1,0.5``; values are JSON, or words.

    Raises `InputError` if one is no axis, or stands twice.
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
    for path, suffixes in ((output, tuple(_FORMS)), (frontier_file, FRONTIER_SUFFIXES)):
        if path is not None and path.suffix not in suffixes:
            raise InputError(
                f"cannot write {path.name}: the suffix chooses the format; use one of "
                f"{', '.join(suffixes)}"
            )
        check_writable(path)
    if frontier_file is not None:
        require_drawing(frontier_file.suffix)


def _known_rows(output: Path | None, variations: Sequence[Variation]) -> list[SweepRow]:
    """Return what an earlier run has left in the file.

    Raises `InputError` if the file is something else, or has rows of other problems: they would be
    lost.
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


def _write(rows: Sequence[SweepRow], output: Path | None) -> None:
    """Write the table so that the file is whole at any moment."""
    if output is not None:
        write_file(output, dump_sweep(rows, _FORMS[output.suffix]))


def _show(rows: Sequence[SweepRow]) -> None:
    console = stdout()
    table = Table(box=None, pad_edge=False)
    columns = [column for column in sweep_columns(rows) if column.name != "message"]
    for column in columns:
        if column.is_number:
            table.add_column(column.name, justify="right", no_wrap=True)
        else:
            table.add_column(column.name, overflow="fold")
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*cells)
    console.print(table, markup=False)
    # As a column they would be a few letters wide.
    notes = [f"{row['name']}: {row['message']}" for row in rows if row["message"]]
    if notes:
        console.print("\n" + "\n".join(notes), markup=False, soft_wrap=True)


def _point(variation: Variation, row: SweepRow) -> Point:
    return Point(
        index=row["index"],
        family=family_of(variation.problem),
        label=label_of(variation.values, variation.problem.name),
        memory_bytes=memory_of(variation.problem),
        objective_ms=row["objective_ms"],
        bound_ms=row["bound_ms"],
        is_infeasible=row["state"] == "infeasible",
    )


def _leave(rows: Sequence[SweepRow], *, was_stopped: bool) -> None:
    if was_stopped:
        stderr().print("stopped by Ctrl-C; combinations that were not reached are missing")
        raise typer.Exit(INTERRUPTED)
    if any(row["objective_ms"] is not None for row in rows):
        return
    all_infeasible = all(row["state"] == "infeasible" for row in rows)
    raise typer.Exit(INFEASIBLE if all_infeasible else NOTHING_FOUND)


# --- A sweep that is solved here, one combination after the other.

_DONE = ("succeeded", "infeasible")


def sweep_here(
    variations: Sequence[Variation],
    known: Sequence[SweepRow],
    options: Mapping[str, Any],
    keep: Callable[[list[SweepRow]], None],
) -> tuple[list[SweepRow], bool]:
    """Return a row per variation, and whether Ctrl-C ended it before all had theirs.

    Tighter problems first: each solve starts from the best that they have given, and no row is
    worse than one of theirs.

    * ``known``: rows of an earlier run; what they say of the same problems is taken over.
    * ``keep``: called after each one with all rows so far, in the order of the variations.
    """
    rows: dict[int, SweepRow] = {}
    schedules: dict[int, Schedule] = {}
    tighter = tighter_ones([variation.problem for variation in variations])
    done = {row["problem_hash"]: row for row in known if row["state"] in _DONE}
    order = sorted(range(len(variations)), key=lambda index: len(tighter[index]))
    with interruptible() as stop:
        for number, index in enumerate(order, start=1):
            variation = variations[index]
            row = done.get(variation.problem.problem_hash)
            is_known = row is not None
            if row is None:
                starts = [schedules[other] for other in tighter[index] if other in schedules]
                best = min(starts, key=lambda start: start.objective_ms, default=None)
                result, seconds = _solve(variation.problem, best, options, stop.is_set)
                row = _row(variation.problem, result, seconds, was_stopped=stop.is_set())
                if result.schedule is not None:
                    schedules[index] = result.schedule
            row = _carried(row, [rows[other] for other in tighter[index] if other in rows])
            rows[index] = {**row, "index": index, "values": variation.values}
            _tell(rows[index], f"[{number}/{len(variations)}]", is_known=is_known)
            keep([rows[at] for at in sorted(rows)])
            if stop.is_set():
                break
    return [rows[at] for at in sorted(rows)], stop.is_set()


def _carried(row: SweepRow, tighter: Sequence[SweepRow]) -> SweepRow:
    """Return a row with the best of those of tighter problems, where that is better.

    The solver starts from it; but a table that is gone on with knows no schedules.
    """
    found = [(other["objective_ms"], other["name"]) for other in tighter]
    best_ms, name = min(
        ((ms, name) for ms, name in found if ms is not None), default=(math.inf, "")
    )
    own_ms = row["objective_ms"]
    if row["state"] == "infeasible" or best_ms >= (math.inf if own_ms is None else own_ms):
        return row
    state = "succeeded" if row["state"] == "failed" else row["state"]
    said = f"the schedule of {name}, whose problem is tighter: it is legal here, and no longer"
    return {
        **row,
        "state": state,
        "objective_ms": best_ms,
        "gap": gap_of(best_ms, row["bound_ms"]),
        "message": said,
    }


def _solve(
    problem: Problem,
    start: Schedule | None,
    options: Mapping[str, Any],
    should_stop: Callable[[], bool],
) -> tuple[Result, float]:
    began = time.monotonic()
    with stderr().status(f"solving {problem.name}"):
        import optpipe_solver

        result = optpipe_solver.solve(
            problem,
            start=None if start is None else start.programs,
            start_method="tighter problem",
            should_stop=should_stop,
            **options,
        )
    return result, time.monotonic() - began


def _row(problem: Problem, result: Result, seconds: float, *, was_stopped: bool) -> SweepRow:
    state = result.status.value
    if result.schedule is not None:
        state = "cancelled" if was_stopped and result.status != "optimal" else "succeeded"
    elif result.status != "infeasible":
        state = "cancelled" if was_stopped else "failed"
    schedule = result.schedule
    return {
        "index": 0,
        "values": {},
        "name": problem.name,
        "state": state,
        "objective_ms": None if schedule is None else schedule.objective_ms,
        "bound_ms": result.bound_ms,
        "gap": None if schedule is None else schedule.gap,
        "memory_bytes": max(memory_of(problem)),
        "seconds": round(seconds, 3),
        "problem_hash": problem.problem_hash,
        "job_id": None,
        "message": result.message or None,
    }


def _tell(row: SweepRow, place: str, *, is_known: bool) -> None:
    said = row["state"]
    if row["objective_ms"] is not None:
        said = f"{format_ms(row['objective_ms'])} ms, gap {gap_text(row['gap'])}"
    # Options may have changed since: who gave other ones must see that these were not used.
    source = ", from the file, not solved again" if is_known else ""
    stderr().print(f"{place} {row['name']}: {said}{source}", markup=False, soft_wrap=True)


# --- A sweep that a service solves, as a batch.


def sweep_remote(
    url: str,
    api_key: str | None,
    problem: Problem,
    axes: Mapping[str, Sequence[Any]],
    options: Mapping[str, Any],
) -> list[SweepRow]:
    """Return a row per combination once all have ended.

    Raises `typer.Exit` by Ctrl-C; the service goes on.
    """
    from optpipe.client import Client

    with Client(url, api_key=api_key) as client:
        batch = client.sweep(problem, axes, **options)
        stderr().print(f"batch {batch.id}", markup=False)
        try:
            last_shown = -1
            for news in batch.follow():
                ended = round(news.progress * news.num_items)
                if ended != last_shown:
                    stderr().print(f"{ended} of {news.num_items} have ended", markup=False)
                last_shown = ended
        except KeyboardInterrupt:
            stderr().print(f"batch {batch.id} goes on at {url}/v1/batches/{batch.id}", markup=False)
            raise typer.Exit(INTERRUPTED) from None
        return batch.table()
