"""What all commands share: consoles, exit codes, Ctrl-C, extras; how results are shown; files.

No file is lost, and what took long is kept where it cannot be written.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.measure import measure_renderables
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from optpipe.check import check
from optpipe.errors import IllegalScheduleError, InputError, MissingExtraError
from optpipe.evaluate import verify
from optpipe.formats.exports import dump_csv, load_csv
from optpipe.formats.json import dump_schedule, load_problem, load_schedule, read_text
from optpipe.memory import device_peak_bytes, host_peak_bytes
from optpipe.plot.terminal import ScheduleView
from optpipe.schedule import ActionType
from optpipe.simulate import bubble_rate, link_warnings, simulate
from optpipe.units import format_bytes, format_ms, format_share

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import ConsoleOptions, RenderableType

    from optpipe.errors import OptPipeError
    from optpipe.problem import Problem
    from optpipe.schedule import Programs, Schedule
    from optpipe_solver.budget import Progress

__all__ = [
    "BAD_INPUT",
    "DEFAULT_URL",
    "INFEASIBLE",
    "INTERRUPTED",
    "MOST_DRAWN",
    "NOTHING_FOUND",
    "PIPE",
    "WORLD",
    "ApiKey",
    "AsJson",
    "Follow",
    "JobId",
    "LinkLatency",
    "LinkRate",
    "Output",
    "ProblemFile",
    "ProblemOut",
    "ScheduleFile",
    "Url",
    "baseline_programs",
    "check_apart",
    "check_schedule_file",
    "check_writable",
    "gap_text",
    "in_file",
    "interruptible",
    "load_programs",
    "needs_extra",
    "nothing_found",
    "number_table",
    "print_error",
    "progress_line",
    "read_input",
    "read_problem",
    "read_programs",
    "rescued",
    "results",
    "say_written",
    "searching",
    "show_schedule",
    "stderr",
    "stdout",
    "text_table",
    "warn",
    "warn_of_links",
    "write_file",
    "write_schedule",
]


WORLD, BAD_INPUT, INFEASIBLE, NOTHING_FOUND = 1, 2, 3, 4
INTERRUPTED = 130
# Unicode has pictures of the first and of DEL; of the others there are none.
_SHOWN = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_SHOWN |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}

PIPE = Path("-")
"""Instead of a file's name: standard input, or standard output."""


class _Console(Console):
    """Shows control characters and leaves them to no terminal: names may be anybody's.

    Through a pipe as well, at whose end may be a terminal (`less -R`, the log of a CI). Only `out`
    gives a program the data as they are.
    """

    _is_data = False

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; a table that does not fit is wider than the console before a number is cut."""
        width = self.width
        tables = (thing for thing in objects if isinstance(thing, Table))
        self.width = max(width, *(_least_width(self, table) for table in tables), 0)
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
        """Return a string as text; here, so that tables know how wide it will be."""
        return super().render_str(self._shown(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Give the pieces of anything that is printed; not those that rich itself commands."""
        for segment in super().render(renderable, options):
            shown = segment.text if segment.control else self._shown(segment.text)
            yield Segment(shown, segment.style, segment.control)

    def _shown(self, text: str) -> str:
        return text if self._is_data else text.translate(_SHOWN)


def stdout() -> Console:
    """Return the console for results."""
    return _Console(highlight=False)


def stderr() -> Console:
    """Return the console for progress and errors."""
    return _Console(stderr=True, highlight=False)


def print_error(error: OptPipeError) -> None:
    """Print what went wrong, with marked cells of a grid in red."""
    text = Text(str(error))
    text.highlight_regex(r">>[^<]+<<", "bold red")
    console = stderr()
    console.print(Text.assemble(("error: ", "bold red"), text), soft_wrap=True)


_LEAST_TEXT = 12


