"""What commands read: problems and schedules, from files or standard input."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from optpipe.check import check
from optpipe.cli.console import PIPE
from optpipe.errors import IllegalScheduleError, InputError
from optpipe.evaluate import verify
from optpipe.formats.csv_text import load_csv
from optpipe.formats.json_text import load_problem, load_schedule, read_text

if TYPE_CHECKING:
    from pathlib import Path

    from optpipe.action import Programs
    from optpipe.problem import Problem
    from optpipe.schedule import Schedule

__all__ = ["in_file", "load_programs", "read_input", "read_problem", "read_programs"]


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

    Raises
    ------
    InputError
        If the file is no schedule, not of this problem, or illegal; names the file.
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

    Raises
    ------
    InputError
        If the file is no schedule; names the file.
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
