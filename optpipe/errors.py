"""The errors that OptPipe raises deliberately.

::

    OptPipeError                       has .code, a stable word for programs
    |-- InputError (ValueError)        the caller's input is wrong
    |   |-- RequestError               a request is not JSON, or breaks a rule of its model
    |   |-- FieldError                 a field with an invalid value; has .sentence
    |   |-- ProblemError               a problem file or object
    |   |-- ModelError                 a model file or object, or a cut of it
    |   |-- MeasurementError           measurements that cannot be read or lack data
    |   |-- ActionSyntaxError          the text of an action
    |   |-- ScheduleFormatError        a schedule file or object
    |   |-- ScheduleMismatchError      a schedule for another problem
    |   |-- IllegalScheduleError       well formed, but breaks a rule; has .violations
    |   |-- InfeasibleProblemError     no schedule exists; has .needs
    |   `-- PreflightError             refused before the first step, on every rank alike
    `-- WorldError (RuntimeError)      the input is correct, the environment fails
        |-- ServiceError               the service refused or failed; has .status
        |-- ServiceUnreachableError    the service does not answer
        |-- RankError                  another rank failed, and this one stopped because of it
        |-- OffloadError               activations were needed while they were on the host
        `-- MissingExtraError          a package of an optional extra is not installed

A message has three parts: the value, the rule, and what to do.
"""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias
from urllib.parse import unquote, urlsplit

from pydantic import ValidationError
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pydantic import BaseModel

__all__ = [
    "ActionSyntaxError",
    "FieldError",
    "FieldRef",
    "FieldSentence",
    "IllegalScheduleError",
    "InfeasibleProblemError",
    "InputError",
    "MeasurementError",
    "MissingExtraError",
    "ModelError",
    "OffloadError",
    "OptPipeError",
    "PreflightError",
    "ProblemError",
    "RankError",
    "RequestError",
    "ScheduleFormatError",
    "ScheduleMismatchError",
    "ServiceError",
    "ServiceUnreachableError",
    "Violation",
    "WorldError",
    "Writer",
    "explain",
    "faults_of",
    "nearest_names",
    "places",
    "plain",
    "pointer",
    "rule_broken",
]


class OptPipeError(Exception):
    """Base of everything OptPipe raises on purpose."""

    code: ClassVar[str] = "error"


class InputError(OptPipeError, ValueError):
    """The caller gave us something wrong.

    Attributes
    ----------
    pointers
        Where in the JSON (RFC 6901), one for each line of the message; empty if that is unknown.
    """

    code = "input.invalid"
    pointers: tuple[str, ...] = ()

    def at(self, *pointers: str) -> Self:
        """Return the error, with its places."""
        self.pointers = pointers
        return self

    def inside(self, outer: str) -> Self:
        """Return the error with pointers that begin with that of its document in an outer one."""
        inner = self.pointers or ("",) * len(str(self).splitlines())
        return self.at(*(outer + one for one in inner))


class RequestError(InputError):
    """A request that cannot be read, or breaks a rule that has no narrower class."""

    code = "request.invalid"


# --- Sentences that name fields.
# Command line users know a field as a flag, users of HTTP and Python by its plain name. So a
# sentence keeps its fields apart from its words, and a `Writer` writes them for the reader.

Writer: TypeAlias = "Callable[[str, str | None], str]"
"""Writes a field, given its name and the text of its value (None: the name alone)."""


def plain(name: str, value: str | None = None) -> str:
    """Write a field as HTTP and Python name it: ``tp``, ``tp = 3``."""
    return name if value is None else f"{name} = {value}"


@dataclass(frozen=True)
class FieldRef:
    """A field that a sentence names, with the value that was given if the sentence shows it."""

    name: str
    value: object = None


@dataclass(frozen=True)
class FieldSentence:
    """Words and fields, in order."""

    parts: tuple[str | FieldRef, ...]

    def text(self, written: Writer = plain) -> str:
        """Return the sentence with its fields written for the reader."""
        return "".join(
            part
            if isinstance(part, str)
            else written(part.name, None if part.value is None else repr(part.value))
            for part in self.parts
        )

    def __str__(self) -> str:
        return self.text()


