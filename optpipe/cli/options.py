"""Command-line options from the fields of the requests in `optpipe.requests`.

A command that `takes` a request has an option for each field, fields of nested requests included::

    @takes(PlanOptions, defaults={"time_limit_s": 60.0})
    def plan(builder: RequestBuilder[PlanOptions], model_file: ModelFile) -> None:
        options = builder.build()

`optpipe.requests.Option` describes how an option differs from its field.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin

import typer
from annotated_types import BaseMetadata
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from optpipe.cli.console import number_parser
from optpipe.errors import FieldError, InputError, explain
from optpipe.requests import ALIASES, Option, Request

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.errors import Writer

__all__ = ["RequestBuilder", "flags_of", "takes"]

R = TypeVar("R", bound=Request)

Reader = Callable[[Any], Mapping[str, Any]]
"""Returns fields of a request from the text of an option; from a list of texts if repeated."""


@dataclass(frozen=True)
class RequestBuilder(Generic[R]):
    """The options of a command line, from which `build` makes a request.

    ``files`` are the input files that options name.
    """

    request: type[R]
    values: dict[str, Any]
    files: list[Path]

    def build(self, **more: Any) -> R:
        """Return the request; ``more`` are fields that are no options, such as its problem.

        Raises `InputError` if the options break a rule; the message names them as flags.
        """
        try:
            return self.request.model_validate({**self.values, **more})
        except ValidationError as error:
            raise InputError(explain(error, self.request, flags_of(self.request))) from None


def takes(
    request: type[Request],
    *,
    without: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
    readers: Mapping[str, Reader] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command the options of a request.

    The first parameter of the command is the `RequestBuilder`; the others are its own options.

    Parameters
    ----------
    without
        Fields that are no options of this command; of a nested request as ``options.cache``.
    defaults
        Field -> default of this command, instead of the request's.
    readers
        Field -> function that reads the option's text.
    """
    fields = [field for field in _option_fields(request) if field.path not in without]
    defaults, readers = defaults or {}, readers or {}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run_command(**arguments: Any) -> None:
            values: dict[str, Any] = {}
            files = []
            try:
                for field in fields:
                    value = arguments.pop(field.name)
                    found: Mapping[str, Any]
                    if value is None or value == []:
                        if field.name not in defaults:
                            continue
                        found = {field.name: defaults[field.name]}
                    elif field.name in readers:
                        found = readers[field.name](value)
                        if "FILE" in field.option.metavar:
                            files.append(Path(value))
                    else:
                        found = {field.name: _convert(field, value)}
                    inner = values
                    for name in field.parents:
                        inner = inner.setdefault(name, {})
                    inner.update(found)
                command(RequestBuilder(request, values, files), **arguments)
            except FieldError as error:
                raise InputError(error.sentence.text(flags_of(request))) from None

        _, *others = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [
            *(_typer_parameter(field, defaults.get(field.name)) for field in fields),
            *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in others),
        ]
        run_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run_command.__annotations__ = {one.name: one.annotation for one in parameters}
        return run_command

    return decorate


def flags_of(request: type[Request]) -> Writer:
    """Return the function that writes a field of a request as its option: ``--tp 3``."""
    flags = {field.name: field.flag for field in _option_fields(request)}

    def write(name: str, value: str | None = None) -> str:
        names = re.findall(r"\w+", name)
        option = next((one for one in names if one in flags), names[-1])
        flag = flags.get(option, f"--{option.replace('_', '-')}")
        # A path inside the option's value, such as `.pp` of --current, or `[0]` of --chunks.
        inner = name.partition(option)[2].lstrip(".")
        if inner:
            flag += f" {inner}"
        return flag if value is None else f"{flag}{'=' if inner else ' '}{value}"

    return write


# --- From fields to options.


@dataclass(frozen=True, kw_only=True)
class _OptionField:
    """A field that is an option.

    ``parents`` are the fields that lead to it through nested requests. ``type`` is bool, int, float
    or str, and of a list the type of its items. ``limits`` are in the option's unit, by ge, gt, le
    and lt.
    """

    name: str
    parents: tuple[str, ...]
    info: FieldInfo
    option: Option
    type: type[Any]
    is_list: bool
    choices: tuple[Any, ...]
    limits: dict[str, float]

    @property
    def path(self) -> str:
        return ".".join((*self.parents, self.name))

    @property
    def flag(self) -> str:
        return self.option.flag or f"--{self.name.replace('_', '-')}"

    @property
    def aliases(self) -> list[str]:
        return [f"--{alias}" for alias, name in ALIASES.items() if name == self.name]


