"""``optpipe plot`` and ``export``: a schedule as a picture, or in the form of another runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.check import check
from optpipe.cli.console import (
    ProblemFile,
    ScheduleFile,
    baseline_programs,
    check_apart,
    check_writable,
    needs_extra,
    read_problem,
    read_programs,
    say_written,
    stdout,
    write_file,
)
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
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Draw into a file: .png, .svg, .pdf; .html to zoom into; .json for a Chrome trace.",
    ),
]
Beside = Annotated[
    bool, typer.Option("--beside-1f1b", help="Show plain 1F1B first, on the same time axis.")
]
Dark = Annotated[bool, typer.Option("--dark", help="Light on dark (.html).")]
NumDevices = Annotated[
    int, typer.Option("--devices", metavar="N", min=1, help="Show so many devices (terminal).")
]


def plot(
    problem_file: ProblemFile,
    schedule_files: Schedules,
    output: PictureFile = None,
    beside_1f1b: Beside = False,
    devices: NumDevices = 16,
    dark: Dark = False,
) -> None:
    """Draw schedules: terminal, image, chart to zoom into, or trace.

    Several stand one above the other on one time axis. Without -o they are drawn in the
    terminal. An .html file holds all it needs and asks the network for nothing: zoom with the
    wheel, drag along, point at an action. A .json file is a Chrome trace, which ui.perfetto.dev
    opens.

    \b
    Examples:
      optpipe plot problem.json schedule.json
      optpipe plot problem.json schedule.json --beside-1f1b -o before-after.svg
      optpipe plot problem.json before.csv after.json -o both.html
      optpipe plot problem.json schedule.json -o trace.json
    """
    problem = read_problem(problem_file)
    check_drawable(output)
    check_apart(output, inputs=[problem_file, *schedule_files])
    if dark and (output is None or output.suffix != ".html"):
        shown = "the terminal" if output is None else output.name
        raise InputError(f"--dark is for .html files, not for {shown}; leave it out")
    views = [_read(problem, path) for path in schedule_files]
    if beside_1f1b:
        views.insert(0, _baseline(problem))
    if output is None:
        _show(views, devices)
        return
    _draw_into(output, views, theme="dark" if dark else "light")


def check_drawable(output: Path | None) -> None:
    """Refuse a file that no picture can go into, before the work for it is done.

    Raises `InputError` if its suffix is none of those that can be drawn, or it cannot be written.
    Raises `MissingExtraError` if the package that draws it is not installed.
    """
    check_writable(output)
    if output is None or output.suffix == ".json":
        return
    if output.suffix not in FRONTIER_SUFFIXES:
        raise InputError(
            f"cannot draw {output.name}: the suffix chooses the format; use one of "
            f"{', '.join((*FRONTIER_SUFFIXES, '.json'))}"
        )
    require_drawing(output.suffix)


def _draw_into(output: Path, views: list[View], *, theme: Theme = "light") -> None:
    """Draw schedules into a file that `check_drawable` accepts, and tell where it is."""
    if output.suffix == ".json":
        write_file(output, _trace(views))
    elif output.suffix == ".html":
        from optpipe.plot.interactive import chart_html, schedule_chart

        title = views[0].problem.name or "schedules"
        chart = schedule_chart(views, theme=theme)
        write_file(output, chart_html(chart, title=title, theme=theme))
    else:
        save_figure(views, output)
    say_written(output)


def _read(problem: Problem, path: Path) -> View:
    programs, schedule = read_programs(problem, path)
    return View(path.stem, problem, programs) if schedule is None else _solved(problem, schedule)


def draw_solved(output: Path, problem: Problem, schedule: Schedule) -> None:
    """Draw a schedule into a file, below 1F1B where that applies; alone in a trace."""
    views = [_solved(problem, schedule)]
    baseline = baseline_programs(problem) if output.suffix != ".json" else None
    if baseline is not None:
        views.insert(0, View("1F1B", problem, baseline))
    _draw_into(output, views)


def _solved(problem: Problem, schedule: Schedule) -> View:
    title = f"OptPipe ({title_of(schedule.provenance.method)})"
    return View(title, problem, schedule.programs, schedule.bound_ms)


def _baseline(problem: Problem) -> View:
    with needs_extra("solver"):
        programs = baseline_programs(problem)
    if programs is None:
        raise InputError(
            "--beside-1f1b: 1F1B is for one stage per device, and this problem has several on "
            "one; leave the option out"
        )
    return View("1F1B", problem, programs)


def _show(views: list[View], max_devices: int) -> None:
    length = max(simulate(view.problem, view.programs).makespan_ms for view in views)
    console = stdout()
    for view in views:
        picture = ScheduleView(
            problem=view.problem,
            programs=view.programs,
            title=view.title,
            length_ms=length,
            max_devices=max_devices,
            legend=view is views[-1],
        )
        console.print(picture)
        console.print()


def _trace(views: list[View]) -> str:
    if len(views) > 1:
        raise InputError(f"a trace holds one schedule, not {len(views)}; write one file for each")
    return dump_chrome_trace(views[0].problem, views[0].programs)


# --- ``optpipe export``: a schedule for another runtime.

Target = Annotated[
    str, typer.Option("--to", metavar="NAME", help="torch-csv, python, megatron-layout or trace.")
]
ExportFile = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write here, not to stdout.")
]
NumLayers = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Refuse unless the stages hold N transformer layers."),
]
Fuse = Annotated[
    bool, typer.Option("--fuse", help="Run I and W as one backward B first; checked anew.")
]


def export(
    problem_file: ProblemFile,
    schedule_file: ScheduleFile,
    to: Target,
    output: ExportFile = None,
    fuse: Fuse = False,
    num_layers: NumLayers = None,
) -> None:
    """Write a schedule in the form that another runtime takes.

    \b
      torch-csv        torch.distributed.pipelining and torchtitan
                       (pipeline_parallel_schedule_csv)
      python           ScheduledNode lists of the public zero-bubble runtime, as Python text
      megatron-layout  the cut alone, as Megatron-Core's arguments; its order is its own
      trace            a Chrome trace, which ui.perfetto.dev opens

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
    if num_layers is not None:
        check_num_layers(problem, num_layers)
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
    "megatron-layout": lambda problem, _: megatron_layout(problem) + "\n",
    "trace": dump_chrome_trace,
}
"""Every form by name."""
