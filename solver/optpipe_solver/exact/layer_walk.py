"""What both beam searches share: layers of states, expanded one after the other, some left out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from optpipe_solver.exact.counts import Answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["LayerWalk", "keep_rows"]


class _Layer(Protocol):
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


_L = TypeVar("_L", bound=_Layer)


class LayerWalk(ABC, Generic[_L]):
    """A walk from the empty schedule to whole ones.

    A state of one layer leads into the next one or, where it takes two passes at once, into the one
    after that; so three layers are held. ``ways`` has, of each layer that was left, the parents of
    its states and what led to them.
    """

    def __init__(self, layers: list[_L]) -> None:
        self.layers = layers
        self.ways: list[tuple[NDArray[Any], NDArray[Any]]] = []
        self.num_states = 0
        self.is_thinned = False

    def walk(self, num_layers: int, should_stop: Callable[[], bool]) -> Answer:
        """Expand so many layers; where states are in the last one the answer is ``FOUND``.

        ``NONE`` only where no state was left out.
        """
        for _ in range(num_layers):
            layer, one, two = self.layers
            self._thin(layer)
            size = int(layer.size[0])
            self.num_states += size
            self.ways.append((layer.parent[:size].copy(), layer.way[:size].copy()))
            if not self._expand(should_stop):
                return Answer.UNKNOWN
            if one.size[0] == 0 and two.size[0] == 0:
                return Answer.UNKNOWN if self.is_thinned else Answer.NONE
            self._clear(layer)
            self.layers = [one, two, layer]
        return Answer.FOUND

    @abstractmethod
    def _thin(self, layer: _L) -> None:
        """Keep the most promising states of a layer; note where one is left out."""

    @abstractmethod
    def _expand(self, should_stop: Callable[[], bool]) -> bool:
        """Expand the first layer into the others; return False where told to stop."""

    def _clear(self, layer: _L) -> None:
        """Make a layer ready to be filled again."""
        layer.first[:] = -1
        layer.size[0] = 0


def keep_rows(layer: _Layer, columns: tuple[NDArray[Any], ...], rows: NDArray[Any]) -> None:
    """Move rows of a layer to its beginning, in their order, and end it behind them."""
    kept = len(rows)
    for column in columns:
        column[:kept] = column[rows]
    layer.alive[:kept] = True
    layer.size[0] = kept