def _option_fields(request: type[Request], parents: tuple[str, ...] = ()) -> Iterator[_OptionField]:
    for name, info in request.model_fields.items():
        parts = [*_parts(info.annotation), *info.metadata]
        option = next((part for part in parts if isinstance(part, Option)), None)
        nested = [part for part in parts if isinstance(part, type) and issubclass(part, Request)]
        if nested and option is None:
            yield from _option_fields(nested[0], (*parents, name))
            continue
        choices = next((get_args(part) for part in parts if get_origin(part) is Literal), ())
        scalars = [*map(type, choices), *(p for p in parts if p in (bool, int, float, str))]
        if scalars or option is not None:
            option = option or Option()
            yield _OptionField(
                name=name,
                parents=parents,
                info=info,
                option=option,
                type=scalars[0] if scalars and not option.is_text else str,
                is_list=any(get_origin(part) in (tuple, frozenset, list) for part in parts),
                choices=choices,
                limits={
                    key: getattr(part, key) / option.scale
                    for part in parts
                    for key in _LIMITS
                    if isinstance(part, BaseMetadata) and hasattr(part, key)
                },
            )


def _parts(annotation: Any) -> Iterator[Any]:
    """Yield a type and its parts at every depth: members, items, choices, metadata."""
    yield annotation
    is_field = isinstance(annotation, FieldInfo)
    for part in annotation.metadata if is_field else get_args(annotation):
        yield from _parts(part)


def _typer_parameter(field: _OptionField, default: Any) -> inspect.Parameter:
    option, flag, kind = field.option, field.flag, field.type
    if option.repeated:
        kind = list[str]
    elif field.is_list:
        kind = str
    elif option.scale != 1:
        kind = float
    metavar = option.metavar or ("" if field.is_list else "|".join(map(str, field.choices)))
    if default is None:
        default = field.info.get_default()
    notes = []
    if kind is bool:
        if default:
            flag = f"{flag}/--no-{flag.removeprefix('--')}"
            notes.append("default: on")
    elif isinstance(default, int | float):
        notes.append(f"default: {default:.10g}")
    elif default and isinstance(default, str):
        notes.append(f"default: {default}")
    low, high = field.limits.get("ge"), field.limits.get("le")
    # Higher limits only refuse nonsense.
    if low is not None and high is not None and high <= 4096 and kind in (int, float):
        notes.append(f"{low:g} to {high:g}")
    text = (field.info.description or "").replace("`", "").rstrip(".") + "."
    annotation = Annotated[
        kind | None,  # type: ignore[valid-type]
        typer.Option(
            flag,
            *field.aliases,
            metavar=metavar or {int: "N", float: "X", str: "TEXT"}.get(kind),
            parser=number_parser(kind) if kind in (int, float) else None,
            help=text + (f"  [{'; '.join(notes)}]" if notes else ""),
        ),
    ]
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=None
    )


# --- From an option's value to a field's value.

_LIMITS = {
    "ge": (">=", operator.ge),
    "gt": (">", operator.gt),
    "le": ("<=", operator.le),
    "lt": ("<", operator.lt),
}


def _convert(field: _OptionField, value: Any) -> Any:
    """Return the field's value. Raises `InputError` if the option's value cannot be one."""
    if field.option.repeated:
        return value if field.is_list else ",".join(value)
    if field.is_list:
        try:
            return [field.type(part.strip()) for part in value.split(",") if part.strip()]
        except ValueError:
            kind = "whole numbers" if field.type is int else "numbers"
            raise InputError(
                f"{field.flag} {value}: must be {kind} with commas between; write e.g. 1,2"
            ) from None
    if field.option.scale == 1:
        return value
    # Checked here in the option's unit, because the request would report the field's.
    for key, limit in field.limits.items():
        sign, is_met = _LIMITS[key]
        if not is_met(value, limit):
            raise InputError(f"{field.flag} {value:g}: must be {sign} {limit:.10g}; stay in range")
    scaled = value * field.option.scale
    return round(scaled) if field.type is int else scaled
