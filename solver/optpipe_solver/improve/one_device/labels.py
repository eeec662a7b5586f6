"""Where the search over one device's programs stands: labels by how many passes are done."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Chores", "Labels", "labels_for"]


class Chores(NamedTuple):
    """What a device has to do; all by its own stages, numbered from 0.

    ``duration`` (ms), ``delta`` and ``workspace`` (bytes) are by kind (F, I, W, B) and stage,
    ``limit`` is the device's bytes, ``sync`` a stage's gradient reduction (ms), ``may_fuse`` flags
    stages where a B can be of use. ``begin`` is what the device's end is counted from (ms),
    ``most_per_state`` how many labels with the same counts are kept.
    """

    num_stages: int
    num_microbatches: int
    duration: NDArray[np.float64]
    delta: NDArray[np.int64]
    workspace: NDArray[np.int64]
    limit: int
    sync: NDArray[np.float64]
    may_fuse: NDArray[np.bool_]
    begin: float
    most_per_state: int


class Labels(NamedTuple):
    """Labels of three layers in turn, by layer and row; layer n holds those with n passes done.

    A label is counts of F, backwards and weight gradients per stage (``counts``, packed in
    ``key``), when the device is free (``time``), when each pass still to come can start for the
    others (``ready``, see `ways.Ways`; 0 = done), the largest end plus tail so far (``worst``), all
    in ms, and where its last action stands in the trail. ``next`` links labels with keys of the
    same hash from ``first`` on; ``alive`` is False where a better one was found.

    ``parent`` and ``action`` (4 x stage + kind) are the trail of all labels ever made. ``sizes``
    are its length and whether anything was left out for want of room. ``trial`` is scratch.
    """

    size: NDArray[np.int64]
    counts: NDArray[np.int64]
    key: NDArray[np.int64]
    time: NDArray[np.float64]
    ready: NDArray[np.float64]
    worst: NDArray[np.float64]
    trail: NDArray[np.int64]
    next: NDArray[np.int64]
    first: NDArray[np.int64]
    alive: NDArray[np.bool_]
    parent: NDArray[np.int64]
    action: NDArray[np.int64]
    sizes: NDArray[np.int64]
    trial: NDArray[np.float64]
    trial_counts: NDArray[np.int64]


def labels_for(num_stages: int, num_microbatches: int, width: int, most: int) -> Labels:
    """Return room for ``width`` labels per layer and ``most`` in all."""
    passes = 2 * num_stages * num_microbatches
    hashes = 1 << max(4, width.bit_length())
    return Labels(
        size=np.zeros(3, dtype=np.int64),
        counts=np.zeros((3, width, 3 * num_stages), dtype=np.int64),
        key=np.zeros((3, width), dtype=np.int64),
        time=np.zeros((3, width)),
        ready=np.zeros((3, width, passes)),
        worst=np.zeros((3, width)),
        trail=np.zeros((3, width), dtype=np.int64),
        next=np.zeros((3, width), dtype=np.int64),
        first=np.full((3, hashes), -1, dtype=np.int64),
        alive=np.zeros((3, width), dtype=np.bool_),
        parent=np.zeros(most, dtype=np.int64),
        action=np.zeros(most, dtype=np.int64),
        sizes=np.zeros(2, dtype=np.int64),
        trial=np.zeros(passes),
        trial_counts=np.zeros(3 * num_stages, dtype=np.int64),
    )