class FieldError(InputError):
    """A field has a value that it cannot have; the error points at the first field it names.

    Attributes
    ----------
    sentence
        The message, with its fields apart from its words.
    """

    def __init__(self, *parts: str | FieldRef) -> None:
        self.sentence = FieldSentence(parts)
        super().__init__(str(self.sentence))
        self.at(*[pointer(part.name) for part in parts if isinstance(part, FieldRef)][:1])


class ProblemError(InputError):
    """A problem breaks a rule of ``optpipe/problem/v1``."""

    code = "problem.invalid"


class ModelError(InputError):
    """A model breaks a rule of ``optpipe/model/v1``, or cannot be cut as requested."""

    code = "model.invalid"


class MeasurementError(InputError):
    """A file of measurements cannot be read, or has too little data for a problem."""

    code = "measurement.invalid"


class ActionSyntaxError(InputError):
    """A text is not exactly one action."""

    code = "action.syntax"


class ScheduleFormatError(InputError):
    """A schedule breaks a rule of ``optpipe/schedule/v1`` or of the CSV form."""

    code = "schedule.invalid"


class ScheduleMismatchError(InputError):
    """A schedule was made for another problem."""

    code = "schedule.mismatch"


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule at one cell.

    ``index`` is the position in the device's program; one past its end where an action is missing.
    ``code`` is stable, ``message`` has value, rule and fix.
    """

    code: str
    device: int
    index: int
    message: str


class IllegalScheduleError(InputError):
    """A schedule breaks a rule of docs/specification.md, "Legal".

    Attributes
    ----------
    violations
        What is wrong, in program order; never empty.
    """

    code = "schedule.illegal"

    def __init__(self, message: str, violations: Sequence[Violation]) -> None:
        super().__init__(message)
        self.violations = tuple(violations)


class InfeasibleProblemError(InputError):
    """No schedule of this problem fits its memory limits; this is proven.

    Attributes
    ----------
    needs
        Maps each limit that is too small to the smallest value in bytes that works.
    """

    code = "problem.infeasible"

    def __init__(self, message: str, needs: dict[str, int]) -> None:
        super().__init__(message)
        self.needs = dict(needs)


class WorldError(OptPipeError, RuntimeError):
    """The input is valid, but a file, port, process or database cannot be used."""

    code = "world"


class ServiceError(WorldError):
    """The service refused or failed.

    * ``status``: the HTTP status code.
    * ``problem_code``: the service's own stable ``code``, if it sent one.
    """

    code = "service.error"

    def __init__(self, message: str, status: int, problem_code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.problem_code = problem_code


class ServiceUnreachableError(WorldError):
    """Nobody answers at the service's address."""

    code = "service.unreachable"


class MissingExtraError(WorldError):
    """A package of an optional extra is not installed; the message holds the pip command."""

    code = "extra.missing"


def install_command(extra: str) -> str:
    """Return the pip command that adds an extra to the OptPipe that is installed here.

    OptPipe is on no package index. So the command names the folder or the repository that pip
    installed it from (PEP 610). If neither is known, it names a clone.
    """
    try:
        text = metadata.distribution("optpipe").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        text = None
    origin = json.loads(text) if text else {}
    url = origin.get("url", "")
    if url.startswith("file://"):
        editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
        return f"pip install {editable}'{unquote(urlsplit(url).path)}[{extra}]'"
    if vcs := origin.get("vcs_info"):
        return f"pip install 'optpipe[{extra}] @ {vcs['vcs']}+{url}@{vcs['commit_id']}'"
    if url:
        return f"pip install 'optpipe[{extra}] @ {url}'"
    return f"pip install '.[{extra}]' in a clone of OptPipe"


# --- Pydantic's errors as value, rule and fix, with the path into the JSON.

