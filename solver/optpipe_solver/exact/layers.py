"""One layer of a layered search expanded, a slice at a time, so that it can be told to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

__all__ = ["SLICE", "expand_layer"]


SLICE = 200
"""States expanded between two looks at whether to stop."""


class _SweptLayer(Protocol):
    @property
    def size(self) -> NDArray[Any]:
        """The number of states, in an array of one."""


def expand_layer(
    layers: Sequence[_SweptLayer],
    step: Callable[[int], int],
    num_states: int,
    most_states: int,
    should_stop: Callable[[], bool],
) -> tuple[bool, int]:
    """Expand the first of three layers into the others.

    Parameters
    ----------
    step
        Expands up to `SLICE` states from a row on; returns the next row, -1 where one is too many
        for a layer.
    num_states, most_states
        States met so far, and at most.

    Returns
    -------
    Whether all was expanded (False: too much, or told to stop), and the states met.
    """
    layer, one, two = layers
    at, before = 0, int(one.size[0] + two.size[0])
    while at < layer.size[0]:
        at = step(at)
        met = num_states + int(one.size[0] + two.size[0]) - before
        if at < 0 or met > most_states or should_stop():
            return False, met
    return True, num_states + int(one.size[0] + two.size[0]) - before
