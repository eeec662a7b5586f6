"""Load the stages or the model to measure, and a sample micro-batch, from a user's function."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from optpipe.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ModelToMeasure", "StageSet", "load_function", "load_model", "load_stages"]


_FORM = "module:function, as in my_model:build"


class StageSet(NamedTuple):
    """The stages in model order and one micro-batch for them.

    Attributes
    ----------
    stages
        Modules that each take what the one before returns: a tensor or a tuple of tensors.
    sample
        The first stage's input, one micro-batch.
    loss_fn
        From (the last stage's output, target) to a scalar; None = the sum of the output.
    target
        The loss's target, one micro-batch.
    """

    stages: Sequence[nn.Module]
    sample: Tensor | tuple[Tensor, ...]
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    target: Tensor | None = None


class ModelToMeasure(NamedTuple):
    """A model and one micro-batch for it.

    ``sample``, ``loss_fn`` and ``target`` are those of `StageSet`. ``blocks`` is the name of the
    list of its layers; None = its longest list.
    """

    model: nn.Module
    sample: Tensor | tuple[Tensor, ...]
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    target: Tensor | None = None
    blocks: str | None = None


def load_stages(name: str, **arguments: int | None) -> StageSet:
    """Return the stages that a user's function makes.

    Parameters
    ----------
    name
        ``module:function``; modules of the current folder are found, too.
    arguments
        Passed to the function if they are not None: ``microbatch``, the samples of the micro-batch.

    Raises
    ------
    InputError
        If there is no such function, it does not take these arguments, or returns something else.
    """
    given = StageSet(*_called("--stages", name, arguments, "(stages, sample)"))
    if not isinstance(given.stages, Iterable):
        raise InputError(
            f"{name} returned {_shown(given.stages)} for the stages; give a list of nn.Modules in "
            "model order"
        )
    stages: list[Any] = list(given.stages)
    odd = [type(stage).__name__ for stage in stages if not isinstance(stage, nn.Module)]
    if odd or not stages:
        what = f"something of type {odd[0]} among the stages" if odd else "no stages"
        raise InputError(f"{name} returned {what}; give a list of nn.Modules in model order")
    return given._replace(stages=stages)


def load_model(name: str, blocks: str | None = None, **arguments: int | None) -> ModelToMeasure:
    """Return the model that a user's function makes; as `load_stages`.

    ``arguments`` are ``microbatch`` and ``sequence``, the tokens of a sample.
    """
    given = ModelToMeasure(*_called("--model", name, arguments, "(model, sample)"))
    if not isinstance(given.model, nn.Module):
        raise InputError(f"{name} returned {_shown(given.model)} for the model; give an nn.Module")
    return given._replace(blocks=blocks)


def _called(option: str, name: str, arguments: dict[str, int | None], form: str) -> tuple[Any, ...]:
    """Return what a user's function returns; refuse another form, or a function with others."""
    function = load_function(option, name)
    handed = {key: value for key, value in arguments.items() if value is not None}
    signature = inspect.signature(function)
    try:
        signature.bind(**handed)
    except TypeError as error:
        given = ", ".join(f"{key}={value} (--{key})" for key, value in handed.items()) or "nothing"
        known = " and ".join(arguments)
        raise InputError(
            f"{name}{signature} is handed {given}, which does not fit: {error}; give every "
            f"parameter but {known} a default, and name an option only where it is one"
        ) from None
    found = function(**handed)
    rule = f"it must return {form} or {form[:-1]}, loss_fn, target)"
    if not isinstance(found, tuple) or not 2 <= len(found) <= 4:
        raise InputError(f"{name} returned {_shown(found)}; {rule}; return such a tuple")
    sample = found[1]
    tensors = sample if isinstance(sample, tuple) else (sample,)
    if not tensors or not all(isinstance(one, Tensor) for one in tensors):
        raise InputError(
            f"{name} returned a sample of type {type(sample).__name__}; {rule}; "
            "sample is a tensor or a tuple of tensors"
        )
    return found


def load_function(option: str, name: str) -> Callable[..., Any]:
    """Return the object ``module:function``; an `InputError` names the option that gave it."""
    module_name, separator, function_name = name.partition(":")
    is_name = all(part.isidentifier() for part in module_name.split("."))
    if not (separator and is_name and function_name.isidentifier()):
        raise InputError(f"{option} {name}: must name a function; write {_FORM}")
    if os.getcwd() not in sys.path:  # noqa: PTH109 - sys.path holds texts
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise InputError(
            f"{option} {name}: there is no module {error.name}; run this where it can be "
            "imported, or correct the name"
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        offered = sorted(key for key, value in vars(module).items() if callable(value))
        near = ", ".join(key for key in offered if not key.startswith("_")) or "none"
        raise InputError(
            f"{option} {name}: {module_name} has no function {function_name} (it has: {near}); "
            "correct the name"
        )
    found: Callable[..., Any] = function
    return found


def _shown(found: Any) -> str:
    if isinstance(found, tuple):
        return f"a tuple of {len(found)}"
    return f"something of type {type(found).__name__}"