_RULES = {
    "missing": ("is missing", "give it"),
    "float_type": ("must be a number", "give one"),
    "float_parsing": ("must be a number", "write it without quotes"),
    "finite_number": ("must be finite", "NaN and infinities are refused; give a measured number"),
    "int_type": ("must be a whole number", "give one"),
    "int_parsing": ("must be a whole number", "write it without quotes"),
    "int_from_float": ("must be a whole number", "round it"),
    "bool_type": ("must be true or false", "write true or false"),
    "string_type": ("must be a text", "put it in quotes"),
    "tuple_type": ("must be a list", "put it in [ ]"),
    "list_type": ("must be a list", "put it in [ ]"),
    "dict_type": ("must be an object", "put it in { }"),
    "model_type": ("must be an object", "put it in { }"),
    "model_attributes_type": ("must be an object", "put it in { }"),
}
_IN_DIGITS = {
    str: "write it without quotes",
    float: "write it in digits alone, without a point or an exponent",
}
_SIGNS = {
    "greater_than_equal": ">=",
    "greater_than": ">",
    "less_than_equal": "<=",
    "less_than": "<",
}
_SHOWN_ERRORS = 8
_SHOWN_CHARS = 60
_MAX_BITS = 200


def rule_broken(rule: str, fix: str) -> PydanticCustomError:
    """Return the error a validator raises: which rule the value breaks and what to do."""
    return PydanticCustomError("rule", "{rule}; {fix}", {"rule": rule, "fix": fix})


def explain(error: ValidationError, model: type[BaseModel], written: Writer = plain) -> str:
    """Return one line per problem found, such as ``pp = 0: must be >= 1; stay in range``.

    ``written`` writes the fields for the reader.
    """
    details = _without_echoes(error.errors(include_url=False))
    lines = [_line(item, model, written) for item in details[:_SHOWN_ERRORS]]
    if len(details) > _SHOWN_ERRORS:
        lines.append(f"... and {len(details) - _SHOWN_ERRORS} more")
    return "\n".join(lines)


@contextmanager
def faults_of(model: type[BaseModel], fault: type[InputError]) -> Iterator[None]:
    """Raise pydantic's errors about a model's fields as our error, with the path of each."""
    try:
        yield
    except ValidationError as error:
        raise fault(explain(error, model)).at(*places(error)) from None


def places(error: ValidationError) -> tuple[str, ...]:
    """Return where each line of `explain` applies, as JSON pointers (RFC 6901)."""
    details = _without_echoes(error.errors(include_url=False))
    found = tuple(map(_place, details[:_SHOWN_ERRORS]))
    return found if len(details) <= _SHOWN_ERRORS else (*found, "")


def _place(item: Any) -> str:
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, FieldError) and cause.pointers:
        return pointer(*item["loc"]) + cause.pointers[0]
    return pointer(*item["loc"])


