"""``optpipe plot`` and ``export``: a schedule as a picture, or in another runtime's format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.check import check
from optpipe.cli import console as cli
from optpipe.errors import InputError
from optpipe.formats.exports import (
    check_num_layers,
    dump_chrome_trace,
    dump_csv,
    dump_python_list,
    megatron_layout,
)
from optpipe.plot.image import FRONTIER_SUFFIXES, save_figure
from optpipe.plot.scene import View, require_drawing, title_of
from optpipe.plot.terminal import ScheduleView
from optpipe.schedule import ActionType
from optpipe.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Callable

    from optpipe.plot.scene import Theme
    from optpipe.problem import Problem
    from optpipe.schedule import Programs, Schedule

__all__ = ["TARGETS", "check_drawable", "draw_solved", "export", "plot"]


Schedules = Annotated[
    list[Path], typer.Argument(metavar="SCHEDULE...", help="One or more schedules, JSON or CSV.")
]
PictureFile = Annotated[
    Path | None,
    cli.output_option(
        "Draw into a file: .png, .svg, .pdf; .html (zooms); .json is a Chrome trace."
    ),
]
Beside = Annotated[
    str | None,
    typer.Option(
        "--beside",
        metavar="METHOD",
        help="Show a published schedule first, such as 1f1b or interleaved.",
    ),
]
Dark = Annotated[bool, typer.Option("--dark", help="Draw light on dark (.html).")]
NumDevices = Annotated[
    int,
    typer.Option(
        "--devices",
        metavar="N",
        parser=cli.number_parser(int, 1),
        help="Maximum number of devices in the terminal.",
    ),
]


def plot(
    problem_file: cli.ProblemFile,
    schedule_files: Schedules,
    output: PictureFile = None,
    beside: Beside = None,
    devices: NumDevices = 16,
    dark: Dark = False,
) -> None:
    """Draw schedules: terminal, image, zoomable chart, or trace.

    Several schedules share one time axis, one above the other. Without -o they are drawn in the
    terminal. An .html file is self-contained and needs no network: zoom with the wheel, drag to
    move, point at an action for details. A .json file is a Chrome trace, which ui.perfetto.dev
    opens.

    \b
    Examples:
      optpipe plot problem.json schedule.json
      optpipe plot problem.json schedule.json --beside 1f1b -o before-after.svg
      optpipe plot problem.json schedule.json --beside interleaved
      optpipe plot problem.json before.csv after.json -o both.html
      optpipe plot problem.json schedule.json -o trace.json
    """
    problem = cli.read_problem(problem_file)
    check_drawable(output)
    cli.check_outputs(output, inputs=[problem_file, *schedule_files])
    if dark and (output is None or output.suffix != ".html"):
        shown = "the terminal" if output is None else output.name
        raise InputError(f"--dark is for .html files, not for {shown}; leave it out")
    views = []
    if beside is not None:
        views.append(View(title_of(beside), problem, _published(problem, beside)))
    for path in schedule_files:
        programs, schedule = cli.read_programs(problem, path)
        plain = View(path.stem, problem, programs)
        views.append(plain if schedule is None else _view_schedule(problem, schedule))
    if output is not None:
        _draw_into(output, views, theme="dark" if dark else "light")
        return
    length_ms = max(simulate(view.problem, view.programs).makespan_ms for view in views)
    console = cli.stdout()
    for view in views:
        picture = ScheduleView(
            problem=view.problem,
            programs=view.programs,
            title=view.title,
            length_ms=length_ms,
            max_devices=devices,
            legend=view is views[-1],
        )
        console.print(picture)
        console.print()


def _published(problem: Problem, method: str) -> Programs:
    """Return a method's programs, possibly over the memory limit. Raises `InputError`."""
    with cli.needs_extra("solver"):
        from optpipe_solver.families import FAMILIES, NotApplicable
    families = {family.name: family for family in FAMILIES}
    if method not in families:
        raise InputError(f"--beside {method}: must be one of {', '.join(families)}; choose one")
    try:
        return families[method].build(problem)
    except NotApplicable as fault:
        raise InputError(f"--beside {method}: {fault}; choose another method") from None


