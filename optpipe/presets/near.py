"""A name looked up in a catalogue; a wrong one is answered with the nearest."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, TypeVar

from optpipe.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["pick"]

Value = TypeVar("Value")


def pick(what: str, name: str, catalogue: Mapping[str, Value]) -> Value:
    """Return the entry of that name.

    Raises
    ------
    InputError
        If there is none; ``what`` names the option that gave it.
    """
    found = catalogue.get(name)
    if found is not None:
        return found
    close = difflib.get_close_matches(name, catalogue, n=3)
    hint = f"did you mean {', '.join(close)}?" if close else "optpipe estimate --list names all"
    raise InputError(f"{what} {name!r}: the catalogue has none of that name; {hint}")
