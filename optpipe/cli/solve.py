"""``optpipe solve``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.console import (
    MOST_DRAWN,
    Output,
    ProblemFile,
    ScheduleFile,
    baseline_programs,
    check_apart,
    check_schedule_file,
    gap_text,
    needs_extra,
    nothing_found,
    number_table,
    read_problem,
    read_programs,
    rescued,
    results,
    say_written,
    searching,
    show_schedule,
    stderr,
    stdout,
    write_schedule,
)
from optpipe.cli.options import OptionsOf, takes
from optpipe.cli.plot import check_drawable, draw_solved
from optpipe.errors import InfeasibleProblemError, InputError
from optpipe.evaluate import evaluate
from optpipe.formats.json import dump_schedule
from optpipe.requests import SubmitOptions
from optpipe.sweep import sweep
from optpipe.units import format_ms

if TYPE_CHECKING:
    from optpipe.problem import Objective, Problem
    from optpipe.schedule import Schedule
    from optpipe_solver import Robust

__all__ = ["bound", "check", "solve"]


@takes(
    SubmitOptions,
    without=["chunks", "placements", "cache"],
    defaults={"time_limit_s": 60.0, "threads": 2},
)
def solve(
    given: OptionsOf[SubmitOptions],
    problem_file: ProblemFile,
    output: Output = None,
    no_offload: Annotated[
        bool, typer.Option("--no-offload", help="Only schedules that offload nothing.")
    ] = False,
    no_recompute: Annotated[
        bool, typer.Option("--no-recompute", help="Only schedules that recompute nothing.")
    ] = False,
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
      optpipe solve problem.json --no-offload --no-recompute
      optpipe solve problem.json --robust P90 --stragglers 0.2
      optpipe solve problem.json --plot picture.html
    """
    began = time.monotonic()
    options = given()
    problem = _with_objective(read_problem(problem_file), options.objective)
    barred = {"offload": no_offload, "recompute": no_recompute}
    barred_names = [name for name, is_barred in barred.items() if is_barred]
    searched = problem
    if barred_names:
        searched = sweep(problem, {name: [False] for name in barred_names})[0].problem
    # What the problem does not allow anyway restricts nothing.
    is_restricted = searched.problem_hash != problem.problem_hash
    among = f"among schedules without {' and '.join(barred_names)}" if is_restricted else ""
    check_schedule_file(output)
    check_drawable(picture)
    _refuse_large(problem, picture)
    check_apart(output, picture, inputs=[problem_file])
    with needs_extra("solver"):
        import optpipe_solver

        if among:
            stderr().print(f"{among}: bounds on the way hold there", markup=False)
        # Reading and loading count, or the command would end late on a busy machine.
        limit_s = options.time_limit_s or 0.0
        left_s = max(limit_s / 2, limit_s - (time.monotonic() - began))
        with searching(f"solving {among}".strip()) as search:
            result = optpipe_solver.solve(
                searched,
                time_limit_s=left_s,
                work_limit=options.work_limit,
                threads=options.threads,
                seed=options.seed,
                gap=options.gap,
                method=options.method,
                robust=_robust(options),
                **search,
            )
        found = result.schedule
        if found is None:
            raise nothing_found(
                result.status, f"{among}: {result.message}" if among else result.message
            )
        schedule = _in_full(problem, found, among) if among else found
        # Before the picture: a closed pipe (| head) must not cost the schedule.
        if output is not None:
            write_schedule(schedule, output)
            say_written(output)
        if picture is not None:
            _draw(picture, problem, schedule, is_kept=output is not None)
        console = results(output)
        show_schedule(console, problem, schedule, baseline_programs(problem))
        if among:
            console.print(f"{among}: {_certificate(found)}", markup=False)
        if result.robust is not None:
            console.print(str(result.robust), markup=False, soft_wrap=True)


def _robust(options: SubmitOptions) -> Robust | None:
    """Return the percentile by which schedules are ranked and its noise; None without one."""
    if options.robust is None:
        return None
    from optpipe_solver import Robust

    return Robust.parse(
        options.robust,
        jitter=options.jitter,
        stragglers=options.stragglers,
        seed=options.seed,
    )


def _with_objective(problem: Problem, objective: Objective | None) -> Problem:
    if objective in (None, problem.objective):
        return problem
    changed = problem.model_copy(update={"objective": objective})
    stderr().print(
        f"--objective {objective}: the file says {problem.objective}, so that this is another "
        f"problem, {changed.problem_hash}; to check its schedule, write that objective there",
        markup=False,
        soft_wrap=True,
    )
    return changed


def _in_full(problem: Problem, found: Schedule, among: str) -> Schedule:
    """Return a schedule of the problem with less allowed as one of the problem.

    What was proven there does not hold here: its bound stands in words in ``bound_method``, and
    that of the problem takes its place.
    """
    from optpipe_solver.bounds import lower_bound

    proven = lower_bound(problem)
    reduced = found.provenance
    unproven = {"bound_ms": None}
    provenance = reduced.model_copy(
        update={
            "bound_method": f"{proven.method}; {among}: {_certificate(found)}",
            "trace": tuple(entry.model_copy(update=unproven) for entry in reduced.trace),
            "contributions": tuple(
                part.model_copy(update=unproven | {"bound_gain_ms": 0.0})
                for part in reduced.contributions
            ),
        }
    )
    stopped_by = "gap" if found.stopped_by == "optimal" else found.stopped_by
    return evaluate(problem, found.programs, provenance, bound_ms=proven.ms, stopped_by=stopped_by)


def _certificate(found: Schedule) -> str:
    if not found.bound_ms:
        return "nothing is proven"
    by = found.provenance.bound_method
    return f"bound {format_ms(found.bound_ms)} ms, gap {gap_text(found.gap)}, by {by}"


def _refuse_large(problem: Problem, picture: Path | None) -> None:
    """Refuse a picture that would be drawn long after the time limit."""
    least = 2 * len(problem.stages) * problem.num_microbatches
    if picture is not None and least > MOST_DRAWN:
        raise InputError(
            f"--plot: the schedule will have {least:,} actions or more, and more than "
            f"{MOST_DRAWN:,} are not drawn within a time limit; leave --plot out, and draw what -o "
            "writes with optpipe plot"
        )


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
