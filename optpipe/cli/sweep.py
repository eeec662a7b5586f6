"""``optpipe sweep``: a problem along axes, as a table and a frontier."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from optpipe.cli import console as cli
from optpipe.cli.options import RequestBuilder, takes
from optpipe.errors import InputError
from optpipe.formats.json import read_text
from optpipe.formats.tables import dump_sweep, load_sweep_csv, sweep_columns
from optpipe.plot.image import FRONTIER_SUFFIXES, save_frontier
from optpipe.plot.scene import require_drawing
from optpipe.requests import SweepRequest
from optpipe.schedule import gap_of
from optpipe.sweep import (
    Point,
    best_sources,
    carried_message,
    family_of,
    frontier,
    label_of,
    memory_of,
    tighter_ones,
)
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


_DONE = ("succeeded", "infeasible")
_FORMATS = {".csv": "csv", ".md": "markdown", ".json": "json"}

TableFile = Annotated[
    Path | None,
    cli.output_option(
        "Write the table here: .csv, .md or .json. An existing .csv file is continued: its "
        "combinations are not solved again."
    ),
]
FrontierFile = Annotated[
    Path | None,
    typer.Option(
        "--frontier",
        metavar="FILE",
        help="Draw the best objective and its bound over memory here: .svg, .png, .pdf; .html "
        "(zooms).",
    ),
]
MaybeUrl = Annotated[
    str | None, typer.Option(metavar="URL", help="Solve on this service, as a batch; else locally.")
]


@takes(
    SweepRequest,
    without=["what_if", "name", "tags", "priority", "options.cache"],
    defaults={"time_limit_s": 20.0, "threads": 2},
    readers={"axes": lambda texts: {"axes": parse_axes(texts)}},
)
def sweep(
    builder: RequestBuilder[SweepRequest],
    problem_file: cli.ProblemFile,
    output: TableFile = None,
    frontier_file: FrontierFile = None,
    url: MaybeUrl = None,
    api_key: cli.ApiKey = None,
    as_json: cli.AsJson = False,
) -> None:
    """Solve a problem along axes, and show what memory buys.

    Limits and options hold for each combination. All combinations are checked before the first is
    solved. Ctrl-C keeps the combinations that are done. Exit codes: 0 if any combination has a
    schedule, 3 if all are proven infeasible, 4 if nothing was found.

    \b
    Examples:
      optpipe sweep problem.json --axis memory_scale=1,0.75,0.5
      optpipe sweep problem.json --axis memory_gb=16,24,32,40 --axis num_microbatches=8,16 \\
          -o table.csv --frontier frontier.svg
      optpipe sweep problem.json --axis offload=true,false --url http://planner:8000
    """
    for path, suffixes in ((output, tuple(_FORMATS)), (frontier_file, FRONTIER_SUFFIXES)):
        if path is not None and path.suffix not in suffixes:
            raise InputError(
                f"cannot write {path.name}: the suffix chooses the format; use one of "
                f"{', '.join(suffixes)}"
            )
    cli.check_outputs(output, frontier_file, inputs=[problem_file])
    if frontier_file is not None:
        require_drawing(frontier_file.suffix)
    problem = cli.read_problem(problem_file)
    request = builder.build(problem=problem)
    variations = vary(problem, request.axes)
    known = _read_known_rows(output, variations)
    options = request.options.model_dump(exclude={"cache"})
    is_stopped = False
    if url is not None:
        found = sweep_remote(url, api_key, problem, request.axes, options)
        rows = [_take_known(row, known.get(row["problem_hash"])) for row in found]
    else:
        with cli.needs_extra("solver"):
            rows, is_stopped = sweep_here(
                variations, known, options, lambda rows: _write(rows, output)
            )
    _write(rows, output)
    if as_json:
        cli.stdout().out(dump_sweep(rows, "json"), highlight=False, end="")
    else:
        _show(rows)
    if frontier_file is not None:
        points = []
        for row in rows:
            variation = variations[row["index"]]
            points.append(
                Point(
                    index=row["index"],
                    family=family_of(variation.problem),
                    label=label_of(variation.values, variation.problem.name),
                    memory_bytes=memory_of(variation.problem),
                    objective_ms=row["objective_ms"],
                    bound_ms=row["bound_ms"],
                    is_infeasible=row["state"] == "infeasible",
                )
            )
        save_frontier(frontier(points), frontier_file, problem.name)
        cli.report_written(frontier_file)
    if is_stopped:
        raise cli.stopped_by_user("combinations")
    if all(row["objective_ms"] is None for row in rows):
        is_infeasible = all(row["state"] == "infeasible" for row in rows)
        raise typer.Exit(cli.INFEASIBLE if is_infeasible else cli.NOTHING_FOUND)


def parse_axes(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return axis -> values from texts like ``memory_scale=1,0.5``; values are JSON or words.

    Raises `InputError` if a text is no axis, or an axis is given twice.
    """
    axes: dict[str, list[Any]] = {}
    for text in texts:
        name, _, values = map(str.strip, text.partition("="))
        if not name or not values:
            raise InputError(f"--axis {text}: must be NAME=VALUE,VALUE,...; write it so")
        if name in axes:
            raise InputError(f"--axis {name} is given twice; put all its values into one")
        listed = _parse_json(f"[{values}]")
        axes[name] = (
            listed
            if isinstance(listed, list)
            else [_parse_json(value.strip()) for value in values.split(",")]
        )
    return axes


