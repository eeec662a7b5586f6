"""``optpipe export``: a schedule for another runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.check import check
from optpipe.cli.options import ProblemFile, ScheduleFile
from optpipe.cli.reading import read_problem, read_programs
from optpipe.cli.writing import check_apart, check_writable, say_written, write_file
from optpipe.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.action import Programs
    from optpipe.problem import Problem

__all__ = ["TARGETS", "export"]

Target = Annotated[
    str,
    typer.Option("--to", metavar="NAME", help="torch-csv, python, deepspeed, megatron or trace."),
]
ExportFile = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write here, not to stdout.")
]
Fuse = Annotated[
    bool,
    typer.Option("--fuse", help="Run I and W as one backward B first; checked anew."),
]
Layers = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,...",
        help="For megatron: transformer layers of each stage, in model order.",
    ),
]


def export(
    problem_file: ProblemFile,
    schedule_file: ScheduleFile,
    to: Target,
    output: ExportFile = None,
    fuse: Fuse = False,
    layers: Layers = None,
) -> None:
    """Write a schedule in the form that another runtime takes.

    \b
      torch-csv  torch.distributed.pipelining and torchtitan (pipeline_parallel_schedule_csv)
      python     ScheduledNode lists of the public zero-bubble runtime, as Python text
      deepspeed  instructions for a PipeSchedule's steps(), as Python text
      megatron   Megatron-Core's nearest flags, and what they leave out
      trace      a Chrome trace, which ui.perfetto.dev opens

    What a runtime cannot run, or would run with wrong gradients, is refused with its row and
    column. docs/exports.md says how each is used and what was tried.

    \b
    Examples:
      optpipe export problem.json schedule.json --to torch-csv -o schedule.csv
      optpipe export problem.json schedule.json --to deepspeed --fuse -o pipe_schedule.py
      optpipe export problem.json schedule.json --to megatron --layers 8,8,8,8
    """
    if to not in TARGETS:
        raise InputError(f"--to {to!r}: must be one of {', '.join(TARGETS)}; choose one")
    if layers is not None and to != "megatron":
        raise InputError(f"--layers {layers}: is for --to megatron, not for {to}; leave it out")
    check_writable(output)
    check_apart(output, inputs=[problem_file, schedule_file])
    problem = read_problem(problem_file)
    programs, _ = read_programs(problem, schedule_file)
    if fuse:
        programs = _fused(problem, programs)
    if to == "megatron":
        text = _megatron(problem, programs, _numbers(layers))
    else:
        text = TARGETS[to](problem, programs)
    if output is None:
        print(text, end="")
        return
    write_file(output, text)
    say_written(output)


def _fused(problem: Problem, programs: Programs) -> Programs:
    from optpipe.formats.deepspeed_rules import fuse_backwards

    fused = fuse_backwards(programs)
    check(problem, fused)
    return fused


def _numbers(layers: str | None) -> list[int] | None:
    if layers is None:
        return None
    parts = [part.strip() for part in layers.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 6 for part in parts):
        raise InputError(
            f"--layers {layers}: must be whole numbers with commas between; write 8,8,8,8"
        )
    return [int(part) for part in parts]


def _torch_csv(problem: Problem, programs: Programs) -> str:  # noqa: ARG001 - one shape for all
    from optpipe.formats.csv_text import dump_csv

    return dump_csv(programs, for_torch=True)


def _python(problem: Problem, programs: Programs) -> str:
    from optpipe.formats.python_list import dump_python_list

    return dump_python_list(problem, programs)


def _deepspeed(problem: Problem, programs: Programs) -> str:
    from optpipe.formats.deepspeed import dump_deepspeed

    return dump_deepspeed(problem, programs)


def _megatron(problem: Problem, programs: Programs, layers: list[int] | None = None) -> str:
    from optpipe.formats.megatron import dump_megatron

    return dump_megatron(problem, programs, layers)


def _trace(problem: Problem, programs: Programs) -> str:
    from optpipe.formats.chrome_trace import dump_chrome_trace

    return dump_chrome_trace(problem, programs)


TARGETS: dict[str, Callable[[Problem, Programs], str]] = {
    "torch-csv": _torch_csv,
    "python": _python,
    "deepspeed": _deepspeed,
    "megatron": _megatron,
    "trace": _trace,
}
"""Every form by name."""
