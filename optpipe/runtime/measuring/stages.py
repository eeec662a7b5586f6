"""What is measured: stages with a sample micro-batch, made by a function of the user's."""

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

__all__ = ["StageSet", "load_function", "load_stages"]


_FORM = "module:function, as in --stages my_model:stages"


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


def load_stages(name: str, microbatch: int | None = None) -> StageSet:
    """Return what a function of a module gives.

    Parameters
    ----------
    name
        ``module:function``; modules of the current folder are found, too.
    microbatch
        Samples of the micro-batch; handed to the function as ``microbatch=`` if given.
    """
    function = load_function("--stages", name)
    arguments = {} if microbatch is None else {"microbatch": microbatch}
    _check_call(name, function, microbatch)
    return _checked(name, function(**arguments))


def _check_call(name: str, function: Callable[..., Any], microbatch: int | None) -> None:
    """Refuse a function that cannot be called as --stages calls it."""
    signature = inspect.signature(function)
    arguments = {} if microbatch is None else {"microbatch": microbatch}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        handed = "nothing" if microbatch is None else f"microbatch={microbatch} (--microbatch)"
        raise InputError(
            f"{name}{signature} is handed {handed}, which does not fit: {error}; give every "
            "parameter but microbatch a default, and name --microbatch only where it is one"
        ) from None


def load_function(option: str, name: str) -> Callable[..., Any]:
    """Return what ``module:function`` names; an `InputError` speaks of the option that said it."""
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


def _checked(name: str, found: Any) -> StageSet:
    rule = "it must return (stages, sample) or (stages, sample, loss_fn, target)"
    if not isinstance(found, tuple) or not 2 <= len(found) <= 4:
        raise InputError(f"{name} returned {_shown(found)}; {rule}; return such a tuple")
    given = StageSet(*found)
    if not isinstance(given.stages, Iterable):
        raise InputError(
            f"{name} returned {_shown(given.stages)} for the stages; {rule}; stages are a list of "
            "nn.Modules in model order"
        )
    stages: list[Any] = list(given.stages)
    odd = [type(stage).__name__ for stage in stages if not isinstance(stage, nn.Module)]
    if odd or not stages:
        what = f"something of type {odd[0]} among the stages" if odd else "no stages"
        raise InputError(f"{name} returned {what}; {rule}; stages are nn.Modules in model order")
    tensors = given.sample if isinstance(given.sample, tuple) else (given.sample,)
    if not tensors or not all(isinstance(one, Tensor) for one in tensors):
        raise InputError(
            f"{name} returned a sample of type {type(given.sample).__name__}; {rule}; "
            "sample is a tensor or a tuple of tensors"
        )
    return given._replace(stages=stages)


def _shown(found: Any) -> str:
    if isinstance(found, tuple):
        return f"a tuple of {len(found)}"
    return f"something of type {type(found).__name__}"
