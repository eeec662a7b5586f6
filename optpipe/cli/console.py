"""What all commands share: consoles, exit codes, Ctrl-C, and extras that may be missing."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from optpipe.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import ConsoleOptions, RenderableType

    from optpipe.errors import OptPipeError

__all__ = [
    "BAD_INPUT",
    "DEFAULT_URL",
    "INFEASIBLE",
    "INTERRUPTED",
    "NOTHING_FOUND",
    "PIPE",
    "WORLD",
    "ApiKey",
    "AsJson",
    "Follow",
    "Gap",
    "Jitter",
    "JobId",
    "LinkLatency",
    "LinkRate",
    "Method",
    "Output",
    "ProblemFile",
    "ProblemOut",
    "RobustPercentile",
    "ScheduleFile",
    "Seed",
    "Stragglers",
    "Threads",
    "TimeLimit",
    "Url",
    "WorkLimit",
    "interruptible",
    "needs_extra",
    "noise_of",
    "print_error",
    "stderr",
    "stdout",
    "text_table",
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


def text_table(*numbers: str, texts: Sequence[str] = ()) -> Table:
    """Return a table without lines: columns of texts, then of numbers, by their names."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in texts:
        table.add_column(name, no_wrap=True)
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


def noise_of(robust: str | None, jitter: float | None, stragglers: float | None) -> dict[str, Any]:
    """Return the options under which schedules are ranked by a percentile; none where not asked.

    Raises `InputError` for noise without a percentile.
    """
    given = {"jitter": jitter, "stragglers": stragglers}
    noise = {name: share for name, share in given.items() if share is not None}
    if robust is None and noise:
        raise InputError(f"--{next(iter(noise))}: is noise, for --robust; add --robust P90")
    return {} if robust is None else {"robust": robust, **noise}


@contextmanager
def interruptible() -> Iterator[Event]:
    """Let a first Ctrl-C ask for the best so far, and a second one end the program."""
    stop = Event()

    def ask(_number: int, _frame: object) -> None:
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

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
TimeLimit = Annotated[
    float, typer.Option("--time-limit", metavar="S", min=0.01, help="Seconds to search.")
]
WorkLimit = Annotated[
    float | None,
    typer.Option(
        "--work-limit",
        metavar="N",
        help="Units of work, about a second of one core each, counted in iterations: the same "
        "result on every machine, unless --time-limit cuts it short.",
    ),
]
Gap = Annotated[
    float,
    typer.Option(
        metavar="X", help="Stop where proven within this share of the optimum, e.g. 0.01."
    ),
]
Threads = Annotated[
    int, typer.Option(metavar="N", min=1, help="From 2 on, search and proofs run side by side.")
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Seed of everything random.")]
Method = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="auto, milp, or a published method, as optpipe compare names it."
    ),
]
RobustPercentile = Annotated[
    str | None,
    typer.Option(
        "--robust",
        metavar="P90",
        help="Rank what is found by this percentile of the objective under noise, instead of the "
        "objective. Bound and gap stay those without noise.",
    ),
]
Jitter = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="With --robust: by which share every action's time varies.  [default: 0.1]",
    ),
]
Stragglers = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="With --robust: by which share all of a device's compute times vary together.  "
        "[default: 0.1]",
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
