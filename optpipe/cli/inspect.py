"""``optpipe check``, ``bound`` and ``compare``: what is true of a problem and of a schedule."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from optpipe.cli.console import needs_extra, read_problem, read_programs, stdout
from optpipe.cli.options import ProblemFile, ScheduleFile, Seed, Threads, TimeLimit
from optpipe.cli.report import number_table
from optpipe.errors import InfeasibleProblemError, InputError
from optpipe.plot.units import format_bytes, format_ms, format_share
from optpipe.timeline import bubble_rate

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe_solver.compare import Row

__all__ = ["bound", "check", "compare"]

_HEADERS = ("method", "makespan", "bubble", "span", "peak memory", "host", "seconds", "remark")


def check(problem_file: ProblemFile, schedule_file: ScheduleFile) -> None:
    """Say whether a schedule is legal; if not, why and where.

    Legal: every pass once and in order, no cyclic wait, and every memory peak within its limit
    under every timing. Leaves with 0 if legal, with 2 if not.

    \b
    Examples:
      optpipe check problem.json schedule.json
      optpipe check problem.json schedule.csv
    """
    problem = read_problem(problem_file)
    programs, schedule = read_programs(problem, schedule_file)
    console = stdout()
    console.print("[bold green]legal[/]")
    console.print(number_table(problem, programs, schedule, None))


def bound(problem_file: ProblemFile) -> None:
    """Print a time that no schedule can beat, and its proof.

    \b
    Example:
      optpipe bound problem.json
    """
    problem = read_problem(problem_file)
    with needs_extra("solver"):
        from optpipe_solver.bounds import lower_bound
        from optpipe_solver.smallest_memory import feasibility

        verdict = feasibility(problem)
        if verdict.plan is None:
            raise InfeasibleProblemError(verdict.message, verdict.needs)
        proven = lower_bound(problem)
    stdout().print(
        f"{problem.objective} >= {format_ms(proven.ms)} ms   proven by: {proven.method}",
        markup=False,
    )


def compare(
    problem_file: ProblemFile,
    time_limit: TimeLimit = 20.0,
    threads: Threads = 1,
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a Markdown table, for documents.")
    ] = False,
) -> None:
    """Run every method and print one table.

    Schedules over the memory limit are listed with what they would take, and marked.

    \b
    Examples:
      optpipe compare problem.json
      optpipe compare problem.json --time-limit 60 --markdown
    """
    if as_json and as_markdown:
        raise InputError("--json and --markdown exclude each other; give one of them")
    problem = read_problem(problem_file)
    with needs_extra("solver"):
        from optpipe_solver.compare import compare as compare_methods

        rows = compare_methods(problem, time_limit_s=time_limit, threads=threads, seed=seed)
    console = stdout()
    if as_json:
        console.print(json.dumps([_as_json(row) for row in rows], indent=2), soft_wrap=True)
    elif as_markdown:
        console.print(_as_markdown(problem, rows), soft_wrap=True, markup=False)
    else:
        console.print(_as_table(problem, rows))


def _as_json(row: Row) -> dict[str, Any]:
    data = asdict(row)
    programs = row.programs
    data["programs"] = None if programs is None else [[str(a) for a in p] for p in programs]
    return data


def _as_markdown(problem: Problem, rows: list[Row]) -> str:
    lines = [f"| {' | '.join(_HEADERS)} |", f"|{'|'.join(['---'] * len(_HEADERS))}|"]
    lines += [f"| {' | '.join(_cells(problem, row))} |" for row in rows]
    return "\n".join(lines)


def _as_table(problem: Problem, rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    for header in _HEADERS:
        table.add_column(header, justify="left" if header in ("method", "remark") else "right")
    for row in rows:
        style = "dim" if row.programs is None or row.over_limit else ""
        table.add_row(*_cells(problem, row), style=style)
    return table


def _cells(problem: Problem, row: Row) -> tuple[str, ...]:
    if row.programs is None:
        return (row.method, "-", "-", "-", "-", "-", f"{row.seconds:.2f}", row.reason)
    remark = "over the memory limit" if row.over_limit else ""
    return (
        row.method,
        f"{format_ms(row.makespan_ms)} ms",
        format_share(bubble_rate(problem, row.makespan_ms)),
        f"{format_ms(row.span_ms)} ms",
        format_bytes(row.peak_bytes),
        format_bytes(row.host_peak_bytes),
        f"{row.seconds:.2f}",
        "; ".join(part for part in (remark, row.reason) if part),
    )
