"""``optpipe solve``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.console import (
    Gap,
    Method,
    Output,
    ProblemFile,
    ScheduleFile,
    Seed,
    Threads,
    TimeLimit,
    WorkLimit,
    needs_extra,
    stdout,
)
from optpipe.cli.files import (
    check_apart,
    check_schedule_file,
    read_problem,
    read_programs,
    rescued,
    results,
    say_written,
    write_schedule,
)
from optpipe.cli.plot import check_drawable, draw_solved
from optpipe.cli.report import (
    baseline_programs,
    nothing_found,
    number_table,
    searching,
    show_schedule,
)
from optpipe.errors import InfeasibleProblemError, InputError
from optpipe.formats.json import dump_schedule
from optpipe.schedule import OPTIMAL_GAP
from optpipe.units import format_ms

if TYPE_CHECKING:
    from optpipe.problem import Problem
    from optpipe.schedule import Schedule

__all__ = ["bound", "check", "solve"]


def solve(
    problem_file: ProblemFile,
    output: Output = None,
    time_limit: TimeLimit = 60.0,
    threads: Threads = 2,
    seed: Seed = 0,
    method: Method = "auto",
    gap: Gap = OPTIMAL_GAP,
    work_limit: WorkLimit = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Draw the schedule below 1F1B: .html to zoom into, .svg, .png, .pdf.",
        ),
    ] = None,
) -> None:
    """Find a schedule, and how far from the optimum it can be.

    Every improvement is printed while it runs; Ctrl-C stops and keeps the best. Leaves with 0 and
    a schedule, 2 on bad input, 3 where no schedule can exist (and says the smallest memory that
    works), 4 where nothing was found.

    \b
    Examples:
      optpipe solve problem.json
      optpipe solve problem.json -o schedule.json --time-limit 120 --threads 4
      optpipe solve problem.json -o schedule.csv --method greedy
      optpipe solve problem.json --work-limit 30 --gap 0.01
      optpipe solve problem.json --plot picture.html
    """
    problem = read_problem(problem_file)
    check_schedule_file(output)
    check_drawable(picture)
    check_apart(output, picture, inputs=[problem_file])
    with needs_extra("solver"):
        import optpipe_solver

        with searching("solving") as search:
            result = optpipe_solver.solve(
                problem,
                time_limit_s=time_limit,
                work_limit=work_limit,
                threads=threads,
                seed=seed,
                gap=gap,
                method=method,
                **search,
            )
        if result.schedule is None:
            raise nothing_found(result.status, result.message)
        # Before the picture: a closed pipe (| head) must not cost the schedule.
        if output is not None:
            write_schedule(result.schedule, output)
            say_written(output)
        if picture is not None:
            _draw(picture, problem, result.schedule, is_kept=output is not None)
        show_schedule(results(output), problem, result.schedule, baseline_programs(problem))


def _draw(picture: Path, problem: Problem, schedule: Schedule, *, is_kept: bool) -> None:
    """Draw; where that fails, keep a schedule that is nowhere else."""
    try:
        draw_solved(picture, problem, schedule)
    except InputError as error:
        if is_kept:
            raise
        place = rescued(Path("schedule.json"), dump_schedule(schedule))
        raise InputError(f"{error}; the schedule is not lost, {place}") from None


# --- ``optpipe check`` and ``bound``: what is true of a problem and of a schedule.


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
        from optpipe_solver.feasibility import feasibility

        found = feasibility(problem)
        if found.plan is None:
            raise InfeasibleProblemError(found.message, found.needs)
        proven = lower_bound(problem)
    stdout().print(
        f"{problem.objective} >= {format_ms(proven.ms)} ms   proven by: {proven.method}",
        markup=False,
    )
