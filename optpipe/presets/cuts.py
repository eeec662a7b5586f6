"""Where a model of layers is cut into stages, and where stages stand."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, get_args

import numpy as np

from optpipe.errors import InputError
from optpipe.presets.shape import AskedError, Field
from optpipe.problem import Placement, placement_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["asked_placement", "balanced_sizes", "even_sizes"]

_SLACK = 1 + 1e-12  # sums in another order


def asked_placement(name: str, num_devices: int, chunks: int) -> tuple[int, ...]:
    """Return the device of each stage: once along the devices, round and round, or to and fro."""
    if name not in get_args(Placement):
        raise AskedError(Field("placement", name), ": must be linear, loop or v; choose one")
    if chunks < 1 or num_devices < 1:
        raise InputError(f"{num_devices} devices, {chunks} chunks: must be at least 1; raise them")
    if name == "linear" and chunks > 1:
        raise AskedError(
            Field("placement", name),
            f" has one stage per device, not {chunks}; choose loop or v, or leave ",
            Field("chunks"),
            " out",
        )
    return placement_of(name, num_devices, chunks)


def even_sizes(num_layers: int, behind: int, count: int) -> tuple[int, ...]:
    """Return the frameworks' cut; ``behind`` parts (head, multi-token prediction) end the last.

    Equally many layers where that comes out, else equally many with embedding and head counted
    (Megatron-LM's --account-for-embedding-in-pipeline-split and -loss-), else the least number
    that every stage can have, the last stage fewer, or nothing but what is behind.
    """
    if num_layers % count == 0:
        layers = [num_layers // count] * count
    elif (num_layers + 2) % count == 0:
        each = (num_layers + 2) // count
        layers = [each - 1, *[each] * (count - 2), each - 1]
    else:
        each = -(-num_layers // count)
        full, rest = divmod(num_layers, each)
        layers = [*[each] * full, *([rest] if rest else [])]
        if len(layers) < count - 1:
            small, more = divmod(num_layers, count)
            layers = [small + (index < more) for index in range(count)]
        layers += [0] * (count - len(layers))
    layers[0] += 1
    layers[-1] += behind
    return tuple(layers)


def balanced_sizes(
    times_ms: Sequence[float], num_stages: int, slower: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Return how many layers each stage has so that the slowest stage is as fast as can be.

    Of the cuts with that slowest stage, one whose stage times have the least sum of squares, and
    then the one with the latest cuts: a slow stage waits the less at both ends of a step the
    earlier it stands. Exact: two dynamic programs over the places to cut, the
    least largest stage first, then the least sum of squares with no stage above it. This is the
    simplest rule that counts embedding and head; it knows no memory and no schedule, which
    ``optpipe plan`` does. ``slower`` multiplies the times of each stage, where devices differ.
    """
    count = len(times_ms)
    ends = np.array([0.0, *accumulate(times_ms)])
    width = np.subtract.outer(ends, ends)  # [end, start]
    width[np.triu_indices(count + 1)] = np.inf
    widths = [width] * num_stages if slower is None else [width * factor for factor in slower]
    largest = _least_largest(widths)
    most = largest * _SLACK + 1e-300
    return _least_sum([np.where(one <= most, one**2, np.inf) for one in widths])


def _least_largest(widths: Sequence[NDArray[np.float64]]) -> float:
    best = widths[0][:, 0]
    for width in widths[1:]:
        best = np.maximum(width, best[np.newaxis, :]).min(axis=1)
    return float(best[-1])


def _least_sum(costs: Sequence[NDArray[np.float64]]) -> tuple[int, ...]:
    best = costs[0][:, 0]
    cuts = []
    for cost in costs[1:]:
        sums = cost + best[np.newaxis, :]
        best = sums.min(axis=1)
        is_best = sums <= best[:, np.newaxis] * _SLACK
        cuts.append(len(cost) - 1 - is_best[:, ::-1].argmax(axis=1))
    end, sizes = len(costs[0]) - 1, []
    for cut in reversed(cuts):
        sizes.append(end - int(cut[end]))
        end = int(cut[end])
    return tuple([*sizes, end][::-1])
