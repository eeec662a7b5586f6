"""``optpipe export``: a schedule for another runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.check import check
from optpipe.cli.console import ProblemFile, ScheduleFile
from optpipe.cli.files import (
    check_apart,
    check_writable,
    read_problem,
    read_programs,
    say_written,
    write_file,
)
from optpipe.errors import InputError
from optpipe.formats.chrome_trace import dump_chrome_trace
from optpipe.formats.csv import dump_csv
from optpipe.formats.zero_bubble import dump_python_list
from optpipe.schedule import ActionType

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.problem import Problem
    from optpipe.schedule import Programs

__all__ = ["TARGETS", "export"]


Target = Annotated[
    str,
    typer.Option("--to", metavar="NAME", help="torch-csv, python or trace."),
]
ExportFile = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write here, not to stdout.")
]
Fuse = Annotated[
    bool,
    typer.Option("--fuse", help="Run I and W as one backward B first; checked anew."),
]


def export(
    problem_file: ProblemFile,
    schedule_file: ScheduleFile,
    to: Target,
    output: ExportFile = None,
    fuse: Fuse = False,
) -> None:
    """Write a schedule in the form that another runtime takes.

    \b
      torch-csv  torch.distributed.pipelining and torchtitan (pipeline_parallel_schedule_csv)
      python     ScheduledNode lists of the public zero-bubble runtime, as Python text
      trace      a Chrome trace, which ui.perfetto.dev opens

    What a runtime cannot run, or would run with wrong gradients, is refused with its row and
    column. docs/exports.md says how each is used and what was tried.

    \b
    Examples:
      optpipe export problem.json schedule.json --to torch-csv -o schedule.csv
      optpipe export problem.json schedule.json --to python --fuse -o zero_bubble_schedule.py
    """
    if to not in TARGETS:
        raise InputError(f"--to {to!r}: must be one of {', '.join(TARGETS)}; choose one")
    check_writable(output)
    check_apart(output, inputs=[problem_file, schedule_file])
    problem = read_problem(problem_file)
    programs, _ = read_programs(problem, schedule_file)
    if fuse:
        programs = _fused(problem, programs)
    text = TARGETS[to](problem, programs)
    if output is None:
        print(text, end="")
        return
    write_file(output, text)
    say_written(output)


def _fused(problem: Problem, programs: Programs) -> Programs:
    """Return programs in which every I is a B and no W is left.

    Checked anew: a B has a workspace and a time of its own.
    """
    fused = tuple(
        tuple(
            action._replace(type=ActionType.FULL_BACKWARD)
            if action.type is ActionType.BACKWARD_INPUT
            else action
            for action in program
            if action.type is not ActionType.BACKWARD_WEIGHT
        )
        for program in programs
    )
    check(problem, fused)
    return fused


TARGETS: dict[str, Callable[[Problem, Programs], str]] = {
    "torch-csv": lambda _, programs: dump_csv(programs, for_torch=True),
    "python": dump_python_list,
    "trace": dump_chrome_trace,
}
"""Every form by name."""
