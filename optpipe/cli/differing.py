"""``optpipe diff``: what changed between two schedules or two problems, and what it cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.console import PIPE, needs_extra, stderr, stdout
from optpipe.cli.reading import load_programs, read_problem, read_programs
from optpipe.errors import InputError, MissingExtraError
from optpipe.formats.json_text import read_text

if TYPE_CHECKING:
    from optpipe.explain import Cost, ProblemDifference, ScheduleDifference
    from optpipe.problem import Problem

__all__ = ["DIFFERENT", "diff"]

DIFFERENT = 1
"""The exit code where something changed, as that of diff(1)."""

_ALWAYS = ("makespan", "span")
_PROBLEM_FORMAT = '"optpipe/problem/'

Before = Annotated[
    Path,
    typer.Argument(
        metavar="A", help="A schedule (JSON, CSV) or a problem; - is a problem from standard input."
    ),
]
After = Annotated[Path, typer.Argument(metavar="B", help="Another of the same kind.")]
TheirProblem = Annotated[
    Path | None,
    typer.Argument(
        metavar="PROBLEM",
        help="The problem of both schedules: then they are checked, and what changed is told in "
        "ms and bytes.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def diff(
    before: Before, after: After, problem_file: TheirProblem = None, as_json: AsJson = False
) -> None:
    """Say what changed between two schedules or two problems.

    Schedules: placement, what is offloaded and recomputed, split or fused backwards, order. The
    problem of both adds what it cost in ms and bytes; without it there is what the files say of
    themselves. Problems: every field; with the solver installed, also the proven bound and the
    smallest memory that works. Leaves as diff(1) does: 0 where nothing changed, 1 where something
    did, 2 on bad input.

    \b
    Examples:
      optpipe diff before.json after.json problem.json
      optpipe diff schedule.json edited.csv
      optpipe diff problem.json less-memory.json
    """
    if before == after == PIPE:
        raise InputError("- and -: standard input is one problem; give the other as a file")
    kinds = [_is_problem(path) for path in (before, after)]
    if kinds[0] != kinds[1]:
        names = (str(before), str(after)) if kinds[0] else (str(after), str(before))
        raise InputError(
            f"{names[0]} is a problem and {names[1]} a schedule; give two of the same kind, and "
            "the problem of two schedules as the third"
        )
    if kinds[0] and problem_file is not None:
        raise InputError(f"{problem_file}: two problems need no third; leave it out")
    found = _problems(before, after) if kinds[0] else _schedules(before, after, problem_file)
    if as_json:
        stdout().out(found.model_dump_json(indent=2), highlight=False)
    else:
        _show(found)
    if not found.is_empty:
        raise typer.Exit(DIFFERENT)


def _is_problem(path: Path) -> bool:
    """Whether a file says that it is a problem, or, being JSON, lacks what schedules have.

    Standard input is one, as it is for all commands.
    """
    if path == PIPE:
        return True
    text = read_text(path)
    if not text.lstrip().startswith("{"):
        return False
    return _PROBLEM_FORMAT in text or '"programs"' not in text


def _show(found: ScheduleDifference | ProblemDifference) -> None:
    from optpipe.explain import cost_line, difference_lines

    if found.is_empty:
        stderr().print("no difference")
        return
    console = stdout()
    for line in difference_lines(found):
        console.print(line, markup=False, soft_wrap=True)
    costs = [cost for cost in found.costs if cost.before != cost.after or cost.name in _ALWAYS]
    if costs:
        console.print("What it cost", style="bold")
    for cost in costs:
        console.print(f"  {cost_line(cost)}", markup=False, soft_wrap=True)


def _problems(before: Path, after: Path) -> ProblemDifference:
    from optpipe.explain import compare_problems, problem_costs

    pair = read_problem(before), read_problem(after)
    return compare_problems(*pair, costs=(*problem_costs(*pair), *_solver_costs(*pair)))


def _solver_costs(before: Problem, after: Problem) -> list[Cost]:
    """Return what only the solver knows of problems; nothing where it is not installed."""
    from optpipe.explain import Cost

    if before == after:
        return []
    try:
        with needs_extra("solver"):
            from optpipe_solver.bounds import lower_bound
            from optpipe_solver.smallest_memory import feasibility, smallest_memory
    except MissingExtraError:
        return []
    bounds = [
        lower_bound(problem).ms if feasibility(problem).plan is not None else None
        for problem in (before, after)
    ]
    least = [max(smallest_memory(problem)) for problem in (before, after)]
    same = before.objective == after.objective
    name = f"proven bound of the {before.objective}" if same else "proven bound"
    return [
        Cost(name=name, unit="ms", before=bounds[0], after=bounds[1]),
        Cost(
            name="smallest memory of the largest device", unit="bytes",
            before=least[0], after=least[1],
        ),
    ]  # fmt: skip


def _schedules(before: Path, after: Path, problem_file: Path | None) -> ScheduleDifference:
    from optpipe.explain import compare_programs, record_costs, schedule_costs

    if problem_file is not None:
        problem = read_problem(problem_file)
        old, new = (read_programs(problem, path)[0] for path in (before, after))
        return compare_programs(old, new, schedule_costs(problem, old, new))
    (old, first), (new, second) = (load_programs(path) for path in (before, after))
    hashes = {record.problem_hash for record in (first, second) if record is not None}
    if len(hashes) > 1:
        stderr().print("note: the two schedules were made for different problems")
    return compare_programs(old, new, record_costs(first, second))
