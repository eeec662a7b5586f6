"""A name looked up in a catalogue; a wrong one is answered with the nearest."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, TypeVar

from optpipe.presets.asking import AskedError, Field

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["pick"]

Value = TypeVar("Value")


def pick(field: str, name: str, catalogue: Mapping[str, Value]) -> Value:
    """Return the entry of that name.

    Raises
    ------
    InputError
        If there is none; ``field`` is what gave it.
    """
    found = catalogue.get(name)
    if found is not None:
        return found
    close = difflib.get_close_matches(name, catalogue, n=3)
    hint = f"did you mean {', '.join(close)}?" if close else f"it has {', '.join(catalogue)}"
    raise AskedError(Field(field, name), f": the catalogue has none of that name; {hint}")
