"""The methods that the solver knows, each with one line about it."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["load_methods"]

_AUTO = (
    "The optimiser: the best of all methods as a start, improved by local search and MILP, with a "
    "proven bound."
)


def load_methods() -> dict[str, str]:
    """Return every method's name and description: of a family, its module's first line.

    The first call imports the solver, half a second: make it in a thread.
    """
    from optpipe_solver import METHODS  # noqa: PLC0415 - heavy; the service needs it, workers too
    from optpipe_solver.families import FAMILIES  # noqa: PLC0415 - likewise

    described = {"auto": _AUTO} | {family.name: _first_line(family.build) for family in FAMILIES}
    return {name: described[name] for name in METHODS}


def _first_line(build: Callable[..., Any]) -> str:
    """Return the first line of the module that defines a function, or what it is a variant of."""
    while isinstance(build, partial):
        build = build.func
    return (sys.modules[build.__module__].__doc__ or "").strip().partition("\n")[0]
