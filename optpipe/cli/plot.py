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
from optpipe.plot.image import SUFFIXES, Panel, require_matplotlib, save_figure
from optpipe.plot.interactive_style import require_bokeh
from optpipe.plot.scene import title_of
from optpipe.plot.terminal import ScheduleView
from optpipe.simulate import simulate

if TYPE_CHECKING:
    from optpipe.plot.interactive_style import Theme
    from optpipe.problem import Problem
    from optpipe.schedule import Schedule

__all__ = ["check_drawable", "draw_into", "draw_solved", "plot"]


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
    _check_dark(output, dark)
    panels = [_panel(problem, path) for path in schedule_files]
    if beside_1f1b:
        panels.insert(0, _baseline(problem))
    if output is None:
        _show(problem, panels, devices)
        return
    draw_into(output, problem, panels, theme="dark" if dark else "light")


def check_drawable(output: Path | None) -> None:
    """Refuse a file that no picture can go into, before the work for it is done.

    Raises
    ------
    InputError
        If its suffix is none of those that `draw_into` knows, or it cannot be written.
    MissingExtraError
        If the package that draws it is not installed.
    """
    check_writable(output)
    if output is None or output.suffix == ".json":
        return
    if output.suffix == ".html":
        require_bokeh()
    elif output.suffix in SUFFIXES:
        require_matplotlib()
    else:
        raise InputError(
            f"cannot draw {output.name}: the suffix chooses the format; use one of "
            f"{', '.join((*SUFFIXES, '.html', '.json'))}"
        )


def draw_into(
    output: Path, problem: Problem, panels: list[Panel], *, theme: Theme = "light"
) -> None:
    """Draw panels into a file that `check_drawable` accepts, and tell where it is."""
    if output.suffix == ".json":
        _trace(problem, panels, output)
    elif output.suffix == ".html":
        _chart(problem, panels, output, theme)
    else:
        save_figure(problem, panels, output)
    say_written(output)


def _check_dark(output: Path | None, dark: bool) -> None:
    if dark and (output is None or output.suffix != ".html"):
        shown = "the terminal" if output is None else output.name
        raise InputError(f"--dark is for .html files, not for {shown}; leave it out")


def _panel(problem: Problem, path: Path) -> Panel:
    programs, schedule = read_programs(problem, path)
    return Panel(title=path.stem, programs=programs) if schedule is None else _solved(schedule)


def draw_solved(output: Path, problem: Problem, schedule: Schedule) -> None:
    """Draw a schedule into a file, below 1F1B where that applies; alone in a trace."""
    panels = [_solved(schedule)]
    baseline = baseline_programs(problem) if output.suffix != ".json" else None
    if baseline is not None:
        panels.insert(0, Panel(title="1F1B", programs=baseline))
    draw_into(output, problem, panels)


def _solved(schedule: Schedule) -> Panel:
    return Panel(
        title=f"OptPipe ({title_of(schedule.provenance.method)})",
        programs=schedule.programs,
        bound_ms=schedule.bound_ms,
    )


def _baseline(problem: Problem) -> Panel:
    with needs_extra("solver"):
        programs = baseline_programs(problem)
    if programs is None:
        raise InputError(
            "--beside-1f1b: 1F1B is for one stage per device, and this problem has several on "
            "one; leave the option out"
        )
    return Panel(title="1F1B", programs=programs)


def _show(problem: Problem, panels: list[Panel], max_devices: int) -> None:
    length = max(simulate(problem, panel.programs).makespan_ms for panel in panels)
    console = stdout()
    for panel in panels:
        view = ScheduleView(
            problem=problem,
            programs=panel.programs,
            title=panel.title,
            length_ms=length,
            max_devices=max_devices,
            legend=panel is panels[-1],
        )
        console.print(view)
        console.print()


def _chart(problem: Problem, panels: list[Panel], output: Path, theme: Theme) -> None:
    from optpipe.plot.interactive import chart_html, schedule_chart
    from optpipe.plot.scene import View

    views = [View(panel.title, problem, panel.programs, panel.bound_ms) for panel in panels]
    layout = schedule_chart(views, theme=theme)
    write_file(output, chart_html(layout, title=problem.name or "schedules", theme=theme))


def _trace(problem: Problem, panels: list[Panel], output: Path) -> None:
    from optpipe.formats.chrome_trace import dump_chrome_trace

    if len(panels) > 1:
        raise InputError(f"a trace holds one schedule, not {len(panels)}; write one file for each")
    write_file(output, dump_chrome_trace(problem, panels[0].programs))
