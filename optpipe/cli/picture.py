"""``optpipe plot``: a schedule in the terminal, as an image, or as a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.console import needs_extra, read_problem, read_programs, stderr, stdout, write_file
from optpipe.cli.options import ProblemFile
from optpipe.cli.report import baseline_programs
from optpipe.errors import InputError
from optpipe.plot.figure import SUFFIXES, Panel, save_figure
from optpipe.plot.terminal import ScheduleView
from optpipe.simulate import simulate

if TYPE_CHECKING:
    from optpipe.problem import Problem

__all__ = ["plot"]

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
        help="Draw into a file: .png, .svg, .pdf, or .json for a Chrome trace.",
    ),
]
Beside = Annotated[
    bool, typer.Option("--beside-1f1b", help="Show plain 1F1B first, on the same time axis.")
]
NumDevices = Annotated[
    int, typer.Option("--devices", metavar="N", min=1, help="Show so many devices (terminal).")
]


def plot(
    problem_file: ProblemFile,
    schedule_files: Schedules,
    output: PictureFile = None,
    beside_1f1b: Beside = False,
    devices: NumDevices = 16,
) -> None:
    """Draw schedules: in the terminal, as an image, as a trace.

    Several stand one above the other on one time axis. Without -o they are drawn in the
    terminal. A .json file is a Chrome trace, which ui.perfetto.dev opens.

    \b
    Examples:
      optpipe plot problem.json schedule.json
      optpipe plot problem.json schedule.json --beside-1f1b -o before-after.svg
      optpipe plot problem.json schedule.json -o trace.json
    """
    problem = read_problem(problem_file)
    panels = [_panel(problem, path) for path in schedule_files]
    if beside_1f1b:
        panels.insert(0, _baseline(problem))
    if output is None:
        _show(problem, panels, devices)
        return
    if output.suffix == ".json":
        _trace(problem, panels, output)
    elif output.suffix in SUFFIXES:
        save_figure(problem, panels, output)
    else:
        raise InputError(
            f"cannot draw {output.name}: the suffix chooses the format; use one of "
            f"{', '.join((*SUFFIXES, '.json'))}"
        )
    stderr().print(f"written to {output}", markup=False)


def _panel(problem: Problem, path: Path) -> Panel:
    programs, schedule = read_programs(problem, path)
    return Panel(
        title=f"OptPipe ({schedule.provenance.method})" if schedule else path.stem,
        programs=programs,
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


def _trace(problem: Problem, panels: list[Panel], output: Path) -> None:
    from optpipe.formats.chrome_trace import dump_chrome_trace

    if len(panels) > 1:
        raise InputError(f"a trace holds one schedule, not {len(panels)}; write one file for each")
    write_file(output, dump_chrome_trace(problem, panels[0].programs))
