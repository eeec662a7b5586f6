"""``optpipe check`` and ``bound``: what is true of a problem and of a schedule."""

from __future__ import annotations

from optpipe.cli.console import needs_extra, stdout
from optpipe.cli.options import ProblemFile, ScheduleFile
from optpipe.cli.reading import read_problem, read_programs
from optpipe.cli.report import number_table
from optpipe.errors import InfeasibleProblemError
from optpipe.plot.units import format_ms

__all__ = ["bound", "check"]


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
