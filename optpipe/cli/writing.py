"""What commands write: no file is lost, and what took long is kept where it cannot be written."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from optpipe.cli.console import PIPE, stderr, stdout
from optpipe.errors import InputError
from optpipe.formats.csv_text import dump_csv
from optpipe.formats.json_text import dump_schedule

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from optpipe.schedule import Schedule

__all__ = [
    "check_apart",
    "check_schedule_file",
    "check_writable",
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

    Raises
    ------
    InputError
        If its folder does not exist or may not be written to, or it is a folder itself.
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

    Raises
    ------
    InputError
        As `check_writable`; or if people would take the file for a picture.
    """
    check_writable(path)
    if path is not None and path.suffix.lower() in _PICTURES:
        raise InputError(
            f"cannot write a schedule to {path.name}: {path.suffix} is for pictures; write .json "
            "or .csv, and draw it with optpipe plot"
        )


def check_apart(*outputs: Path | None, inputs: Iterable[Path | None] = ()) -> None:
    """Refuse an output that would overwrite what the command reads, or another output.

    Raises
    ------
    InputError
        With the file that would be lost.
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

    A file that stood there is replaced once the new one is whole.

    Raises
    ------
    InputError
        If it cannot be written; names the place where the text is kept instead.
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
