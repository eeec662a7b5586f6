"""Programs from columns: where a schedule has hundreds of thousands of actions, loops count."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from optpipe.action import Action

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optpipe.action import ActionType, Program

__all__ = ["program_of"]

_action = partial(tuple.__new__, Action)  # without the two calls of Python that a call would cost


def program_of(
    stages: Iterable[int], types: Iterable[ActionType], microbatches: Iterable[int]
) -> Program:
    """Return the actions whose parts stand beside each other in columns of equal length.

    Raises
    ------
    ValueError
        If the lengths differ.
    """
    return tuple(map(_action, zip(stages, types, microbatches, strict=True)))
