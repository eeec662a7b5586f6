"""Compiled: layers of states of `counts`, the successors of each, and dominance among them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.exact.count_bounds import ends_late, rate_of
from optpipe_solver.exact.kernel import State, pass_over, run, start_of, wastes, weigh
from optpipe_solver.lean import lean

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe_solver.exact.kernel import Desk, Line

__all__ = ["Layer", "chain", "expand", "make_layer"]


class Layer(NamedTuple):
    """States with the same number of passes done: ``size[0]`` rows.

    ``counts`` and ``times`` are those of `kernel.State`, ``rate`` is how promising the state is,
    ``parent`` the row of the state before in its layer, ``way`` 4 x stage + kind of the pass
    between. ``first`` and ``link`` chain rows with one hash. No state comes in whose rate is not
    below ``limit[0]``.
    """

    counts: NDArray[np.int8]
    times: NDArray[np.int64]
    rate: NDArray[np.float64]
    parent: NDArray[np.int64]
    way: NDArray[np.int64]
    alive: NDArray[np.bool_]
    link: NDArray[np.int64]
    first: NDArray[np.int64]
    size: NDArray[np.int64]
    limit: NDArray[np.float64]


def make_layer(most: int, num_stages: int, num_devices: int) -> Layer:
    """Return an empty layer with room for ``most`` states and the successors of one."""
    most += 4 * num_stages
    slots = 1
    while slots < most:
        slots *= 2
    return Layer(
        counts=np.zeros((most, 3 * num_stages), dtype=np.int8),
        times=np.zeros((most, 1 + num_devices + 2 * num_stages), dtype=np.int64),
        rate=np.zeros(most, dtype=np.float64),
        parent=np.zeros(most, dtype=np.int64),
        way=np.zeros(most, dtype=np.int64),
        alive=np.zeros(most, dtype=np.bool_),
        link=np.full(most, -1, dtype=np.int64),
        first=np.full(slots, -1, dtype=np.int64),
        size=np.zeros(1, dtype=np.int64),
        limit=np.full(1, np.inf),
    )


@lean
def chain(layer: Layer) -> None:
    """Chain all rows of a layer anew."""
    layer.first[:] = -1
    for row in range(layer.size[0]):
        slot = _hash(layer.counts[row]) & (len(layer.first) - 1)
        layer.link[row], layer.first[slot] = layer.first[slot], row


@lean
def expand(
    line: Line,
    layers: tuple[Layer, Layer, Layer],
    work: tuple[State, Desk],
    begin: int,
    most: int,
) -> int:
    """Add the successors of up to ``most`` states of the first layer from row ``begin`` on.

    Those by F, I and W go to the second layer, those by B to the third: it counts as two passes.
    Returns the next row; it is ahead of others where a layer may have no room for the successors of
    that row. ``work`` is written to.
    """
    layer, one, two = layers
    end = min(layer.size[0], begin + most)
    for row in range(begin, end):
        if _has_no_room(line, one) or _has_no_room(line, two):
            return int(row)
        if layer.alive[row]:
            state = State(layer.counts[row], layer.times[row])
            _expand_row(line, layers, state, work, row)
    return int(end)


@lean
def _has_no_room(line: Line, layer: Layer) -> bool:
    return bool(layer.size[0] + 4 * len(line.forward) > len(layer.alive))


@lean
def _expand_row(
    line: Line,
    layers: tuple[Layer, Layer, Layer],
    state: State,
    work: tuple[State, Desk],
    row: int,
) -> None:
    """Add the state after each pass to its layer if it is worth it."""
    _, one, two = layers
    new, desk = work
    weigh(line, state, desk)
    for s in range(len(line.forward)):
        for kind in range(4):
            start = start_of(line, state, desk, s, kind)
            if start < 0 or (kind != 2 and wastes(line, state, desk, s, start)):
                continue
            what = s, kind, start
            if ends_late(line, state, desk, what):
                continue
            run(line, state, what, new)
            pass_over(line, new, line.device[s], start)
            rate = rate_of(line, new, desk, what)
            if rate < 0:
                continue
            if kind == 3:
                _keep(two, new, rate, (row, 4 * s + kind))
            else:
                _keep(one, new, rate, (row, 4 * s + kind))


@lean
def _keep(layer: Layer, state: State, rate: float, origin: tuple[int, int]) -> None:
    """Add a state unless it is barred, or another with its counts is nowhere later."""
    if rate >= layer.limit[0]:
        return
    slot = _hash(state.counts) & (len(layer.first) - 1)
    at = layer.first[slot]
    while at >= 0:
        if layer.alive[at] and _same(layer.counts[at], state.counts):
            if _not_later(layer.times[at], state.times):
                return
            if _not_later(state.times, layer.times[at]):
                layer.alive[at] = False
        at = layer.link[at]
    row = layer.size[0]
    for i in range(len(state.counts)):
        layer.counts[row, i] = state.counts[i]
    for i in range(len(state.times)):
        layer.times[row, i] = state.times[i]
    layer.rate[row] = rate
    layer.parent[row], layer.way[row] = origin
    layer.alive[row] = True
    layer.link[row], layer.first[slot] = layer.first[slot], row
    layer.size[0] += 1


@lean
def _hash(counts: NDArray[np.int8]) -> int:
    value = 1469598103
    for x in counts:
        value = (value ^ int(x)) * 1099511 & 0x7FFFFFFFFFFF
        value ^= value >> 17
    return value


@lean
def _same(a: NDArray[np.int8], b: NDArray[np.int8]) -> bool:
    for i in range(len(a)):  # noqa: SIM110 - compiled
        if a[i] != b[i]:
            return False
    return True


@lean
def _not_later(a: NDArray[np.int64], b: NDArray[np.int64]) -> bool:
    for i in range(len(a)):  # noqa: SIM110 - compiled
        if a[i] > b[i]:
            return False
    return True
