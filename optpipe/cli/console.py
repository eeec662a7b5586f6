"""Shared parts of the commands: consoles, exit codes, Ctrl-C, options, results and files."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.measure import measure_renderables
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from optpipe.check import check
from optpipe.errors import InputError, MissingExtraError, install_command
from optpipe.evaluate import verify
from optpipe.formats.exports import dump_csv, parse_programs
from optpipe.formats.json import dump_schedule, load_problem, read_text
from optpipe.memory import device_peak_bytes, host_peak_bytes
from optpipe.plot.terminal import ScheduleView
from optpipe.schedule import ActionType
from optpipe.simulate import bubble_rate, link_warnings, simulate
from optpipe.units import format_bytes, format_ms, format_share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rich.console import ConsoleOptions, RenderableType

    from optpipe.client import Client
    from optpipe.errors import OptPipeError
    from optpipe.problem import Problem
    from optpipe.schedule import Programs, Schedule
    from optpipe_solver.budget import Progress

FAILURE, BAD_INPUT, INFEASIBLE, NOTHING_FOUND = 1, 2, 3, 4
INTERRUPTED = 130
# Unicode has pictures of C0 control characters and of DEL, and none of C1.
_VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_VISIBLE |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}

_MIN_TEXT_WIDTH = 12

PIPE = Path("-")
"""File name that means standard input or standard output."""


class _Console(Console):
    """A console that prints control characters as visible text: names are untrusted input.

    The same holds for a pipe, because a terminal may be at its end (`less -R`, a CI log). Only
    `out` leaves data for programs unchanged.
    """

    _is_data = False

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; widen the console for a table whose numbers do not fit."""
        width = self.width
        wide = self.options.update(width=10_000)
        for table in (thing for thing in objects if isinstance(thing, Table)):
            _, right, _, left = table.padding
            needed = (left + right) * len(table.columns)
            for column in table.columns:
                size = measure_renderables(self, wide, [column.header, *column.cells])
                needed += size.maximum if column.no_wrap else min(size.minimum, _MIN_TEXT_WIDTH)
            self.width = max(self.width, needed)
        try:
            super().print(*objects, **options)
        finally:
            self.width = width

    def out(self, *objects: Any, **options: Any) -> None:
        """Print data, such as JSON."""
        self._is_data = not self.is_terminal
        try:
            super().out(*objects, **options)
        finally:
            self._is_data = False

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string as text; replaced here so that tables measure what is printed."""
        return super().render_str(self._replace_controls(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Yield the segments of a renderable; rich's own control segments are kept."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else self._replace_controls(segment.text)
            yield Segment(text, segment.style, segment.control)

    def _replace_controls(self, text: str) -> str:
        return text if self._is_data else text.translate(_VISIBLE)


def stdout() -> Console:
    """Return the console for results."""
    return _Console(highlight=False)


def stderr() -> Console:
    """Return the console for progress and errors."""
    return _Console(stderr=True, highlight=False)


def result_console(output: Path | None) -> Console:
    """Return the console for results: standard output, unless the output file is written there."""
    return stderr() if output == PIPE else stdout()


def print_json(value: Any) -> None:
    """Print a value as indented JSON on standard output."""
    stdout().out(json.dumps(value, indent=2), highlight=False)


def print_error(error: OptPipeError) -> None:
    """Print an error message, with the marked cells of a grid in red."""
    text = Text(str(error))
    text.highlight_regex(r">>[^<]+<<", "bold red")
    stderr().print(Text.assemble(("error: ", "bold red"), text), soft_wrap=True)


def text_table(*numbers: str, texts: Sequence[str] = ()) -> Table:
    """Return a table without lines: columns of text that wrap, then columns of numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Turn a missing package of an extra into a `MissingExtraError` with the pip command."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package.startswith("optpipe"):
            raise
        raise MissingExtraError(
            f"this command needs {package}, which is not installed; run: {install_command(extra)}"
        ) from None


_SAME_INTERRUPT_S = 1.0


@contextmanager
def interruptible() -> Iterator[Event]:
    """Set the event on the first Ctrl-C, to keep the best so far; the second ends the program.

    Signals within a second of the first are ignored: `timeout` signals a process and its group.
    """
    stop = Event()
    first_s = math.inf

    def request_stop(_number: int, _frame: object) -> None:
        nonlocal first_s
        if time.monotonic() > first_s + _SAME_INTERRUPT_S:
            raise KeyboardInterrupt
        first_s = min(first_s, time.monotonic())
        stop.set()

    before = signal.signal(signal.SIGINT, request_stop)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def stopped_by_user(what: str) -> typer.Exit:
    """Print what an interrupted command did not reach; return its exit."""
    stderr().print(f"stopped by Ctrl-C; {what} that were not reached are missing")
    return typer.Exit(INTERRUPTED)


