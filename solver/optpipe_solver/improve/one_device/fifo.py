"""Micro-batches renamed so that every stage runs every pass in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optpipe_solver.improve.compiled.kernel import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OFFLOAD,
)
from optpipe_solver.improve.compiled.problem import Rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from optpipe_solver.improve.compiled.kernel import Times

__all__ = ["in_order", "is_plain"]


def is_plain(rows: Rows, times: Times) -> bool:
    """Whether the programs offload and recompute nothing."""
    return all(
        bool((row[:count] < OFFLOAD * times.num_cells).all())
        for row, count in zip(rows.actions, rows.lengths, strict=True)
    )


def in_order(rows: Rows, times: Times) -> Rows:
    """Return plain programs with each stage's k-th F, k-th backward and k-th W renamed to k's.

    W go to those of split backwards in turn. Nothing ends later, and no program holds more: when
    the k-th pass of a stage starts, k inputs have arrived, and in the renamed programs, by
    induction along the schedule, the k-th of them has; bytes depend on counts alone.
    """
    actions = rows.actions.copy()
    for row, count in zip(actions, rows.lengths, strict=True):
        codes = row[:count]
        kinds, stages = codes // times.num_cells, codes % times.num_cells // times.num_microbatches
        for stage in np.unique(stages):
            _rename(codes, kinds, stages == stage, int(stage) * times.num_microbatches, times)
    return Rows(actions, rows.lengths.copy())


def _rename(
    codes: NDArray[np.int64],
    kinds: NDArray[np.int64],
    here: NDArray[np.bool_],
    first: int,
    times: Times,
) -> None:
    """Rename one stage's passes in place; ``first`` is its first cell."""
    forwards = np.flatnonzero(here & (kinds == FORWARD))
    backwards = np.flatnonzero(here & ((kinds == BACKWARD_INPUT) | (kinds == FULL_BACKWARD)))
    weights = np.flatnonzero(here & (kinds == BACKWARD_WEIGHT))
    split = np.flatnonzero(kinds[backwards] == BACKWARD_INPUT)
    for places, labels in (
        (forwards, np.arange(forwards.size)),
        (backwards, np.arange(backwards.size)),
        (weights, split),
    ):
        codes[places] = kinds[places] * times.num_cells + first + labels
