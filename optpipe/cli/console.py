"""What all commands share: consoles, exit codes, reading files, and extras that may be missing."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from optpipe.check import check
from optpipe.errors import InputError, MissingExtraError
from optpipe.evaluate import verify
from optpipe.formats.csv_text import dump_csv, load_csv
from optpipe.formats.json_text import dump_schedule, load_problem, load_schedule, read_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.action import Programs
    from optpipe.errors import OptPipeError
    from optpipe.problem import Problem
    from optpipe.schedule import Schedule

__all__ = [
    "BAD_INPUT",
    "INFEASIBLE",
    "INTERRUPTED",
    "NOTHING_FOUND",
    "PIPE",
    "WORLD",
    "check_writable",
    "interruptible",
    "needs_extra",
    "print_error",
    "read_problem",
    "read_programs",
    "results",
    "say_written",
    "stderr",
    "stdout",
    "write_file",
    "write_schedule",
]

WORLD, BAD_INPUT, INFEASIBLE, NOTHING_FOUND = 1, 2, 3, 4
INTERRUPTED = 130
PIPE = Path("-")
"""Instead of a file's name: standard input, or standard output."""

_PACKAGES = {
    "solver": {"pulp", "highspy", "scipy", "numba"},
    "server": {
        "alembic",
        "fastapi",
        "fastapi_offline",
        "prometheus_client",
        "pydantic_settings",
        "sqlalchemy",
        "starlette",
        "structlog",
        "uvicorn",
    },
}
_PACKAGES["server"] |= _PACKAGES["solver"]


def stdout() -> Console:
    """Return the console for results."""
    return Console(highlight=False)


def stderr() -> Console:
    """Return the console for progress and errors."""
    return Console(stderr=True, highlight=False)


def print_error(error: OptPipeError) -> None:
    """Print what went wrong, with marked cells of a grid in red."""
    text = Text(str(error))
    text.highlight_regex(r">>[^<]+<<", "bold red")
    console = stderr()
    console.print(Text.assemble(("error: ", "bold red"), text), soft_wrap=True)


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Turn the absence of an extra's package into the pip command that installs it.

    Raises
    ------
    MissingExtraError
        If a package of the extra is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _PACKAGES[extra]:
            raise
        raise MissingExtraError(
            f"this command needs {package}, which is not installed; "
            f"run: pip install 'optpipe[{extra}]'"
        ) from None


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


def read_problem(path: Path) -> Problem:
    """Return the problem of a file, or of standard input; errors name the file."""
    try:
        return load_problem(_piped() if path == PIPE else read_text(path))
    except InputError as error:
        raise _in_file(path, error) from None


def read_programs(problem: Problem, path: Path) -> tuple[Programs, Schedule | None]:
    """Return legal programs of a JSON or CSV file, and the schedule record where there is one.

    Raises
    ------
    InputError
        If the file is no schedule, not of this problem, or illegal.
    """
    text = read_text(path)
    if path.suffix.lower() == ".csv" or not text.lstrip().startswith("{"):
        programs = _load_programs(path, text)
        check(problem, programs)
        return programs, None
    try:
        schedule = load_schedule(text)
    except InputError as error:
        raise _in_file(path, error) from None
    verify(problem, schedule)
    return schedule.programs, schedule


def write_schedule(schedule: Schedule, path: Path) -> None:
    """Write a schedule; the suffix .csv chooses CSV, any other JSON."""
    if path.suffix.lower() == ".csv":
        write_file(path, dump_csv(schedule.programs))
    else:
        write_file(path, dump_schedule(schedule))


def check_writable(path: Path | None) -> None:
    """Refuse an output file that cannot be written, before the work for it is done.

    Raises
    ------
    InputError
        If its folder does not exist or may not be written to, or it is a folder itself.
    """
    if path is None or path == PIPE:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {folder}; make it first")
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder; give a file name in it")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError(f"cannot write {path}: permission denied; choose another place")


def results(output: Path | None) -> Console:
    """Return the console for what people read: standard output, unless a file goes there."""
    return stderr() if output == PIPE else stdout()


def say_written(path: Path, what: str = "") -> None:
    """Tell where a file went, if it is one."""
    if path != PIPE:
        stderr().print(f"{what} written to {path}".lstrip(), markup=False)


def write_file(path: Path, text: str) -> None:
    """Write a text file, or standard output.

    Raises
    ------
    InputError
        If it cannot be written.
    """
    if path == PIPE:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; check the path") from None


def _piped() -> str:
    if sys.stdin.isatty():
        raise InputError(
            "- reads a problem from standard input, and nothing is piped into it; "
            "give a file, or write: optpipe estimate ... -o - | optpipe solve -"
        )
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"standard input is not UTF-8 text (byte {error.start}); pipe the problem's JSON"
        ) from None


def _load_programs(path: Path, text: str) -> Programs:
    try:
        return load_csv(text)
    except InputError as error:
        raise _in_file(path, error) from None


def _in_file(path: Path, error: InputError) -> InputError:
    if str(path) in str(error):
        return error
    return type(error)(f"{path}: {error}")
