"""JSON of problems, models and schedules, read strictly: no NaN, no key twice, paths in errors."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args

from optpipe.errors import InputError
from optpipe.model import Model
from optpipe.problem import FileValue, Problem
from optpipe.schedule import Schedule

__all__ = [
    "dump_model",
    "dump_problem",
    "dump_schedule",
    "load_model",
    "load_problem",
    "load_schedule",
    "parse_json",
    "read_text",
]


Read = TypeVar("Read", bound=FileValue)

_FORMAT = re.compile(r"optpipe/([a-z]{1,20})/v[0-9]{1,9}")


def load_problem(text: str) -> Problem:
    """Return the problem a JSON text describes.

    Raises
    ------
    ProblemError
        If the text is not JSON or breaks a rule of ``optpipe/problem/v1``.
    """
    return _load(text, Problem)


def load_model(text: str) -> Model:
    """Return the model a JSON text describes.

    Raises
    ------
    ModelError
        If the text is not JSON or breaks a rule of ``optpipe/model/v1``.
    """
    return _load(text, Model)


def load_schedule(text: str) -> Schedule:
    """Return the schedule a JSON text describes.

    Raises
    ------
    ScheduleFormatError
        If the text is not JSON or breaks a rule of ``optpipe/schedule/v1``.
    """
    return _load(text, Schedule)


def _load(text: str, read: type[Read]) -> Read:
    data = parse_json(text, read.fault)
    if isinstance(data, dict) and data:
        _expect_kind(data, read)
    return read.parse(data)


def _expect_kind(data: dict[str, Any], read: type[FileValue]) -> None:
    """Refuse a document of another kind or version in one line, not with a line for every field."""
    field, error_type = read.model_fields["format"], read.fault
    expected, known = field.default, get_args(field.annotation)
    kind = expected.split("/")[1]
    said = data.get("format", expected)
    if said in known and data.keys() & read.model_fields.keys():
        return
    if said in known:
        keys = [repr(key[:30]) for key in list(data)[:4]]
        shown = ", ".join(keys) + (", ..." if len(data) > len(keys) else "")
        raise error_type(
            f"this is no {kind}: it has none of a {kind}'s fields, but {shown}; give a file of "
            f"{expected}"
        )
    if not isinstance(said, str):
        return
    other = _FORMAT.fullmatch(said)
    if other is None:
        raise error_type(f"format = {said[:60]!r}: must be {expected!r}; correct it")
    if other[1] != kind:
        raise error_type(
            f"format = {said[:60]!r}: this is a {other[1]}, but a {kind} is asked for here; give "
            f"a file of {expected}"
        )
    raise error_type(
        f"format = {said[:60]!r}: this optpipe reads {' and '.join(map(repr, known))}; read it "
        "with the optpipe that wrote it, or write it anew"
    )


def dump_problem(problem: Problem) -> str:
    """Return a problem as indented JSON text with defaults filled in."""
    return json.dumps(problem.model_dump(mode="json", by_alias=True), indent=2) + "\n"


def dump_model(model: Model) -> str:
    """Return a model as indented JSON text with defaults filled in."""
    return json.dumps(model.model_dump(mode="json", by_alias=True), indent=2) + "\n"


def dump_schedule(schedule: Schedule) -> str:
    """Return a schedule as JSON text, one line per program."""
    data = schedule.model_dump(mode="json", by_alias=True)
    programs = data.pop("programs")
    rows = ",\n".join("    " + json.dumps(program) for program in programs)
    head, marker, tail = json.dumps({"programs": 0, **data}, indent=2).partition('"programs": 0')
    return f"{head}{marker[:-1]}[\n{rows}\n  ]{tail}\n"


def read_text(path: Path | str) -> str:
    """Return the text of a file.

    Raises `InputError` if it cannot be read or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; check the path") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from None


def parse_json(
    text: str, error_type: type[InputError] = InputError, *, takes_constants: bool = False
) -> Any:
    """Return the object of a strict JSON text.

    Parameters
    ----------
    takes_constants
        Read ``NaN``, ``Infinity`` and ``-Infinity``, which Python's json writes, as these words.

    Raises
    ------
    InputError
        Or ``error_type``, with line and column: if the text is no JSON, or has a key twice.
    """

    def refuse_constant(name: str) -> NoReturn:
        raise error_type(f"{name} is not a JSON number; give a finite number")

    def refuse_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            counted = Counter(name for name, _ in pairs)
            twin = next(name for name, count in counted.items() if count > 1)
            raise error_type(f"key {twin[:60]!r} stands twice in one object; remove one")
        return found

    if text.startswith("\ufeff"):
        raise error_type("the text starts with a byte order mark; save it as UTF-8 without one")
    if not text.strip():
        raise error_type("the text is empty; JSON starts with { here")
    try:
        return json.loads(
            text,
            parse_constant=str if takes_constants else refuse_constant,
            object_pairs_hook=refuse_twins,
        )
    except json.JSONDecodeError as error:
        raise error_type(
            f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}; "
            "is the file complete?"
        ) from None
    except RecursionError:
        raise error_type(
            "the JSON is nested too deeply; a problem has four levels of brackets, remove others"
        ) from None
    except InputError:
        raise
    except ValueError:  # Python's own limit, which guards against quadratic time
        raise error_type(
            "a number has more than 4300 digits; give bytes, milliseconds or a count"
        ) from None