def _parse_json(text: str) -> Any:
    """Return the value of a JSON text, and another text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _read_known_rows(output: Path | None, variations: Sequence[Variation]) -> dict[str, SweepRow]:
    """Return the rows that an earlier run has left in the file, by the hash of their problem.

    Raises `InputError` if the file is no table of a sweep, or has rows of other problems, which
    would be lost.
    """
    if output is None or output.suffix != ".csv" or not output.exists():
        return {}
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
    known: dict[str, SweepRow] = {}
    for row in rows:  # two combinations may be the same problem
        known[row["problem_hash"]] = _take_known(row, known.get(row["problem_hash"]))
    return known


def _take_known(row: SweepRow, known: SweepRow | None) -> SweepRow:
    """Return a row with the shorter schedule and the higher bound of it and of an earlier run."""
    if known is None:
        return row
    both = (row, known)
    found = [one for one in both if one["objective_ms"] is not None]
    ended = [one for one in both if one["state"] in _DONE]
    last = ended[0] if ended else row
    best = min(found, key=lambda one: one["objective_ms"] or 0.0, default=last)
    bound_ms = max((one["bound_ms"] for one in both if one["bound_ms"] is not None), default=None)
    best_ms = best["objective_ms"]
    return {
        **best,
        "index": row["index"],
        "values": row["values"],
        "state": last["state"] if ended else best["state"],
        "bound_ms": bound_ms,
        "gap": None if best_ms is None else gap_of(best_ms, bound_ms),
    }


def _write(rows: Sequence[SweepRow], output: Path | None) -> None:
    if output is not None:
        cli.write_file(output, dump_sweep(rows, _FORMATS[output.suffix]))


def _show(rows: Sequence[SweepRow]) -> None:
    console = cli.stdout()
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
    # A column of messages would be a few letters wide.
    names: dict[tuple[str, int | None], list[str]] = {}
    for row in rows:
        if row["message"]:
            # The same reason for no schedule often holds for many rows.
            place = None if row["objective_ms"] is None else row["index"]
            names.setdefault((row["message"], place), []).append(row["name"])
    notes = [
        f"{first}{f' and {len(others)} more' if others else ''}: {message}"
        for (message, _), (first, *others) in names.items()
    ]
    if notes:
        console.print("\n" + "\n".join(notes), markup=False, soft_wrap=True)


# --- A sweep on this machine, one combination after the other.


def sweep_here(
    variations: Sequence[Variation],
    known: Mapping[str, SweepRow],
    options: Mapping[str, Any],
    keep: Callable[[list[SweepRow]], None],
) -> tuple[list[SweepRow], bool]:
    """Return a row per variation, and whether Ctrl-C ended the sweep before all had one.

    Tighter problems are solved first. Each solve starts from the best schedule of its tighter
    problems, and no row is worse than one of theirs.

    * ``known``: problem hash -> row of an earlier run; no row becomes worse than that one.
    * ``keep``: called after each variation with all rows so far, in the order of the variations.
    """
    import optpipe_solver

    schedules: dict[int, Schedule] = {}
    tighter = tighter_ones([variation.problem for variation in variations])
    rows: dict[int, SweepRow] = {
        index: {**row, "index": index, "values": variation.values}
        for index, variation in enumerate(variations)
        if (row := known.get(variation.problem.problem_hash)) is not None
    }
    order = sorted(range(len(variations)), key=lambda index: len(tighter[index]))
    with cli.interruptible() as stop:
        for number, index in enumerate(order, start=1):
            problem, earlier = variations[index].problem, rows.get(index)
            is_known = earlier is not None and earlier["state"] in _DONE
            if not is_known:
                starts = [schedules[other] for other in tighter[index] if other in schedules]
                best = min(starts, key=lambda start: start.objective_ms, default=None)
                began_s = time.monotonic()
                with cli.stderr().status(f"solving {problem.name}"):
                    result = optpipe_solver.solve(
                        problem,
                        start=None if best is None else best.programs,
                        start_method="tighter problem",
                        should_stop=stop.is_set,
                        **options,
                    )
                seconds = time.monotonic() - began_s
                row = _make_row(problem, result, seconds, was_stopped=stop.is_set())
                row |= {"index": index, "values": variations[index].values}
                rows[index] = _take_known(row, earlier)
                if result.schedule is not None:
                    schedules[index] = result.schedule
            # The solver starts from a tighter problem's schedule, but a continued table has none.
            row = rows[index]
            sources = [index, *(other for other in tighter[index] if other in rows)]
            lengths = [rows[source]["objective_ms"] for source in sources]
            source = rows[sources[best_sources(lengths, [range(1, len(sources))])[0]]]
            if source is not row and (best_ms := source["objective_ms"]) is not None:
                row = rows[index] = {
                    **row,
                    "objective_ms": best_ms,
                    "gap": gap_of(best_ms, row["bound_ms"]),
                    "message": carried_message(source["name"], row["message"]),
                }
            outcome = row["state"]
            if row["objective_ms"] is not None:
                outcome = f"{format_ms(row['objective_ms'])} ms, gap {cli.gap_text(row['gap'])}"
            # Options may have changed since then: the user must see that they were not used.
            origin = ", from the file, not solved again" if is_known else ""
            cli.stderr().print(
                f"[{number}/{len(variations)}] {row['name']}: {outcome}{origin}",
                markup=False,
                soft_wrap=True,
            )
            keep([rows[at] for at in sorted(rows)])
            if stop.is_set():
                break
    return [rows[at] for at in sorted(rows)], stop.is_set()


def _make_row(problem: Problem, result: Result, seconds: float, *, was_stopped: bool) -> SweepRow:
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


# --- A sweep on a service, as a batch.


def sweep_remote(
    url: str,
    api_key: str | None,
    problem: Problem,
    axes: Mapping[str, Sequence[Any]],
    options: Mapping[str, Any],
) -> list[SweepRow]:
    """Return a row per combination when all have ended.

    Raises `typer.Exit` on Ctrl-C; the batch continues.
    """
    with cli.connect(url, api_key) as client:
        batch = client.sweep(problem, axes, **options)
        cli.stderr().print(f"batch {batch.id}", markup=False)
        try:
            last_shown = -1
            for news in batch.follow():
                ended = round(news.progress * news.num_items)
                if ended != last_shown:
                    cli.stderr().print(f"{ended} of {news.num_items} have ended", markup=False)
                last_shown = ended
        except KeyboardInterrupt:
            place = f"{url}/v1/batches/{batch.id}"
            cli.stderr().print(f"batch {batch.id} continues at {place}", markup=False)
            raise typer.Exit(cli.INTERRUPTED) from None
        return batch.table()
