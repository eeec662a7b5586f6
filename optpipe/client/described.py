"""Methods made of described requests: the signature and the words are those of the description."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["described_by"]

F = TypeVar("F", bound="Callable[..., Any]")


def described_by(describe: Callable[..., Any], *, skips_first: bool) -> Callable[[F], F]:
    """Give a method the name, the words and the parameters of what describes its request.

    Parameters
    ----------
    skips_first
        Whether the object itself stands for the first parameter: its id.
    """

    def dress(method: F) -> F:
        signature = inspect.signature(describe)
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        others = list(signature.parameters.values())[1 if skips_first else 0 :]
        method.__name__ = describe.__name__
        method.__doc__ = describe.__doc__
        method.__module__ = describe.__module__
        method.__signature__ = signature.replace(parameters=[own, *others])  # type: ignore[attr-defined]
        return method

    return dress
