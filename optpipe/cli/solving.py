"""``optpipe solve``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from optpipe.cli.console import INFEASIBLE, NOTHING_FOUND, interruptible, needs_extra, stderr
from optpipe.cli.options import (
    Gap,
    Method,
    Output,
    ProblemFile,
    Seed,
    Threads,
    TimeLimit,
    WorkLimit,
)
from optpipe.cli.picture import check_drawable, draw_solved
from optpipe.cli.reading import read_problem
from optpipe.cli.report import progress_line, show_schedule
from optpipe.cli.writing import (
    check_apart,
    check_schedule_file,
    rescued,
    results,
    say_written,
    write_schedule,
)
from optpipe.errors import InputError
from optpipe.formats.json_text import dump_schedule
from optpipe.schedule import OPTIMAL_GAP

if TYPE_CHECKING:
    from rich.console import Console

    from optpipe.problem import Problem
    from optpipe.schedule import Schedule
    from optpipe_solver import Progress, Result

__all__ = ["solve"]


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
    progress = stderr()
    with needs_extra("solver"):
        result = _run(
            problem,
            progress,
            time_limit_s=time_limit,
            work_limit=work_limit,
            threads=threads,
            seed=seed,
            gap=gap,
            method=method,
        )
        if result.schedule is None:
            say = f"[bold red]{result.status.value}:[/] {escape(result.message)}"
            progress.print(say, soft_wrap=True)
            raise typer.Exit(INFEASIBLE if result.status == "infeasible" else NOTHING_FOUND)
        # Before the picture: a closed pipe (| head) must not cost the schedule.
        if output is not None:
            write_schedule(result.schedule, output)
            say_written(output)
        if picture is not None:
            _draw(picture, problem, result.schedule, is_kept=output is not None)
        show_schedule(results(output), problem, result.schedule.programs, result.schedule)


def _draw(picture: Path, problem: Problem, schedule: Schedule, *, is_kept: bool) -> None:
    """Draw; where that fails, keep a schedule that is nowhere else."""
    try:
        draw_solved(picture, problem, schedule)
    except InputError as error:
        if is_kept:
            raise
        place = rescued(Path("schedule.json"), dump_schedule(schedule))
        raise InputError(f"{error}; the schedule is not lost, {place}") from None


def _run(problem: Problem, progress: Console, **options: Any) -> Result:
    import optpipe_solver

    def tell(news: Progress) -> None:
        line = progress_line(news.seconds, news.method, news.objective_ms, news.bound_ms)
        progress.print(line, markup=False)

    with interruptible() as stop, progress.status("solving"):
        return optpipe_solver.solve(problem, on_progress=tell, should_stop=stop.is_set, **options)
