"""How results are shown: the picture, the table of numbers beside 1F1B's, one line of progress."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from optpipe.cli.console import INFEASIBLE, NOTHING_FOUND, interruptible, stderr
from optpipe.memory import device_peak_bytes, host_peak_bytes
from optpipe.plot.terminal import ScheduleView
from optpipe.schedule import ActionType
from optpipe.simulate import bubble_rate, link_warnings, simulate
from optpipe.units import format_bytes, format_ms, format_share

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from optpipe.problem import Problem
    from optpipe.schedule import Programs, Schedule
    from optpipe_solver.result import Progress

__all__ = [
    "MOST_DRAWN",
    "baseline_programs",
    "gap_text",
    "nothing_found",
    "number_table",
    "progress_line",
    "searching",
    "show_schedule",
    "warn",
    "warn_of_links",
]

_SHOWN_DEVICES = 16
_SHOWN_WARNINGS = 2
MOST_DRAWN = 50_000
"""Actions up to which a result is drawn: picture, table and 1F1B beside it take 40 us for each."""


def show_schedule(
    console: Console, problem: Problem, schedule: Schedule, baseline: Programs | None
) -> None:
    """Print the picture and, below it, the numbers, beside those of 1F1B where they are given.

    Of more than 50,000 actions the numbers alone, so that a solve ends with its time limit.
    """
    name = " - ".join(part for part in (problem.name, schedule.provenance.method) if part)
    if (count := sum(map(len, schedule.programs))) > MOST_DRAWN:
        left_out = f"{name}: {count:,} actions are not drawn; optpipe plot does it"
        console.print(left_out, markup=False)
        baseline = None
    else:
        console.print(ScheduleView(problem=problem, programs=schedule.programs, title=name))
    console.print()
    console.print(number_table(problem, schedule.programs, schedule, baseline))
    warn_of_links(problem, schedule.makespan_ms)


def warn_of_links(problem: Problem, makespan_ms: float) -> None:
    """Say on standard error which links could not deliver within a makespan in ms."""
    warn("links", link_warnings(problem, makespan_ms))


def warn(what: str, sentences: Sequence[str]) -> None:
    """Print warnings on standard error: two, and how many more of the same there are."""
    for sentence in sentences[:_SHOWN_WARNINGS]:
        stderr().print(f"warning: {sentence}", style="yellow", markup=False, soft_wrap=True)
    if (more := len(sentences) - _SHOWN_WARNINGS) > 0:
        stderr().print(f"warning: so are {more} more {what}", style="yellow", markup=False)


def baseline_programs(problem: Problem) -> Programs | None:
    """Return 1F1B's programs, over the memory limit or not; None where it does not apply.

    Slices have none: the last of a sample goes back first.
    """
    from optpipe_solver.families.classic import build_one_f_one_b
    from optpipe_solver.families.common import NotApplicable

    if problem.has_samples:
        return None
    try:
        return build_one_f_one_b(problem)
    except NotApplicable:
        return None


def number_table(
    problem: Problem, programs: Programs, schedule: Schedule | None, baseline: Programs | None
) -> Table:
    """Return the table: one row per number, one column per schedule.

    What a schedule says of itself is taken from it: it was judged when it was solved, or verified
    when it was read, and simulating it once more takes seconds where programs are long.
    """
    table = Table(box=None, pad_edge=False, show_header=baseline is not None)
    table.add_column("")
    table.add_column("this schedule", justify="right")
    if baseline is not None:
        table.add_column("1F1B", justify="right")
    if schedule is None:
        known = _measured(problem, programs)
    else:
        peaks = schedule.peak_bytes[:_SHOWN_DEVICES]
        known = _Known(schedule.makespan_ms, schedule.span_ms, peaks, schedule.host_peak_bytes)
    columns = [_numbers(problem, programs, known)]
    if baseline is not None:
        columns.append(_numbers(problem, baseline, _measured(problem, baseline)))
    for label in columns[0]:
        table.add_row(escape(label), *(column.get(label, "") for column in columns))
        if label == "bubble of the span" and schedule is not None:
            bound = "none" if schedule.bound_ms is None else f"{format_ms(schedule.bound_ms)} ms"
            table.add_row("proven bound", bound)
            table.add_row("gap", gap_text(schedule.gap))
    return table


def gap_text(gap: float | None) -> str:
    """Return a gap for people."""
    if gap is None:
        return "unknown"
    return "0 % (optimal)" if gap <= 1e-6 else format_share(gap)


def progress_line(
    seconds: float, method: str, objective_ms: float | None, bound_ms: float | None
) -> str:
    """Return one line about the best known so far."""
    best = "no schedule yet" if objective_ms is None else f"{format_ms(objective_ms)} ms"
    bound = "" if bound_ms is None else f"   bound {format_ms(bound_ms)} ms"
    return f"{seconds:7.1f} s   {best:>14}{bound}   {method}"


@contextmanager
def searching(text: str) -> Iterator[dict[str, Any]]:
    """Give a solver's arguments that let it print what it finds, and let Ctrl-C stop it."""
    console = stderr()

    def tell(news: Progress) -> None:
        line = progress_line(news.seconds, news.method, news.objective_ms, news.bound_ms)
        console.print(line, markup=False)

    with interruptible() as stop, console.status(text):
        yield {"on_progress": tell, "should_stop": stop.is_set}


def nothing_found(state: str, reason: str) -> typer.Exit:
    """Print why there is no schedule; return how the command leaves."""
    text = Text.assemble((f"{state}:", "bold red"), f" {reason}")
    stderr().print(text, soft_wrap=True)
    return typer.Exit(INFEASIBLE if state == "infeasible" else NOTHING_FOUND)


class _Known(NamedTuple):
    """What programs cost: ms, and bytes of the devices that are shown, and of all hosts."""

    makespan_ms: float
    span_ms: float
    peak_bytes: tuple[int, ...]
    host_peak_bytes: dict[str, int]


def _measured(problem: Problem, programs: Programs) -> _Known:
    run = simulate(problem, programs)
    shown = programs[:_SHOWN_DEVICES]
    peaks = tuple(device_peak_bytes(problem, device, row) for device, row in enumerate(shown))
    return _Known(run.makespan_ms, run.span_ms, peaks, host_peak_bytes(problem, programs))


def _numbers(problem: Problem, programs: Programs, known: _Known) -> dict[str, str]:
    rows = {
        "makespan": f"{format_ms(known.makespan_ms)} ms",
        "span": f"{format_ms(known.span_ms)} ms",
        "bubble of the makespan": format_share(bubble_rate(problem, known.makespan_ms)),
        "bubble of the span": format_share(bubble_rate(problem, known.span_ms)),
    }
    for device, peak in enumerate(known.peak_bytes):
        rows[f"peak memory {problem.devices[device].name}"] = _peak_text(problem, device, peak)
    for host, peak in known.host_peak_bytes.items():
        if peak:
            rows[f"peak memory of host {host}"] = format_bytes(peak)
    for kind, label in ((ActionType.OFFLOAD, "offloaded"), (ActionType.RECOMPUTE, "recomputed")):
        count = sum(action.type is kind for program in programs for action in program)
        if count:
            cells = len(problem.stages) * problem.num_microbatches
            rows[label] = f"{count} of {cells} activations"
    return rows


def _peak_text(problem: Problem, device: int, peak: int) -> str:
    limit = problem.devices[device].usable_bytes
    if peak > limit:
        return f"[bold red]{format_bytes(peak)}, {format_bytes(peak - limit)} too much[/]"
    return f"{format_bytes(peak)} of {format_bytes(limit)}"
