"""``optpipe explain``: what limits a schedule, why it offloads, and what more would buy."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe.cli.console import (
    INTERRUPTED,
    PIPE,
    AsJson,
    ProblemFile,
    ScheduleFile,
    check_writable,
    interruptible,
    load_programs,
    needs_extra,
    read_problem,
    read_programs,
    stderr,
    stdout,
    write_file,
    write_schedule,
)
from optpipe.cli.options import OptionsOf, takes
from optpipe.errors import InputError, MissingExtraError
from optpipe.formats.json import dump_problem, read_text
from optpipe.requests import SearchOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.explain import Cost, Explanation, ProblemDifference, ScheduleDifference
    from optpipe.explain.what_if import Unasked
    from optpipe.problem import Problem
    from optpipe.schedule import Programs, Schedule
    from optpipe_solver.compare import WhatIf

__all__ = ["DIFFERENT", "diff", "explain"]


_ANSWERS = (".problem.json", ".schedule.json")
_TITLES = {
    "length": "Length",
    "critical path": "Critical path (start in ms, what, how long)",
    "lanes": "Lanes",
    "pairs": "What hides behind what",
    "slack": "Slack (alone, before the step is longer)",
    "memory": "Memory",
    "idle": "Idle",
    "offload": "Why it offloads",
    "recompute": "Why it recomputes",
    "mode": "Why it does not keep",
}

AskWhatIf = Annotated[
    bool,
    typer.Option(
        "--what-if",
        help="Solve with 1 GB more on the tightest device, 20 % more PCIe bandwidth, and twice the "
        "micro-batches.",
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        help="Write problem and schedule of each what-if into this folder.",
    ),
]


@takes(SearchOptions, defaults={"time_limit_s": 10.0, "threads": 2})
def explain(
    given: OptionsOf[SearchOptions],
    problem_file: ProblemFile,
    schedule_file: ScheduleFile,
    what_if: AskWhatIf = False,
    as_json: AsJson = False,
    output: Folder = None,
) -> None:
    """Say in words what limits a schedule, and why it offloads.

    The critical path, how much each lane is used, memory left, idle time by cause, and what would
    not fit without each offload. With --what-if: what a little more would buy, each solved for
    --time-limit seconds and measured against the same search without the change.

    \b
    Examples:
      optpipe explain problem.json schedule.json
      optpipe explain problem.json schedule.json --json
      optpipe explain problem.json schedule.json --what-if --time-limit 20 -o what-if
    """
    if output is not None and not what_if:
        raise InputError("-o DIR is for what --what-if finds; add --what-if, or leave -o out")
    problem = read_problem(problem_file)
    programs, schedule = read_programs(problem, schedule_file)
    folder = None if output is None else _made_folder(output, (problem_file, schedule_file))
    explanation = _explain(problem, programs, schedule)
    if not as_json:
        _show_explanation(explanation)
    document = explanation.model_dump(mode="json")
    with interruptible() as stop:
        if what_if:
            options = given().model_dump()
            answers = _ask(
                problem, programs, explanation.length_ms, should_stop=stop.is_set, **options
            )
            document["what_if"] = [_tell(answer, folder, as_json) for answer in answers]
    if as_json:
        stdout().out(json.dumps(document, indent=2), highlight=False)
    if stop.is_set():
        stderr().print("stopped by Ctrl-C; questions that were not reached are missing")
        raise typer.Exit(INTERRUPTED)


def _explain(problem: Problem, programs: Programs, schedule: Schedule | None) -> Explanation:
    from optpipe.explain import explain as explain_programs

    bound = None if schedule is None else schedule.bound_ms
    return explain_programs(problem, programs, bound_ms=bound)


def _show_explanation(explanation: Explanation) -> None:
    console = stdout()
    for topic, sentences in groupby(explanation.sentences, key=lambda sentence: sentence.topic):
        console.print(_TITLES[topic], style="bold")
        for sentence in sentences:
            console.print(f"  {sentence.text}", markup=False, soft_wrap=True)


def _ask(
    problem: Problem, programs: Programs, objective_ms: float, **options: Any
) -> Iterator[WhatIf | Unasked]:
    with needs_extra("solver"):
        from optpipe_solver.compare import what_if

        answers = what_if(problem, programs, objective_ms, **options)
    while True:
        # Not while an answer is printed: both would write on the same line of a terminal.
        with stderr().status("solving"):
            answer = next(answers, None)
        if answer is None:
            return
        yield answer


def _tell(answer: WhatIf | Unasked, folder: Path | None, as_json: bool) -> dict[str, Any]:
    """Print an answer as soon as it is there, write its files, and return it as JSON."""
    console = stdout()
    if not as_json:
        if answer.name == "as-it-is":
            console.print("What if", style="bold")
        console.print(f"  {answer.sentence()}", markup=False, soft_wrap=True)
    schedule, problem = getattr(answer, "schedule", None), getattr(answer, "problem", None)
    if folder is not None and schedule is not None and problem is not None:
        write_file(folder / f"{answer.name}.problem.json", dump_problem(problem))
        write_schedule(schedule, folder / f"{answer.name}.schedule.json")
        stderr().print(f"written to {folder / answer.name}.*.json", markup=False)
    return answer.as_json()


def _made_folder(path: Path, inputs: tuple[Path, ...]) -> Path:
    """Return a folder that exists and can be written to.

    Raises `InputError` if there is none and none can be made, or an input lies in it under the name
    of an answer.
    """
    for file in inputs:
        if file.name.endswith(_ANSWERS) and file.resolve().parent == path.resolve():
            raise InputError(
                f"-o {path}: {file.name} lies there, may be the name of an answer, and would be "
                "lost; choose another folder"
            )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make folder {path}: {error.strerror}; choose another") from None
    check_writable(path / "problem.json")
    return path


# --- ``optpipe diff``: what changed between two schedules or two problems, and what it cost.

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
        _show_difference(found)
    if not found.is_empty or _costs_differ(found):
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


def _show_difference(found: ScheduleDifference | ProblemDifference) -> None:
    from optpipe.explain import cost_line, difference_lines

    console = stdout()
    if found.is_empty and not _costs_differ(found):
        stderr().print("no difference")
        return
    if found.is_empty:
        console.print("the programs are the same, what the files say of them is not")
    for line in difference_lines(found):
        console.print(line, markup=False, soft_wrap=True)
    costs = [cost for cost in found.costs if cost.before != cost.after or cost.name in _ALWAYS]
    if costs:
        console.print("What it cost", style="bold")
    for cost in costs:
        console.print(f"  {cost_line(cost)}", markup=False, soft_wrap=True)


def _costs_differ(found: ScheduleDifference | ProblemDifference) -> bool:
    """Whether a number differs that both say: of equal programs, made for different problems."""
    pairs = ((cost.before, cost.after) for cost in found.costs)
    return any(a is not None and b is not None and a != b for a, b in pairs)


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