def check_drawable(output: Path | None) -> None:
    """Refuse a picture file with another suffix than those of the formats.

    Raises `InputError`, and `MissingExtraError` if the package that draws it is not installed.
    """
    if output is None or output.suffix == ".json":
        return
    if output.suffix not in FRONTIER_SUFFIXES:
        raise InputError(
            f"cannot draw {output.name}: the suffix chooses the format; use one of "
            f"{', '.join((*FRONTIER_SUFFIXES, '.json'))}"
        )
    require_drawing(output.suffix)


def _draw_into(output: Path, views: list[View], *, theme: Theme = "light") -> None:
    """Draw schedules into a file that `check_drawable` accepts."""
    if output.suffix == ".json":
        if len(views) > 1:
            raise InputError(
                f"a trace holds one schedule, not {len(views)}; write one file for each"
            )
        cli.write_output(output, dump_chrome_trace(views[0].problem, views[0].programs))
    elif output.suffix == ".html":
        from optpipe.plot.interactive import chart_html, schedule_chart

        title = views[0].problem.name or "schedules"
        chart = schedule_chart(views, theme=theme)
        cli.write_output(output, chart_html(chart, title=title, theme=theme))
    else:
        save_figure(views, output)
        cli.report_written(output)


def draw_solved(output: Path, problem: Problem, schedule: Schedule) -> None:
    """Draw a schedule below 1F1B, where that applies; draw it alone in a trace."""
    views = [_view_schedule(problem, schedule)]
    baseline = cli.baseline_programs(problem) if output.suffix != ".json" else None
    if baseline is not None:
        views.insert(0, View("1F1B", problem, baseline))
    _draw_into(output, views)


def _view_schedule(problem: Problem, schedule: Schedule) -> View:
    title = f"OptPipe ({title_of(schedule.provenance.method)})"
    return View(title, problem, schedule.programs, schedule.bound_ms)


# --- ``optpipe export``: a schedule in another runtime's format.

Target = Annotated[
    str, typer.Option("--to", metavar="NAME", help="torch-csv, python, megatron-layout or trace.")
]
ExportFile = Annotated[Path | None, cli.output_option("Write here, instead of standard output.")]
NumLayers = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=cli.number_parser(int, 1),
        help="Refuse unless the stages hold N transformer layers.",
    ),
]
Fuse = Annotated[bool, typer.Option("--fuse", help="Fuse I and W into one backward B first.")]


def export(
    problem_file: cli.ProblemFile,
    schedule_file: cli.ScheduleFile,
    to: Target,
    output: ExportFile = None,
    fuse: Fuse = False,
    num_layers: NumLayers = None,
) -> None:
    """Write a schedule in the format of another runtime.

    \b
      torch-csv        torch.distributed.pipelining and torchtitan
                       (pipeline_parallel_schedule_csv)
      python           ScheduledNode lists of the public zero-bubble runtime, as Python text
      megatron-layout  the cut as Megatron-Core's arguments; Megatron has its own order
      trace            a Chrome trace, which ui.perfetto.dev opens

    A schedule that a runtime cannot run, or would run with wrong gradients, is refused with its row
    and column. docs/exports.md describes how to use each format, and what was tested.

    \b
    Examples:
      optpipe export problem.json schedule.json --to torch-csv -o schedule.csv
      optpipe export problem.json schedule.json --to python --fuse -o zero_bubble_schedule.py
    """
    if to not in TARGETS:
        raise InputError(f"--to {to!r}: must be one of {', '.join(TARGETS)}; choose one")
    cli.check_outputs(output, inputs=[problem_file, schedule_file])
    problem = cli.read_problem(problem_file)
    if num_layers is not None:
        check_num_layers(problem, num_layers)
    programs, _ = cli.read_programs(problem, schedule_file)
    if fuse:
        programs = tuple(
            tuple(
                action._replace(type=ActionType.FULL_BACKWARD)
                if action.type is ActionType.BACKWARD_INPUT
                else action
                for action in program
                if action.type is not ActionType.BACKWARD_WEIGHT
            )
            for program in programs
        )
        # A B has a workspace and a duration of its own.
        check(problem, programs)
    text = TARGETS[to](problem, programs)
    if output is None:
        print(text, end="")
    else:
        cli.write_output(output, text)


TARGETS: dict[str, Callable[[Problem, Programs], str]] = {
    "torch-csv": lambda _, programs: dump_csv(programs, for_torch=True),
    "python": dump_python_list,
    "megatron-layout": lambda problem, _: megatron_layout(problem) + "\n",
    "trace": dump_chrome_trace,
}
"""Format -> function that writes it."""