def _least_width(console: Console, table: Table) -> int:
    """Return how wide a table must be for columns that do not wrap: numbers, and what is drawn."""
    wide, (_, right, _, left) = console.options.update(width=10_000), table.padding
    needed = 0
    for column in table.columns:
        size = measure_renderables(console, wide, [column.header, *column.cells])
        needed += size.maximum if column.no_wrap else min(size.minimum, _LEAST_TEXT)
    return needed + (left + right) * len(table.columns)


def text_table(*numbers: str, texts: Sequence[str] = ()) -> Table:
    """Return a table without lines: columns of texts, which wrap, then of numbers, by names."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Turn the absence of an extra's package into the pip command that installs it.

    Raises `MissingExtraError` if a package of the extra is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package.startswith("optpipe"):
            raise
        raise MissingExtraError(
            f"this command needs {package}, which is not installed; "
            f"run: pip install 'optpipe[{extra}]'"
        ) from None


_SAME_INTERRUPT_S = 1.0


@contextmanager
def interruptible() -> Iterator[Event]:
    """Let a first Ctrl-C ask for the best so far, and a second one end the program.

    What comes within a second of the first is the same one: `timeout` signals a process, and then
    its group.
    """
    stop = Event()
    first_s = math.inf

    def ask(_number: int, _frame: object) -> None:
        nonlocal first_s
        if time.monotonic() > first_s + _SAME_INTERRUPT_S:
            raise KeyboardInterrupt
        first_s = min(first_s, time.monotonic())
        stop.set()

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


# --- Arguments and options that several commands have in common.

DEFAULT_URL = "http://127.0.0.1:8000"

ProblemFile = Annotated[
    Path,
    typer.Argument(
        metavar="PROBLEM", help="Problem file (optpipe/problem/v1, JSON); - is standard input."
    ),
]
ProblemOut = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the problem here.")
]
ScheduleFile = Annotated[
    Path, typer.Argument(metavar="SCHEDULE", help="Schedule file, JSON or CSV.")
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write the schedule here: .csv is CSV, else JSON; - is standard output.",
    ),
]
LinkLatency = Annotated[
    float | None,
    typer.Option("--link-latency-ms", metavar="X", help="Of links that were not measured."),
]
LinkRate = Annotated[
    float | None,
    typer.Option("--link-gb-per-s", metavar="X", help="Of links that were not measured."),
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
        help="What the service asks for, where others can reach it.",
        show_envvar=True,
    ),
]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id that submit printed.")]
Follow = Annotated[
    bool, typer.Option("--follow", help="Wait for the end, printing every improvement.")
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


# --- Files that commands read and write.


_PICTURES = frozenset({".svg", ".png", ".pdf", ".html"})


def write_schedule(schedule: Schedule, path: Path) -> None:
    """Write a schedule; the suffix .csv chooses CSV, any other JSON."""
    if path.suffix.lower() == ".csv":
        write_file(path, dump_csv(schedule.programs))
    else:
        write_file(path, dump_schedule(schedule))


def check_writable(path: Path | None) -> None:
    """Refuse an output file that cannot be written, before the work for it is done.

    Raises `InputError` if its folder does not exist or may not be written to, or it is a folder
    itself.
    """
    if path is None or path == PIPE:
        return
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


def check_schedule_file(path: Path | None) -> None:
    """Refuse a file that a schedule cannot be written to, or whose suffix is that of a picture.

    Raises `InputError` as `check_writable`; or if people would take the file for a picture.
    """
    check_writable(path)
    if path is not None and path.suffix.lower() in _PICTURES:
        raise InputError(
            f"cannot write a schedule to {path.name}: {path.suffix} is for pictures; write .json "
            "or .csv, and draw it with optpipe plot"
        )


def check_apart(*outputs: Path | None, inputs: Iterable[Path | None] = ()) -> None:
    """Refuse an output that would overwrite what the command reads, or another output.

    Raises `InputError` with the file that would be lost.
    """
    read = {_place(path) for path in inputs if path is not None and path != PIPE}
    written: set[str] = set()
    for path in outputs:
        # Devices, such as /dev/null, lose nothing.
        if path is None or (path != PIPE and path.exists() and not path.is_file()):
            continue
        place = _place(path)
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


def _place(path: Path) -> str:
    return str(path) if path == PIPE else os.path.realpath(path)


def results(output: Path | None) -> Console:
    """Return the console for what people read: standard output, unless a file goes there."""
    return stderr() if output == PIPE else stdout()


def say_written(path: Path, what: str = "") -> None:
    """Tell where a file went, if it is one."""
    if path != PIPE:
        stderr().print(f"{what} written to {path}".lstrip(), markup=False)


def write_file(path: Path, text: str) -> None:
    """Write a text file, or standard output.

    A file that stood there is replaced once the new one is whole. Raises `InputError` if it cannot
    be written; names the place where the text is kept instead.
    """
    if path == PIPE:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        _write_whole(path, text)
    except OSError as error:
        fix = rescued(path, text)
        raise InputError(f"cannot write {path}: {error.strerror}; {fix}") from None


def _write_whole(path: Path, text: str) -> None:
    place = Path(os.path.realpath(path))
    is_other = place.exists() and not (place.is_file() and os.access(place, os.W_OK))
    if is_other or not os.access(place.parent, os.W_OK):
        path.write_text(text, encoding="utf-8")
        return
    part = place.with_name(f".optpipe-{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        if place.exists():
            shutil.copymode(place, part)
        part.replace(place)
    finally:
        part.unlink(missing_ok=True)


def rescued(path: Path, text: str) -> str:
    """Keep a text whose file cannot be written, for it may have taken hours; say where."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", prefix="optpipe-", suffix=path.suffix, delete=False
        ) as kept:
            kept.write(text)
    except OSError:
        return "check the path"
    return f"its text is in {kept.name}: move it, or check the path"