def nothing_found(state: str, reason: str) -> typer.Exit:
    """Print why there is no schedule; return the command's exit."""
    text = Text.assemble((f"{state}:", "bold red"), f" {reason}")
    stderr().print(text, soft_wrap=True)
    return typer.Exit(INFEASIBLE if state == "infeasible" else NOTHING_FOUND)


# --- Arguments and options that several commands have.

DEFAULT_URL = "http://127.0.0.1:8000"


def output_option(help_text: str, metavar: str = "FILE") -> Any:
    """Return the option ``-o``."""
    return typer.Option("--output", "-o", metavar=metavar, help=help_text)


ProblemFile = Annotated[
    Path,
    typer.Argument(
        metavar="PROBLEM", help="Problem file (optpipe/problem/v1, JSON); - is standard input."
    ),
]
ProblemOut = Annotated[Path | None, output_option("Write the problem here.")]
ScheduleFile = Annotated[
    Path, typer.Argument(metavar="SCHEDULE", help="Schedule file, JSON or CSV.")
]
Output = Annotated[
    Path | None,
    output_option("Write the schedule here: .csv is CSV, else JSON; - is standard output."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Url = Annotated[
    str, typer.Option(envvar="OPTPIPE_URL", metavar="URL", help="Address of the service.")
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="OPTPIPE_API_KEY",
        metavar="KEY",
        help="API key, if the service requires one.",
        show_envvar=True,
    ),
]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id that submit printed.")]


def number_parser(
    kind: type[int | float], low: float = -math.inf, high: float = math.inf
) -> Callable[[str], Any]:
    """Return the ``parser`` of an option that is a number between ``low`` and ``high``."""
    rule = "a whole number" if kind is int else "a number"
    if high < math.inf:
        rule += f" from {low:g} to {high:g}"
    elif low > -math.inf:
        rule += f" of at least {low:g}"

    def parse(text: str) -> Any:
        with suppress(ValueError):
            number = kind(text)
            if low <= number <= high:
                return number
        raise typer.BadParameter(f"{text!r} must be {rule}; correct it")

    return parse


def connect(url: str, api_key: str | None) -> Client:
    """Return a client of a service; its package is loaded only here."""
    from optpipe.client import Client

    return Client(url, api_key=api_key)


# --- Results.

_SHOWN_DEVICES = 16
_SHOWN_WARNINGS = 2
_ODD_RATIO = 1000
MAX_DRAWN = 50_000
"""Maximum number of actions that a result draws: each takes 40 us, with table and 1F1B."""


def show_schedule(
    console: Console, problem: Problem, schedule: Schedule, baseline: Programs | None
) -> None:
    """Print the picture and the numbers of a schedule, next to those of 1F1B if given.

    Above `MAX_DRAWN` actions print the numbers only, so that a solve ends with its time limit.
    """
    name = " - ".join(part for part in (problem.name, schedule.provenance.method) if part)
    if (count := sum(map(len, schedule.programs))) > MAX_DRAWN:
        left_out = f"{name}: {count:,} actions are not drawn; use optpipe plot"
        console.print(left_out, markup=False)
        baseline = None
    else:
        console.print(ScheduleView(problem=problem, programs=schedule.programs, title=name))
    console.print()
    console.print(number_table(problem, schedule.programs, schedule, baseline))
    warn("links", link_warnings(problem, schedule.makespan_ms))


def warn(what: str, sentences: Sequence[str]) -> None:
    """Print the first two warnings on standard error, and the number of the others."""
    for sentence in sentences[:_SHOWN_WARNINGS]:
        stderr().print(f"warning: {sentence}", style="yellow", markup=False, soft_wrap=True)
    if (more := len(sentences) - _SHOWN_WARNINGS) > 0:
        stderr().print(f"warning: so are {more} more {what}", style="yellow", markup=False)


def baseline_programs(problem: Problem) -> Programs | None:
    """Return 1F1B's programs, possibly over the memory limit; None where it does not apply.

    It does not apply to slices, because the last slice of a sample goes backward first.
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
    """Return a table with a row per number and a column per schedule.

    The numbers of ``schedule`` are its own: they were checked when it was solved or read, and
    another simulation of long programs takes seconds.
    """
    table = Table(box=None, pad_edge=False, show_header=baseline is not None)
    table.add_column("")
    table.add_column("this schedule", justify="right")
    columns = [_numbers(problem, programs, schedule)]
    if baseline is not None:
        table.add_column("1F1B", justify="right")
        columns.append(_numbers(problem, baseline, None))
    for label in columns[0]:
        table.add_row(escape(label), *(column.get(label, "") for column in columns))
        if label == "bubble of the span" and schedule is not None:
            bound = "none" if schedule.bound_ms is None else f"{format_ms(schedule.bound_ms)} ms"
            table.add_row("proven bound", bound)
            table.add_row("gap", gap_text(schedule.gap))
    return table


def _numbers(problem: Problem, programs: Programs, schedule: Schedule | None) -> dict[str, str]:
    """Return label -> text; without a schedule's record the programs are simulated."""
    if schedule is None:
        run = simulate(problem, programs)
        makespan_ms, span_ms = run.makespan_ms, run.span_ms
        shown = enumerate(programs[:_SHOWN_DEVICES])
        peaks = tuple(device_peak_bytes(problem, d, p, run.modes[d]) for d, p in shown)
        host_peaks = host_peak_bytes(problem, programs, run.modes)
    else:
        makespan_ms, span_ms = schedule.makespan_ms, schedule.span_ms
        peaks, host_peaks = schedule.peak_bytes[:_SHOWN_DEVICES], schedule.host_peak_bytes
    rows = {
        "makespan": f"{format_ms(makespan_ms)} ms",
        "span": f"{format_ms(span_ms)} ms",
        "bubble of the makespan": format_share(bubble_rate(problem, makespan_ms)),
        "bubble of the span": format_share(bubble_rate(problem, span_ms)),
    }
    for device, peak in zip(problem.devices, peaks, strict=False):
        over = peak - device.usable_bytes
        rows[f"peak memory {device.name}"] = (
            f"[bold red]{format_bytes(peak)}, {format_bytes(over)} too much[/]"
            if over > 0
            else f"{format_bytes(peak)} of {format_bytes(device.usable_bytes)}"
        )
    for host, peak in host_peaks.items():
        if peak:
            rows[f"peak memory of host {host}"] = format_bytes(peak)
    for kind, label in ((ActionType.OFFLOAD, "offloaded"), (ActionType.RECOMPUTE, "recomputed")):
        count = sum(action.type is kind for program in programs for action in program)
        if count:
            cells = len(problem.stages) * problem.num_microbatches
            rows[label] = f"{count} of {cells} activations"
    return rows


def gap_text(gap: float | None) -> str:
    """Return a gap as a percentage."""
    if gap is None:
        return "unknown"
    return "0% (optimal)" if gap <= 1e-6 else format_share(gap)


def progress_line(
    seconds: float, method: str, objective_ms: float | None, bound_ms: float | None
) -> str:
    """Return one line about the best schedule and bound so far."""
    best = "no schedule yet" if objective_ms is None else f"{format_ms(objective_ms)} ms"
    bound = "" if bound_ms is None else f"   bound {format_ms(bound_ms)} ms"
    return f"{seconds:7.1f} s   {best:>14}{bound}   {method}"


@contextmanager
def searching(text: str) -> Iterator[dict[str, Any]]:
    """Yield a solver's callbacks: they print improvements, and stop it at Ctrl-C."""
    console = stderr()

    def print_progress(news: Progress) -> None:
        line = progress_line(news.seconds, news.method, news.objective_ms, news.bound_ms)
        console.print(line, markup=False)

    with interruptible() as stop, console.status(text):
        yield {"on_progress": print_progress, "should_stop": stop.is_set}
        if stop.is_set():
            console.print("stopped by Ctrl-C")


def remaining_s(limit_s: float | None, began_s: float) -> float:
    """Return the time limit less the seconds since ``began_s``; at least half of the limit.

    Reading and imports count, or the command would end late on a busy machine.
    """
    limit_s = limit_s or 0.0
    return max(limit_s / 2, limit_s - (time.monotonic() - began_s))


# --- Output files.

_PICTURES = frozenset({".svg", ".png", ".pdf", ".html"})


def check_outputs(*outputs: Path | None, inputs: Iterable[Path | None] = ()) -> None:
    """Refuse output files before the work is done.

    Raises `InputError` if a file cannot be written, or would overwrite an input or another output.
    """
    read = {os.path.realpath(path) for path in inputs if path is not None and path != PIPE}
    written: set[str] = set()
    for path in outputs:
        if path is None:
            continue
        if path != PIPE:
            _check_writable(path)
            if path.exists() and not path.is_file():  # a device, such as /dev/null
                continue
        place = os.path.realpath(path)
        if place in read:
            raise InputError(
                f"cannot write {path}: this command reads it, and it would be lost; give another "
                "file"
            )
        if place in written:
            raise InputError(
                f"cannot write {path} twice: one output would overwrite the other; give two files"
            )
        written.add(place)


def _check_writable(path: Path) -> None:
    folder = path.absolute().parent
    try:
        if not folder.is_dir():
            raise InputError(f"cannot write {path}: there is no folder {folder}; make it first")
        if path.is_dir():
            raise InputError(f"cannot write {path}: it is a folder; give a file name in it")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise InputError(f"cannot write {path}: permission denied; choose another place")
    except OSError as error:  # a name that is too long
        raise InputError(f"cannot write {path}: {error.strerror}; choose another name") from None


def check_schedule_name(path: Path | None) -> None:
    """Refuse a schedule file with the suffix of a picture. Raises `InputError`."""
    if path is not None and path.suffix.lower() in _PICTURES:
        raise InputError(
            f"cannot write a schedule to {path.name}: {path.suffix} is for pictures; write .json "
            "or .csv, and draw it with optpipe plot"
        )


def write_file(path: Path, text: str) -> None:
    """Write a text file, or standard output.

    An existing file is replaced only by a complete one. Raises `InputError` if the file cannot be
    written; the message names a temporary file with the text.
    """
    if path == PIPE:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    place = Path(os.path.realpath(path))
    part = place.with_name(f".optpipe-{os.getpid()}.part")
    try:
        is_other = place.exists() and not (place.is_file() and os.access(place, os.W_OK))
        if is_other or not os.access(place.parent, os.W_OK):
            path.write_text(text, encoding="utf-8")
            return
        try:
            part.write_text(text, encoding="utf-8")
            if place.exists():
                shutil.copymode(place, part)
            part.replace(place)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        fix = rescue_text(path, text)
        raise InputError(f"cannot write {path}: {error.strerror}; {fix}") from None


def rescue_text(path: Path, text: str) -> str:
    """Write a text that may have taken hours to a temporary file; return a hint with its name."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", prefix="optpipe-", suffix=path.suffix, delete=False
        ) as file:
            file.write(text)
    except OSError:
        return "check the path"
    return f"its text is in {file.name}: move it, or check the path"


def report_written(path: Path, what: str = "") -> None:
    """Print on standard error where a file was written."""
    if path != PIPE:
        stderr().print(f"{what} written to {path}".lstrip(), markup=False)


def write_output(path: Path, text: str, what: str = "") -> None:
    """Write a file as `write_file` and report it."""
    write_file(path, text)
    report_written(path, what)


def write_schedule(schedule: Schedule, path: Path, what: str = "") -> None:
    """Write a schedule and report it; the suffix .csv selects CSV, any other JSON."""
    is_csv = path.suffix.lower() == ".csv"
    text = dump_csv(schedule.programs) if is_csv else dump_schedule(schedule)
    write_output(path, text, what)


# --- Input files.


@contextmanager
def name_file(path: Path) -> Iterator[None]:
    """Put the name of a file in front of the messages of its errors."""
    try:
        yield
    except InputError as error:
        if str(path) not in str(error):
            error.args = (f"{path}: {error}",)
        raise


def read_input(path: Path) -> str:
    """Return the text of a file, or of standard input. Raises `InputError`."""
    return _read_stdin() if path == PIPE else read_text(path)


def _read_stdin() -> str:
    if sys.stdin.isatty():
        raise InputError(
            "- reads standard input, and nothing is piped into it; "
            "give a file, or write: optpipe estimate ... -o - | optpipe solve -"
        )
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"standard input is not UTF-8 text (byte {error.start}); pipe the problem's JSON"
        ) from None


def read_problem(path: Path) -> Problem:
    """Return the problem of a file, or of standard input; warn about odd units.

    Raises `InputError`.
    """
    with name_file(path):
        problem = load_problem(read_input(path))
    warn("stages", _unit_warnings(problem))
    return problem


def _unit_warnings(problem: Problem) -> list[str]:
    """Return a sentence per stage whose forward and backward differ by a factor of 1,000."""
    found = []
    for index, stage in enumerate(problem.stages):
        forward_ms, backward_ms = stage.forward_ms, stage.fused_backward_ms
        low_ms, high_ms = sorted((forward_ms, backward_ms))
        if 0 < low_ms <= high_ms / _ODD_RATIO:
            found.append(
                f"stage {index}: forward {format_ms(forward_ms)} ms and backward "
                f"{format_ms(backward_ms)} ms differ by a factor of {high_ms / low_ms:,.0f}; "
                "all durations are in milliseconds"
            )
    return found


def read_programs(problem: Problem, path: Path) -> tuple[Programs, Schedule | None]:
    """Return the legal programs of a JSON or CSV file, and the record of a JSON file.

    Raises `InputError` if the file is no schedule, is for another problem, or is illegal.
    """
    programs, schedule = load_programs(path)
    with name_file(path):
        if schedule is None:
            check(problem, programs)
        else:
            verify(problem, schedule)
    return programs, schedule


def load_programs(path: Path) -> tuple[Programs, Schedule | None]:
    """Return the programs of a schedule file, legal or not, and the record of a JSON file.

    Raises `InputError` if the file is no schedule.
    """
    if path == PIPE:
        raise InputError("- is for problems: schedules are read from files; give a file's name")
    text = read_text(path)
    with name_file(path):
        return parse_programs(path.name, text)
