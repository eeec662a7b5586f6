"""``lean``: compile a function that allocates nothing, without numba's reference counts.

numba counts references to every array of every argument at every call, atomically. Where small
functions hand each other records of a dozen arrays, that is nearly all of the time: `kernel.length`
took 800 ns per action with it and takes 20 ns without. The arrays are kept alive by whoever calls
from Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numba

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["lean"]

_F = TypeVar("_F", bound="Callable[..., object]")
_OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "_nrt": False}


def lean(function: _F) -> _F:
    """Compile a function, cached; it must not allocate, and calls only functions like itself.

    Raises
    ------
    numba.core.errors.NumbaError
        At its first call, if it allocates.
    """
    compiled: _F = numba.njit(**_OPTIONS)(function)
    return compiled
