"""Options of commands, made from the models of `optpipe.requests`.

A command that `takes` a request has an option for each of its fields; fields of nested requests
are options too. `optpipe.requests.Option` says where an option differs from its field.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    Optional,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import annotated_types
import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from optpipe.errors import FieldError, InputError, explain
from optpipe.requests import Option, Request

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe.errors import Writer

__all__ = ["OptionsOf", "flags_of", "takes"]

R = TypeVar("R", bound=Request)

Reader = Callable[[Any], Mapping[str, Any]]
"""Makes fields of a request from the text of an option."""

_SCALARS = (bool, int, float, str)
_LISTED = ((int,), (str,))


class OptionsOf(Generic[R]):
    """The options that a command line gives; call it to get their request.

    ``files`` are the input files that options name.

    Raises `InputError` if the options break a rule of the request; it names them as flags.
    """

    def __init__(
        self, request: type[R], values: dict[str, Any], written: Writer, files: list[Path]
    ) -> None:
        self.files = files
        self._request = request
        self._values = values
        self._written = written

    def __call__(self, **more: Any) -> R:
        """Return the request; ``more`` are fields that are no options, such as its problem."""
        try:
            return self._request.model_validate({**self._values, **more})
        except ValidationError as error:
            raise InputError(explain(error, self._request, self._written)) from None


@dataclass(frozen=True, kw_only=True)
class _Leaf:
    """A field that is an option: ``path`` leads to it through nested requests."""

    path: tuple[str, ...]
    info: FieldInfo
    option: Option
    kind: Any  # bool, int, float, str, or a list of one of them
    default: Any

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def flag(self) -> str:
        return self.option.flag or f"--{self.name.replace('_', '-')}"


def takes(
    request: type[R],
    *,
    without: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
    readers: Mapping[str, Reader] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for a command whose first parameter is the `OptionsOf` of a request.

    Parameters
    ----------
    without
        Fields that are no options of this command.
    defaults
        Field -> value where the option is not given, instead of the request's own default.
    readers
        Field -> function that makes fields of the request from the option's text. The option is
        given as text, for a repeated option as a list of texts.
    """
    read = dict(readers or {})
    leaves = [leaf for leaf in _leaves(request, read) if leaf.name not in without]
    own = dict(defaults or {})
    written = flags_of(request)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        (first, *others) = inspect.signature(command).parameters.values()

        @wraps(command)
        def run(**arguments: Any) -> None:
            try:
                values: dict[str, Any] = {}
                files: list[Path] = []
                for leaf in leaves:
                    value = arguments.pop(leaf.name)
                    if value is None or value == []:
                        value = own.get(leaf.name)
                    elif leaf.name in read:
                        if "FILE" in leaf.option.metavar:
                            files.append(Path(value))
                        _put(values, leaf.path[:-1], read[leaf.name](value))
                        continue
                    else:
                        value = _read(leaf, value)
                    if value is not None:
                        _put(values, leaf.path[:-1], {leaf.name: value})
                command(**{first.name: OptionsOf(request, values, written, files)}, **arguments)
            except FieldError as error:
                raise InputError(error.sentence.text(written)) from None

        kept = [other.replace(annotation=hints[other.name]) for other in others]
        is_argument = [_is_argument(parameter) for parameter in kept]
        all_of_them = [
            *(one for one, at_front in zip(kept, is_argument, strict=True) if at_front),
            *(_parameter(leaf, own.get(leaf.name, leaf.default), leaf.name in read)
              for leaf in leaves),
            *(one for one, at_front in zip(kept, is_argument, strict=True) if not at_front),
        ]  # fmt: skip
        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in all_of_them]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return decorate


def flags_of(request: type[Request]) -> Writer:
    """Return the function that writes a field of a request as its option: ``--tp 3``."""
    flags = {leaf.name: leaf.flag for leaf in _leaves(request, {})}

    def written(name: str, value: str | None = None) -> str:
        # Nested requests are options of the command, unless they are one option themselves.
        parts = re.findall(r"\w+", name)
        known = next((part for part in parts if part in flags), parts[-1])
        flag = flags.get(known, f"--{known.replace('_', '-')}")
        inner = name.partition(known)[2].lstrip(".")
        if not inner:
            return flag if value is None else f"{flag} {value}"
        return f"{flag} {inner}" if value is None else f"{flag} {inner}={value}"

    return written


def _put(values: dict[str, Any], path: tuple[str, ...], fields: Mapping[str, Any]) -> None:
    for name in path:
        values = values.setdefault(name, {})
    values.update(fields)


def _is_argument(parameter: inspect.Parameter) -> bool:
    metadata = getattr(parameter.annotation, "__metadata__", ())
    return any(isinstance(one, typer.models.ArgumentInfo) for one in metadata)


# --- From a field to an option.


