"""``optpipe explain`` and ``diff``: what limits a schedule, and what changed between two."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe.cli import console as cli
from optpipe.cli.options import RequestBuilder, takes
from optpipe.errors import InputError, MissingExtraError
from optpipe.formats.json import dump_problem, dump_schedule, read_text
from optpipe.requests import SearchOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.explain import Cost, ProblemDifference, ScheduleDifference
    from optpipe.explain.what_if import Unasked
    from optpipe.problem import Problem
    from optpipe.schedule import Programs
    from optpipe_solver.compare import WhatIf

__all__ = ["DIFFERENT", "diff", "explain"]


_ANSWERS = (".problem.json", ".schedule.json")
_TITLES = {
    "length": "Length",
    "critical path": "Critical path (start in ms, what, how long)",
    "lanes": "Lanes",
    "pairs": "Pairs that hide time",
    "slack": "Slack (alone, before the step is longer)",
    "memory": "Memory",
    "idle": "Idle",
    "offload": "Why it offloads",
    "recompute": "Why it recomputes",
    "mode": "Why it does not keep",
}

WithWhatIf = Annotated[
    bool,
    typer.Option(
        "--what-if",
        help="Solve with 1 GB more on the tightest device, 20% more PCIe bandwidth, and twice the "
        "micro-batches.",
    ),
]
Folder = Annotated[
    Path | None,
    cli.output_option(
        "Write problem and schedule of each what-if into this folder.", metavar="DIR"
    ),
]


@takes(SearchOptions, defaults={"time_limit_s": 10.0, "threads": 2})
def explain(
    builder: RequestBuilder[SearchOptions],
    problem_file: cli.ProblemFile,
    schedule_file: cli.ScheduleFile,
    what_if: WithWhatIf = False,
    as_json: cli.AsJson = False,
    output: Folder = None,
) -> None:
    """Explain what limits a schedule, and why it offloads.

    The report has the critical path, the use of each lane, free memory and idle time by cause. For
    each offload it shows what would not fit without it. --what-if adds the gain of a little more
    memory, bandwidth or micro-batches. Each is solved for --time-limit seconds and compared with
    the same search without the change.

    \b
    Examples:
      optpipe explain problem.json schedule.json
      optpipe explain problem.json schedule.json --json
      optpipe explain problem.json schedule.json --what-if --time-limit 20 -o what-if
    """
    if output is not None and not what_if:
        raise InputError("-o DIR is for what --what-if finds; add --what-if, or leave -o out")
    problem = cli.read_problem(problem_file)
    programs, schedule = cli.read_programs(problem, schedule_file)
    if output is not None:
        _make_folder(output, (problem_file, schedule_file))
    from optpipe.explain import explain as explain_programs

    bound_ms = None if schedule is None else schedule.bound_ms
    explanation = explain_programs(problem, programs, bound_ms=bound_ms)
    if not as_json:
        for topic, sentences in groupby(explanation.sentences, key=lambda one: one.topic):
            cli.stdout().print(_TITLES[topic], style="bold")
            for sentence in sentences:
                cli.stdout().print(f"  {sentence.text}", markup=False, soft_wrap=True)
    document = explanation.model_dump(mode="json")
    with cli.interruptible() as stop:
        if what_if:
            options = builder.build().model_dump()
            answers = _solve_what_ifs(
                problem, programs, explanation.length_ms, should_stop=stop.is_set, **options
            )
            document["what_if"] = [_report(answer, output, as_json) for answer in answers]
    if as_json:
        cli.print_json(document)
    if stop.is_set():
        raise cli.stopped_by_user("what-ifs")


def _solve_what_ifs(
    problem: Problem, programs: Programs, objective_ms: float, **options: Any
) -> Iterator[WhatIf | Unasked]:
    with cli.needs_extra("solver"):
        from optpipe_solver.compare import what_if

        answers = what_if(problem, programs, objective_ms, **options)
    while True:
        # Only while solving: the status and an answer would share a line of the terminal.
        with cli.stderr().status("solving"):
            answer = next(answers, None)
        if answer is None:
            return
        yield answer


def _report(answer: WhatIf | Unasked, folder: Path | None, as_json: bool) -> dict[str, Any]:
    """Print an answer and write its files; return it as JSON."""
    if not as_json:
        if answer.name == "as-it-is":
            cli.stdout().print("What if", style="bold")
        cli.stdout().print(f"  {answer.sentence()}", markup=False, soft_wrap=True)
    schedule, problem = getattr(answer, "schedule", None), getattr(answer, "problem", None)
    if folder is not None and schedule is not None and problem is not None:
        cli.write_file(folder / f"{answer.name}.problem.json", dump_problem(problem))
        cli.write_file(folder / f"{answer.name}.schedule.json", dump_schedule(schedule))
        cli.report_written(folder / f"{answer.name}.*.json")
    return answer.as_json()


def _make_folder(path: Path, inputs: tuple[Path, ...]) -> None:
    """Make a folder for answers.

    Raises `InputError` if it cannot be made, or if an answer could overwrite an input in it.
    """
    for file in inputs:
        if file.name.endswith(_ANSWERS) and file.resolve().parent == path.resolve():
            raise InputError(
                f"-o {path}: {file.name} is there, and an answer could overwrite it; choose "
                "another folder"
            )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make folder {path}: {error.strerror}; choose another") from None
    cli.check_outputs(path / "problem.json")


# --- ``optpipe diff``: what changed between two schedules or two problems, in ms and bytes.

DIFFERENT = 1
"""Exit code if something changed, as of diff(1)."""

_ALWAYS_SHOWN = ("makespan", "span")
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
        help="The problem of both schedules. It adds a check of both, and ms and bytes.",
        show_default=False,
    ),
]


def diff(
    before: Before, after: After, problem_file: TheirProblem = None, as_json: cli.AsJson = False
) -> None:
    """Show what changed between two schedules or two problems.

    Schedules differ in placement, offload and recompute, split or fused backwards, and order. With
    their problem the report adds the difference in ms and bytes; without it, the numbers in the
    files. Problems differ in any field; with the solver installed the report adds the proven bound
    and the smallest memory that works. Exit codes as of diff(1): 0 if nothing changed, 1 if
    something did, 2 on bad input.

    \b
    Examples:
      optpipe diff before.json after.json problem.json
      optpipe diff schedule.json edited.csv
      optpipe diff problem.json less-memory.json
    """
    if before == after == cli.PIPE:
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
    found = (
        _compare_problems(before, after)
        if kinds[0]
        else _compare_schedules(before, after, problem_file)
    )
    # Equal programs that were made for different problems have different costs.
    costs_differ = any(
        None not in (cost.before, cost.after) and cost.before != cost.after for cost in found.costs
    )
    is_different = costs_differ or not found.is_empty
    if as_json:
        cli.stdout().out(found.model_dump_json(indent=2), highlight=False)
    elif is_different:
        _show_difference(found)
    else:
        cli.stderr().print("no difference")
    if is_different:
        raise typer.Exit(DIFFERENT)


def _is_problem(path: Path) -> bool:
    """Whether a file has the format of a problem, or is JSON without programs.

    Standard input is a problem, as for all commands.
    """
    if path == cli.PIPE:
        return True
    text = read_text(path)
    if not text.lstrip().startswith("{"):
        return False
    return _PROBLEM_FORMAT in text or '"programs"' not in text


def _show_difference(found: ScheduleDifference | ProblemDifference) -> None:
    from optpipe.explain import cost_line, difference_lines

    console = cli.stdout()
    if found.is_empty:
        console.print("the programs are the same, the numbers in the files are not")
    for line in difference_lines(found):
        console.print(line, markup=False, soft_wrap=True)
    costs = [
        cost for cost in found.costs if cost.before != cost.after or cost.name in _ALWAYS_SHOWN
    ]
    if costs:
        console.print("Cost", style="bold")
    for cost in costs:
        console.print(f"  {cost_line(cost)}", markup=False, soft_wrap=True)


def _compare_problems(before: Path, after: Path) -> ProblemDifference:
    from optpipe.explain import compare_problems, problem_costs

    pair = cli.read_problem(before), cli.read_problem(after)
    return compare_problems(*pair, costs=(*problem_costs(*pair), *_solver_costs(*pair)))


def _solver_costs(before: Problem, after: Problem) -> list[Cost]:
    """Return bounds and smallest memories; nothing if the solver is not installed."""
    from optpipe.explain import Cost

    if before == after:
        return []
    try:
        with cli.needs_extra("solver"):
            from optpipe_solver.bounds import lower_bound
            from optpipe_solver.feasibility import feasibility, smallest_memory
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


def _compare_schedules(before: Path, after: Path, problem_file: Path | None) -> ScheduleDifference:
    from optpipe.explain import compare_programs, record_costs, schedule_costs

    if problem_file is not None:
        problem = cli.read_problem(problem_file)
        old, new = (cli.read_programs(problem, path)[0] for path in (before, after))
        return compare_programs(old, new, schedule_costs(problem, old, new))
    (old, first), (new, second) = (cli.load_programs(path) for path in (before, after))
    hashes = {record.problem_hash for record in (first, second) if record is not None}
    if len(hashes) > 1:
        cli.stderr().print("note: the two schedules were made for different problems")
    return compare_programs(old, new, record_costs(first, second))
