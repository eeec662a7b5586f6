"""The base of both searches: layers of states, expanded one after the other.

A search is *exact*, or a *beam*. An exact search gives up where it meets too many states. A beam
expands only the ``width`` most promising states of each layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from optpipe.schedule import Programs
    from optpipe_solver.arrays import Ints
    from optpipe_solver.bounds.heads_tails import Events

__all__ = ["HorizonAnswer", "LayeredOutcome", "LayeredSearch", "keep_rows", "whole"]


class HorizonAnswer(StrEnum):
    """The answer of a search within a horizon."""

    NONE = "none"
    FOUND = "found"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class LayeredOutcome:
    """The end of a search and how many states it met, or a beam expanded.

    ``programs`` has the programs, if some were found and can be written. ``found_ms``, for a search
    of some devices alone, is the length of a relaxed schedule; no real one as short need exist.
    Then ``earliest`` may have bounds: no schedule within the horizon starts the k-th F or I of one
    of their stages sooner.
    """

    answer: HorizonAnswer
    num_states: int
    programs: Programs | None = None
    found_ms: float | None = None
    earliest: Events | None = None


class _SearchLayer(Protocol):
    @property
    def parent(self) -> NDArray[Any]: ...
    @property
    def way(self) -> NDArray[Any]: ...
    @property
    def alive(self) -> NDArray[Any]: ...
    @property
    def first(self) -> NDArray[Any]: ...
    @property
    def size(self) -> NDArray[Any]: ...


_L = TypeVar("_L", bound=_SearchLayer)


class LayeredSearch(ABC, Generic[_L]):
    """A search from the empty schedule to complete ones.

    A state of one layer leads into one of the next layers, as many steps ahead as its event takes.
    ``ways`` has, for each layer left so far, the parents of its states and the events between.
    """

    def __init__(self, layers: list[_L], num_layers: int, width: int | None) -> None:
        self.layers = layers
        self.num_layers = num_layers
        self.width = width
        self.ways: list[tuple[NDArray[Any], NDArray[Any]]] = []
        self.num_states = 1 if width is None else 0
        self.is_thinned = False
        self.keeps_ways = True

    def walk(self, should_stop: Callable[[], bool], most_states: float = inf) -> HorizonAnswer:
        """Expand all layers; where states are in the last one the answer is ``FOUND``.

        ``NONE`` only where no state was left out.
        """
        for _ in range(self.num_layers):
            layer, *following = self.layers
            if self.width is not None:
                self._thin(layer)
                self.num_states += int(layer.size[0])
            if not self._expand(should_stop, most_states):
                return HorizonAnswer.UNKNOWN
            if all(later.size[0] == 0 for later in following):
                return HorizonAnswer.UNKNOWN if self.is_thinned else HorizonAnswer.NONE
            self._leave(layer)
            self.layers = [*following, layer]
        return HorizonAnswer.FOUND

    def _expand(self, should_stop: Callable[[], bool], most_states: float) -> bool:
        """Expand the first layer into the others; False after too many states, or if stopped."""
        layer, *following = self.layers
        at, before = 0, self.num_states - _num_rows(following)
        while at < layer.size[0]:
            at = self._step(at)
            if self.width is None:
                self.num_states = before + _num_rows(following)
            if at < 0 or self.num_states > most_states or should_stop():
                return False
        return True

    @abstractmethod
    def _step(self, at: int) -> int:
        """Expand some states from a row on; return the next row, -1 where a layer is full."""

    @abstractmethod
    def _thin(self, layer: _L) -> None:
        """Keep the most promising states of a layer; note where one is left out."""

    def _leave(self, layer: _L) -> None:
        """Remember how the layer was reached, and make it ready to be filled again."""
        if self.keeps_ways:
            size = int(layer.size[0])
            self.ways.append((layer.parent[:size].copy(), layer.way[:size].copy()))
        layer.first[:] = -1
        layer.size[0] = 0

    def _way_to_first(self, ends: NDArray[Any], is_double: Callable[[int], bool]) -> list[int]:
        """Return the ways to the state of the last layer that ends first, from the beginning.

        ``ends`` is by row; ``is_double`` flags ways that take two steps.
        """
        last = self.layers[0]
        alive = last.alive[: len(ends)]
        row, at = int(np.argmin(np.where(alive, ends, np.iinfo(ends.dtype).max))), len(self.ways)
        parents, ways = last.parent, last.way
        found: list[int] = []
        while at > 0:
            found.append(int(ways[row]))
            row = int(parents[row])
            at -= 2 if is_double(found[-1]) else 1
            parents, ways = self.ways[at]
        return found[::-1]


def _num_rows(layers: Sequence[_SearchLayer]) -> int:
    return sum(int(layer.size[0]) for layer in layers)


def keep_rows(layer: _SearchLayer, columns: tuple[NDArray[Any], ...], rows: NDArray[Any]) -> None:
    """Move rows of a layer to its beginning, in their order, and end the layer after them."""
    kept = len(rows)
    for column in columns:
        column[:kept] = column[rows]
    layer.alive[:kept] = True
    layer.size[0] = kept


def whole(values: Iterable[float]) -> Ints:
    """Return numbers >= -1 without their fractional digits."""
    return np.array([int(value) for value in values], dtype=np.int64)