# --- What commands read: problems and schedules, from files or standard input.


def read_input(path: Path) -> str:
    """Return the text of a file, or of standard input."""
    return _piped() if path == PIPE else read_text(path)


def read_problem(path: Path) -> Problem:
    """Return the problem of a file, or of standard input; errors name the file."""
    try:
        return load_problem(read_input(path))
    except InputError as error:
        raise in_file(path, error) from None


def read_programs(problem: Problem, path: Path) -> tuple[Programs, Schedule | None]:
    """Return legal programs of a JSON or CSV file, and the schedule record where there is one.

    Raises `InputError` if the file is no schedule, not of this problem, or illegal; names the file.
    """
    programs, schedule = load_programs(path)
    try:
        if schedule is None:
            check(problem, programs)
        else:
            verify(problem, schedule)
    except IllegalScheduleError as error:
        raise IllegalScheduleError(f"{path}: {error}", error.violations) from None
    except InputError as error:
        raise in_file(path, error) from None
    return programs, schedule


def load_programs(path: Path) -> tuple[Programs, Schedule | None]:
    """Return what a schedule file holds, legal or not, and the record where it is JSON.

    Raises `InputError` if the file is no schedule; names the file.
    """
    if path == PIPE:
        raise InputError("- is for problems: schedules are read from files; give a file's name")
    text = read_text(path)
    try:
        if _is_csv(path, text):
            return load_csv(text), None
        schedule = load_schedule(text)
    except InputError as error:
        raise in_file(path, error) from None
    return schedule.programs, schedule


def _is_csv(path: Path, text: str) -> bool:
    suffix = path.suffix.lower()
    return suffix == ".csv" or (suffix != ".json" and not text.lstrip().startswith("{"))


def _piped() -> str:
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


def in_file(path: Path, error: InputError) -> InputError:
    """Return the error with the name of the file in front, unless its message has it."""
    if str(path) in str(error):
        return error
    return type(error)(f"{path}: {error}")
