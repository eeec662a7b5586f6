"""Compiled: layers of states of `journeys`, the successors of each, and dominance among them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe_solver.exact.journey_bounds import least_end, least_end_by
from optpipe_solver.exact.journey_kernel import (
    AWAY,
    CHECKPOINT,
    DROP,
    FUSED,
    GRADIENT,
    KEEP,
    RECOMPUTE,
    RELOAD,
    SEND,
    WEIGHT,
    State,
    mode_of,
    position_of,
    run,
    start_of,
    survey,
    wastes,
)
from optpipe_solver.lean import lean

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe_solver.exact.journey_kernel import Desk
    from optpipe_solver.exact.road import Road

__all__ = ["Layer", "chain", "expand", "make_layer", "set_out"]

_NONE = -1
_PASSES = FUSED + 1


class Layer(NamedTuple):
    """States with the same number of steps done: ``size[0]`` rows.

    ``end`` is the greatest lower bound of the end on the way to a state, ``parent`` the row before
    it, in its layer, and ``way`` the event between (see `_way_of`). ``first`` and ``link``
    chain rows with one hash.
    """

    codes: NDArray[np.int32]
    weights: NDArray[np.int8]
    times: NDArray[np.int32]
    end: NDArray[np.int32]
    parent: NDArray[np.int32]
    way: NDArray[np.int32]
    alive: NDArray[np.bool_]
    link: NDArray[np.int32]
    first: NDArray[np.int32]
    size: NDArray[np.int64]


def make_layer(most: int, num_microbatches: int, num_stages: int, num_devices: int) -> Layer:
    """Return an empty layer with room for ``most`` states."""
    slots = 1
    while slots < most:
        slots *= 2
    num_times = 1 + 3 * num_devices + num_microbatches
    return Layer(
        codes=np.zeros((most, num_microbatches), dtype=np.int32),
        weights=np.zeros((most, num_stages), dtype=np.int8),
        times=np.zeros((most, num_times), dtype=np.int32),
        end=np.zeros(most, dtype=np.int32),
        parent=np.zeros(most, dtype=np.int32),
        way=np.zeros(most, dtype=np.int32),
        alive=np.zeros(most, dtype=np.bool_),
        link=np.full(most, -1, dtype=np.int32),
        first=np.full(slots, -1, dtype=np.int32),
        size=np.zeros(1, dtype=np.int64),
    )


def set_out(layer: Layer, road: Road) -> None:
    """Put the state before everything into an empty layer."""
    layer.times[0, 1 + 3 * len(road.room) :] = road.head
    layer.alive[0] = True
    layer.size[0] = 1


@lean
def chain(layer: Layer) -> None:
    """Chain all rows of a layer anew."""
    layer.first[:] = _NONE
    for row in range(layer.size[0]):
        state = State(layer.codes[row], layer.weights[row], layer.times[row])
        slot = _hash(state) & (len(layer.first) - 1)
        layer.link[row], layer.first[slot] = layer.first[slot], row


@lean
def expand(
    road: Road,
    layers: tuple[Layer, Layer, Layer],
    work: tuple[State, Desk, Desk],
    begin: int,
    most: int,
) -> int:
    """Add the successors of up to ``most`` states of the first layer from row ``begin`` on.

    Returns the next row, -1 where a layer is full. ``work`` is written to.
    """
    layer = layers[0]
    end = min(layer.size[0], begin + most)
    for row in range(begin, end):
        if layer.alive[row]:
            state = State(layer.codes[row], layer.weights[row], layer.times[row])
            if not _expand_row(road, layers, state, work, (layer.end[row], row)):
                return -1
    return int(end)


@lean
def _expand_row(
    road: Road,
    layers: tuple[Layer, Layer, Layer],
    state: State,
    work: tuple[State, Desk, Desk],
    known: tuple[int, int],
) -> bool:
    """Add the state after each event to its layer if it is worth it; False = no room.

    ``known`` is the bound and the row of the state.
    """
    new, desk, other = work
    end, row = known
    survey(road, state, desk)
    num_stages = len(road.forward)
    for number in range(num_stages + len(state.codes) * (_PASSES + num_stages)):
        event = _event(road, state, desk, number)
        if event[0] == _NONE:
            continue
        start = start_of(road, state, desk, event)
        least = max(end, least_end_by(road, state, desk, event, start))
        if start < 0 or least > road.horizon:
            continue
        if wastes(road, state, desk, road.device[event[2]], start):
            continue
        run(road, state, event, start, new)
        least = max(least, least_end(road, new, other))
        if least > road.horizon:
            continue
        # A kept F counts for the RELOAD or RECOMPUTE it saves, a B for I and W.
        steps = 2 if event[0] == KEEP or event[0] == FUSED else 1
        if not _keep(layers[steps], new, (least, row, _way_of(event))):
            return False
    return True


@lean
def _event(road: Road, state: State, desk: Desk, number: int) -> tuple[int, int, int]:
    """Return one of all events as (kind, index of the micro-batch, stage); kind -1 = not now.

    First a W per stage, then per micro-batch its next pass in every way, and RELOAD or RECOMPUTE
    on every stage.
    """
    num_stages = len(road.forward)
    if number < num_stages:
        waits = state.weights[number] < desk.gradients[number]
        return (WEIGHT if waits else _NONE, 0, number)
    j = (number - num_stages) // (_PASSES + num_stages)
    way = (number - num_stages) % (_PASSES + num_stages)
    is_again = j > 0 and state.codes[j - 1] == state.codes[j]
    if way >= _PASSES:
        s = way - _PASSES
        first = 1 + 3 * len(road.room)
        if is_again and state.times[first + j - 1] == state.times[first + j]:
            return (_NONE, j, s)
        mode = mode_of(state.codes[j], s)
        return (RELOAD if mode == AWAY else RECOMPUTE if mode == CHECKPOINT else _NONE, j, s)
    q = position_of(state.codes[j])
    if is_again or q == 2 * num_stages:
        return (_NONE, j, 0)
    s = q if q < num_stages else 2 * num_stages - 1 - q
    return (way if _is_open(road, state.codes[j], way, s) else _NONE, j, s)


@lean
def _is_open(road: Road, code: int, kind: int, s: int) -> bool:
    """Whether the next pass of a micro-batch, on stage s, can be of a kind."""
    if position_of(code) < len(road.forward):
        if kind == SEND:
            return bool(road.may_leave[s])
        if kind == DROP:
            return bool(road.again[s] >= 0)
        return bool(kind == KEEP)
    mode = mode_of(code, s)
    if kind < GRADIENT or mode in (AWAY, CHECKPOINT):
        return False
    return bool(kind == GRADIENT or road.may_fuse[s])


@lean
def _way_of(event: tuple[int, int, int]) -> int:
    """Return an event (kind, index of the micro-batch, stage) as ``64 j + 8 s + kind``."""
    return int(64 * event[1] + 8 * event[2] + event[0])


@lean
def _keep(layer: Layer, state: State, known: tuple[int, int, int]) -> bool:
    """Add a state unless another with its codes and W is nowhere later; False = no room.

    ``known`` is its bound, the row before it, and the way from there.
    """
    slot = _hash(state) & (len(layer.first) - 1)
    at = layer.first[slot]
    while at >= 0:
        if layer.alive[at] and _same(layer, at, state):
            if _not_later(layer.times[at], state.times):
                return True
            if _not_later(state.times, layer.times[at]):
                layer.alive[at] = False
        at = layer.link[at]
    row = layer.size[0]
    if row == len(layer.alive):
        return False
    for i in range(len(state.codes)):
        layer.codes[row, i] = state.codes[i]
    for i in range(len(state.weights)):
        layer.weights[row, i] = state.weights[i]
    for i in range(len(state.times)):
        layer.times[row, i] = state.times[i]
    layer.end[row], layer.parent[row], layer.way[row] = known
    layer.alive[row] = True
    layer.link[row], layer.first[slot] = layer.first[slot], row
    layer.size[0] += 1
    return True


@lean
def _hash(state: State) -> int:
    value = 1469598103
    for x in state.codes:
        value = (value ^ int(x)) * 1099511 & 0x7FFFFFFFFFFF
        value ^= value >> 17
    for y in state.weights:
        value = (value ^ int(y)) * 1099511 & 0x7FFFFFFFFFFF
        value ^= value >> 17
    return value


@lean
def _same(layer: Layer, row: int, state: State) -> bool:
    for i in range(len(state.codes)):
        if layer.codes[row, i] != state.codes[i]:
            return False
    for i in range(len(state.weights)):  # noqa: SIM110 - compiled
        if layer.weights[row, i] != state.weights[i]:
            return False
    return True


@lean
def _not_later(a: NDArray[np.int32], b: NDArray[np.int32]) -> bool:
    for i in range(len(a)):  # noqa: SIM110 - compiled
        if a[i] > b[i]:
            return False
    return True
