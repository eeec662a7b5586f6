"""``optpipe explain``: what limits a schedule, why it offloads, and what more would buy."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe.cli.console import INTERRUPTED, interruptible, needs_extra, stderr, stdout
from optpipe.cli.options import ProblemFile, ScheduleFile, Seed, Threads, TimeLimit
from optpipe.cli.reading import read_problem, read_programs
from optpipe.cli.writing import check_writable, write_file, write_schedule
from optpipe.errors import InputError
from optpipe.formats.json_text import dump_problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.action import Programs
    from optpipe.explain import Explanation
    from optpipe.problem import Problem
    from optpipe.schedule import Schedule
    from optpipe_solver.whatif import Unasked, WhatIf

__all__ = ["explain"]

_ANSWERS = (".problem.json", ".schedule.json")
_TITLES = {
    "length": "Length",
    "critical path": "Critical path (start in ms, what, how long)",
    "lanes": "Lanes",
    "memory": "Memory",
    "idle": "Idle",
    "offload": "Why it offloads",
    "recompute": "Why it recomputes",
}

AskWhatIf = Annotated[
    bool,
    typer.Option(
        "--what-if",
        help="Solve with 1 GB more on the tightest device, 20 % more PCIe bandwidth, and twice the "
        "micro-batches.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        help="Write problem and schedule of each what-if into this folder.",
    ),
]


def explain(
    problem_file: ProblemFile,
    schedule_file: ScheduleFile,
    what_if: AskWhatIf = False,
    time_limit: TimeLimit = 10.0,
    threads: Threads = 2,
    seed: Seed = 0,
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
    told = _explain(problem, programs, schedule)
    if not as_json:
        _show(told)
    document = told.model_dump(mode="json")
    with interruptible() as stop:
        if what_if:
            options = {"time_limit_s": time_limit, "threads": threads, "seed": seed}
            answers = _ask(problem, programs, told.length_ms, should_stop=stop.is_set, **options)
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


def _show(told: Explanation) -> None:
    console = stdout()
    for topic, sentences in groupby(told.sentences, key=lambda sentence: sentence.topic):
        console.print(_TITLES[topic], style="bold")
        for sentence in sentences:
            console.print(f"  {sentence.text}", markup=False, soft_wrap=True)


def _ask(
    problem: Problem, programs: Programs, objective_ms: float, **options: Any
) -> Iterator[WhatIf | Unasked]:
    with needs_extra("solver"):
        from optpipe_solver.whatif import what_if

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

    Raises
    ------
    InputError
        If there is none and none can be made, or an input lies in it under the name of an answer.
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
