"""An even cut of layers into stages, and where stages stand."""

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

__all__ = ["asked_placement", "balanced_sizes", "too_many_stages"]

_SLACK = 1 + 1e-12  # sums in another order


def asked_placement(name: str, num_devices: int, chunks: int) -> tuple[int, ...]:
    """Return the device of each stage: once along the devices, round and round, or to and fro.

    Raises
    ------
    InputError
        If the name is none of these, or several chunks are asked of a line.
    """
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


def balanced_sizes(times_ms: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return how many layers each stage has so that the slowest stage is as fast as can be.

    Of the cuts with that slowest stage, one whose stage times have the least sum of squares, and
    then one with the earliest last cut. Exact: two dynamic programs over the places to cut, the
    least largest stage first, then the least sum of squares with no stage above it. This is the
    simplest rule that counts embedding and head; it knows no memory and no schedule, which
    ``optpipe plan`` does.

    Raises
    ------
    InputError
        If there are fewer layers than stages.
    """
    count = len(times_ms)
    if num_stages > count:
        raise too_many_stages(num_stages, count)
    ends = np.array([0.0, *accumulate(times_ms)])
    width = np.subtract.outer(ends, ends)  # [end, start]
    width[np.triu_indices(count + 1)] = np.inf
    largest = _least_largest(width, num_stages)
    squares = np.where(width <= largest * _SLACK + 1e-300, width**2, np.inf)
    return _least_sum(squares, num_stages)


def too_many_stages(num_stages: int, num_layers: int) -> AskedError:
    """Return the error of more stages than layers."""
    return AskedError(
        f"{num_stages} stages, but only {num_layers} layers, embedding and head counted: a stage "
        "needs at least one; lower ",
        Field("pp"),
        " or ",
        Field("chunks"),
    )


def _least_largest(width: NDArray[np.float64], num_stages: int) -> float:
    best = width[:, 0]
    for _ in range(num_stages - 1):
        best = np.maximum(width, best[np.newaxis, :]).min(axis=1)
    return float(best[-1])


def _least_sum(costs: NDArray[np.float64], num_stages: int) -> tuple[int, ...]:
    best = costs[:, 0]
    cuts = []
    for _ in range(num_stages - 1):
        sums = costs + best[np.newaxis, :]
        cuts.append(sums.argmin(axis=1))
        best = sums.min(axis=1)
    end, sizes = len(costs) - 1, []
    for cut in reversed(cuts):
        sizes.append(end - int(cut[end]))
        end = int(cut[end])
    return tuple([*sizes, end][::-1])