def pointer(*parts: str | int) -> str:
    """Return the JSON pointer (RFC 6901) of names and indices; none = the whole document."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)


def _line(item: Any, model: type[BaseModel], written: Writer) -> str:
    path = _path(item["loc"])
    kind = item["type"]
    context = item.get("ctx", {})
    if kind == "rule" and not item["loc"]:
        return f"{context['rule']}; {context['fix']}"
    if kind == "value_error" and isinstance(context["error"], FieldError):
        return context["error"].sentence.text(written)
    name, with_value = written(path, None), written(path, _shown(item.get("input")))
    if kind == "extra_forbidden":
        return f"{name}: unknown field; {_nearest(item['loc'], model)}"
    if kind == "missing":
        return f"{name}: is missing; give it"
    if kind == "value_error":
        return f"{name}: {context['error']}"
    if kind in ("too_short", "too_long"):
        rule = (
            f"at least {context.get('min_length')}"
            if kind == "too_short"
            else (f"at most {context.get('max_length')}")
        )
        return (
            f"{name}: must have {rule} items, and has {context['actual_length']}; change the list"
        )
    return f"{with_value}: {_rule_and_fix(item, kind, context)}"


def _rule_and_fix(item: Any, kind: str, context: Mapping[str, Any]) -> str:
    if kind == "rule":
        return f"{context['rule']}; {context['fix']}"
    if kind in _RULES:
        rule, fix = _RULES[kind]
        if kind in ("float_type", "int_type"):
            fix = _IN_DIGITS.get(type(item["input"]), fix)
        return f"{rule}; {fix}"
    if kind in _SIGNS:
        bound = next(iter(context.values()))
        shown = int(bound) if isinstance(bound, float) and bound.is_integer() else bound
        return f"must be {_SIGNS[kind]} {shown}; stay in range"
    if kind == "literal_error":
        near = nearest_names(str(item["input"]), re.findall(r"'([^']+)'", context["expected"]), 1)
        fix = f"did you mean {near[0]!r}?" if near else "choose one"
        return f"must be {context['expected']}; {fix}"
    return f"{item['msg']}; change it"


def nearest_names(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Return the known names that a mistyped one may mean, the most likely first.

    Case, blanks and signs do not count, nor what is before a slash: ``meta-llama/Meta-Llama-3-8B``
    contains ``llama3-8b``.
    """
    plain = {_letters(one): one for one in known}
    wanted = _letters(name[-_SHOWN_CHARS:].rpartition("/")[2])
    within = sorted((one for one in plain if len(one) > 1 and one in wanted), key=len, reverse=True)
    close = difflib.get_close_matches(wanted, plain, n=most)
    return [plain[one] for one in dict.fromkeys([*within[:1], *close])][:most]


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _without_echoes(details: list[Any]) -> list[Any]:
    """Drop "the list is too short" where the real fault is in one of its items."""
    deep = {item["loc"][0] for item in details if len(item["loc"]) > 1}
    return [
        item
        for item in details
        if not (item["type"] == "too_short" and len(item["loc"]) == 1 and item["loc"][0] in deep)
    ]


def _path(location: Iterable[Any]) -> str:
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            name = part if len(part) <= _SHOWN_CHARS else part[: _SHOWN_CHARS - 3] + "..."
            text += f".{name}" if text else name
    return text or "the document"


def _shown(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return f"an integer of {value.bit_length()} bits"
    short = reprlib.Repr()  # unlike repr, indifferent to size and depth
    short.maxstring = short.maxother = short.maxlong = _SHOWN_CHARS
    text = short.repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def _nearest(location: tuple[Any, ...], model: type[BaseModel]) -> str:
    fields = _fields_at(location[:-1], model)
    near = nearest_names(str(location[-1]), fields, 1)
    if near:
        return f"did you mean {near[0]!r}? Otherwise remove it"
    return f"remove it (known here: {', '.join(sorted(fields))})"


def _fields_at(location: tuple[Any, ...], model: type[BaseModel]) -> list[str]:
    current: type[BaseModel] = model
    for part in location:
        if not isinstance(part, str) or part not in current.model_fields:
            continue
        inner = _model_inside(current.model_fields[part].annotation)
        if inner is None:
            return []
        current = inner
    return [
        field.alias or name
        for name, field in current.model_fields.items()
        if not any(type(known) is SkipJsonSchema for known in field.metadata)
    ]


def _model_inside(annotation: Any) -> type[BaseModel] | None:
    if hasattr(annotation, "model_fields"):
        return annotation  # type: ignore[no-any-return]
    for argument in getattr(annotation, "__args__", ()):
        found = _model_inside(argument)
        if found is not None:
            return found
    return None


class PreflightError(InputError):
    """The ranks, stages, batch or schedule do not fit together; the same text on every rank."""

    code = "runtime.preflight"


class RankError(WorldError):
    """Another rank failed; the message holds its cause."""

    code = "runtime.rank"


class OffloadError(WorldError):
    """Activations were requested in a state in which the device does not hold them."""

    code = "runtime.offload"
