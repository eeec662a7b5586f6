"""What commands write: no file is lost, and what took long is kept where it cannot be written."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from optpipe.check import check
from optpipe.cli.console import PIPE, stderr, stdout
from optpipe.errors import IllegalScheduleError, InputError
from optpipe.evaluate import verify
from optpipe.formats.csv import dump_csv, load_csv
from optpipe.formats.json import dump_schedule, load_problem, load_schedule, read_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from optpipe.problem import Problem
    from optpipe.schedule import Programs, Schedule

__all__ = [
    "check_apart",
    "check_schedule_file",
    "check_writable",
    "in_file",
    "load_programs",
    "read_input",
    "read_problem",
    "read_programs",
    "rescued",
    "results",
    "say_written",
    "write_file",
    "write_schedule",
]


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
