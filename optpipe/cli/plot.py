"""``optpipe plot``: a schedule in the terminal, as an image, or as a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.console import ProblemFile, needs_extra, stdout
from optpipe.cli.files import (
    check_apart,
    check_writable,
    read_problem,
    read_programs,
    say_written,
    write_file,
)
from optpipe.cli.report import baseline_programs
from optpipe.errors import InputError
from optpipe.plot.image import FRONTIER_SUFFIXES, save_figure
from optpipe.plot.scene import View, require_drawing, title_of
from optpipe.plot.terminal import ScheduleView
from optpipe.simulate import simulate

if TYPE_CHECKING:
    from optpipe.plot.scene import Theme
    from optpipe.problem import Problem
    from optpipe.schedule import Schedule

__all__ = ["check_drawable", "draw_solved", "plot"]


Schedules = Annotated[
    list[Path],
    typer.Argument(metavar="SCHEDULE...", help="One or more schedules, JSON or CSV."),
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
    from optpipe.formats.chrome_trace import dump_chrome_trace

    if len(views) > 1:
        raise InputError(f"a trace holds one schedule, not {len(views)}; write one file for each")
    return dump_chrome_trace(views[0].problem, views[0].programs)