def _leaves(
    request: type[Request], readers: Mapping[str, Reader], path: tuple[str, ...] = ()
) -> Iterator[_Leaf]:
    for name, info in request.model_fields.items():
        option = next(_found(info.annotation, info.metadata, Option), None)
        kind = _kind_of(info.annotation)
        if option is None and isinstance(kind, type) and issubclass(kind, Request):
            yield from _leaves(kind, readers, (*path, name))
        elif option is not None or kind in _SCALARS or get_args(kind)[:1] in _LISTED:
            yield _Leaf(
                path=(*path, name),
                info=info,
                option=option or Option(),
                kind=kind,
                default=None if info.is_required() else info.get_default(),
            )


def _found(annotation: Any, metadata: Collection[Any], wanted: type[Any]) -> Iterator[Any]:
    """Yield the metadata of a type, those of a field's annotation included."""
    yield from (one for one in metadata if isinstance(one, wanted))
    if get_origin(annotation) is Annotated:
        yield from _found(annotation.__origin__, annotation.__metadata__, wanted)
    elif get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from _found(part, (), wanted)
    for one in metadata:
        if isinstance(one, FieldInfo):
            yield from _found(None, one.metadata, wanted)


def _kind_of(annotation: Any) -> Any:
    """Return the plain type of an annotation: without null, ranges and names of choices."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind_of(inner[0])
    if origin in (Union, UnionType):
        return next(kind for kind in map(_kind_of, inner) if kind is not NoneType)
    if origin is Literal:
        return type(inner[0])
    if origin in (tuple, frozenset, list):
        return list[_kind_of(inner[0])]  # type: ignore[misc]
    return origin or annotation


def _parameter(leaf: _Leaf, default: Any, has_reader: bool) -> inspect.Parameter:
    option = leaf.option
    flag, shown = leaf.flag, _shown_default(default)
    kind = leaf.kind
    if option.repeated:
        kind = list[str]
    elif has_reader or get_origin(kind) is list:
        kind = str
    elif option.scale != 1:
        kind = float
    if kind is bool and default:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    brackets = "; ".join(filter(None, (shown, _range_text(leaf))))
    text = (leaf.info.description or "").replace("`", "").rstrip(".") + "."
    annotation = Annotated[
        Optional[kind],  # type: ignore[valid-type]  # noqa: UP045 - known only here
        typer.Option(
            flag,
            metavar=None if kind is bool else option.metavar or _metavar(leaf),
            help=text + (f"  [{brackets}]" if brackets else ""),
        ),
    ]
    return inspect.Parameter(
        leaf.name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=None
    )


def _metavar(leaf: _Leaf) -> str:
    choices = _choices(leaf.info.annotation)
    if choices:
        return "|".join(map(str, choices))
    return {int: "N", float: "X"}.get(leaf.kind, "TEXT")


def _choices(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) in (Annotated, Union, UnionType):
        return next(filter(None, map(_choices, get_args(annotation))), ())
    return ()


def _shown_default(default: Any) -> str:
    if isinstance(default, bool):
        return "default: on" if default else ""
    if not isinstance(default, int | float | str) or default == "":
        return ""
    return f"default: {default if isinstance(default, str) else format(default, '.10g')}"


def _limits(leaf: _Leaf) -> dict[type[Any], float]:
    """Return the limits of a number by kind, in the option's unit."""
    annotation, metadata = leaf.info.annotation, leaf.info.metadata
    limits: dict[type[Any], float] = {}
    for kind, name in (
        (annotated_types.Ge, "ge"),
        (annotated_types.Gt, "gt"),
        (annotated_types.Le, "le"),
        (annotated_types.Lt, "lt"),
    ):
        for found in _found(annotation, metadata, kind):
            limits[kind] = getattr(found, name) / leaf.option.scale
    return limits


_WORDS = {
    annotated_types.Ge: ">=",
    annotated_types.Gt: ">",
    annotated_types.Le: "<=",
    annotated_types.Lt: "<",
}


_MOST_SHOWN = 4096


def _range_text(leaf: _Leaf) -> str:
    if get_origin(leaf.kind) is list or leaf.kind not in (int, float):
        return ""
    limits = _limits(leaf)
    low, high = limits.get(annotated_types.Ge), limits.get(annotated_types.Le)
    # Higher limits only stop nonsense.
    is_shown = low is not None and high is not None and high <= _MOST_SHOWN
    return f"{low:g} to {high:g}" if is_shown else ""


def _read(leaf: _Leaf, value: Any) -> Any:
    """Return the value of a field from the value of its option."""
    if leaf.option.repeated:
        return ",".join(value) if leaf.kind is str else list(value)
    if get_origin(leaf.kind) is list:
        parts = [part.strip() for part in value.split(",") if part.strip()]
        (of,) = get_args(leaf.kind)
        try:
            return [of(part) for part in parts]
        except ValueError:
            raise InputError(
                f"{leaf.flag} {value}: must be whole numbers with commas between; write e.g. 1,2"
            ) from None
    if leaf.option.scale == 1:
        return value
    for kind, limit in _limits(leaf).items():
        below = kind in (annotated_types.Ge, annotated_types.Gt)
        if not (value >= limit if below else value <= limit):
            raise InputError(
                f"{leaf.flag} {value:g}: must be {_WORDS[kind]} {limit:.10g}; stay in range"
            )
    scaled = value * leaf.option.scale
    return round(scaled) if leaf.kind is int else scaled
